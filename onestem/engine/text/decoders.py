"""Decoders of the tokenizers library that give each token a text of its own, so that a text can be
streamed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from onestem.errors import UnsupportedError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
# Decoders of which each token's text is its own, whatever follows it.
_LOCAL = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace", "WordPiece"}


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's form of bytes: printable ones as they are, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + place): byte for place, byte in enumerate(others)}


BYTE_LEVEL = _byte_level_alphabet()


def settled(library: Tokenizer) -> list[str]:
    """Names of the decoder's steps.

    Converters write ByteFallback, Fuse and Replace before ByteLevel for any BPE. With names of
    bytes alone in the vocabulary these steps find nothing, and the tokenizer gets a plain
    ByteLevel: after Fuse, one added token that is spelled in other characters would leave the
    whole text in the vocabulary's spelling.

    Raises:
        UnsupportedError: a token's text would depend on the tokens after it.
    """
    if library.decoder is None:
        return []
    steps = _steps(library)
    kinds = [step["type"] for step in steps]
    if kinds[-1:] == ["ByteLevel"] and all(map(_is_idle, steps[:-1])) and _is_byte_level(library):
        from tokenizers import decoders

        library.decoder = decoders.ByteLevel()
        return ["ByteLevel"]
    byte_level = "ByteLevel" in kinds and set(kinds) <= {"ByteLevel", "Fuse"}
    if not byte_level and not all(_is_local(index, steps) for index in range(len(steps))):
        raise UnsupportedError(
            f"tokenizer decoder {' + '.join(kinds)} cannot be streamed, expected ByteLevel, or a "
            f"sequence of {', '.join(sorted(_LOCAL))}"
        )
    return kinds


def _steps(library: Tokenizer) -> list[Mapping[str, Any]]:
    state = json.loads(library.decoder.__getstate__())
    return list(state["decoders"]) if state["type"] == "Sequence" else [state]


def _is_idle(step: Mapping[str, Any]) -> bool:
    """Whether a step changes no name that is spelled in bytes."""
    if step["type"] == "Replace":
        pattern = step["pattern"].get("String")
        return bool(pattern) and not BYTE_LEVEL.keys() >= set(pattern)
    return step["type"] in ("ByteFallback", "Fuse")


def _is_byte_level(library: Tokenizer) -> bool:
    """Whether the vocabulary is a byte-level BPE's: all bytes, and tokens that are made of them."""
    if type(library.model).__name__ != "BPE":
        return False
    names = library.get_vocab(with_added_tokens=True).keys()
    added = {token.content for token in library.get_added_tokens_decoder().values()}
    return (
        names >= BYTE_LEVEL.keys()
        and not any(map(BYTE_TOKEN.fullmatch, names))
        and all(BYTE_LEVEL.keys() >= set(name) for name in names - added)
    )


def _is_local(index: int, steps: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a step of the decoder works on single tokens, or at the text's beginning."""
    step = steps[index]
    fused = any(before["type"] == "Fuse" for before in steps[:index])
    if step["type"] == "Strip":
        return bool(step["stop"] == 0)
    if step["type"] == "Replace":
        return not fused
    return step["type"] in _LOCAL
