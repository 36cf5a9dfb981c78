"""A tokenizer from a GGUF file's fields is the one of the model's `tokenizer.json`."""

from __future__ import annotations

import json
import random
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from onestem.engine.text.gguf_tokenizer import TURN_ENDS, read_tokenizer
from onestem.engine.text.tokenizer import Tokenizer as Ours
from onestem.llm import LLM
from onestem.models.gguf.file import open_gguf
from onestem.request import SamplingParams
from tests.engine.tiny_tokenizers import make_byte_fallback_tokenizer, make_byte_level_tokenizer
from tests.models.as_gguf import vocabulary, write_file, write_gguf
from tests.models.tiny import make_tiny

CORPUS = """The quick brown fox's tail isn't what we'd HAVE'D; they're 12 345 6789 years old!!
    def add(a, b):\n\treturn a+b  # 3.14\r\n\r\n   Grüße, naïve façade, e\u0301 привет МОСКВА
    漢字かな 한국어 ... 1,000,000 == `code` $x^2$ "quoted" 'single' <|end|>
    camelCase HTTPServer x86_64"""

# How published `tokenizer.json` split texts, by `tokenizer.ggml.pre`.
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    + _SHORT
    + r"?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    + _SHORT
    + r"?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|"
    + _SPACES
)
_CL100K = rf"{_SHORT}|{_WORDS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN2 = rf"{_SHORT}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


def _split(pattern: str) -> dict[str, Any]:
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


def _bytes(regex: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": regex,
    }


_DIGITS = [{"type": "Digits", "individual_digits": True}, _bytes(True)]
PUBLISHED: dict[str, list[dict[str, Any]]] = {
    "gpt-2": [_bytes(True)],
    "olmo": [_bytes(True)],
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "llama-bpe": [_split(_CL100K), _bytes(False)],
    "dbrx": [_split(_CL100K), _bytes(False)],
    "smaug-bpe": [_split(_CL100K), _bytes(False)],
    "qwen2": [_split(_QWEN2), _bytes(False)],
    "deepseek-r1-qwen": [_split(_QWEN2), _bytes(False)],
    "gpt-4o": [_split(_O200K), _bytes(False)],
    "tekken": [
        _split(_O200K.replace(_SHORT + "?", "").replace(r"\p{N}{1,3}", r"\p{N}")),
        _bytes(False),
    ],
    "falcon": [
        {"type": "Punctuation", "behavior": "Contiguous"},
        _bytes(True),
        {"type": "Digits", "individual_digits": False},
        _split("[0-9][0-9][0-9]"),
    ],
}


def texts(count: int, seed: int, names: list[str]) -> list[str]:
    draw = random.Random(seed)
    words = [*CORPUS.split(" "), "  ", "\n\n", "\t", " \r\n ", "\u00a0", "\u3000", *names]

    def anything() -> str:
        found = chr(draw.choice((draw.randrange(32, 0x250), draw.randrange(0x250, 0x1F700))))
        return found if unicodedata.category(found) not in ("Cs", "Cn") else "x"

    return [
        draw.choice(("", " ")).join(
            draw.choice(words) if draw.random() < 0.8 else anything()
            for _ in range(draw.randint(1, 20))
        )
        for _ in range(count)
    ]


def compare(truth: Tokenizer, file: Path) -> None:
    """Ids of texts, with what is put around them, and texts of ids."""
    ours, library = Ours.from_directory(file), read_tokenizer(open_gguf(file)).backend_tokenizer
    assert ours is not None
    names = [token.content for token in truth.get_added_tokens_decoder().values()]
    for text in texts(300, 0, names):
        for special in (False, True):
            ids = truth.encode(text, add_special_tokens=special).ids
            assert library.encode(text, add_special_tokens=special).ids == ids, text
        assert ours.decode(ids) == truth.decode(ids)


def write(file: Path, whole: dict[str, Any], pre: str, **more: Any) -> Path:
    """A file that holds a vocabulary alone."""
    fields = {"general.architecture": "llama", **vocabulary(whole, pre), **more}
    rows = np.zeros((len(fields["tokenizer.ggml.tokens"]), 1), np.float32)
    return write_file(file, fields, {"token_embd.weight": rows})


@pytest.mark.parametrize("pre", PUBLISHED)
def test_every_way_of_splitting(tmp_path, pre):
    truth = Tokenizer(models.BPE())
    state = {"type": "Sequence", "pretokenizers": PUBLISHED[pre]}
    whole = json.loads(truth.to_str()) | {"pre_tokenizer": state}
    whole["normalizer"] = {"type": "NFC"} if "qwen" in pre else None
    truth = Tokenizer.from_str(json.dumps(whole))
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    truth.train_from_iterator([CORPUS], trainer)
    truth.decoder = decoders.ByteLevel()
    truth.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    truth.add_tokens([AddedToken("<think>", normalized=False)])
    whole = json.loads(truth.to_str())
    compare(truth, write(tmp_path / "model.gguf", whole, pre))


@pytest.mark.parametrize("prefix", [True, False])
def test_pieces(tmp_path, prefix):
    """SentencePiece, with a space before each text and without."""
    make_byte_fallback_tokenizer(tmp_path)
    whole = json.loads((tmp_path / "tokenizer.json").read_text())
    if not prefix:
        whole["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        whole["decoder"]["decoders"] = [
            step for step in whole["decoder"]["decoders"] if step["type"] != "Strip"
        ]
    file = write(
        tmp_path / "model.gguf", whole, "default", **{"tokenizer.ggml.add_space_prefix": prefix}
    )
    compare(Tokenizer.from_str(json.dumps(whole)), file)


def _end(**more: Any) -> Callable[[Path], Ours]:
    def made(folder: Path) -> Ours:
        make_byte_level_tokenizer(folder, more_names=TURN_ENDS[4:])
        whole = json.loads((folder / "tokenizer.json").read_text())
        if not more.pop("has_return", True):
            whole["added_tokens"] = [
                one for one in whole["added_tokens"] if one["content"] != "<|return|>"
            ]
        found = Ours.from_directory(write(folder / "model.gguf", whole, "gpt-2", **more))
        assert found is not None
        return found

    return made


def test_ends_of_turns(tmp_path):
    """`<|end|>` ends a turn, but in gpt-oss only a part of one."""
    (tmp_path / "phi").mkdir()
    (tmp_path / "oss").mkdir()
    phi = _end(has_return=False)(tmp_path / "phi")
    oss = _end()(tmp_path / "oss")
    ends = [{one.token_text(id) for id in one.end_ids} for one in (phi, oss)]
    assert ends[0] >= {"<|eot_id|>", "<|end|>", "<|call|>"}
    assert ends[1] >= {"<|eot_id|>", "<|return|>", "<|call|>"}
    assert "<|end|>" not in ends[1]


@pytest.mark.parametrize("split", [0, 9])
def test_a_file_answers_as_its_directory(tmp_path, split):
    """Ids, texts, chats and ends; a file is all that is needed."""
    directory = make_tiny("qwen3", tmp_path / "model", changes={"vocab_size": 512})
    make_byte_level_tokenizer(directory)
    whole = json.loads((directory / "tokenizer.json").read_text())
    config = json.loads((directory / "tokenizer_config.json").read_text())
    template = config.get("chat_template") or (directory / "chat_template.jinja").read_text()
    fields = vocabulary(whole, "gpt-2") | {"tokenizer.chat_template": template}
    names = {one["content"]: one["id"] for one in whole["added_tokens"]}
    fields["tokenizer.ggml.eos_token_id"] = names["<|end_of_text|>"]
    file = write_gguf(
        directory, tmp_path / "m.gguf", change=lambda own: own.update(fields), split=split
    )
    params = SamplingParams(max_tokens=12, temperature=0)
    answers = []
    for model in (directory, file):
        with LLM(model, dtype="float32", device="cpu", kv_memory="1MiB", seed=0) as llm:
            texts = llm.generate(["The quick", "brown <|eot_id|> fox"], params)
            chats = llm.chat([{"role": "user", "content": "Hello <|eot_id|>"}], params)
        answers.append(
            [
                (one.prompt_token_ids, one.outputs[0].token_ids, one.outputs[0].text)
                for one in (*texts, *chats)
            ]
        )
    assert answers[0] == answers[1]
