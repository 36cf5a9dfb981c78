"""`AttentionPlan`: what each query row of a step may see, as runs and spans.

A *run* is a stretch of consecutive tokens whose keys and values are stored once, in pages. A step
of the engine is a list of query rows. A row's attention is a softmax over the union of what its
*spans* show it. Runs and spans express all sharing. A system prompt is one run with a span over all
rows, a tree has a run for each node, and a module is a run that any row may see.

The plan is host data (numpy, int32). It is the contract between the code that builds a step
(`engine.inputs`) and the code that computes it (`ops.reference`, `ops.torch_impl`, ...). An
implementation's `prepare` turns it into its device's form. `docs/attention-plan.md` has it in full.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from onestem.arrays import ragged
from onestem.errors import ConfigError

# Columns of `AttentionPlan.runs` and `AttentionPlan.spans`.
RUN_FIELDS = ("page_start", "offset", "len", "position")
SPAN_FIELDS = ("row", "rows", "run", "first", "end", "step")
MOVED_FIELDS = ("row", "shift")
RUN_PAGES, RUN_OFFSET, RUN_LEN, RUN_POSITION = range(4)
ROW, ROWS, RUN, FIRST, END, STEP = range(6)


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """The tokens that each row sees in one step.

    Row `row + j` (0 <= j < rows) of a span sees the tokens `first, ..., end + j * step - 1` of the
    run that are in the row's window. `step` is 0 (a shared run: all rows see the same) or 1 (a
    prefill chunk: one token more per row). No row sees a token twice.

    Attributes:
        page_size: slots in a page.
        run_pages: int32 `[num_run_pages]`, page ids of all runs, one after the other; slack may
            follow each list.
        runs: int32 `[num_runs, 4]`, C-contiguous, columns `RUN_FIELDS`: where the run's page list
            begins in `run_pages`; the first slot used in its first page; its number of tokens; the
            position id of its first token. Positions inside a run are consecutive, unless neither
            a window nor ALiBi asks for them.
        spans: int32 `[num_spans, 6]`, C-contiguous, columns `SPAN_FIELDS`.
        row_position: int32 `[num_queries]`, position id of each row, then of each of `moved`.
        moved: int32 `[num_moved, 2]`, columns `MOVED_FIELDS`. Query `num_rows + i` is row `row` as
            it sees runs `shift` positions further than they were stored: its position is the row's
            less `shift`, its vector is rotated to that, and its state is merged into the row's.
            Spans show runs to queries.
        window: a row sees only keys with `p_row - p_key < window`; None: all that its spans show.

    Raises:
        ConfigError: the window is not in 1 .. 2^31 - 1.
    """

    page_size: int
    run_pages: np.ndarray
    runs: np.ndarray
    spans: np.ndarray
    row_position: np.ndarray
    window: int | None = None
    moved: np.ndarray = field(default_factory=lambda: np.zeros((0, 2), np.int32))

    def __post_init__(self) -> None:
        if self.window is not None and not 1 <= self.window < 2**31:
            raise ConfigError(
                f"attention plan: the window is {self.window}, expected 1 to {2**31 - 1}, or None "
                "for none"
            )

    @property
    def num_rows(self) -> int:
        """Rows of the step, each of which has a result."""
        return len(self.row_position) - len(self.moved)

    @property
    def num_queries(self) -> int:
        """Rows, and `moved` ones."""
        return len(self.row_position)

    def sources(self) -> np.ndarray:
        """The row of each query, int64 `[num_queries]`."""
        return np.concatenate((np.arange(self.num_rows), self.moved[:, 0]))

    @property
    def num_runs(self) -> int:
        """Runs, also those that no span shows."""
        return len(self.runs)

    @property
    def num_spans(self) -> int:
        """Spans of all rows."""
        return len(self.spans)

    @property
    def run_len(self) -> np.ndarray:
        """Tokens of each run, int32 `[num_runs]`, a view."""
        return self.runs[:, 2]

    @property
    def run_position(self) -> np.ndarray:
        """Position id of each run's first token, int32 `[num_runs]`, a view."""
        return self.runs[:, 3]

    def rows_of(self, queries: np.ndarray) -> np.ndarray:
        """The row that each query's state is a part of."""
        if not len(self.moved):
            return queries
        return self.sources()[queries]

    def slots(self, run: int, first: int, end: int) -> np.ndarray:
        """int64 `[end - first]`: slots of tokens first..end-1 of a run (page * size + slot)."""
        page_start, offset = int(self.runs[run, 0]), int(self.runs[run, 1])
        index = np.arange(first, end, dtype=np.int64) + offset
        pages = self.run_pages[page_start + index // self.page_size]
        return pages.astype(np.int64) * self.page_size + index % self.page_size

    def positions(self, run: int, first: int, end: int) -> np.ndarray:
        """int64 `[end - first]`: position ids of tokens first..end-1 of a run."""
        return np.arange(first, end, dtype=np.int64) + int(self.run_position[run])


_ZEROS = np.zeros(1024, np.int32)  # fills slack; never looked up


class PlanBuilder:
    """Collects runs and spans; `build` returns the plan. The runs and spans of a plan `behind`, if
    given, come first, and those that are added are numbered after them.

    Args:
        page_size: slots in a page.
        part: of those, slots in a part of a page; a plan with runs of parts has these as pages.

    Attributes:
        num_page_ids: page ids of all runs so far, and room for more.
    """

    def __init__(
        self, page_size: int, behind: AttentionPlan | None = None, *, part: int = 0
    ) -> None:
        self.page_size, self._part = page_size, part
        self._behind = behind
        self._first_run = behind.num_runs if behind is not None else 0
        self._pages: list[np.ndarray] = [behind.run_pages] if behind is not None else []
        self.num_page_ids = len(behind.run_pages) if behind is not None else 0
        self._parts: dict[int, np.ndarray] = {}  # by run
        self._runs: list[tuple[int, int, int, int]] = []
        self._spans: list[tuple[int, int, int, int, int, int]] = []
        self._shifts: list[int] = []  # of each of them
        self._more: list[tuple[np.ndarray, int]] = []  # spans that were added together; their shift

    def add_run(self, pages: np.ndarray, offset: int, length: int, position: int) -> int:
        """Add a run stored in `pages` (int32) from slot `offset` of the first; return its index."""
        return self.add_runs([pages], [(offset, length, position)])

    def add_part_run(self, parts: np.ndarray, length: int, position: int) -> int:
        """Add a run of tokens in parts of pages (int32: page id * parts of a page + part), from the
        first one's first slot; return its index."""
        run = self._first_run + len(self._runs)
        self._parts[run] = parts
        self._runs.append((0, 0, length, position))
        return run

    def add_span(
        self,
        row: int,
        rows: int,
        run: int,
        end: int,
        *,
        first: int = 0,
        step: int = 0,
        shift: int = 0,
    ) -> None:
        """Show tokens first..end-1 of a run to rows, `shift` positions further than they were
        stored. A span that shows nothing is left out."""
        step = step if rows > 1 else 0
        if rows <= 0 or end + (rows - 1) * step <= first:
            return
        self._spans.append((row, rows, run, first, end, step))
        self._shifts.append(shift)

    def add_spans(self, spans: np.ndarray, shift: int) -> None:
        """Add spans (int32 `[n, 6]`) of one shift, each of which shows something."""
        self._more.append((spans, shift))

    def add_runs(
        self, pages: Sequence[np.ndarray], runs: Sequence[tuple[int, int, int]], *, slack: int = 0
    ) -> int:
        """Add runs, each with its pages and (offset, length, position), and with room for `slack`
        further page ids after its pages; return the first one's index."""
        first, at, room = self._first_run + len(self._runs), self.num_page_ids, _ZEROS[:slack]
        for ids, (offset, length, position) in zip(pages, runs, strict=True):
            self._runs.append((at, offset, length, position))
            self._pages.append(ids)
            self._pages.append(room)
            at += len(ids) + slack
        self.num_page_ids = at
        return first

    def add_row_spans(self, count: int) -> None:
        """Add spans of row i over run i, for i < `count`; their `END` is set in the built plan."""
        self._spans.extend((i, 1, i, 0, 0, 0) for i in range(count))
        self._shifts.extend([0] * count)

    def build(self, row_position: np.ndarray) -> AttentionPlan:
        """The plan over rows with the given position ids, int `[num_rows]`."""
        row_position = np.asarray(row_position, dtype=np.int32)
        pages = np.concatenate(self._pages) if self._pages else np.zeros(0)
        runs = np.array(self._runs, dtype=np.int32).reshape(-1, len(RUN_FIELDS))
        spans, moved = self._placed(len(row_position))
        page_size = self.page_size
        if self._behind is not None:
            runs = np.concatenate((self._behind.runs, runs))
            spans = np.concatenate((self._behind.spans, spans))
            if len(self._behind.moved):  # they come after all rows
                before, rows = self._behind.num_rows, spans[: self._behind.num_spans, ROW]
                rows[rows >= before] += len(row_position) - before
        if self._parts:
            page_size = self._part
            pages, runs = self._parted(pages, runs)
        if len(moved):
            more = row_position[moved[:, 0]] - moved[:, 1]
            row_position = np.concatenate((row_position, more))
        return AttentionPlan(
            page_size=page_size,
            run_pages=pages.astype(np.int32, copy=False),
            runs=runs,
            spans=spans,
            row_position=row_position,
            moved=moved,
        )

    def _parted(self, pages: np.ndarray, runs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Page lists and runs with parts as pages."""
        count = self.page_size // self._part
        whole = (pages[:, None] * count + np.arange(count)).ravel()
        runs[:, RUN_PAGES] *= count
        sizes = [len(parts) for parts in self._parts.values()]
        runs[list(self._parts), RUN_PAGES] = len(whole) + np.cumsum(sizes) - sizes
        return np.concatenate([whole, *self._parts.values()]), runs

    def _placed(self, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
        """The spans, in which those that have a shift show runs to queries after all rows; and
        `AttentionPlan.moved`, whose queries of one shift are ascending rows."""
        own = np.array(self._spans, np.int32).reshape(-1, len(SPAN_FIELDS))
        spans = np.concatenate([own, *(spans for spans, _ in self._more)])
        counts, shifts = [len(spans) for spans, _ in self._more], [shift for _, shift in self._more]
        shift = np.concatenate((np.array(self._shifts, np.int64), np.repeat(shifts, counts)))
        before = np.zeros((0, len(MOVED_FIELDS)), np.int32)
        before = before if self._behind is None else self._behind.moved
        shifted = np.flatnonzero(shift)
        if not len(shifted):
            return spans, before
        # Stretches of rows that some span of a shift shows, by shift and row.
        known, kind = np.unique(shift[shifted], return_inverse=True)
        start = kind * (num_rows + 1) + spans[shifted, ROW]
        order = np.argsort(start, kind="stable")
        reach = np.maximum.accumulate((start + spans[shifted, ROWS])[order])
        new = np.flatnonzero(np.append(True, start[order][1:] > reach[:-1]))
        begin, end = start[order][new], np.append(reach[new[1:] - 1], reach[-1])
        row = begin % (num_rows + 1)
        at = np.cumsum(end - begin) - (end - begin)  # of their queries
        nth = np.searchsorted(begin, start, "right") - 1
        spans[shifted, ROW] = num_rows + len(before) + (at[nth] + start - begin[nth])
        rows = ragged(row, end - begin)
        moved = np.stack((rows, np.repeat(known[begin // (num_rows + 1)], end - begin)), 1)
        return spans, np.concatenate((before, moved.astype(np.int32)))


def windowed(plan: AttentionPlan, window: int | None) -> AttentionPlan:
    """The same plan, its arrays shared, under a sliding window."""
    return plan if window is None else dataclasses.replace(plan, window=window)
