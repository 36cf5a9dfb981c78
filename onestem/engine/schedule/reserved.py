"""Whether KV memory has room for a sequence: what those that run will still take of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from onestem.cache import PrefixCache
from onestem.engine.sequence import Sequence

# Steps after which the pages that running sequences will still need are counted again. They become
# fewer with time, but for new sequences, which are counted when admitted.
COUNTED_STEPS = 16
# Decodes that sequences of unknown length have room for.
LOOKAHEAD_TOKENS = 32


class _Need(NamedTuple):
    """What a sequence will take, with those that fork from it.

    Attributes:
        left: tokens that each will store until its end; -1: not known.
        now: pages for tokens that it has and that are not computed.
        rows: sequences that will decode.
        spare: slots that are free in the last page that it writes.
        freed: pages that it alone holds, and leaves at its end.
        soon: pages for `now` and the next decodes.
    """

    left: int
    now: int
    rows: int
    spare: int
    freed: int
    soon: int


class ReservedPages:
    """Pages that running sequences will take, by the last count, and those admitted since.

    A sequence whose length is not known has room for some tokens more, and is supposed to stay.
    Where it is known (`Sequence.known_left`), its pages are reserved up to its end, and free after
    it. So most is needed at one of the ends: sequences that end later have grown until then, and
    those that ended before have left.

    Fewer sequences then run at once, in more steps, and none is preempted and computed again. A
    step more costs as much as `free_rows` rows, since all weights are read for one row as for many.
    A preemption costs more, the more tokens of its own a prompt has. So where memory holds less
    than `free_rows * left / (left + 3 / 4 * own)` such sequences, they are admitted as if nothing
    were known (on an H100 both took the same for 124 with 391 own tokens and answers of 512).

    Args:
        free_rows: rows that take as long as reading the weights.

    Attributes:
        needs: of each sequence that is counted.
        soon: pages that all of them will take for what they have and their next decodes.
        ending: int64 `[n, 6]`, the needs of those whose end is known, the last end first.
    """

    def __init__(self, cache: PrefixCache, free_rows: int) -> None:
        self._cache = cache
        self._free_rows = free_rows
        self.expire()
        self.count(())

    def expire(self) -> None:
        """Let `keep_up` count at once."""
        self._counted_at = self._refreshed_at = -COUNTED_STEPS

    def keep_up(self, running: Iterable[Sequence], step: int) -> None:
        """`count`, now and then."""
        if step >= self._counted_at + COUNTED_STEPS:
            self._counted_at = self._refreshed_at = step
            self.count(running)

    def hurry(self, running: Iterable[Sequence], step: int) -> bool:
        """`refresh`, once a step. False: that is done."""
        if self._refreshed_at == step:
            return False
        self._refreshed_at = step
        self.refresh(running)
        return True

    def count(self, running: Iterable[Sequence]) -> None:
        """Count again, for all running sequences."""
        self.needs = {sequence: self._need(sequence) for sequence in running}
        needs = self.needs.values()
        self.soon = sum(need.soon for need in needs)
        ending = sorted((need for need in needs if need.left >= 0), reverse=True)
        self.ending = np.array(ending, np.int64).reshape(-1, len(_Need._fields))

    def refresh(self, running: Iterable[Sequence]) -> None:
        """`count`, sooner: a sequence of unknown length needs as much as at the last count from its
        prompt's end until it comes near its own."""
        if len(self.ending):
            self.count(running)
            return
        for sequence in running:
            need = self.needs.get(sequence)
            is_same = need is not None and need.now == 0 and need.rows <= 1 and sequence.sid >= 0
            if not is_same or sequence.num_left <= LOOKAHEAD_TOKENS:
                self.drop(sequence)
                self.add(sequence)

    def add(self, sequence: Sequence) -> None:
        """Add a sequence that is admitted."""
        need = self.needs[sequence] = self._need(sequence)
        self.soon += need.soon
        if need.left >= 0:
            self.ending = _with(self.ending, need)

    def drop(self, sequence: Sequence) -> None:
        """Forget one that has ended, or is preempted: its pages are free."""
        need = self.needs.pop(sequence, None)
        if need is None:
            return
        self.soon -= need.soon
        if need.left >= 0:
            same = int(np.argmax((self.ending == need).all(axis=1)))
            self.ending = np.delete(self.ending, same, axis=0)

    def have_room(self, sequence: Sequence) -> bool:
        """Whether a sequence with its path attached fits beside what is reserved."""
        need, free = self._need(sequence), self._cache.pool.num_available
        soon = self.soon + need.soon
        if soon > free or not self._goes_by_length(need):
            return soon <= free
        ending = _with(self.ending, need)
        return soon - int(ending[:, _SOON].sum()) + self._peak(ending) <= free

    def _goes_by_length(self, need: _Need) -> bool:
        """Whether its length is known, and more steps cost less than preemptions."""
        pool, left = self._cache.pool, need.left
        if left <= 0:
            return False
        own = need.freed * pool.page_size
        held = pool.num_pages * pool.page_size / (left + own)
        return held >= self._free_rows * left / (left + 0.75 * own)

    def _peak(self, ending: np.ndarray) -> int:
        """The most pages that sequences of known ends need at once; the last end comes first."""
        if not len(ending):
            return 0
        size, left = self._cache.pool.page_size, ending[:, 0]
        # At each end: what that sequence and those of later ends have.
        now, rows, spare, kept = ending[:, 1:_SOON].cumsum(axis=0).T
        grown = np.minimum(rows * -(-left // size), (rows * (left + size - 1) - spare) // size)
        return int((now + grown + kept).max() - kept[-1])

    def _need(self, sequence: Sequence) -> _Need:
        run, size = sequence.run, self._cache.pool.page_size
        assert run is not None
        now = 0 if sequence.sid >= 0 else self._uncomputed(sequence)
        if sequence.score_only:
            return _Need(-1, now, 0, 0, 0, now)
        rows, left = 1 + sequence.num_forks, sequence.known_left
        ahead = self._cache.pool.pages_for(min(LOOKAHEAD_TOKENS, sequence.num_left))
        soon = now + rows * ahead
        if left is None:
            return _Need(-1, now, rows, 0, 0, soon)
        if rows > 1 or run.pins > 1:  # each writes a run of its own
            return _Need(left, now, rows, 0, 0, soon)
        place = run.offset + len(run.tokens) if sequence.sid < 0 else sequence.next_place
        held = max(len(run.pages), -(-place // size))
        # What its planned group shares stays, and so does a page that begins with tokens before it.
        shared = max(0, sequence.state.request.group_prefix_tokens - run.start)
        freed = held - self._cache.pool.pages_for(run.offset + shared)
        return _Need(left, now, 1, held * size - place, freed, soon)

    def _uncomputed(self, sequence: Sequence) -> int:
        """Pages still to be allocated on its path, for runs that it is to compute itself."""
        size = self._cache.pool.page_size
        imported = sequence.modules.missing_pages() if sequence.modules is not None else 0
        return imported + sum(
            max(0, -(-(run.offset + len(run.tokens)) // size) - len(run.pages))
            for run in sequence.path(self._cache.tree.num_splits)
            if run.owner is sequence or run.owner is None
        )


_SOON = _Need._fields.index("soon")


def _with(ending: np.ndarray, need: _Need) -> np.ndarray:
    """Needs by their ends, the last first, with another one."""
    at = int(np.searchsorted(-ending[:, 0], -need.left))
    return np.insert(ending, at, np.array(need, np.int64), axis=0)
