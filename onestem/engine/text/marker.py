"""Texts in which some names of control tokens are these tokens, and others are characters."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from onestem.engine.text.backend import Backend
from onestem.errors import RequestError
from onestem.rawtext import RawText

__all__ = ["Marker", "any_of"]


def any_of(names: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern for the names, the longest that begins at a place first, as tokenizers prefer it;
    None: there are none."""
    ordered = sorted({name for name in names if name}, key=lambda name: (-len(name), name))
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


class Marker:
    """Tells the control tokens that a template writes from those that messages mention, and those
    of a raw text from those that it quotes.

    Attributes:
        backend: reads control tokens' names as characters, and stand-ins of theirs as tokens.
        ids: a stand-in's id -> the control token's.
    """

    def __init__(self, text_backend: Backend, special: Mapping[int, Any]) -> None:
        from tokenizers import AddedToken

        self._nonce = secrets.token_hex(12)
        self._names = [token.content for token in special.values()]
        names = any_of(self._names)
        assert names is not None
        self._mentioned = names
        self._rendered = re.compile(f"mark{self._nonce}n([0-9]+)n|({names.pattern})")
        self._place = {name: place for place, name in enumerate(self._names)}
        self.backend = text_backend.copy()
        stand_ins = [
            AddedToken(
                self._stand_in(name),
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=False,
                special=False,
            )
            for name, token in zip(self._names, special.values(), strict=True)
        ]
        self.backend.library.add_tokens(stand_ins)
        vocabulary = self.backend.library.get_added_tokens_decoder()
        by_name = {token.content: token_id for token_id, token in vocabulary.items()}
        self.ids: dict[int, int] = {
            by_name[token.content]: token_id
            for token, token_id in zip(stand_ins, special, strict=True)
        }

    def _stand_in(self, name: str) -> str:
        return f"token{self._nonce}n{self._place[name]}n"

    def mark(self, value: Any) -> Any:
        """The messages with marks in place of the names that they mention."""
        if isinstance(value, str):
            return self._mentioned.sub(
                lambda found: f"mark{self._nonce}n{self._place[found.group()]}n", value
            )
        if isinstance(value, Mapping):
            return {key: self.mark(part) for key, part in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.mark(part) for part in value]
        return value

    def mark_raw(self, raw: RawText) -> str:
        """The text with stand-ins for the control tokens that it does not quote."""
        return self._mentioned.sub(
            lambda found: (
                found.group() if raw.quotes(*found.span()) else self._stand_in(found.group())
            ),
            raw.text,
        )

    def unmark(self, rendered: str) -> tuple[str, bool]:
        """Put stand-ins for the template's control tokens, and names for the marks. Also returns
        whether there are marks: a template may have dropped the messages that mention names."""
        literal = False

        def replace(found: re.Match[str]) -> str:
            nonlocal literal
            mark, name = found.groups()
            if mark is None:
                return self._stand_in(name)
            literal = True
            meant: str = self._names[int(mark)]
            return meant

        kept = self._rendered.sub("", rendered)
        if self._nonce in kept.lower():
            raise RequestError(
                "the chat template changes the letters of a message that mentions a control "
                "token: leave the control token's name out of the message"
            )
        return self._rendered.sub(replace, rendered), literal
