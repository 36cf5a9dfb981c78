"""response_format: what is refused, what a mask allows, and rebuilding from sampled ids."""

from __future__ import annotations

import builtins
import json
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from onestem.engine.grammar.compiler import GrammarCompiler
from onestem.engine.grammar.state import GrammarState
from onestem.engine.grammar.tags import FIELDS
from onestem.engine.sampling.rows import SamplingRow
from onestem.engine.sampling.sampler import Sampler
from onestem.engine.text.tokenizer import Tokenizer
from onestem.errors import RequestError, UnsupportedError
from onestem.request import SamplingParams
from tests.engine.held_grammars import HeldTrials
from tests.engine.tiny_tokenizers import make_byte_fallback_tokenizer, make_byte_level_tokenizer

pytest.importorskip("xgrammar")

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
OBJECT = {"type": "json_object", "whitespace": "any"}


def json_schema(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    named = {"name": "answer", "schema": schema, **more}
    return {"type": "json_schema", "json_schema": named, "whitespace": "any"}


@pytest.fixture(scope="module", params=["byte_level", "byte_fallback"])
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    path: Path = tmp_path_factory.mktemp(request.param)
    make = {"byte_level": make_byte_level_tokenizer, "byte_fallback": make_byte_fallback_tokenizer}
    tokenizer = Tokenizer.from_directory(make[request.param](path))
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, tokenizer.vocab_size + 20)


def state_of(
    compiler: GrammarCompiler, response_format: dict[str, Any], output: Iterable[int] = ()
) -> GrammarState:
    """Of a sequence that has sampled these tokens."""
    state = compiler.compile(response_format)
    assert state is not None
    for token in output:
        state.accept(token)
    return state


def allowed(state: GrammarState, vocab_size: int) -> set[int]:
    words = state.fill_mask().tolist()
    return {i for i in range(vocab_size) if (words[i // 32] >> (i % 32)) & 1}


def byte_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    single = {
        tokenizer.token_bytes(token): token for token in reversed(range(tokenizer.vocab_size))
    }
    return [single[bytes([byte])] for byte in text.encode()]


def fits(tokenizer: Tokenizer, state: GrammarState, text: str) -> bool:
    try:
        for token in byte_ids(tokenizer, text):
            state.accept(token)
    except RequestError:
        return False
    return tokenizer.eos_token_id in allowed(state, tokenizer.vocab_size)


# --- masks -------------------------------------------------------------------------------------


def test_texts_that_fit_a_schema(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    for text, expected in (
        ('{"name": "Ada", "age": 36}', True),
        ('{"name":"Ada","age":36}', True),
        ('{\n  "name": "Ada",\n  "age": 36\n}', True),
        ('{"name": "é", "age": 3}', True),
        ('{"name": "\t", "age": 3}', False),
        ('{"name": "Ada"}', False),
        ('{"name": "Ada", "age": "36"}', False),
        ('{"name": "Ada", "age": 36, "x": 1}', False),
        ('{"name": "Ada Lovelace", "age": 36}', False),
    ):
        assert fits(tokenizer, state_of(compiler, json_schema(SCHEMA)), text) is expected


WRITTEN = {
    '{"name": "Ada L", "age": 36}': {"spaced", "any"},
    '{"name":"Ada L","age":36}': {"compact", "any"},
    '{"name": "Ada L","age":36}': {"any"},
    '{"name":"Ada L", "age":36}': {"any"},
    '{\n"name": "Ada L", "age": 36\n}': {"any"},
}


@pytest.mark.parametrize(
    ("said", "whitespace"),
    [
        ({}, "spaced"),
        ({"whitespace": "spaced"}, "spaced"),
        ({"any_whitespace": False}, "spaced"),
        ({"whitespace": "compact"}, "compact"),
        ({"whitespace": "any"}, "any"),
        ({"any_whitespace": True}, "any"),
    ],
)
def test_a_space_follows_commas_and_colons_unless_another_form_is_asked_for(
    tokenizer: Tokenizer, compiler: GrammarCompiler, said: dict[str, Any], whitespace: str
) -> None:
    named = {"type": "json_schema", "json_schema": {"schema": SCHEMA}, **said}
    unnamed = {"type": "json_object", **said}
    tag = {"type": "json_schema", "json_schema": SCHEMA, "whitespace": whitespace}
    for text, forms in WRITTEN.items():
        for one in (named, unnamed, {"type": "structural_tag", "format": tag}):
            expected = whitespace in forms
            assert fits(tokenizer, state_of(compiler, one), text) is expected, (one, text)


@pytest.mark.parametrize("whitespace", ["spaced", "compact", "any"])
def test_values_of_an_enum_are_written_like_others(
    tokenizer: Tokenizer, compiler: GrammarCompiler, whitespace: str
) -> None:
    values = [{"b/é": [1, 2.5, {}, []], "a": None}, [[1], "q"], {}, [], "x", 3]
    separators = {"spaced": (", ", ": "), "compact": (",", ":"), "any": (",  ", ":\n")}
    for schema, good in (({"enum": values}, values), ({"const": values[0]}, values[:1])):
        form = {**json_schema(schema), "whitespace": whitespace}
        for used, marks in separators.items():
            for value in values:
                text = json.dumps(value, ensure_ascii=False, separators=marks)
                other = used != whitespace and whitespace != "any"
                expected = value in good and (not other or _is_same_in_all(value))
                assert fits(tokenizer, state_of(compiler, form), text) is expected, text
        for text in ('[["1"], "q"]', '{"b/é": [1, 2.5, {}, []]}', "[[1]]"):
            assert not fits(tokenizer, state_of(compiler, form), text)


def _is_same_in_all(value: Any) -> bool:
    return value in ({}, [], "x", 3)


def test_a_form_beside_another_is_refused() -> None:
    for more, message in (
        ({"type": "json_object", "any_whitespace": True, "whitespace": "any"}, "give whitespace"),
        ({"type": "json_object", "whitespace": "wide"}, "'wide', expected spaced, compact or any"),
        ({"type": "regex", "regex": "a", "whitespace": "any"}, "of type regex has whitespace"),
    ):
        with pytest.raises(RequestError, match=message):
            SamplingParams(response_format=more)


def test_vllms_name_of_a_form() -> None:
    for value, expected in ((None, None), (True, None), (False, "any")):
        given = {"json": SCHEMA, "disable_any_whitespace": value}
        asked = SamplingParams(structured_outputs=given).response_format
        assert asked is not None
        assert asked.get("whitespace") == expected


@pytest.mark.parametrize(
    ("response_format", "good", "bad"),
    [
        ({"type": "regex", "regex": "[0-9]{2}-[a-c]+"}, "12-abc", "1-abc"),
        ({"type": "choice", "choice": ["yes", 'no "x"\n']}, 'no "x"\n', "no"),
        ({"type": "grammar", "grammar": 'root ::= "a" root | "b"'}, "aab", "aa"),
        (
            {
                "type": "structural_tag",
                "format": {
                    "type": "tag",
                    "begin": "<n>",
                    "content": {
                        "type": "json_schema",
                        "json_schema": {"type": "array", "items": {}},
                    },
                    "end": "</n>",
                },
            },
            "<n>[1, 2]</n>",
            "<n>[1,2]</n>",
        ),
    ],
)
def test_other_forms(
    tokenizer: Tokenizer, compiler: GrammarCompiler, response_format, good: str, bad: str
) -> None:
    SamplingParams(response_format=response_format)
    assert fits(tokenizer, state_of(compiler, response_format), good)
    assert not fits(tokenizer, state_of(compiler, response_format), bad)


OLDER = {
    "structures": [
        {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"type": "null"}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "structural_tag", **OLDER}},
        {"structured_outputs": {"structural_tag": {"type": "structural_tag", **OLDER}}},
        {"structured_outputs": {"structural_tag": json.dumps(OLDER)}},
    ],
)
def test_the_older_form_of_structural_tags(
    tokenizer: Tokenizer, compiler: GrammarCompiler, fields: dict[str, Any]
) -> None:
    response_format = SamplingParams(**fields).response_format
    assert response_format is not None
    assert fits(
        tokenizer, state_of(compiler, dict(response_format)), "Hi <f=a>12</f> <f=b>null</f>"
    )
    assert not fits(tokenizer, state_of(compiler, dict(response_format)), "Hi <f=a>null</f>")
    assert not fits(tokenizer, state_of(compiler, dict(response_format)), "Hi <f=c>")


NULL = {"type": "json_schema", "json_schema": {"type": "null"}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"content": {**NULL, "lenient": True}},
            r"format\.content of type json_schema has 'lenient', which is not honoured",
        ),
        ({"content": {**NULL, "any_order": True}}, "has 'any_order', which is not honoured"),
        ({"content": {**NULL, "excludes": ["a"]}}, "has 'excludes', which is not honoured"),
        ({"content": {**NULL, "max_whitespace_cnt": 1}}, "has 'max_whitespace_cnt', which is not"),
        ({"content": NULL, "wonder": 1}, r"format of type tag has 'wonder', which is not honoured"),
        ({"content": {"type": "wonder"}}, r"format\.content\.type is 'wonder', expected one of"),
        ({"content": {"value": "a"}}, r"format\.content\.type is None, expected one of any_text"),
        ({"content": {**NULL, "name": 5}}, r"format\.content\.name is 5, expected text"),
        (
            {"content": {**NULL, "whitespace": "wide"}},
            r"format\.content\.whitespace is 'wide', expected one of spaced, compact, any",
        ),
        (
            {"content": {**NULL, "style": "qwen_xml", "whitespace": "any"}},
            r"format\.content\.whitespace is not honoured beside a style",
        ),
        (
            {"content": {"type": "json_schema", "json_schema": {"type": "frob"}}},
            r"format\.content\.json_schema cannot be used: type is 'frob'",
        ),
    ],
)
def test_what_of_a_tag_would_not_be_honoured_is_refused(
    compiler: GrammarCompiler, content: dict[str, Any], message: str
) -> None:
    tag = {"type": "tag", "begin": "<", "end": ">", **content}
    with pytest.raises(RequestError, match=message):
        compiler.compile({"type": "structural_tag", "format": tag})


def test_fields_of_tags_are_xgrammars() -> None:
    from xgrammar import structural_tag

    theirs = {
        each.model_fields["type"].default: each.model_fields.keys() - {"type"}
        for each in vars(structural_tag).values()
        if isinstance(each, type) and each.__name__.endswith("Format")
    }
    assert theirs.keys() == FIELDS.keys()
    for kind, fields in FIELDS.items():
        assert fields - {"name", "whitespace"} <= theirs[kind]


@pytest.mark.parametrize(
    ("response_format", "message"),
    [
        ({"type": "regex", "regex": "(?=a)b"}, r"regex has a pattern with \(\?="),
        ({"type": "regex", "regex": "a$b"}, r"regex has a pattern with '\$' inside"),
        ({"type": "grammar", "grammar": 'x ::= "a"'}, "cannot be used: .*root"),
        ({"type": "grammar", "grammar": "root ::= b"}, 'cannot be used: .*"b" is not defined'),
        (
            {
                "type": "structural_tag",
                "format": {"type": "json_schema", "json_schema": {"not": {}}},
            },
            "'not', which is not enforced",
        ),
        ({"type": "structural_tag", "format": {"type": "wonder"}}, "type is 'wonder', expected"),
    ],
)
def test_other_forms_that_are_refused(
    compiler: GrammarCompiler, response_format: dict[str, Any], message: str
) -> None:
    with pytest.raises((RequestError, UnsupportedError), match=message) as caught:
        compiler.compile(response_format)
    assert "\n" not in str(caught.value)


def test_control_characters(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    """Texts may have them, JSON may not."""
    null = {"type": "json_schema", "json_schema": {"type": "null"}}
    tag = {"type": "tag", "begin": "<n>", "content": null, "end": ""}
    free = {"type": "triggered_tags", "triggers": ["<n>"], "tags": [tag]}
    texts = [
        {"type": "regex", "regex": "a.*[^x]"},
        {"type": "grammar", "grammar": 'root ::= "a" [^x]* '},
        {"type": "structural_tag", "format": free},
    ]
    for text in ("a\tb\x00\x1f", "a\r\n\t"):
        for response_format in texts:
            assert fits(tokenizer, state_of(compiler, response_format), text)
    strings = [{}, {"maxLength": 9}, {"minLength": 1}, {"pattern": ".*"}, {"pattern": "[^a]*"}]
    for control in map(chr, range(32)):
        for more in strings:
            state = state_of(compiler, json_schema({"type": "string", **more}))
            assert not fits(tokenizer, state, f'"{control}"')


def test_strict_false_allows_more_properties(
    tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    text = '{"name": "Ada", "age": 36, "x": 1}'
    state = state_of(compiler, json_schema(SCHEMA, strict=False))
    assert fits(tokenizer, state, text)


def test_json_object(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    assert fits(tokenizer, state_of(compiler, OBJECT), '{"a": [1, {"b": null}], "c": "d"}')
    assert fits(tokenizer, state_of(compiler, OBJECT), "{}")
    assert not fits(tokenizer, state_of(compiler, OBJECT), "[1]")
    assert not fits(tokenizer, state_of(compiler, OBJECT), '{"a": 1')


def test_text_and_nothing_need_no_grammar(compiler: GrammarCompiler) -> None:
    assert compiler.compile({"type": "text"}) is None
    assert compiler.compile(None) is None


def test_control_tokens_and_ids_past_the_vocabulary_are_never_allowed(
    tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    state = state_of(compiler, OBJECT)
    for token in byte_ids(tokenizer, '{"a": "x'):
        state.accept(token)
    inside_a_string = allowed(state, tokenizer.vocab_size + 20)
    assert inside_a_string.isdisjoint(tokenizer.special_ids)
    assert max(inside_a_string) < tokenizer.vocab_size
    assert len(inside_a_string) > 100


@pytest.mark.parametrize("by_name", [True, False])
def test_a_tag_may_name_a_control_token(
    tokenizer: Tokenizer, compiler: GrammarCompiler, by_name: bool
) -> None:
    """It is allowed where the tag has it, and no other ever is."""
    mark, other, *_ = sorted(tokenizer.special_ids - {tokenizer.eos_token_id})
    spelled = tokenizer.token_name(mark) if by_name else mark
    token = {"type": "token", "token": spelled}
    call = {"type": "tag", "begin": token, "content": {"type": "regex", "pattern": "[^x]*"},
            "end": "x"}  # fmt: skip
    for calls in (
        {"type": "token_triggered_tags", "trigger_tokens": [spelled], "tags": [call]},
        {"type": "token_dispatch", "rules": [[spelled, {"type": "const_string", "value": "ax"}]]},
        {"type": "sequence", "elements": [{"type": "regex", "pattern": "ho"}, call]},
    ):
        state = state_of(compiler, {"type": "structural_tag", "format": calls})
        for token_id in (*byte_ids(tokenizer, "ho"), mark, *byte_ids(tokenizer, "ax")):
            special = allowed(state, tokenizer.vocab_size) & tokenizer.special_ids
            assert special <= {mark, tokenizer.eos_token_id}
            assert other not in special
            assert (token_id == mark) <= (mark in special)
            state.accept(token_id)
    assert mark not in allowed(state, tokenizer.vocab_size)


def test_mask_says_what_accept_takes(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    output: list[int] = []
    for token in byte_ids(tokenizer, '{"name": "A", "age'):
        mask = allowed(state_of(compiler, json_schema(SCHEMA), output), tokenizer.vocab_size)
        assert token in mask
        for other in range(0, tokenizer.vocab_size, 7):
            trial = state_of(compiler, json_schema(SCHEMA), output)
            if other in mask:
                trial.accept(other)
            else:
                with pytest.raises(RequestError, match=f"token {other} does not follow"):
                    trial.accept(other)
        output.append(token)


def test_a_rebuilt_state_goes_on_where_the_old_one_stood(
    tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    ids = byte_ids(tokenizer, '{"name": "Ada", "age": 36}')
    state = state_of(compiler, json_schema(SCHEMA))
    for done, token in enumerate(ids):
        rebuilt = state_of(compiler, json_schema(SCHEMA), ids[:done])
        assert torch.equal(rebuilt.fill_mask(), state.fill_mask())
        assert rebuilt.is_finished == state.is_finished
        state.accept(token)
    assert state.is_finished


def test_when_an_answer_is_finished(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    state = state_of(compiler, OBJECT)
    for token in byte_ids(tokenizer, '{"a": 1}'):
        assert not state.is_finished
        state.accept(token)
    assert state.is_finished
    # A number may go on, so only the end of sequence finishes it.
    number = state_of(compiler, json_schema({"type": "integer"}))
    for token in byte_ids(tokenizer, "12"):
        number.accept(token)
    assert not number.is_finished
    assert tokenizer.eos_token_id is not None
    number.accept(tokenizer.eos_token_id)
    assert number.is_finished
    assert allowed(number, tokenizer.vocab_size) == {tokenizer.eos_token_id}


def test_several_stop_ids(tokenizer: Tokenizer) -> None:
    others = sorted(tokenizer.special_ids)[:2]
    compiler = GrammarCompiler(tokenizer, stop_token_ids=others)
    state = state_of(compiler, json_schema({"type": "integer"}))
    for token in byte_ids(tokenizer, "12"):
        state.accept(token)
    assert set(others) <= allowed(state, tokenizer.vocab_size)
    assert not state.is_finished
    state.accept(others[1])
    assert state.is_finished


@pytest.mark.parametrize("seed", range(6))
def test_random_logits_give_valid_json(
    tokenizer: Tokenizer, compiler: GrammarCompiler, seed: int
) -> None:
    """Sampled under the mask, whatever the model says, the text fits the schema."""
    schema = {
        "type": "object",
        "properties": {
            "label": {"enum": ["yes", "no", "perhaps"]},
            "score": {"type": "integer", "minimum": 0, "maximum": 100},
            "why": {"type": "string", "maxLength": 5},
        },
        "required": ["label", "score", "why"],
    }
    state = state_of(compiler, json_schema(schema, strict=True))
    sampler = Sampler(compiler.vocab_size)
    generator = torch.Generator().manual_seed(seed)
    output: list[int] = []
    while not state.is_finished:
        assert len(output) < 1000
        logits = torch.randn(1, compiler.vocab_size, generator=generator)
        row = SamplingRow(SamplingParams(), seed, 0, len(output), allowed_mask=state.fill_mask())
        output.append(int(sampler.sample(logits, [row]).ids[0]))
        state.accept(output[-1])
    answer = json.loads(tokenizer.decode(output))
    assert list(answer) == ["label", "score", "why"]
    assert answer["label"] in ("yes", "no", "perhaps")
    assert 0 <= answer["score"] <= 100
    assert len(answer["why"]) <= 5


# --- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response_format", "message"),
    [
        ("json", "response_format is 'json', expected an object"),
        ({}, "response_format.type is missing"),
        ({"type": "regex"}, "of type regex needs regex"),
        ({"type": "xml"}, "response_format.type is 'xml'"),
        (
            {"type": "structural_tag", "structures": OLDER["structures"]},
            "structures needs triggers",
        ),
        ({"type": "structural_tag", "format": {}, **OLDER}, "type structural_tag has format"),
        ({"type": "structural_tag", "triggers": ["a"]}, "structural_tag needs structures"),
        ({"type": "structural_tag", "structures": [{}], "triggers": ["a"]}, "begin is missing"),
        ({"type": "regex", "regex": "a", "triggers": ["a"]}, "type regex has triggers"),
        ({"type": "json_object", "schema": {}}, "unknown field in response_format: 'schema'"),
        ({"type": "json_schema"}, "json_schema needs json_schema"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "schema is missing"),
        (json_schema({}, strct=True), "unknown field in response_format.json_schema: 'strct'"),
        (json_schema({}, strict="yes"), "strict is 'yes'"),
    ],
)
def test_formats_that_are_none(response_format: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(response_format=response_format)


@pytest.mark.parametrize(
    "schema", [{"type": "nonsense"}, {"$ref": "#/$defs/none"}, {"properties": 3}]
)
def test_schemas_that_are_none(compiler: GrammarCompiler, schema: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"schema cannot be used: [A-Zpt$]") as caught:
        compiler.compile(json_schema(schema))
    assert "\n" not in str(caught.value)
    assert ".cc:" not in str(caught.value)


@pytest.fixture
def held(tokenizer: Tokenizer) -> Iterator[tuple[GrammarCompiler, HeldTrials]]:
    compiler = GrammarCompiler(tokenizer)
    trials = HeldTrials(compiler, "slow")
    yield compiler, trials
    trials.restore()
    compiler.close()


SLOW = {"enum": ["slow", "slower"]}


def test_others_do_not_wait_for_a_slow_schema(held: tuple[GrammarCompiler, HeldTrials]) -> None:
    compiler, inner = held
    compiler.compile(json_schema(SCHEMA))
    with ThreadPoolExecutor(3) as threads:
        slow = [threads.submit(compiler.compile, json_schema(SLOW)) for _ in range(2)]
        assert inner.begun.wait(60)
        assert compiler.compile(json_schema(SCHEMA)) is not None  # cached
        assert compiler.compile(json_schema({"type": "null"})) is not None
        prepared = compiler.prepare(json_schema(SLOW))
        assert prepared is not None
        assert not prepared.done()
        assert not any(one.done() for one in slow)
        inner.let.set()
        assert all(one.result(60) is not None for one in slow)
        prepared.result(60)
    assert len(inner.names) == 1


def test_prepared_grammars_are_the_compiled_ones(
    tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    for number in range(3):
        schema = json_schema({"type": "string", "maxLength": 20 + number})
        prepared = compiler.prepare(schema)
        assert prepared is not None
        state = compiler.state(prepared)
        state.accept(byte_ids(tokenizer, '"')[0])
        other = state_of(GrammarCompiler(tokenizer, compiler.vocab_size), schema)
        assert torch.equal(state.at_start().fill_mask(), other.fill_mask())
        other.accept(byte_ids(tokenizer, '"')[0])
        assert torch.equal(state.fill_mask(), other.fill_mask())
    assert compiler.prepare({"type": "text"}) is None
    bad = compiler.prepare(json_schema({"$ref": "#/$defs/none"}))
    assert bad is not None
    with pytest.raises(RequestError):
        bad.result()


def test_a_schema_is_compiled_once(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer)
    first = state_of(compiler, json_schema(SCHEMA))
    second = state_of(compiler, json_schema(dict(SCHEMA)))
    assert len(compiler.kept) == 1
    first.accept(byte_ids(tokenizer, "{")[0])
    assert not torch.equal(first.fill_mask(), second.fill_mask())


def test_without_xgrammar(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    load = builtins.__import__

    def absent(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "xgrammar":
            raise ImportError(name)
        return load(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    compiler = GrammarCompiler(tokenizer)
    assert compiler.compile({"type": "text"}) is None
    with pytest.raises(UnsupportedError, match="pip install xgrammar"):
        compiler.compile(OBJECT)
