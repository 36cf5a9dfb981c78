"""The next step of the same decodes, made from the one before it in place.

Only lengths change from one decode step to the next, and now and then a run takes a page: arrays
are edited, and no sequence is visited (`docs/attention-plan.md`, "In place").
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onestem.cache import PrefixCache
from onestem.engine.inputs import SLACK_PAGES, DecodeRows, StepInputs
from onestem.ops import AttentionPlan
from onestem.ops.plan import END, ROW, ROWS

__all__ = ["Advance", "Change"]

LEN = 2  # column of `AttentionPlan.runs`


@dataclass(frozen=True, eq=False)
class Change:
    """What a step differs in from the one before it.

    Attributes:
        structure: also in who sees what, not in lengths alone (or it is the first).
        spans: int64 `[n]`, the spans that grew by one token.
        runs, page_index, pages: int64 `[m]`: page `pages[i]` was put at `page_index[i]` of run
            `runs[i]`.
    """

    structure: bool
    spans: np.ndarray
    runs: np.ndarray
    page_index: np.ndarray
    pages: np.ndarray


class Advance:
    """Edits a step's inputs.

    Args:
        inputs: of a step of decodes alone; its arrays change with every `step`.
        cache: gives pages.
        scratch_slot: where rows that have ended write: nobody reads it.

    Attributes:
        live: bool `[num_rows]`, rows that have not ended.
        shared_read_tokens: of the next step, as in `StepInputs`.
    """

    def __init__(self, inputs: StepInputs, cache: PrefixCache, scratch_slot: int) -> None:
        assert inputs.decodes is not None
        self.inputs = inputs
        self.rows: DecodeRows = inputs.decodes
        self.live = np.ones(len(self.rows.sequences), bool)
        self._cache = cache
        self._scratch = scratch_slot
        self._plan: AttentionPlan = next(iter(inputs.plans.values()))  # its arrays are all plans'
        runs = self._plan.runs[self.rows.run_index]
        self._page_start = runs[:, 0].astype(np.int64)
        self._place = runs[:, 1].astype(np.int64) + runs[:, LEN] - 1  # of the row's own token
        held = [len(run.pages) + SLACK_PAGES for run in self.rows.runs]
        self._room = np.array(held, np.int64) * cache.pool.page_size
        self._structure = True
        self.shared_read_tokens = inputs.shared_read_tokens

    def drop(self, rows: np.ndarray) -> None:
        """Rows (bool `[num_rows]`) that have ended: they stay in their place, write to scratch and
        see nothing of their own."""
        self._structure = True
        self.live &= ~rows
        self.inputs.slots[rows] = self._scratch
        self._plan.spans[self.rows.span_index[rows], END] = 0
        self.shared_read_tokens = self._count_shared()

    def _count_shared(self) -> int:
        """Keys that one read of a run spares all live rows of a span but the first."""
        spans = self._plan.spans.astype(np.int64)
        spans = spans[spans[:, ROWS] > 1]
        before = np.concatenate([[0], np.cumsum(self.live)])
        readers = before[spans[:, ROW] + spans[:, ROWS]] - before[spans[:, ROW]]
        return int((np.maximum(readers - 1, 0) * spans[:, END]).sum())

    def step(self) -> Change | None:
        """One token further in every live row. None: KV memory, or the room for page ids, is
        short; nothing of this step may be computed then."""
        live = self.live
        self._place += live
        if bool((self._place >= self._room).any()):
            return None
        pages = self._take_pages(live)
        if pages is None:
            return None
        self._plan.runs[self.rows.run_index, LEN] += live
        self._plan.spans[self.rows.span_index, END] += live
        self._plan.row_position[:] += live
        self.inputs.positions[:] += live
        structure, self._structure = self._structure, False
        return Change(structure, self.rows.span_index[live], *pages)

    def _take_pages(self, live: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Slots one further; where a run's last page is full, its next page."""
        size = self._cache.pool.page_size
        fresh = live & (self._place % size == 0)
        self.inputs.slots[live & ~fresh] += 1
        rows = np.flatnonzero(fresh)
        index = self._place[rows] // size
        pages = np.zeros(len(rows), np.int64)
        for i, row in enumerate(rows.tolist()):
            run = self.rows.runs[row]
            if not self._cache.reserve(run, int(self._place[row]) - run.offset + 1):
                return None
            pages[i] = run.pages[int(index[i])]
        self._plan.run_pages[self._page_start[rows] + index] = pages
        self.inputs.slots[rows] = pages * size
        return self.rows.run_index[rows], index, pages
