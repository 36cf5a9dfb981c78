"""A step's tensors: ids, positions, slots to write, the attention plan, rows that want logits.

Decodes come first, then chunks of prompts; within each, rows stand in depth-first order of the
tree, so that a run's rows are neighbours.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from onestem.cache import Run
from onestem.engine.modules import ImportedRun
from onestem.engine.scheduler import Chunk
from onestem.engine.sequence import Sequence
from onestem.ops import AttentionPlan, PlanBuilder, windowed

__all__ = ["DecodeRows", "LogitRow", "StepInputs", "build_inputs", "decodes_behind", "join_prompts"]

# Page ids that a decode's own run may take before its plan must be laid out anew.
SLACK_PAGES = 8


@dataclass(slots=True)  # not frozen: one is made for each row of each step
class LogitRow:
    """Logits after token `index` of a sequence are wanted: to sample the next token (`samples`), or
    to score the one that follows."""

    sequence: Sequence
    index: int
    samples: bool


@dataclass(frozen=True, eq=False)
class DecodeRows:
    """A step of decodes alone: what the next one needs to be made from it in place.

    Attributes:
        sequences: of each row.
        runs: the run that each row writes.
        run_index, span_index: int64 `[num_rows]`, where that run and the row's span over it stand
            in the plan.
    """

    sequences: list[Sequence]
    runs: list[Run]
    run_index: np.ndarray
    span_index: np.ndarray


@dataclass(frozen=True, eq=False)
class StepInputs:
    """Host arrays of one step.

    Attributes:
        token_ids, positions, slots: int64 `[num_rows]`; `slots` is where each row's K and V go.
        plans: attention plan by window (None: unlimited).
        logit_rows: int64 `[num_logits]`, rows whose logits are wanted.
        wanted: what for; those of prompts that joined decodes alone.
        decodes: set where every row is a decode.
        shared_read_tokens: keys that sequences see and need not read, since one read of a run
            serves several of them.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    plans: dict[int | None, AttentionPlan]
    logit_rows: np.ndarray
    wanted: list[LogitRow]
    decodes: DecodeRows | None
    shared_read_tokens: int


def build_inputs(
    chunks: list[Chunk],
    *,
    page_size: int,
    windows: Seq[int | None],
    version: int,
    share: bool = True,
) -> StepInputs:
    """Lay the chunks out as rows.

    With `share=False` each sequence gets spans of its own, also over runs that several see.
    """

    layout = _Layout(page_size, share)
    decodes: list[_Placed] = []
    prompts: list[_Placed] = []
    modules: list[_Placed] = []
    for chunk in chunks:
        if chunk.module is not None:
            path: list[Run] = [*chunk.attends, chunk.module]
            modules.append(([run.uid for run in path], chunk, path))
            continue
        path = chunk.sequence.path(version)
        placed = (_uids(chunk.sequence, path), chunk, path)
        (decodes if _is_decode(chunk) else prompts).append(placed)
    layout.add_decodes([(chunk.sequence, path) for _, chunk, path in sorted(decodes, key=_place)])
    for _, chunk, path in sorted(modules, key=_place):
        layout.add_module(chunk, path)
    for _, chunk, path in sorted(prompts, key=_place):
        layout.add_chunk(chunk, path)
    return layout.inputs(windows)


def decodes_behind(
    sequences: list[Sequence],
    *,
    page_size: int,
    windows: Seq[int | None],
    version: int,
    share: bool = True,
) -> StepInputs:
    """The step that is behind sequences whose last token has no keys and values yet, as if it had
    been one of decodes alone."""
    layout = _Layout(page_size, share)
    rows = [(sequence, sequence.path(version)) for sequence in sequences]
    rows.sort(key=lambda row: _uids(*row))
    layout.add_decodes(rows, behind=1)
    return layout.inputs(windows)


def join_prompts(
    decodes: StepInputs, chunks: list[Chunk], *, page_size: int, version: int, share: bool = True
) -> StepInputs:
    """A step of decodes with chunks of prompts behind their rows. Of the logits, the decodes' come
    first, a row each; `wanted` and `shared_read_tokens` are of what stands behind them."""
    layout = _Layout(page_size, share, behind=decodes)
    paths = [(chunk, chunk.sequence.path(version)) for chunk in chunks]
    for chunk, path in sorted(paths, key=lambda one: _uids(one[0].sequence, one[1])):
        layout.add_chunk(chunk, path)
    return layout.inputs(tuple(decodes.plans))


_Placed = tuple[list[int], Chunk, list[Run]]


def _place(placed: _Placed) -> list[int]:
    return placed[0]


def _uids(sequence: Sequence, path: list[Run]) -> list[int]:
    """What rows are sorted by: those who import the same stand together."""
    return [*(one.run.uid for one in sequence.imports), *(run.uid for run in path)]


def _is_decode(chunk: Chunk) -> bool:
    """One row, behind which the next token is sampled, in a run that the sequence writes."""
    sequence = chunk.sequence
    return (
        chunk.end - chunk.start == 1
        and chunk.end == len(sequence.tokens)
        and sequence.num_output > 0
        and sequence.run is not None
        and sequence.run.end == chunk.end
    )


@dataclass(slots=True)
class _OpenSpan:
    """Rows, of so many sequences, that see a run up to `end`; the rows behind may go on with it."""

    row: int
    rows: int
    end: int
    readers: int


class _Layout:
    """Rows of a step; `behind`: those that stand before them, decodes."""

    def __init__(self, page_size: int, share: bool, behind: StepInputs | None = None) -> None:
        self.share = share
        self.page_size = page_size
        self.builder = PlanBuilder(page_size)
        self.ids: list[np.ndarray] = []
        self.positions: list[np.ndarray] = []
        self.slots: list[np.ndarray] = []
        self.num_rows = 0
        self.logit_rows: list[int] = []
        self.wanted: list[LogitRow] = []
        self._runs: dict[Run, int] = {}
        self._open: dict[int, _OpenSpan] = {}  # by run
        self._shared_read_tokens = 0
        self._decode_rows: DecodeRows | None = None
        self._path: list[Run] = []  # of the decode before
        self._first_rows: list[int] = []  # where the rows of each of its shared runs begin
        if behind is not None:
            self._go_on_from(behind)

    def _go_on_from(self, decodes: StepInputs) -> None:
        plan = next(iter(decodes.plans.values()))
        self.builder = PlanBuilder(self.page_size, plan)
        self.ids.append(decodes.token_ids)
        self.positions.append(decodes.positions)
        self.slots.append(decodes.slots)
        self.num_rows = plan.num_rows
        self.logit_rows.extend(range(plan.num_rows))

    # ----------------------------------------------------------------------------- decodes

    def add_decodes(self, rows: list[tuple[Sequence, list[Run]]], *, behind: int = 0) -> None:
        """A row each, before all others: it sees its ancestors whole, and its own run, the last of
        its path, up to itself; so many tokens are `behind` it. Most of many a step, so what can be
        is done for all at once."""
        sequences, runs = [one for one, _ in rows], [path[-1] for _, path in rows]
        computed = [run.computed for run in runs]
        first_run = self.builder.add_runs(
            [run.page_ids() for run in runs],
            [(run.offset, run.computed, run.position) for run in runs],
            slack=SLACK_PAGES,
        )
        first_span = self.builder.add_row_spans(first_run, computed)
        self._runs = {run: first_run + i for i, run in enumerate(runs)}
        last = [len(sequence.tokens) - 1 - behind for sequence in sequences]
        self.ids.append(np.array([sequence.tokens[-1] for sequence in sequences], np.int64))
        shifts = [run.label.shift for run in runs]
        self.positions.append(np.array(last, np.int64) + np.array(shifts, np.int64))
        self.slots.append(_last_slots(runs, computed, self.page_size))
        self.logit_rows.extend(range(len(rows)))
        self.wanted.extend(map(LogitRow, sequences, last, itertools.repeat(True)))
        self.num_rows = len(rows)
        index = np.arange(len(rows))
        self._decode_rows = DecodeRows(sequences, runs, first_run + index, first_span + index)
        self._see_above(rows)

    def _see_above(self, rows: list[tuple[Sequence, list[Run]]]) -> None:
        """Spans over what decodes see above their own runs."""
        before: object = None
        for row, (sequence, path) in enumerate(rows):
            parent = path[-1].parent
            if sequence.modules is not None:
                self._see_ancestors([*self._import_whole(sequence, row), *path[:-1]], row)
                parent = None
            elif not self.share or parent is not before:
                self._see_ancestors(path[:-1], row)
            before = parent

    def _import_whole(self, sequence: Sequence, row: int) -> list[Run]:
        """Imported runs that a decode sees whole. What it sees a part of has a span of its own."""
        for one in sequence.imports:
            if not one.whole:
                self.builder.add_span(row, 1, self._run_index(one.run), one.in_use)
        return [one.run for one in sequence.imports if one.whole]

    def _see_ancestors(self, above: list[Run], row: int) -> None:
        """Runs that the row before sees too go on, the others begin."""
        common = 0
        limit = min(len(self._path), len(above)) if self.share else 0
        while common < limit and self._path[common] is above[common]:
            common += 1
        self._close_above(common, row)
        for run in above[common:]:
            self._path.append(run)
            self._first_rows.append(row)

    def _close_above(self, depth: int, row: int) -> None:
        """End the spans over the ancestors below `depth`; chunks may go on with them."""
        while len(self._path) > depth:
            run, first = self._path.pop(), self._first_rows.pop()
            rows = row - first
            self._see_whole(self._run_index(run), first, rows, len(run.tokens), readers=rows)

    # ----------------------------------------------------------------------------- chunks

    def add_chunk(self, chunk: Chunk, path: list[Run]) -> None:
        self._close_above(0, self.num_rows)
        sequence, a, b = chunk.sequence, chunk.start, chunk.end
        self.ids.append(sequence.ids()[a:b].astype(np.int64))
        self.positions.append(sequence.positions(a, b))
        for one in sequence.imports:
            self._import(one, a, b)
        for run in path:
            if run.start >= b:
                break
            self._add_run(run, a, b)
        self._add_logits(sequence, a, b)
        self.num_rows += b - a

    def _import(self, one: ImportedRun, a: int, b: int) -> None:
        """Rows from the import's first on see it."""
        rows = b - max(a, one.first)
        if rows <= 0:
            return
        index, row = self._run_index(one.run), self.num_rows + b - a - rows
        if one.whole:
            self._see_whole(index, row, rows, one.in_use)
        else:
            self.builder.add_span(row, rows, index, one.in_use)

    def add_module(self, chunk: Chunk, path: list[Run]) -> None:
        """Rows of a module: they see what it attends to whole, and itself causally."""
        self._close_above(0, self.num_rows)
        module, a, b = path[-1], chunk.start, chunk.end
        self.ids.append(np.array(module.tokens[a:b], np.int64))
        self.positions.append(module.position + np.arange(a, b))
        self._add_run(module, a, b)
        for run in path[:-1]:
            self._see_whole(self._run_index(run), self.num_rows, b - a, len(run.tokens))
        self.num_rows += b - a

    def _add_run(self, run: Run, a: int, b: int) -> None:
        """Rows inside the run see it causally, rows behind it see it whole."""
        index = self._run_index(run)
        inside = min(b, run.end) - max(a, run.start)
        if inside > 0:
            first = max(a, run.start)
            self.slots.append(run.slots(first - run.start, first - run.start + inside))
            self.builder.add_span(
                self.num_rows + first - a, inside, index, first - run.start + 1, step=1
            )
        behind = b - max(a, run.end)
        if behind > 0:
            self._see_whole(index, self.num_rows + b - a - behind, behind, len(run.tokens))

    def _see_whole(self, index: int, row: int, rows: int, end: int, *, readers: int = 1) -> None:
        """Rows of so many sequences see a run whole."""
        span = self._open.get(index)
        if self.share and span is not None and span.row + span.rows == row:
            span.rows += rows
            span.readers += readers
            return
        if span is not None:
            self._add_open(index, span)
        self._open[index] = _OpenSpan(row, rows, end, readers)

    def _add_open(self, index: int, span: _OpenSpan) -> None:
        self.builder.add_span(span.row, span.rows, index, span.end)
        self._shared_read_tokens += (span.readers - 1) * span.end

    def _run_index(self, run: Run) -> int:
        if run not in self._runs:
            self._runs[run] = self.builder.add_run(
                run.page_ids(), run.offset, run.computed, run.position
            )
        return self._runs[run]

    def _add_logits(self, sequence: Sequence, a: int, b: int) -> None:
        samples = not sequence.score_only and b == len(sequence.tokens)
        first = b - 1 if samples else b
        if sequence.score_from is not None:
            # Row i scores token i + 1; sampled tokens have theirs from the step that sampled them.
            last_given = len(sequence.tokens) if sequence.score_only else sequence.num_prompt
            for index in range(max(a, sequence.score_from - 1), min(first, last_given - 1)):
                self._want(sequence, index, index - a, False)
        if samples:
            self._want(sequence, b - 1, b - 1 - a, True)

    def _want(self, sequence: Sequence, index: int, row: int, samples: bool) -> None:
        self.logit_rows.append(self.num_rows + row)
        self.wanted.append(LogitRow(sequence, index, samples))

    # ----------------------------------------------------------------------------- the step

    def inputs(self, windows: Seq[int | None]) -> StepInputs:
        self._close_above(0, self.num_rows)
        for index, span in self._open.items():
            self._add_open(index, span)
        ids, positions, slots = map(np.concatenate, (self.ids, self.positions, self.slots))
        plan = self.builder.build(positions)
        pure = self._decode_rows is not None and len(self._decode_rows.runs) == self.num_rows
        return StepInputs(
            ids,
            positions,
            slots,
            {window: windowed(plan, window) for window in set(windows)},
            np.array(self.logit_rows, np.int64),
            self.wanted,
            self._decode_rows if pure else None,
            self._shared_read_tokens,
        )


def _last_slots(runs: list[Run], computed: list[int], page_size: int) -> np.ndarray:
    """int64: where each run's last computed token stands."""
    places = [run.offset + count - 1 for run, count in zip(runs, computed, strict=True)]
    pages = [run.pages[at // page_size] for run, at in zip(runs, places, strict=True)]
    return np.array(pages, np.int64) * page_size + np.array(places, np.int64) % page_size
