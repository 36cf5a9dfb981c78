"""Texts in which some names of control tokens are these tokens, and others are characters."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from functools import partial
from typing import Any

from onestem.engine.text.backend import Backend
from onestem.engine.text.control import ControlNames
from onestem.errors import RequestError
from onestem.rawtext import RawText


class Marker:
    """Tells the control tokens that a template writes from those that messages mention, and those
    of a raw text from those that it quotes.

    Its backend reads control tokens' names as characters, and stand-ins of theirs as tokens.
    """

    def __init__(self, text_backend: Backend, names: ControlNames, special: Mapping[int, Any]):
        from tokenizers import AddedToken

        assert names.pattern is not None
        self._nonce = secrets.token_hex(12)
        self._names, self._mentioned = names, names.pattern
        self._rendered = re.compile(f"mark{self._nonce}n([0-9]+)n|({names.pattern.pattern})")
        self._special = special
        stand_ins = {
            token_id: AddedToken(
                self._stand_in(token.content),
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=False,
                special=False,
            )
            for token_id, token in special.items()
        }
        self._backend = text_backend.copy()
        self._backend.library.add_tokens([*stand_ins.values()])
        vocabulary = self._backend.library.get_added_tokens_decoder()
        by_name = {token.content: token_id for token_id, token in vocabulary.items()}
        self._ids: dict[int, int] = {
            by_name[token.content]: token_id for token_id, token in stand_ins.items()
        }

    def _stand_in(self, name: str) -> str:
        return f"token{self._nonce}n{self._names.ids[name]}n"

    def mark(self, value: Any) -> Any:
        """The messages with marks in place of the names that they mention."""
        if isinstance(value, str):
            if not self._names.are_mentioned(value):
                return value
            marked = partial("mark{}n{}n".format, self._nonce)
            return self._names.replaced(str(value), marked)
        if isinstance(value, Mapping):
            return {self.mark(key): self.mark(part) for key, part in value.items()}
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

    def encode(self, text: str, *, literal: bool = True) -> list[int]:
        """Ids of a text with stand-ins. `literal`: it may mention names of control tokens."""
        ids = self._backend.encode(text)
        ids = self._names.unforged(self._backend, text, ids) if literal else ids
        return [self._ids.get(token_id, token_id) for token_id in ids]

    def unmark(self, rendered: str) -> tuple[str, bool]:
        """Put stand-ins for the template's control tokens, and names for the marks. Also returns
        whether there are marks: a template may have dropped the messages that mention names."""
        if self._nonce in self._rendered.sub("", rendered).lower():
            raise RequestError(
                "the chat template changes the letters of a message that mentions a control "
                "token: leave the control token's name out of the message"
            )
        text = self._rendered.sub(
            lambda found: (
                self._special[int(found[1])].content if found[1] else self._stand_in(found[2])
            ),
            rendered,
        )
        return text, f"mark{self._nonce}" in rendered
