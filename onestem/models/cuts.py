"""A part of a tensor, read without the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# (first, last + 1)
Span = tuple[int, int]


@dataclass(frozen=True)
class Axis:
    """A dimension of a tensor.

    Attributes:
        spans: what one rank has of it; (): all.
    """

    size: int
    spans: tuple[Span, ...] = ()

    @property
    def part(self) -> int:
        """The size of what the rank has."""
        return sum(stop - start for start, stop in self.spans) if self.spans else self.size

    def times(self, count: int) -> Axis:
        """This axis with `count` elements in place of each."""
        spans = tuple((start * count, stop * count) for start, stop in self.spans)
        return Axis(self.size * count, spans)

    def over(self, count: int) -> Axis:
        """This axis with one element in place of each `count`, which all spans are multiples of."""
        spans = tuple((start // count, stop // count) for start, stop in self.spans)
        return Axis(self.size // count, spans)

    def then(self, other: Axis) -> Axis:
        """This axis, and after it another one."""
        spans = tuple((self.size + start, self.size + stop) for start, stop in other.spans)
        return Axis(self.size + other.size, self.spans + spans)


@dataclass(frozen=True)
class Cut:
    """Consecutive spans of one dimension of a tensor. Zeros are beyond the dimension's end."""

    dim: int
    spans: tuple[Span, ...]

    def of(self, held: Any) -> Tensor:
        """The part of a tensor: a view if it is one span. `held` may also be a slice of safetensors
        (`get_slice`), of which only the part is read."""
        shape = held.shape if isinstance(held, Tensor) else held.get_shape()
        before = (slice(None),) * self.dim
        spans = [span for span in self.within(shape[self.dim]).spans if span[0] < span[1]]
        if not spans:  # one element gives the dtype
            return self.filled(held[(*before, slice(0, 1))].narrow(self.dim, 0, 0))
        parts = [held[(*before, slice(*span))] for span in spans]
        return self.filled(parts[0] if len(parts) == 1 else torch.cat(parts, self.dim))

    def within(self, size: int) -> Cut:
        """This cut, clipped to a dimension of `size`."""
        clipped = ((min(start, size), min(stop, size)) for start, stop in self.spans)
        return Cut(self.dim, tuple(clipped))

    def filled(self, part: Tensor) -> Tensor:
        """A part that was read `within` its tensor, padded with the zeros beyond the end."""
        shape = list(part.shape)
        shape[self.dim] = len(self) - shape[self.dim]
        return torch.cat([part, part.new_zeros(shape)], self.dim) if shape[self.dim] else part

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self.spans)


def covering(spans: Sequence[Span], per_word: int) -> tuple[tuple[Span, ...], list[int]]:
    """Spans of words that hold spans of codes (`per_word` codes a word), and the places of these
    codes among all codes of those words."""
    words, places, before = [], list[int](), 0
    for start, stop in spans:
        first, last = start // per_word, -(-stop // per_word)
        words.append((first, last))
        begin = before + start - first * per_word
        places += range(begin, begin + stop - start)
        before += (last - first) * per_word
    return tuple(words), places
