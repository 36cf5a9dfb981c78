"""Runs that nobody holds, and the order in which they are evicted."""

from __future__ import annotations

import heapq
import math
from typing import Protocol

from onestem.cache.pages import PagePool
from onestem.cache.pauses import CLEARLY, BothPauses
from onestem.cache.run import Run

SWEEP = 256  # heap entries from which stale ones are removed
MEMORY = 2.0  # turnovers after which an observation counts half

_Entry = tuple[float, int, int, int, "Run", "Keeper"]


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

    The second kind are first prompts and later turns of conversations, of which each has its own
    pauses (`BothPauses`). The older of both kinds' oldest runs goes, unless a use of the other one
    is clearly less likely.

    Attributes:
        clock: counts releases.
        turnovers: time, as above.
    """

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.clock = 0
        self.turnovers = 0.0
        self._fresh, self._shared = Kind(), Kind()
        self._pauses = BothPauses()
        self._heaps: tuple[list[_Entry], ...] = ([], [], [])  # of these, and of shared runs
        self._sweep_at = SWEEP

    def use(self, run: Run, *, beside: bool) -> None:
        """Note that a sequence continues a run; `beside`: continuations of others are stored."""
        self._count(run, len(run.pages), used=True)
        run.is_continued = True
        run.is_shared = run.is_shared or beside

    def _count(self, run: Run, pages: int, *, used: bool) -> None:
        """Count pages that were used or evicted. That one sequence continued a run says nothing of
        others."""
        if run.is_continued and not run.is_shared:
            return
        kind = self._shared if run.is_shared else self._fresh
        kind.used += pages * used
        kind.lost += pages * (not used)
        if not run.is_shared and run.pins <= used:  # who uses it has pinned it
            self._pauses.note(run.kind, pages, self.turnovers - run.rank, used=used)

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
        if sum(map(len, self._heaps)) >= self._sweep_at:
            self._sweep()
        which = 2 if run.is_shared else run.kind
        heap = self._heaps[which]
        heapq.heappush(heap, (run.rank, run.last_used, -run.end, run.uid, run, keeper))

    def _sweep(self) -> None:
        """Drop entries of runs that were used again: without evictions nothing else does."""
        for heap in self._heaps:
            heap[:] = filter(_is_idle, heap)
            heapq.heapify(heap)
        self._sweep_at = max(SWEEP, 2 * sum(map(len, self._heaps)))

    def rate(self, run: Run) -> float:
        """Uses per page and turnover that are expected of an idle run that is not shared."""
        age = self.turnovers - run.rank
        return self._pauses.rate(run.kind, age, self.pool.num_available)

    def _next(self) -> list[_Entry]:
        """The heap of which the first run goes next; an empty one: there is none."""
        for heap in self._heaps:
            while heap and not _is_idle(heap[0]):
                heapq.heappop(heap)
        *others, shared = self._heaps
        others = sorted((heap for heap in others if heap), key=lambda heap: heap[0])
        if not others or (shared and shared[0] < others[0][0]):
            return shared
        rates = [self.rate(heap[0][4]) for heap in others]
        return others[-1] if CLEARLY * rates[-1] < rates[0] else others[0]

    def evict_one(self, pages: int) -> bool:
        """Free at least `pages` pages, or all, of the next run; False if there is none."""
        while heap := self._next():
            _, last_used, _, _, run, keeper = heapq.heappop(heap)
            available = max(1, self.pool.num_available)
            lost = keeper.evict(run, last_used, pages)
            if lost:
                self._note_lost(run, lost, lost / available)
                return True
        return False

    def _note_lost(self, run: Run, pages: int, turnovers: float) -> None:
        self._count(run, pages, used=False)
        self.turnovers += turnovers
        for kind in (self._fresh, self._shared):
            kind.fade(2 ** (-turnovers / MEMORY))
        self._pauses.fade(turnovers)


def _is_idle(entry: _Entry) -> bool:
    """Whether its run was not used since it was entered."""
    return entry[4].pins == 0 and entry[4].last_used == entry[1]
