"""The names of control tokens, and texts in which users write them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from onestem.engine.text.backend import Backend
from onestem.openai.forms.spelling import SpelledText
from onestem.rawtext import RawText


class ControlNames:
    """Control tokens by their names.

    Args:
        special: control tokens of the library, by id.
        unknown: the id of the unknown token, if there is one. Characters may become it; that
            forges nothing.

    Attributes:
        ids: by name.
        pattern: matches a name, the longest that begins at a place; None: there is none.
    """

    def __init__(self, special: Mapping[int, Any], unknown: int | None) -> None:
        self.ids: dict[str, int] = {token.content: token_id for token_id, token in special.items()}
        self.pattern = _any_of(self.ids)
        self._unforgeable = special.keys() - {unknown}

    def replaced(self, text: str, form: Callable[[int], str]) -> str:
        """A text with `form` of the id in place of each name."""
        if self.pattern is None:
            return text
        return self.pattern.sub(lambda found: form(self.ids[found.group()]), text)

    def is_forged(self, raw: RawText, ids: list[int]) -> bool:
        """Whether something quoted has become a control token."""
        if self._unforgeable.isdisjoint(ids) or self.pattern is None:
            return False
        quotes = [raw.quotes(*found.span()) for found in self.pattern.finditer(raw.text)]
        # A normaliser may make a name of other characters.
        return any(quotes) or len(quotes) < sum(token in self._unforgeable for token in ids)

    def unforged(self, backend: Backend, text: str, ids: list[int]) -> list[int]:
        """`ids` of `text`, or others if characters became control tokens.

        Vocabularies of whole words or pieces may hold a control token's name as a word. There the
        text is cut inside each such name and the parts are encoded alone.
        """
        if self._unforgeable.isdisjoint(ids):
            return ids
        assert self.pattern is not None
        cuts = [found.start() + 1 for found in self.pattern.finditer(text)]
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        joined = [id for part in parts for id in backend.encode(part)]
        return [token for token in joined if token not in self._unforgeable]

    def are_mentioned(self, value: Any) -> bool:
        """Whether a string anywhere in a message mentions a name."""
        if self.pattern is None:
            return False
        if isinstance(value, str):
            source = value.source if isinstance(value, SpelledText) else ""
            return any(map(self.pattern.search, (value, source)))
        parts = (*value, *value.values()) if isinstance(value, Mapping) else value
        return isinstance(value, (Mapping, list, tuple)) and any(map(self.are_mentioned, parts))


def _any_of(names: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern for the names, the longest that begins at a place first, as tokenizers prefer it;
    None: there are none."""
    ordered = sorted({name for name in names if name}, key=lambda name: (-len(name), name))
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None
