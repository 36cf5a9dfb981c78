"""Texts that are tokenised as they stand: prompts of completions, texts that are scored."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

Span = tuple[int, int]  # [start, end), in characters


@dataclass(frozen=True, slots=True)
class RawText:
    """A text whose names of control tokens are these tokens, except in its quoted parts, where they
    are characters. A name that is quoted in part is quoted.

    Attributes:
        quoted: the parts, rising and apart from one another.
    """

    text: str
    quoted: tuple[Span, ...] = ()

    @staticmethod
    def of(text: str, parse_special: bool = True) -> RawText:
        """A text with nothing quoted, or all of it."""
        return RawText(text, () if parse_special or not text else ((0, len(text)),))

    @staticmethod
    def joined(parts: Iterable[RawText]) -> RawText:
        """The parts one after the other."""
        texts: list[str] = []
        quoted: list[Span] = []
        end = 0
        for part in parts:
            for start, stop in part.quoted:
                if quoted and quoted[-1][1] == end + start:
                    start = quoted.pop()[0] - end
                quoted.append((end + start, end + stop))
            texts.append(part.text)
            end += len(part.text)
        return RawText("".join(texts), tuple(quoted))

    def quotes(self, start: int, end: int) -> bool:
        """Whether some of these characters are quoted."""
        return any(first < end and start < stop for first, stop in self.quoted)
