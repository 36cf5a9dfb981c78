"""Runs that nobody holds, and which of them goes first."""

from __future__ import annotations

import heapq
from typing import Protocol

from onestem.cache.run import Run

__all__ = ["IdleRuns", "Keeper"]


SWEEP = 256  # entries from which the heap is looked through


class Keeper(Protocol):
    """Who keeps runs that nobody holds."""

    def evict(self, run: Run, last_used: int) -> bool:
        """Free a run that was last let go at `last_used`; False if it is gone or in use again."""
        ...


class IdleRuns:
    """Least recently used first; of runs let go at once, those that stand highest.

    Attributes:
        clock: counts what was let go.
    """

    def __init__(self) -> None:
        self.clock = 0
        self._heap: list[tuple[int, int, int, Run, Keeper]] = []
        self._sweep_at = SWEEP

    def note(self, run: Run, keeper: Keeper) -> None:
        """A run may be evicted. What is noted twice, or is in use again, is passed over then."""
        if len(self._heap) >= self._sweep_at:
            self._sweep()
        heapq.heappush(self._heap, (run.last_used, -run.end, run.uid, run, keeper))

    def _sweep(self) -> None:
        """Forget runs that were used again: in a pool that never fills nobody else does."""
        self._heap = [e for e in self._heap if e[3].pins == 0 and e[3].last_used == e[0]]
        heapq.heapify(self._heap)
        self._sweep_at = max(SWEEP, 2 * len(self._heap))

    def evict_one(self) -> bool:
        """Free the next run; False if there is none."""
        while self._heap:
            last_used, _, _, run, keeper = heapq.heappop(self._heap)
            if keeper.evict(run, last_used):
                return True
        return False
