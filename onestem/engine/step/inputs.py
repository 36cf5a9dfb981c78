"""A step's tensors: ids, positions, slots to write, the attention plan, rows that want logits.

Decodes come first, then chunks of prompts; within each, rows are in depth-first order of the
tree, so that a run's rows are neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from onestem.arrays import ragged
from onestem.cache import PagePool, Run
from onestem.engine.modules.prompt import ImportedRun
from onestem.engine.sequence import Chunk, ScoreSpan, Sequence
from onestem.engine.step.choices import ChoiceRows
from onestem.engine.step.sequence_table import Columns
from onestem.ops import AttentionPlan, PlanBuilder, StateRows, windowed
from onestem.ops.plan import END, FIRST, ROW, ROWS, RUN, RUN_LEN, RUN_PAGES, SPAN_FIELDS

# Page ids that a decode's own run may take before its plan must be laid out again.
SLACK_PAGES = 8
AFTER_ALL = 2**31  # an index after all of a prompt's tokens


class Rows(Columns):
    """Rows that decode, int64 `[num_rows]` each.

    Attributes:
        sid, generation: of the sequence, in the `SequenceTable`.
        held: how many pages the plan's list of its own run has room for.
        offset, base: slot and index in the sequence of that run's first token, as they were when it
            was put into the plan; they hold also when the run is split.

    Run and span i of the plan are row i's own.
    """

    sid: np.ndarray
    generation: np.ndarray
    held: np.ndarray
    offset: np.ndarray
    base: np.ndarray


@dataclass(frozen=True, eq=False)
class StepInputs:
    """Host arrays of one step.

    Attributes:
        token_ids, positions, slots: int64 `[num_rows]`; `slots` is where each row's K and V go.
        plans: attention plan by window (None: unlimited).
        logit_rows: int64 `[num_logits]`, rows that are sampled from: each decode's, once; then the
            last row of each of `ends`, once for each of its samples.
        ends: chunks after which sequences sample.
        score_rows: int64 `[n]`, ascending: rows that score given tokens, and `scores`: which.
        shared_read_tokens: keys that sequences see and need not read, since one read of a run
            serves several of them.
        choices: rows of questions that choose what is repaired, and `all_choose`: whether its rows
            are there for nothing else.
        states: which rows continue which recurrent state, and `copies`: slots of states that are
            copied after them, (from, to). None: the model's layers keep none.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    plans: dict[int | None, AttentionPlan]
    logit_rows: np.ndarray
    ends: list[Chunk]
    score_rows: np.ndarray
    scores: list[ScoreSpan]
    shared_read_tokens: int
    states: StateRows | None = None
    copies: Seq[tuple[int, int]] = ()
    choices: Seq[ChoiceRows] = ()
    all_choose: bool = False

    def advance(self, new_pages: NewPages) -> None:
        """Make the inputs of decodes those of the next step, in place: each row goes one token
        further, and so do its own run and span."""
        plan, count = next(iter(self.plans.values())), len(self.positions)  # plans share arrays
        self.positions[:] += 1
        self.slots[:] += 1
        plan.row_position[:] += 1
        plan.runs[:count, RUN_LEN] += 1
        plan.spans[:count, END] += 1
        if self.states is not None:
            self.states.position[:] += 1
        if len(new_pages.runs):
            self.slots[new_pages.runs] = new_pages.pages * plan.page_size
            at = plan.runs[new_pages.runs, RUN_PAGES] + new_pages.page_index
            plan.run_pages[at] = new_pages.pages


@dataclass(frozen=True, eq=False)
class NewPages:
    """Pages that rows have taken since the step before, where only lengths have changed.

    Attributes:
        runs, page_index, pages: int64 `[m]`: the new token of row `runs[i]` is the first one in
            page `pages[i]`, which was put at `page_index[i]` of the row's own run.
    """

    runs: np.ndarray
    page_index: np.ndarray
    pages: np.ndarray


def join_prompts(
    decodes: StepInputs,
    chunks: list[Chunk],
    *,
    pool: PagePool,
    version: int,
    share: bool = True,
) -> StepInputs:
    """A step of decodes, then chunks of prompts. `shared_read_tokens` is that of the chunks."""
    layout = _ChunkLayout(pool, share, decodes)
    modules = [chunk for chunk in chunks if chunk.module is not None]
    for chunk in sorted(modules, key=lambda one: [run.uid for run in one.module_path]):
        layout.add_module(chunk)
    prompts = [(c, c.sequence.path(version)) for c in chunks if c.module is None]
    for chunk, path in sorted(prompts, key=lambda one: _uids(one[0].sequence, one[1])):
        layout.add_chunk(chunk, path)
    return layout.inputs(tuple(decodes.plans))


def _uids(sequence: Sequence, path: list[Run]) -> list[int]:
    """What rows are sorted by: those that import the same are adjacent."""
    return [*(one.run.uid for one in sequence.imports), *(run.uid for run in path)]


@dataclass(slots=True)
class _OpenSpan:
    """Rows of `readers` sequences that see a run whole; the next rows may join."""

    row: int
    rows: int
    readers: int


class _Layout:
    """Runs and spans, after those of a plan if one is given. Neighbours that see a run whole share
    a span, unless `share` is False.

    Attributes:
        shared_read_tokens: see `StepInputs`.
    """

    def __init__(
        self, page_size: int, share: bool, behind: AttentionPlan | None = None, part: int = 0
    ) -> None:
        self.builder = PlanBuilder(page_size, behind, part=part)
        self.share = share
        self.shared_read_tokens = 0
        self._runs: dict[Run, int] = {}
        self._open: dict[tuple[Run, int], _OpenSpan] = {}

    def index(self, run: Run) -> int:
        """A run's index in the plan."""
        if run not in self._runs:
            self._runs[run] = self.builder.add_run(
                run.page_ids(), run.offset, run.computed, run.position
            )
        return self._runs[run]

    def see_whole(self, run: Run, row: int, rows: int, shift: int = 0) -> None:
        """Let rows of one more sequence, or of several that see the same, see a run whole, `shift`
        positions further than it was stored."""
        span = self._open.get((run, shift))
        if self.share and span is not None and span.row + span.rows == row:
            span.rows += rows
            span.readers += 1
            return
        if span is not None:
            self._close(run, shift, span)
        self._open[run, shift] = _OpenSpan(row, rows, 1)

    def see_import(self, one: ImportedRun, row: int, rows: int, at: int = AFTER_ALL) -> None:
        """Let rows, tokens of a sequence from index `at` on, see what it imports of a run."""
        first, begin, in_use = one.pieces.T
        unseeing = np.clip(first - at, 0, rows)  # rows before that
        if one.whole:
            if unseeing[0] < rows:
                skip = int(unseeing[0])
                self.see_whole(one.run, row + skip, rows - skip, one.shift)
            return
        spans = np.zeros((len(first), len(SPAN_FIELDS)), np.int32)
        spans[:, ROW], spans[:, ROWS] = row + unseeing, rows - unseeing
        spans[:, RUN], spans[:, FIRST], spans[:, END] = self.index(one.run), begin, in_use
        self.builder.add_spans(spans[unseeing < rows], one.shift)

    def _close(self, run: Run, shift: int, span: _OpenSpan) -> None:
        end = len(run.tokens)
        self.builder.add_span(span.row, span.rows, self.index(run), end, shift=shift)
        self.shared_read_tokens += (span.readers - 1) * len(run.tokens)

    def plan(self, row_position: np.ndarray) -> AttentionPlan:
        """The plan; `row_position` int64 `[num_rows]`: positions of all its rows."""
        for (run, shift), span in self._open.items():
            self._close(run, shift, span)
        return self.builder.build(row_position)


class DecodeLayout(_Layout):
    """Runs and spans of rows that decode."""

    def add_all(self, rows: list[tuple[Sequence, list[Run]]]) -> tuple[list[Sequence], Rows]:
        """Add sequences with their paths, each with its own run and what it sees above. Returns
        them in tree order, and their rows."""
        rows = sorted(rows, key=lambda row: _uids(*row))
        sequences = [sequence for sequence, _ in rows]
        own, at = self.add_own(sequences), 0
        for _, alike in groupby(rows, self._seen_above):
            (sequence, path), *others = alike
            count = 1 + len(others)
            for one in sequence.imports:
                self.see_import(one, at, count)
            for run in path[:-1]:
                self.see_whole(run, at, count)
            at += count
        return sequences, own

    def _seen_above(self, row: tuple[Sequence, list[Run]]) -> object:
        """The same for neighbours that see the same above their own runs, and share that."""
        sequence, path = row
        return path[-1].parent if self.share and sequence.modules is None else sequence

    def add_own(self, sequences: list[Sequence]) -> Rows:
        """Add the runs that sequences write, and a span over each, before all others. Their sids
        are set later."""
        rows, builder = Rows(len(sequences)), self.builder
        runs = [sequence.run for sequence in sequences if sequence.run is not None]
        rows.held[:] = [len(run.pages) + SLACK_PAGES for run in runs]
        rows.offset[:] = [run.offset for run in runs]
        rows.base[:] = [run.start for run in runs]
        builder.add_runs(
            [run.page_ids() for run in runs],
            [(run.offset, 0, run.position) for run in runs],
            slack=SLACK_PAGES,
        )
        builder.add_row_spans(len(runs))
        return rows


class _ChunkLayout(_Layout):
    """Rows of prompts, after those of a step of decodes."""

    def __init__(self, pool: PagePool, share: bool, decodes: StepInputs) -> None:
        plan = next(iter(decodes.plans.values()))
        super().__init__(pool.page_size, share, plan, pool.part)
        self.part = pool.part
        self._views: dict[tuple[Run, bytes], int] = {}
        self.ids = [decodes.token_ids]
        self.positions = [decodes.positions]
        self.slots = [decodes.slots]
        self.num_rows = plan.num_rows
        self.ends: list[Chunk] = []
        self.logit_rows = list(range(plan.num_rows))
        self.scores: list[ScoreSpan] = []
        self.score_rows = [np.zeros(0, np.int64)]
        self._num_score_rows = 0
        self._states = decodes.states
        self._parts: list[tuple[int, int, int, int, int]] = []  # columns of `StateRows`
        self._copies: list[tuple[int, int]] = []
        self._choices: list[ChoiceRows] = []
        self._for_choices = 0  # rows

    def add_chunk(self, chunk: Chunk, path: list[Run]) -> None:
        """Add rows of a sequence, which see its imports from each one's first row on."""
        sequence, a, b = chunk.sequence, chunk.start, chunk.end
        self.ids.append(sequence.ids()[a:b].astype(np.int64))
        self.positions.append(sequence.positions(a, b))
        for one in sequence.imports:
            if self.part and len(one.pieces) > 1:
                self._see_view(one, self.num_rows, b - a, a)
            else:
                self.see_import(one, self.num_rows, b - a, a)
        for run in path:
            if run.start >= b:
                break
            self._add_run(run, a, b)
        self._add_logits(chunk)
        choosing = sequence.choosing
        if choosing is not None:
            self._for_choices += max(0, b - max(a, choosing.sees))
            if b > choosing.first:
                first = max(a, choosing.first)
                at = self.num_rows + first - a
                self._choices.append(ChoiceRows(sequence, at, b - first, b, sequence.imports))
        if chunk.state is not None:
            state = chunk.state
            self._parts.append((self.num_rows, b - a, a, state.source, state.target))
            self._copies += [(state.target, slot) for slot in state.copies]
            if state.again:  # nothing reads what they write
                slots, rows = np.concatenate(self.slots), self.num_rows
                slots[rows : rows + state.again] = path[0].scratch_slot
                self.slots = [slots]
        self.num_rows += b - a

    def add_module(self, chunk: Chunk) -> None:
        """Add rows of a module: they see what it attends to whole, and itself causally."""
        module, a, b = chunk.module, chunk.start, chunk.end
        assert module is not None
        self.ids.append(np.array(module.tokens[a:b], np.int64))
        self.positions.append(module.position + np.arange(a, b))
        self._add_run(module, a, b)
        for run, shift in chunk.attends:
            self.see_whole(run, self.num_rows, b - a, shift)
        self.num_rows += b - a

    def _see_view(self, one: ImportedRun, row: int, rows: int, at: int) -> None:
        """`see_import` of a run of which tokens are hidden: without their parts it is a run again,
        of which each row sees the first tokens."""
        first, begin, in_use = one.pieces.T
        key = one.run, one.pieces.tobytes()
        if key not in self._views:
            size = self.builder.page_size
            parts = ragged(begin // self.part, -(-(in_use - begin) // self.part)) * self.part
            pages = one.run.page_ids()[parts // size].astype(np.int32) * (size // self.part)
            length = int((in_use - begin).sum())
            self._views[key] = self.builder.add_part_run(
                pages + (parts % size // self.part).astype(np.int32), length, one.run.position
            )
        start = np.clip(first - at, 0, rows)
        spans = np.zeros((len(first), len(SPAN_FIELDS)), np.int32)
        spans[:, ROW], spans[:, ROWS] = row + start, np.append(start[1:], rows) - start
        spans[:, RUN], spans[:, END] = self._views[key], np.cumsum(in_use - begin)
        self.builder.add_spans(spans[spans[:, ROWS] > 0], one.shift)

    def _add_run(self, run: Run, a: int, b: int) -> None:
        """Rows inside the run see it causally, rows after it see it whole."""
        inside = min(b, run.end) - max(a, run.start)
        if inside > 0:
            first = max(a, run.start)
            self.slots.append(run.slots(first - run.start, first - run.start + inside))
            self.builder.add_span(
                self.num_rows + first - a, inside, self.index(run), first - run.start + 1, step=1
            )
        behind = b - max(a, run.end)
        if behind > 0:
            self.see_whole(run, self.num_rows + b - a - behind, behind)

    def _add_logits(self, chunk: Chunk) -> None:
        sequence, a, b = chunk.sequence, chunk.start, chunk.end
        if chunk.samples:
            self.ends.append(chunk)
            self.logit_rows.extend([self.num_rows + b - 1 - a] * len(chunk.samples))
        if sequence.scoring is None:
            return
        first, end = sequence.scoring.span(a, b)
        if first < end:
            rows, at = np.unique(sequence.scoring.rows[first:end], return_inverse=True)
            self.scores.append(ScoreSpan(sequence, first, end, at + self._num_score_rows))
            self.score_rows.append(self.num_rows - a + rows)
            self._num_score_rows += len(rows)

    def inputs(self, windows: Seq[int | None]) -> StepInputs:
        """The inputs of the step, with a plan for each window."""
        ids, positions, slots = map(np.concatenate, (self.ids, self.positions, self.slots))
        plan = self.plan(positions)
        return StepInputs(
            ids,
            positions,
            slots,
            {window: windowed(plan, window) for window in set(windows)},
            np.array(self.logit_rows, np.int64),
            self.ends,
            np.concatenate(self.score_rows),
            self.scores,
            self.shared_read_tokens,
            None if self._states is None else _joined(self._states, self._parts),
            self._copies,
            self._choices,
            self._for_choices == len(ids),
        )


def _joined(decodes: StateRows, parts: list[tuple[int, int, int, int, int]]) -> StateRows:
    """Those of decodes, then `parts`, by their columns."""
    table = np.concatenate((decodes.table(), np.array(parts, np.int32).reshape(-1, 5)))
    return StateRows(*table.T)
