"""Which sequence caused an error in a step."""

from __future__ import annotations

from collections.abc import Iterable

from onestem.engine.sequence import Sequence

# Failed steps until all that are suspected are ended: more than halving 2^15 sequences takes.
MAX_FAILURES = 40


class Suspects:
    """Sequences of a step that failed. They are tried by themselves, in halves, until one fails
    alone: the error is its own. An error that does not come again costs no answer."""

    def __init__(self) -> None:
        self._groups: list[list[Sequence]] = []
        self._known: dict[Sequence, int] = {}  # tokens that each had when it was suspected
        self._num_failures = 0

    @property
    def is_hopeless(self) -> bool:
        """Whether steps fail whichever sequences are in them."""
        return self._num_failures > MAX_FAILURES

    @property
    def tried(self) -> frozenset[Sequence] | None:
        """Sequences that may have rows in the next step; None: none is suspected."""
        return frozenset(self._groups[-1]) if self._groups else None

    def failed(self, involved: Iterable[Sequence]) -> list[Sequence]:
        """Note that a step failed, of these or of those that are tried; what was in flight is lost.
        Returns the sequences to which the error is attributed."""
        self._num_failures += 1
        is_trial = bool(self._groups)
        group = self._groups.pop() if is_trial else list(involved)
        group = [sequence for sequence in group if sequence.finish_reason is None]
        if self.is_hopeless:
            found = [*involved, *group, *(s for other in self._groups for s in other)]
            self._groups.clear()
            return [s for s in dict.fromkeys(found) if s.finish_reason is None]
        if len(group) == 1 and is_trial:
            return group
        self._known.update((sequence, _position(sequence)) for sequence in group)
        half = len(group) // 2
        self._groups += [part for part in (group[half:], group[:half]) if part]
        return []

    def passed(self, *, has_rows: bool) -> None:
        """Note that a step was computed and taken. Sequences that came further are not to blame;
        nor are those that cannot be tried, since they wait for others."""
        if not self._groups:
            self._num_failures *= not has_rows
            return
        tried = (s for s in self._groups[-1] if s.finish_reason is None)
        left = [s for s in tried if _position(s) <= self._known[s]]
        if left and has_rows:
            self._groups[-1] = left
        else:
            self._groups.pop()
        if not self._groups:
            self._known.clear()


def _position(sequence: Sequence) -> int:
    """Tokens of a sequence whose rows were launched; of one that lost its memory, those before its
    next token's row."""
    if sequence.sid >= 0:
        return sequence.num_launched
    return sequence.frontier if sequence.run is not None else len(sequence.tokens) - 1
