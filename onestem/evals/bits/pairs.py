"""Pairs of answers to one request, compared to the bit, and counted by what was changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Reply:
    """One answer, or its end.

    Attributes:
        tokens: ids, or texts where an API gives no ids.
        logprobs: of each token, by leading token.
        rows: of each token a digest of its whole row of logits; empty: not known.
        cached: the prompt's tokens that were not computed; None: not known.
        preempted: how often it was taken back, to be computed again.
    """

    tokens: Sequence[int | str]
    logprobs: Sequence[Mapping[Any, float]]
    rows: Sequence[bytes] = ()
    cached: int | None = None
    preempted: int = 0


@dataclass
class Kind:
    """What one kind of change has changed.

    Attributes:
        name: what is not as for the same request alone and cold.
        needs: a count that must not be 0, `cached` or `preempted`; empty: none.
        pairs: answers compared; `differ`: of these, with other tokens.
        positions: compared, up to an answer's first other token; `changed`: with other bits.
        largest: difference of two log-probabilities.
        cached, preempted: sums of what replies say.
        first: the first request (from 0) whose pair differs.
        refused: why this cannot be tried here.
    """

    name: str
    needs: str = ""
    pairs: int = 0
    differ: int = 0
    positions: int = 0
    changed: int = 0
    largest: float = 0.0
    cached: int | None = 0
    preempted: int = 0
    first: int | None = None
    refused: str = ""

    def compare(self, request: int, alone: Reply, other: Reply) -> None:
        """Count a pair: two answers of as many tokens, if they are alike."""
        known = self.cached is not None and other.cached is not None
        self.cached = (self.cached or 0) + (other.cached or 0) if known else None
        self.preempted += other.preempted
        self.pairs += 1
        differs = list(alone.tokens) != list(other.tokens)
        self.differ += differs
        pairs = zip(alone.tokens, other.tokens, alone.logprobs, other.logprobs, strict=False)
        for at, (mine, theirs, a, b) in enumerate(pairs):
            changed = a != b or alone.rows[at : at + 1] != other.rows[at : at + 1]
            self.positions += 1
            self.changed += changed
            differs |= changed
            apart = [abs(a[token] - b[token]) for token in a.keys() & b.keys() if changed]
            self.largest = max(self.largest, *apart, 0.0)
            if mine != theirs:  # what follows has other tokens before it
                break
        if differs and self.first is None:
            self.first = request

    @property
    def problem(self) -> str:
        """Why this does not pass; empty: it does, or was refused."""
        if self.changed or self.differ:
            return "differs"
        if self.needs and getattr(self, self.needs) is None:
            return "hits are not known: not shown"
        lacks = self.needs if self.positions else "compared"
        if not self.refused and lacks and not getattr(self, lacks, 0):
            return f"nothing was {lacks}: not shown"
        return ""

    @property
    def told(self) -> str:
        """The verdict, for people."""
        told = f"refused: {self.refused}" if self.refused else self.problem or "equal"
        return told + (f" ({self.preempted} preempted)" if self.preempted else "")


def table(kinds: Iterable[Kind]) -> str:
    """A line for each kind."""
    lines: list[tuple[str, ...]] = [
        ("", "pairs", "other tokens", "positions", "other bits", "largest", "cached tokens", "")
    ]
    for one in kinds:
        cached = "unknown" if one.cached is None else f"{one.cached:,}"
        counts = (one.pairs, one.differ, one.positions, one.changed)
        largest = f"{one.largest:.3g}"
        lines.append((one.name, *(f"{count:,}" for count in counts), largest, cached, one.told))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([name.ljust(widths[0]), *map(str.rjust, cells, widths[1:-1]), told]).rstrip()
        for name, *cells, told in lines
    )
