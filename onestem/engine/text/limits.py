"""How many characters of a text one token stands for at most: a longer text has more tokens than a
model takes in any case, and need not be tokenised to know it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from onestem.engine.text.decoders import BYTE_LEVEL

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Of any text. These take half a minute to tokenise, and some 10 GiB of memory.
MOST_CHARACTERS = 1 << 26

# Characters that normalisation may make one of. Canonical composition joins at most four.
_COMPOSED = {"NFC": 4, "NFKC": 4, "NFD": 1, "NFKD": 1, "Lowercase": 1, "ByteLevel": 1, "Prepend": 1}
_KEEPS_ALL = {"ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength"}


def most_per_token(backend: Tokenizer, *, control: bool, blanks: bool = True) -> int | None:
    """Characters of a text that one token stands for at most; None: there is no such number, since
    characters may be dropped, or any number of them become one token.

    Args:
        control: whether names of control tokens in the text are these tokens.
        blanks: whether blanks are counted among the characters.
    """
    added = backend.get_added_tokens_decoder().values()
    matched = [token for token in added if control or not token.special]
    if blanks and any(token.lstrip or token.rstrip for token in matched):  # it takes all blanks
        return None
    shortened = _shortened(_state(backend.normalizer))
    if shortened is None or not _keeps_all(_state(backend.pre_tokenizer)):
        return None
    names = backend.get_vocab(with_added_tokens=True)
    if not _names_each(backend, names):
        return None
    longest = max(map(len, names), default=1)
    if backend.normalizer is not None:
        normal = (backend.normalizer.normalize_str(token.content) for token in matched)
        longest = max([longest, *map(len, normal)])
    return max(1, longest) * shortened


def _state(part: Any) -> Any:
    return None if part is None else json.loads(part.__getstate__())


def _shortened(normalizer: Mapping[str, Any] | None) -> int | None:
    """Characters that become one at most; None: any number."""
    if normalizer is None:
        return 1
    kind = normalizer["type"]
    if kind == "Sequence":
        factors = list(map(_shortened, normalizer["normalizers"]))
        known = [factor for factor in factors if factor is not None]
        return math.prod(known) if len(known) == len(factors) else None
    if kind == "Replace":
        pattern, content = normalizer["pattern"].get("String"), normalizer["content"]
        return -(-len(pattern) // len(content)) or 1 if pattern is not None and content else None
    return _COMPOSED.get(kind)


def _keeps_all(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    """Whether every character comes to the model."""
    if pre_tokenizer is None:
        return True
    kind = pre_tokenizer["type"]
    if kind == "Sequence":
        return all(map(_keeps_all, pre_tokenizer["pretokenizers"]))
    if kind in ("Split", "Punctuation"):
        return bool(pre_tokenizer["behavior"] != "Removed")
    return kind in _KEEPS_ALL


def _names_each(backend: Tokenizer, names: Mapping[str, int]) -> bool:
    """Whether each token of the model has a name, or is one unknown character."""
    model: Any = backend.model
    kind = type(model).__name__
    if kind != "BPE":  # others make one token of any unknown word
        return False
    if model.byte_fallback and all(f"<0x{byte:02X}>" in names for byte in range(256)):
        return True
    if model.unk_token is not None:
        return not model.fuse_unk
    steps = [*steps_of(_state(backend.pre_tokenizer)), *steps_of(_state(backend.normalizer))]
    return any(step["type"] == "ByteLevel" for step in steps) and names.keys() >= BYTE_LEVEL.keys()


def steps_of(part: Any) -> Iterator[Mapping[str, Any]]:
    """A part of a tokenizer and all those inside of it, from its state or from a file, which may
    have anything."""
    waiting = [part]
    while waiting:
        here = waiting.pop()
        if isinstance(here, dict) and here:
            yield here
            for name in ("normalizers", "pretokenizers", "processors", "decoders"):
                steps = here.get(name)
                waiting += steps if isinstance(steps, list) else ()
