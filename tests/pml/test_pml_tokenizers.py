"""Real tokenizers and chat templates; the examples with the embedded model's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from onestem.cli.pml_model import load_tokenizer
from onestem.engine.text.tokenizer import Tokenizer
from onestem.pml import (
    ISOLATIONS,
    CompiledPrompt,
    Import,
    Layout,
    Module,
    PmlError,
    Prompt,
    Role,
    Schema,
    compile_prompt,
    lay_out,
    read_prompt,
    read_schema,
)
from tests.engine.tiny_tokenizers import make_byte_fallback_tokenizer, make_byte_level_tokenizer
from tests.pml.mask import visible

EXAMPLES = Path(__file__).parents[2] / "examples" / "pml"
PROMPTS = sorted(path for path in EXAMPLES.glob("*/*.xml") if path.name != "schema.xml")


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("tokenizers")
    directories = {
        "llama 3": make_byte_level_tokenizer(folder / "3"),
        "llama 2": make_byte_fallback_tokenizer(folder / "2"),
        "metaspace": make_byte_fallback_tokenizer(folder / "m", legacy=False),
    }
    loaded = {name: Tokenizer.from_directory(path) for name, path in directories.items()}
    return {**loaded, "embedded": load_tokenizer("embedded")[0]}


def in_order(compiled: CompiledPrompt) -> list[int]:
    return compiled.token_ids[np.argsort(compiled.positions, kind="stable")].tolist()


NAMES = ["embedded", "llama 3", "llama 2", "metaspace"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("split", [0, 1, 2, 3])
def test_turns_are_those_of_the_chat_template(tokenizers, name, split):
    """However a conversation is divided between schema and prompt, its text is the template's."""
    tokenizer = tokenizers[name]
    turns = [("user", "Hello there"), ("assistant", "I am fine."), ("user", "The lazy dog?")]
    messages = [{"role": role, "content": text} for role, text in turns]
    expected = tokenizer.apply_chat_template(messages)
    schema = Schema("s", [Role(role, text) for role, text in turns[:split]])
    prompt = Prompt("s", [Role(role, text) for role, text in turns[split:]])
    layout = lay_out(schema, tokenizer)
    ids = in_order(compile_prompt(layout, prompt, "off"))
    assert ids == expected
    assert ids.count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize("name", NAMES)
def test_bos_stands_once_before_raw_text(tokenizers, name):
    tokenizer = tokenizers[name]
    schema = Schema("s", ["Hello", Module("m", "world"), Module("n", "x")])
    compiled = compile_prompt(lay_out(schema, tokenizer), Prompt("s", [Import("m"), "!"]))
    assert compiled.token_ids[0] == tokenizer.bos_token_id
    assert (compiled.token_ids == tokenizer.bos_token_id).sum() == 1
    raw = Schema("s", ["Hello", Module("m", "world")])
    chat = compile_prompt(lay_out(raw, tokenizer), Prompt("s", [Import("m"), Role("user", "Hi")]))
    assert (chat.token_ids == tokenizer.bos_token_id).sum() == 1


@pytest.mark.parametrize("name", NAMES)
def test_names_of_control_tokens_are_text(tokenizers, name):
    tokenizer = tokenizers[name]
    names = [tokenizer.token_name(token) for token in sorted(tokenizer.special_ids)]
    text = f"Hello {' '.join(names)} dog"
    schema = Schema("s", [Role("user", ["Hello", Module("m", text)])])
    told = Schema("s", [Role("user", [text])])
    plain = Prompt("s", [Import("m"), "a"])
    base = compile_prompt(lay_out(schema, tokenizer), Prompt("s", ["a"]))
    control = np.isin(base.token_ids, list(tokenizer.special_ids)).sum()
    for compiled in (
        compile_prompt(lay_out(schema, tokenizer), plain),
        compile_prompt(lay_out(told, tokenizer), Prompt("s", [text])),
    ):
        assert np.isin(compiled.token_ids, list(tokenizer.special_ids)).sum() == control
        assert in_order(compiled)[0] == tokenizer.bos_token_id


def test_a_role_that_the_template_refuses(tokenizers):
    with pytest.raises(PmlError, match=r"turns system, user: .*only user and assistant may speak"):
        lay_out(Schema("s", [Role("system", "x")]), tokenizers["llama 2"])


# --- examples ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def layouts(tokenizers) -> dict[str, Layout]:
    return {
        path.parent.name: lay_out(read_schema(path), tokenizers["embedded"], max_positions=8192)
        for path in EXAMPLES.glob("*/schema.xml")
    }


@pytest.mark.parametrize("path", PROMPTS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_examples_compile(layouts, path):
    layout = layouts[path.parent.name]
    prompt = read_prompt(path)
    every = {isolation: compile_prompt(layout, prompt, isolation) for isolation in ISOLATIONS}
    assert in_order(every["off"]) == in_order(every["anchored"])
    for compiled in every.values():
        mask = visible(compiled)
        assert mask.shape == (compiled.num_tokens,) * 2
        assert mask.diagonal().all()
    anchored = every["anchored"]
    assert anchored.num_cached_tokens > 4 * anchored.num_computed_tokens
    last = visible(anchored)[-1]
    assert last.all()


def test_examples_say_what_they_show(layouts):
    assert len(PROMPTS) == 4
    tutor, travel, code = (layouts[name] for name in ("tutor", "travel", "code"))
    unions = {(b.start, b.parent) for b in tutor.blocks.values() if b.module is not None}
    assert len(unions) == 6
    assert max(len(path) for path in travel.blocks) == 3
    assert sum(len(block.slots) for block in travel.blocks.values()) == 2
    unit = (EXAMPLES / "code" / "inventory" / "stock.py").read_text()
    assert code.blocks[("stock.py",)].spans[0].text == unit
    assert not code.blocks[("task",)].cached
