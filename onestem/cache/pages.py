"""The pool of KV pages: which are free, and how many runs refer to each of the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from onestem.errors import CacheError

LOOKED_THROUGH = 4096  # pages, before more


class PagePool:
    """Pages 0..num_pages-1 of `page_size` slots.

    Runs whose tokens are in a page refer to it (several do after a split). It is free again when
    the last of them releases it. It is *held* while any of these runs is pinned: pages that are
    neither free nor held can be evicted.

    Attributes:
        part: slots in the parts of pages that plans of prompts may have as their pages; 0: whole
            pages alone.
        num_free, num_held: pages that are so now.
    """

    def __init__(self, num_pages: int, page_size: int, part: int = 0) -> None:
        self.num_pages = num_pages
        self.page_size, self.part = page_size, part
        self._free = np.ones(num_pages, bool)
        self.num_free = num_pages
        self._refs = np.zeros(num_pages, np.int32)
        self._holds = np.zeros(num_pages, np.int32)
        self.num_held = 0
        self._lowest = 0  # no free page is below it

    @property
    def num_tokens(self) -> int:
        """Tokens that all pages hold."""
        return self.num_pages * self.page_size

    @property
    def num_available(self) -> int:
        """Pages that are free or that eviction can free."""
        return self.num_pages - self.num_held

    def pages_for(self, tokens: int, offset: int = 0) -> int:
        """Pages that `tokens` tokens take from slot `offset` on."""
        return -(-(offset + tokens) // self.page_size) if tokens > 0 else 0

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Take `count` free pages, consecutive where possible: a run in consecutive slots is read
        in place. Pages next to page `after` come first, then the lowest: memory that was used
        before costs no page faults."""
        if count > self.num_free:
            raise CacheError(f"{count} pages asked, {self.num_free} of {self.num_pages} are free")
        pages = self._stretch(count, after)
        self._free[pages] = False
        self.num_free -= count
        self._refs[pages] = 1
        if count and pages[0] == self._lowest:
            self._lowest = int(pages[-1]) + 1
        return list(pages.tolist())

    def allocate_each(self, after: np.ndarray) -> np.ndarray:
        """Take a free page for each of `after`, int64 `[n]`: the next one, or the lowest if that is
        taken or `after` is -1. There must be as many."""
        wanted = after + 1
        fits = (after >= 0) & (wanted < self.num_pages)
        fits[fits] = self._free[wanted[fits]]
        self._free[wanted[fits]] = False
        pages = np.where(fits, wanted, -1)
        missing = int((~fits).sum())
        if missing:
            pages[~fits] = next(self._free_pages(missing))[:missing]
        self._free[pages] = False
        self.num_free -= len(pages)
        self._refs[pages] = 1
        return pages

    def hold_new(self, pages: np.ndarray) -> None:
        """`hold` for distinct pages, int64 `[n]`, that are not held."""
        self.num_held += len(pages)
        self._holds[pages] = 1

    def _stretch(self, count: int, after: int | None) -> np.ndarray:
        for start in (after + 1 if after is not None else -1, self._lowest):
            if (
                start >= 0
                and start + count <= self.num_pages
                and self._free[start : start + count].all()
            ):
                return np.arange(start, start + count)
        for free in self._free_pages(count):
            # The first of the `count` pages that lie closest together.
            best = int(np.argmin(free[count - 1 :] - free[: len(free) - count + 1]))
            found = free[best : best + count]
            if found[-1] - found[0] < count:
                break
        return found

    def _free_pages(self, least: int) -> Iterator[np.ndarray]:
        """The lowest free pages, at least `least`; then more and more, to the last. A look at all
        of a pool of a million pages takes a millisecond, and a step may need a thousand."""
        start, size = self._lowest, max(LOOKED_THROUGH, 2 * least)
        while True:
            free = start + np.flatnonzero(self._free[start : start + size])
            if len(free) >= least:
                self._lowest = int(free[0])
                yield free
            if start + size >= self.num_pages:
                return
            size *= 8

    def share(self, page: int, held: bool) -> None:
        """Count a further run that refers to a page (after a split)."""
        self._refs[page] += 1
        if held:
            self.hold([page])

    def release(self, pages: Sequence[int]) -> None:
        """Drop the references of a run that is not pinned; pages without any are free. A run has
        each of its pages once."""
        index = np.array(pages, np.int64)
        self._refs[index] -= 1
        free = index[self._refs[index] == 0]
        self._free[free] = True
        self.num_free += len(free)
        if len(free):
            self._lowest = min(self._lowest, int(free.min()))

    def hold(self, pages: Sequence[int]) -> None:
        """Note that the run of these pages became pinned (or that a pinned run got them)."""
        index = np.array(pages, np.int64)
        self._holds[index] += 1
        self.num_held += int((self._holds[index] == 1).sum())

    def unhold(self, pages: Sequence[int]) -> None:
        """Note that the run of these pages is pinned no more."""
        index = np.array(pages, np.int64)
        self._holds[index] -= 1
        self.num_held -= int((self._holds[index] == 0).sum())

    def check(self, runs: Iterable[tuple[list[int], bool]]) -> None:
        """Raise `CacheError` unless the books agree with the given runs (pages, pinned)."""
        every: list[int] = []
        held: list[int] = []
        for pages, pinned in runs:
            every += pages
            if pinned:
                held += pages
        refs = np.bincount(np.array(every, np.int64), minlength=self.num_pages)
        holds = np.bincount(np.array(held, np.int64), minlength=self.num_pages)
        if not np.array_equal(refs, self._refs) or not np.array_equal(refs == 0, self._free):
            raise CacheError(
                f"KV pages do not balance: {int((refs > 0).sum())} in runs + {self.num_free} free "
                f"of {self.num_pages}"
            )
        if not np.array_equal(holds, self._holds) or int((holds > 0).sum()) != self.num_held:
            raise CacheError(
                f"held KV pages do not balance: {int((holds > 0).sum())} by runs, "
                f"{self.num_held} counted"
            )
        if int(self._free.sum()) != self.num_free:
            raise CacheError(
                f"free KV pages do not balance: {int(self._free.sum())} marked, "
                f"{self.num_free} counted"
            )
