"""Files of a tokenizer's directory, looked at before a library reads them. What it would not
survive is refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onestem.checked import show
from onestem.children import Child, Limits, TooCostlyError
from onestem.engine.text.limits import steps_of
from onestem.errors import ConfigError
from onestem.files import check_regular
from onestem.models.fields import is_integer, read_json

# Those that transformers may read with a tokenizer; `config.json` is one of them. Others in the
# directory may be anything.
_SUFFIXES = (".jinja", ".model", ".tiktoken")
_NAMES = (
    "added_tokens", "chat_template", "config.", "generation_config.", "merges.", "preprocessor",
    "processor", "special_tokens", "tekken.", "tokenizer", "vocab.",
)  # fmt: skip
_FOLDERS = (".", "additional_chat_templates")

# The library makes a table of all ids up to the highest.
LEAST_IDS, HOLES = 1 << 20, 4
MOST_GROWTH = 64  # characters that normalisation may make of one

# What the library reads without harm, whatever its fields are. Others are tried first.
_HARMLESS = {
    "BertNormalizer", "BertPreTokenizer", "BertProcessing", "ByteFallback", "ByteLevel",
    "Digits", "Fuse", "Lowercase", "Metaspace", "NFC", "NFD", "NFKC", "NFKD", "Prepend",
    "Punctuation", "Replace", "RobertaProcessing", "Sequence", "Split", "Strip", "StripAccents",
    "TemplateProcessing", "Whitespace", "WhitespaceSplit", "WordPiece",
}  # fmt: skip
_MODELS = {"BPE", "WordLevel", "WordPiece"}

TRIAL = Child(
    "onestem.engine.text.tokenizer_process",
    Limits(cpu_seconds=60, wall_seconds=300, memory_bytes=4 << 30),
)


def check_files(directory: Path) -> None:
    """Raise `ConfigError` for what a library would read for ever, or into all memory, or that ends
    its process."""
    for folder in (directory / name for name in _FOLDERS):
        if not folder.is_dir():
            continue
        for file in sorted(folder.iterdir()):
            is_read = file.suffix in _SUFFIXES or file.name.startswith(_NAMES)
            if is_read and file.exists():
                check_regular(file, ConfigError)
    if (directory / "vocab.json").exists():
        vocabulary = read_json(directory / "vocab.json")
        _check_ids(directory / "vocab.json", vocabulary, len(vocabulary))
    if (directory / "tokenizer.json").exists():
        _check_tokenizer(directory / "tokenizer.json")


def _check_tokenizer(file: Path) -> None:
    whole = read_json(file)
    model = _object(whole.get("model"))
    added = whole.get("added_tokens")
    names = [_object(one) for one in added] if isinstance(added, list) else []
    ids = {str(one.get("content")): one.get("id") for one in names}
    vocabulary = _object(model.get("vocab"))
    for some in (vocabulary, ids):
        _check_ids(file, some, len(vocabulary) + len(ids))
    growth = _growth(whole.get("normalizer"))
    if growth > MOST_GROWTH:
        raise ConfigError(
            f"{file}: its normalizer makes up to {growth:.3g} characters of one, limit is "
            f"{MOST_GROWTH}: remove its replacements"
        )
    if _is_harmless(whole, model):
        return
    try:
        TRIAL.ask(os.fsencode(file.absolute()))
    except TooCostlyError as error:
        raise ConfigError(
            f"{file}: the tokenizers library {error} by it: the file is damaged, or of another "
            "version"
        ) from None
    finally:
        TRIAL.stop()


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _check_ids(file: Path, vocabulary: Mapping[str, Any], num_tokens: int) -> None:
    limit = max(LEAST_IDS, HOLES * num_tokens)
    for name, token_id in vocabulary.items():
        if is_integer(token_id) and token_id >= limit:
            raise ConfigError(
                f"{file}: token {show(name)} has id {token_id}, limit is {limit - 1} for "
                f"{num_tokens} tokens: the file is damaged"
            )


def _growth(normalizer: Any) -> float:
    """How many characters its replacements make of one, at most."""
    growth = 1.0
    for step in steps_of(normalizer):
        content = step.get("content", step.get("prepend"))
        if isinstance(content, str) and step.get("type") in ("Replace", "Prepend"):
            pattern = _object(step.get("pattern")).get("String")
            replaced = len(pattern) if isinstance(pattern, str) else 0
            # An empty match is beside each character, which stays.
            growth *= max(1.0, len(content) / replaced if replaced else 1 + len(content))
    return growth


def _is_harmless(whole: Mapping[str, Any], model: Mapping[str, Any]) -> bool:
    names = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
    kinds = [str(step.get("type")) for name in names for step in steps_of(whole.get(name))]
    marks = (model.get("continuing_subword_prefix"), model.get("end_of_word_suffix"))
    return (
        str(model.get("type")) in _MODELS
        and all(kind in _HARMLESS for kind in kinds)
        and all(not mark or str(mark).isascii() for mark in marks)
        and not (model["type"] == "BPE" and marks[0])
    )
