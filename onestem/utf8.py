"""UTF-8 that comes in pieces, one for each token."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

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


class Places:
    """Where pieces begin in the text that they make, in characters. A piece that begins within a
    character has that character's place.

    Args:
        count: characters before the first piece.
        unfinished: the beginning of a character before it.
    """

    def __init__(self, count: int = 0, unfinished: bytes = b"") -> None:
        self._count, self._unfinished = count, unfinished

    def next(self, piece: bytes) -> int:
        """The place of the next piece."""
        place = self._count
        if self._unfinished and not _goes_on(self._unfinished + piece[:1]):
            place += 1  # what is unfinished becomes U+FFFD
        shown, self._unfinished = decoded(self._unfinished, piece)
        self._count += len(shown)
        return place


def _goes_on(data: bytes) -> bool:
    """Whether these bytes are the beginning of a UTF-8 character."""
    try:
        codecs.utf_8_decode(data, "strict", False)
    except UnicodeDecodeError:
        return False
    return True
