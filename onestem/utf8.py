"""UTF-8 that comes in pieces, one for each token."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

__all__ = ["decoded", "last_bytes"]

MOST_BYTES = 4  # of a character


def decoded(unfinished: bytes, data: bytes, *, final: bool = False) -> tuple[str, bytes]:
    """The text of `data` after the beginning of a character, and what is unfinished after it. It is
    what `codecs`' incremental decoder gives, which calls Python where this calls C. final: nothing
    follows, what is unfinished becomes U+FFFD."""
    if unfinished:
        data = unfinished + data
    text, consumed = codecs.utf_8_decode(data, "replace", final)
    return text, data[consumed:]


def last_bytes(pieces: Iterable[bytes]) -> bytes:
    """The last bytes of a text, as many as tell whether it ends within a character; from its
    pieces, the last first. Empty if all of them are."""
    context: list[bytes] = []
    length = 0
    for piece in pieces:
        context.append(piece)
        length += len(piece)
        if length >= MOST_BYTES:
            break
    return b"".join(reversed(context))
