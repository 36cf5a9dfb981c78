"""Arguments that remember how they were spelled: where a model wrote `1.50`, `1.5` is another text.

Templates write values as Python does, which spells each in one way. One that was spelled in another
is given to a template as digits that occur nowhere else, and these become its spelling afterwards.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from onestem.checked import read_json

_SPELLED = re.compile(r'"(?:[^"\\]|\\.)*"|-?[0-9][0-9.eE+-]*')


class SpelledText(str):
    """A text, and its JSON."""

    source: str


class SpelledNumber(float):
    """A number, and its JSON."""

    source: str


def read_spelled(text: str) -> Any:
    """The value of a text of JSON; errors as of `read_json`. Of blanks it remembers nothing: those
    that a model writes are a template's, others are a client's."""
    return _remember(read_json(text), (found.group() for found in _SPELLED.finditer(text)))


def _remember(value: Any, sources: Iterator[str]) -> Any:
    """A value with the spellings of its keys and scalars, which come in order."""
    if isinstance(value, dict):
        return {_remember(key, sources): _remember(one, sources) for key, one in value.items()}
    if isinstance(value, list):
        return [_remember(one, sources) for one in value]
    if value is None or isinstance(value, bool):
        return value
    source = next(sources)
    if source == json.dumps(value, ensure_ascii=False):
        return value
    made = SpelledText(value) if isinstance(value, str) else SpelledNumber(value)
    made.source = source
    return made


class StandIns:
    """What one template gets in place of spelled values.

    Args:
        texts: whether it writes texts in JSON.
    """

    def __init__(self, texts: bool) -> None:
        self._texts = texts
        self._first = 10**17 + secrets.randbelow(9 * 10**17)
        self._sources: list[str] = []

    def put(self, value: Any) -> Any:
        """A value with stand-ins in it, of the same types."""
        if isinstance(value, Mapping):
            return {self.put(key): self.put(one) for key, one in value.items()}
        if isinstance(value, list):
            return [self.put(one) for one in value]
        if isinstance(value, SpelledNumber):
            return int(self._stand_in(value.source))
        if isinstance(value, SpelledText):
            return self._stand_in(value.source[1:-1]) if self._texts else str(value)
        return value

    def _stand_in(self, source: str) -> str:
        self._sources.append(source)
        return f"{self._first}{len(self._sources) - 1:09}"

    def spelled(self, rendered: str) -> str:
        """What the template has written, with spellings in place of stand-ins."""
        if not self._sources:
            return rendered
        digits = re.compile(f"{self._first}([0-9]{{9}})")
        return digits.sub(lambda found: self._sources[int(found[1])], rendered)
