"""Runs that nobody holds, and which of them goes first."""

from __future__ import annotations

import heapq
from typing import Protocol

from onestem.cache.run import Run

__all__ = ["IdleRuns", "Keeper"]


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

    def note(self, run: Run, keeper: Keeper) -> None:
        """A run may be evicted. What is noted twice, or is in use again, is passed over then."""
        heapq.heappush(self._heap, (run.last_used, -run.end, run.uid, run, keeper))

    def evict_one(self) -> bool:
        """Free the next run; False if there is none."""
        while self._heap:
            last_used, _, _, run, keeper = heapq.heappop(self._heap)
            if keeper.evict(run, last_used):
                return True
        return False
