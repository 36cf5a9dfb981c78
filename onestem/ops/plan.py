"""`AttentionPlan`: what each query row of a step may see, as runs and spans.

A *run* is a stretch of consecutive tokens whose keys and values are stored once, in pages. A step
of the engine is a list of query rows; attention over a row is a softmax over the union of what the
row's *spans* show it. All sharing is in that relation: a system prompt is one run with a span over
all rows, a tree is a run per node, a module is a run that any row may be given.

The plan is host data (numpy, int32): the contract between whoever builds a step (`engine.inputs`)
and whoever computes it (`ops.reference`, `ops.torch_impl`, ...). An implementation's `prepare`
turns it into what its device wants.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onestem.errors import ConfigError

__all__ = ["SPAN_FIELDS", "AttentionPlan", "PlanBuilder", "windowed"]

# Columns of `AttentionPlan.spans`.
SPAN_FIELDS = ("row", "rows", "run", "first", "first_step", "end", "end_step")
ROW, ROWS, RUN, FIRST, FIRST_STEP, END, END_STEP = range(7)


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """Who sees what in one step.

    Row `row + j` (0 <= j < rows) of a span sees the tokens
    `first + j * first_step, ..., end + j * end_step - 1` of the run. Steps are 0 or 1: a shared run
    is seen whole (0, 0); a prefill chunk sees one token more per row (0, 1); a sliding window
    drops one per row as well (1, 1). No row is shown a token twice.

    Attributes:
        page_size: slots in a page.
        run_pages: int32 `[num_run_pages]`, page ids of all runs, one after the other; there may be
            slack behind each list.
        run_page_start: int32 `[num_runs]`, where a run's page list begins in `run_pages`.
        run_offset: int32 `[num_runs]`, the first slot used in the run's first page.
        run_len: int32 `[num_runs]`, tokens in the run.
        run_position: int32 `[num_runs]`, position id of its first token. Positions inside a run
            are consecutive.
        spans: int32 `[num_spans, 7]`, columns `SPAN_FIELDS`.
        row_position: int32 `[num_rows]`, position id of each query row.
    """

    page_size: int
    run_pages: np.ndarray
    run_page_start: np.ndarray
    run_offset: np.ndarray
    run_len: np.ndarray
    run_position: np.ndarray
    spans: np.ndarray
    row_position: np.ndarray

    @property
    def num_rows(self) -> int:
        return len(self.row_position)

    @property
    def num_runs(self) -> int:
        return len(self.run_len)

    @property
    def num_spans(self) -> int:
        return len(self.spans)

    def slots(self, run: int, first: int, end: int) -> np.ndarray:
        """int64 `[end - first]`: where tokens first..end-1 of a run stand (page * size + slot)."""
        index = np.arange(first, end, dtype=np.int64) + self.run_offset[run]
        pages = self.run_pages[self.run_page_start[run] + index // self.page_size]
        return pages.astype(np.int64) * self.page_size + index % self.page_size

    def check(self) -> None:
        """Raise `ConfigError` where the plan is not well formed (sizes, ranges, steps)."""
        if self.num_spans == 0:
            return
        row, rows, run, first, first_step, end, end_step = self.spans.T.astype(np.int64)
        last = rows - 1
        _require(
            bool(((rows >= 1) & (row >= 0) & (row + rows <= self.num_rows)).all()),
            f"a span's rows leave 0..{self.num_rows - 1}",
        )
        _require(
            bool(((run >= 0) & (run < self.num_runs)).all()),
            f"a span's run is not in 0..{self.num_runs - 1}",
        )
        _require(bool((first >= 0).all()), "a span starts before its run")
        _require(
            bool((end + last * end_step <= self.run_len[run]).all()), "a span ends behind its run"
        )
        _require(
            bool(np.isin(first_step, (0, 1)).all() and np.isin(end_step, (0, 1)).all()),
            "a span's step is neither 0 nor 1",
        )


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(f"attention plan: {message}")


class PlanBuilder:
    """Collects runs and spans; `build` gives the arrays."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._pages: list[np.ndarray] = []
        self._num_pages = 0
        self._runs: list[tuple[int, int, int, int]] = []
        self._spans: list[tuple[int, int, int, int, int, int, int]] = []

    def add_run(self, pages: np.ndarray, offset: int, length: int, position: int) -> int:
        """Add a run stored in `pages` (int32) from slot `offset` of the first; give its index."""
        self._runs.append((self._num_pages, offset, length, position))
        self._pages.append(pages)
        self._num_pages += len(pages)
        return len(self._runs) - 1

    def add_span(
        self,
        row: int,
        rows: int,
        run: int,
        end: int,
        *,
        first: int = 0,
        first_step: int = 0,
        end_step: int = 0,
    ) -> None:
        """Show tokens first..end-1 of a run to rows; one that shows nothing at all is left out."""
        if rows > 0 and end + (rows - 1) * end_step > first:
            self._spans.append((row, rows, run, first, first_step, end, end_step))

    def build(self, row_position: np.ndarray) -> AttentionPlan:
        """The plan over rows with the given position ids, int `[num_rows]`."""
        runs = np.array(self._runs, dtype=np.int32).reshape(-1, 4)
        pages = np.concatenate(self._pages) if self._pages else np.zeros(0)
        return AttentionPlan(
            page_size=self.page_size,
            run_pages=pages.astype(np.int32, copy=False),
            run_page_start=runs[:, 0],
            run_offset=runs[:, 1],
            run_len=runs[:, 2],
            run_position=runs[:, 3],
            spans=np.array(self._spans, dtype=np.int32).reshape(-1, 7),
            row_position=np.asarray(row_position, dtype=np.int32),
        )


def windowed(plan: AttentionPlan, window: int) -> AttentionPlan:
    """The plan in which a row sees only keys with `0 <= p_row - p_key < window`.

    The lower bound is what changes: a plan never shows a row a later position in the first place.
    A span's rows need not have consecutive positions (a shared run's rows belong to different
    sequences), so spans are first cut into stretches whose positions grow by one per row.
    """
    pieces: list[tuple[int, ...]] = []
    for span in plan.spans.tolist():
        pieces.extend(_window_span(plan, span, window))
    spans = np.array(pieces, dtype=np.int32).reshape(-1, 7)
    return AttentionPlan(
        plan.page_size,
        plan.run_pages,
        plan.run_page_start,
        plan.run_offset,
        plan.run_len,
        plan.run_position,
        spans,
        plan.row_position,
    )


def _window_span(plan: AttentionPlan, span: list[int], window: int) -> list[tuple[int, ...]]:
    row, rows, run, first, first_step, end, end_step = span
    positions = plan.row_position[row : row + rows].astype(np.int64)
    steps = np.arange(rows)
    # The first token of the run that each row's window still holds.
    lower = positions - window + 1 - int(plan.run_position[run])
    firsts = np.maximum(first + steps * first_step, lower)
    ends = end + steps * end_step
    # Cut where `firsts` stops being arithmetic with step 0 or 1, or where a row sees nothing.
    return [
        (
            row + a,
            b - a,
            run,
            int(firsts[a]),
            int(firsts[a + 1] - firsts[a]) if b - a > 1 else 0,
            int(ends[a]),
            end_step,
        )
        for a, b in _arithmetic_stretches(firsts, firsts < ends)
    ]


def _arithmetic_stretches(values: np.ndarray, alive: np.ndarray) -> list[tuple[int, int]]:
    """Half-open index ranges of alive entries over which values grow by a constant 0 or 1."""
    out: list[tuple[int, int]] = []
    start = 0
    n = len(values)
    while start < n:
        if not alive[start]:
            start += 1
            continue
        stop = start + 1
        if stop < n and alive[stop] and values[stop] - values[start] in (0, 1):
            step = values[stop] - values[start]
            while stop < n and alive[stop] and values[stop] - values[stop - 1] == step:
                stop += 1
        out.append((start, stop))
        start = stop
    return out
