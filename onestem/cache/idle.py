"""Runs that nobody holds, and the order in which they are evicted."""

from __future__ import annotations

import heapq
import math
from typing import Protocol

from onestem.cache.pages import PagePool
from onestem.cache.run import Run

SWEEP = 256  # heap entries from which stale ones are removed
MEMORY = 2.0  # turnovers after which an observation counts half


class Keeper(Protocol):
    """A store of runs, which can evict those that nobody holds."""

    def evict(self, run: Run, last_used: int, pages: int) -> int:
        """Free at least `pages` pages, or all, of a run that was last released at `last_used`.

        Returns:
            pages that it lost; 0: it is gone or in use again.
        """
        ...


class Kind:
    """Counts of idle pages of one kind that were used again or evicted; old counts fade."""

    def __init__(self) -> None:
        self.used = self.lost = 0.0

    @property
    def chance(self) -> float:
        """Probability that a page is used before it is evicted; 1/2 while nothing is known."""
        return (self.used + 1) / (self.used + self.lost + 2)

    def fade(self, factor: float) -> None:
        """Let what was counted so far weigh less."""
        self.used *= factor
        self.lost *= factor


class IdleRuns:
    """Eviction order of idle runs: the run that saves least per page goes first.

    Each page costs about the same to compute, so its chance of being used again decides. The chance
    is p when a run is released. It is assumed to halve with each turnover: the time in which as
    many pages are evicted as can be. So a run's key never changes: its release time in turnovers
    plus log2(p). (The clock is part of the key, like the inflation value of GreedyDual-Size; Cao
    and Irani 1997.)

    p is learned for two kinds of runs: those that several sequences continued, and those that none
    or one did, as in a conversation. The second kind is the unit (p = 1), so its runs are evicted
    least recently used first. Of runs released together, the one that ends last goes first.

    Attributes:
        clock: counts releases.
        turnovers: time, as above.
    """

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.clock = 0
        self.turnovers = 0.0
        self._fresh, self._shared = Kind(), Kind()
        self._heap: list[tuple[float, int, int, int, Run, Keeper]] = []
        self._sweep_at = SWEEP

    def use(self, run: Run, *, beside: bool) -> None:
        """Note that a sequence continues a run; `beside`: continuations of others are stored."""
        if (kind := self._kind(run)) is not None:
            kind.used += len(run.pages)
        run.is_continued = True
        run.is_shared = run.is_shared or beside

    def _kind(self, run: Run) -> Kind | None:
        """The kind of a run; None: one sequence continued it, which says nothing about others."""
        if run.is_shared:
            return self._shared
        return None if run.is_continued else self._fresh

    def let_go(self, run: Run) -> None:
        """Rank a run that nobody holds any more."""
        run.last_used, run.rank = self.clock, self.rank(run)

    def rank(self, run: Run) -> float:
        """Rank of a run that is released now: the lowest is evicted first."""
        if not run.is_shared:
            return self.turnovers
        return self.turnovers + max(0.0, math.log2(self._shared.chance / self._fresh.chance))

    def note(self, run: Run, keeper: Keeper) -> None:
        """Enter a run that may be evicted. Entries that are stale by then are skipped."""
        if len(self._heap) >= self._sweep_at:
            self._sweep()
        heapq.heappush(self._heap, (run.rank, run.last_used, -run.end, run.uid, run, keeper))

    def _sweep(self) -> None:
        """Drop entries of runs that were used again: without evictions nothing else does."""
        self._heap = [e for e in self._heap if e[4].pins == 0 and e[4].last_used == e[1]]
        heapq.heapify(self._heap)
        self._sweep_at = max(SWEEP, 2 * len(self._heap))

    def evict_one(self, pages: int) -> bool:
        """Free at least `pages` pages, or all, of the next run; False if there is none."""
        while self._heap:
            _, last_used, _, _, run, keeper = heapq.heappop(self._heap)
            available = max(1, self.pool.num_available)
            lost = keeper.evict(run, last_used, pages)
            if lost:
                self._note_lost(run, lost, lost / available)
                return True
        return False

    def _note_lost(self, run: Run, pages: int, turnovers: float) -> None:
        self.turnovers += turnovers
        if (kind := self._kind(run)) is not None:
            kind.lost += pages
        for one in (self._fresh, self._shared):
            one.fade(2 ** (-turnovers / MEMORY))
