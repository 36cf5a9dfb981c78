"""A step's tensors: ids, positions, slots to write, the attention plan, rows that want logits."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from onestem.cache import Run
from onestem.engine.scheduler import Chunk
from onestem.engine.sequence import Sequence
from onestem.ops import AttentionPlan, PlanBuilder, windowed

__all__ = ["LogitRow", "StepInputs", "build_inputs"]


@dataclass(frozen=True)
class LogitRow:
    """Logits after token `index` of a sequence are wanted: to sample the next token (`samples`), or
    to score the one that follows."""

    sequence: Sequence
    index: int
    samples: bool


@dataclass(frozen=True, eq=False)
class StepInputs:
    """Host arrays of one step.

    Attributes:
        token_ids, positions, slots: int64 `[num_rows]`; `slots` is where each row's K and V go.
        plans: attention plan by window (None: unlimited).
        logit_rows: int64 `[num_logits]`, rows whose logits are wanted, and what for.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    plans: dict[int | None, AttentionPlan]
    logit_rows: np.ndarray
    wanted: list[LogitRow]


def build_inputs(
    chunks: list[Chunk],
    *,
    page_size: int,
    windows: Seq[int | None],
    version: int,
    share: bool = True,
) -> StepInputs:
    """Lay the chunks out in depth-first order of the tree, so that a run's rows are neighbours.

    With `share=False` each sequence gets spans of its own, also over runs that several see.
    """
    chunks = sorted(chunks, key=lambda chunk: [run.uid for run in chunk.sequence.path(version)])
    layout = _Layout(page_size, share)
    for chunk in chunks:
        layout.add(chunk, chunk.sequence.path(version))
    return layout.inputs(windows)


class _Layout:
    def __init__(self, page_size: int, share: bool) -> None:
        self.share = share
        self.builder = PlanBuilder(page_size)
        self.ids: list[np.ndarray] = []
        self.positions: list[np.ndarray] = []
        self.slots: list[np.ndarray] = []
        self.logit_rows: list[int] = []
        self.wanted: list[LogitRow] = []
        self.num_rows = 0
        self._runs: dict[Run, int] = {}
        self._open: dict[int, list[int]] = {}  # run -> [row, rows, end] of a span that may go on

    def add(self, chunk: Chunk, path: list[Run]) -> None:
        sequence, a, b = chunk.sequence, chunk.start, chunk.end
        self.ids.append(sequence.ids()[a:b].astype(np.int64))
        self.positions.append(np.arange(a, b))
        for run in path:
            if run.start >= b:
                break
            self._add_run(run, a, b)
        self._add_logits(sequence, a, b)
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

    def _see_whole(self, index: int, row: int, rows: int, end: int) -> None:
        span = self._open.get(index)
        if self.share and span is not None and span[0] + span[1] == row:
            span[1] += rows
            return
        if span is not None:
            self.builder.add_span(span[0], span[1], index, span[2])
        self._open[index] = [row, rows, end]

    def _run_index(self, run: Run) -> int:
        if run not in self._runs:
            self._runs[run] = self.builder.add_run(
                run.page_ids(), run.offset, run.computed, run.start
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

    def inputs(self, windows: Seq[int | None]) -> StepInputs:
        for index, (row, rows, end) in self._open.items():
            self.builder.add_span(row, rows, index, end)
        positions = np.concatenate(self.positions)
        plan = self.builder.build(positions)
        plans = {window: windowed(plan, window) for window in set(windows)}
        return StepInputs(
            np.concatenate(self.ids),
            positions,
            np.concatenate(self.slots),
            plans,
            np.array(self.logit_rows, np.int64),
            self.wanted,
        )
