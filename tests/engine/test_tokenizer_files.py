"""A directory's tokenizer files may hold anything: an error, and never the end of the process."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onestem.engine.text import directory as directory_module
from onestem.engine.text.tokenizer import Tokenizer
from onestem.errors import OnestemError
from tests.engine.tiny_tokenizers import make_byte_fallback_tokenizer, make_byte_level_tokenizer

State = dict[str, Any]


def with_id(number: int) -> Callable[[State], Any]:
    return lambda state: state["model"]["vocab"].update(zz=number)


def added(number: int) -> Callable[[State], Any]:
    token = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return lambda state: state["added_tokens"].append({**token, "id": number, "content": "<zz>"})


def replaced(*pairs: tuple[Any, str]) -> Callable[[State], Any]:
    steps = [
        {"type": "Replace", "pattern": pattern, "content": content} for pattern, content in pairs
    ]
    return lambda state: state.update(normalizer={"type": "Sequence", "normalizers": steps})


def nested(state: State) -> None:
    """Five times a thousand characters for each."""
    part: State = {"type": "NFC"}
    for _ in range(5):
        many = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}
        part = {"type": "Sequence", "normalizers": [many, part]}
    state["normalizer"] = part


def precompiled(state: State) -> None:
    """A table that says that it has 4 GB."""
    table = base64.b64encode(b"\xff" * 64).decode()
    state["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": table}


def prefix(state: State) -> None:
    """Cut inside of a character, where the library makes an error's text of it."""
    model = state["model"]
    model.update(continuing_subword_prefix="a", merges=[["é", "é"]])
    model["vocab"].update({"éé": len(model["vocab"]), "é\xa9": len(model["vocab"]) + 1})


HARMFUL: dict[str, tuple[Callable[[State], Any], str]] = {
    "an id of 8 GB": (with_id(2**31), r"tokenizer.json: token 'zz' has id 2147483648, limit is"),
    "the highest id": (with_id(2**32 - 1), "token 'zz' has id 4294967295, limit is 1048575"),
    "an added token's id": (added(2**31), "token '<zz>' has id 2147483648, limit is"),
    "texts that grow": (nested, r"makes up to 1e\+15 characters of one, limit is 64"),
    "a text beside each character": (
        replaced(({"String": ""}, "x" * 1000)),
        "makes up to 1e\\+03 characters of one",
    ),
    "an expression": (replaced(({"Regex": "b*"}, "x" * 100)), "makes up to 101 characters of one"),
    "a kind that is no text": (lambda state: state["model"].update(type=[]), "cannot be loaded"),
    "a damaged table": (precompiled, r"the tokenizers library crashes \(SIGABRT\) by it"),
    "a prefix": (prefix, r"the tokenizers library crashes \(SIGABRT\) by it"),
}


def changed(path: Path, change: Callable[[State], Any]) -> Path:
    make_byte_level_tokenizer(path)
    state = json.loads((path / "tokenizer.json").read_text())
    change(state)
    (path / "tokenizer.json").write_text(json.dumps(state))
    return path


@pytest.mark.parametrize("name", HARMFUL)
def test_what_would_end_the_process(tmp_path: Path, name: str) -> None:
    change, reason = HARMFUL[name]
    with pytest.raises(OnestemError, match=reason):
        Tokenizer.from_directory(changed(tmp_path, change))


def test_ids_of_a_vocabulary_alone(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 2**31}))
    (tmp_path / "merges.txt").write_text("")
    with pytest.raises(OnestemError, match=r"vocab.json: token 'b' has id 2147483648, limit is"):
        Tokenizer.from_directory(tmp_path)


def test_holes_are_fine(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(changed(tmp_path, with_id(200_000)))
    assert tokenizer is not None
    assert tokenizer.vocab_size == 200_001


def test_panics_while_it_is_loaded(tmp_path: Path) -> None:
    """They pass `except Exception`."""

    def unknown(state: State) -> None:
        special = {"SpecialToken": {"id": "[Q]", "type_id": 0}}
        empty: State = {"pair": [], "special_tokens": {}}
        state["post_processor"] = {"type": "TemplateProcessing", "single": [special], **empty}

    with pytest.raises(OnestemError, match=r"its library fails|cannot be loaded"):
        Tokenizer.from_directory(changed(tmp_path, unknown))


def test_usual_ones_are_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a process, and the time to load it twice."""
    monkeypatch.setattr(directory_module, "TRIAL", None)
    for path in (
        make_byte_level_tokenizer(tmp_path / "level"),
        make_byte_fallback_tokenizer(tmp_path / "fallback"),
        make_byte_fallback_tokenizer(tmp_path / "metaspace", legacy=False),
    ):
        assert Tokenizer.from_directory(path) is not None


def test_others_are_tried_and_used(tmp_path: Path) -> None:
    def fixed(state: State) -> None:
        parts = [{"type": "FixedLength", "length": 2}, state["pre_tokenizer"]]
        state["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": parts}

    tokenizer = Tokenizer.from_directory(changed(tmp_path, fixed))
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer.encode("Hello there")) == "Hello there"
    assert directory_module.TRIAL.pid is None  # it has ended
