"""The next step of the same decodes, made from the one before it in place.

Only lengths change from one decode step to the next, and now and then a run takes a page: arrays
are edited, and no sequence is visited (`docs/attention-plan.md`, "In place"). A sequence that ends
leaves its row empty; one whose prompt has been computed takes an empty row of those that see the
same, or a new one behind the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np

from onestem.cache import PrefixCache, Run
from onestem.engine.inputs import SLACK_PAGES, DecodeRows, StepInputs
from onestem.engine.sequence import Sequence
from onestem.ops import AttentionPlan, windowed
from onestem.ops.plan import END, FIRST, ROW, ROWS, RUN

__all__ = ["Advance", "Change", "longer"]

PAGES, LEN, POSITION = 0, 2, 3  # columns of `AttentionPlan.runs`
MORE_PAGES = 4 * SLACK_PAGES  # that a list gets when it is full
CROWDED_WORDS, CROWDED_SPANS = 1 << 15, 512
# Prompts that begin alike behind a prefix do so by chance, in a token or two: so many tokens a row
# may see above its own run apart from its neighbours.
CHANCE_TOKENS = 64


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
        share: False gives each sequence spans of its own, also over runs that several see.

    Attributes:
        inputs: the step's; other objects once a row was added.
        live: bool `[num_rows]`, rows that have not ended.
        shared_read_tokens: of the next step, as in `StepInputs`.
    """

    def __init__(
        self, inputs: StepInputs, cache: PrefixCache, scratch_slot: int, *, share: bool = True
    ) -> None:
        assert inputs.decodes is not None
        self.inputs = inputs
        self.rows: DecodeRows = inputs.decodes
        self.live = np.ones(len(self.rows.sequences), bool)
        self._cache = cache
        self._scratch = scratch_slot
        self._share = share
        # Its arrays are those of all the step's plans.
        self._plan = replace(next(iter(inputs.plans.values())), window=None)
        self._num_words, self._num_spans = len(self._plan.run_pages), self._plan.num_spans
        runs = self._plan.runs[self.rows.run_index]
        self._page_start = runs[:, 0].astype(np.int64)
        self._place = runs[:, 1].astype(np.int64) + runs[:, LEN] - 1  # of the row's own token
        # A place less this is the index in its sequence: it holds also when the run is split.
        starts = np.array([run.start for run in self.rows.runs], np.int64)
        self._first_place = runs[:, 1].astype(np.int64) - starts
        self._held = np.array([len(r.pages) + SLACK_PAGES for r in self.rows.runs], np.int64)
        # The deepest run that a row sees above its own; None: not what is above that alone.
        self._parents = list(map(_parent, self.rows.sequences, self.rows.runs))
        self._structure = True
        self.shared_read_tokens = inputs.shared_read_tokens

    def drop(self, rows: np.ndarray) -> None:
        """Rows (bool `[num_rows]`) that have ended: they stay in their place, write to scratch and
        see nothing of their own."""
        self._structure = True
        ended = np.flatnonzero(rows & self.live).tolist()
        self.live &= ~rows
        self.inputs.slots[rows] = self._scratch
        self._plan.spans[self.rows.span_index[rows], END] = 0
        for row in ended:
            self._leave_above(row)
        self.shared_read_tokens = self._count_shared()

    def _leave_above(self, row: int) -> None:
        """What an empty row saw with few others, or alone, and nobody of them is left: it is then
        one of those that see what is above that."""
        spans, ends = self._seen(row)
        for span, end in zip(spans[::-1].tolist(), ends[::-1].tolist(), strict=True):
            first, count = self._plan.spans[span, [ROW, ROWS]].tolist()
            length, parent = int(self._plan.spans[span, END]), self._parents[row]
            if length > CHANCE_TOKENS or self.live[first : first + count].any():
                return
            above = _ancestor(parent, end - length)
            like = all(other is parent for other in self._parents[first : first + count])
            if above is None or not like:
                return
            self._plan.spans[span, END] = 0
            self._parents[first : first + count] = [above] * count

    def _count_shared(self) -> int:
        """Keys that one read of a run spares all live rows of a span but the first."""
        spans = self._plan.spans.astype(np.int64)
        spans = spans[spans[:, ROWS] > 1]
        before = np.concatenate([[0], np.cumsum(self.live)])
        readers = before[spans[:, ROW] + spans[:, ROWS]] - before[spans[:, ROW]]
        return int((np.maximum(readers - 1, 0) * spans[:, END]).sum())

    def note_structure(self) -> None:
        """Another plan comes before the next step's."""
        self._structure = True

    @property
    def crowded(self) -> bool:
        """Whether what those who left had of the lists of pages should be put away."""
        plan = self._plan
        spans = plan.num_spans - self._num_spans - len(self.live)
        return len(plan.run_pages) > self._num_words + CROWDED_WORDS or spans > CROWDED_SPANS

    # ----------------------------------------------------------------------------- a step

    def step(self) -> Change | None:
        """One token further in every live row. None: KV memory, or the room for page ids, is
        short; nothing of this step may be computed then."""
        live = self.live
        self._place += live
        full = np.flatnonzero(self._place >= self._held * self._cache.pool.page_size)
        if len(full) and not self._move_lists(full):
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
            tokens = int(self._place[row] - self._first_place[row]) - run.start + 1
            if not self._cache.reserve(run, tokens):
                return None
            pages[i] = run.pages[(run.offset + tokens - 1) // size]
        self._plan.run_pages[self._page_start[rows] + index] = pages
        self.inputs.slots[rows] = pages * size
        return self.rows.run_index[rows], index, pages

    def _move_lists(self, rows: np.ndarray) -> bool:
        """Longer lists of page ids for rows whose lists are full, behind all others; False: there
        would be too many of them."""
        parts = [self._plan.run_pages]
        at = len(parts[0])
        if at + int((self._held[rows] + MORE_PAGES).sum()) > self._num_words + CROWDED_WORDS:
            return False
        for row in rows.tolist():
            start, held = int(self._page_start[row]), int(self._held[row])
            moved = np.zeros(held + MORE_PAGES, np.int32)
            moved[:held] = parts[0][start : start + held]
            self._page_start[row], self._held[row] = at, len(moved)
            self._plan.runs[self.rows.run_index[row], PAGES] = at
            parts.append(moved)
            at += len(moved)
        self._set_plan(replace(self._plan, run_pages=np.concatenate(parts)))
        self._structure = True
        return True

    # ----------------------------------------------------------------------------- newcomers

    def seat(self, sequences: Seq[Sequence], empty: np.ndarray) -> list[int]:
        """Rows for sequences whose prompts were in the step before: as if that had been their
        decode. `empty` bool `[num_rows]`: rows that may be taken."""
        self._structure = True
        num_before = len(self.live)
        rows = self._choose(sequences, empty)
        self._grow(max([*rows, num_before - 1]) + 1 - num_before)
        self._give_pages(rows, sequences)
        above = {row: self._parents[row] for row in rows}
        for row, sequence in zip(rows, sequences, strict=True):
            self._begin(row, sequence)
        for row in sorted(rows):
            if row >= num_before:
                self._see_above(row)
            else:
                self._see_more(row, above[row])
        self.shared_read_tokens = self._count_shared()
        return rows

    def _choose(self, sequences: Seq[Sequence], empty: np.ndarray) -> list[int]:
        """An empty row of those that see the same above their own runs, up to a few tokens, or a
        new one; those that see the same are neighbours."""
        free: dict[Run, list[int]] = {}
        for row in np.flatnonzero(empty).tolist():
            parent = self._parents[row]
            if parent is not None:
                free.setdefault(parent, []).append(row)
        rows, new = [0] * len(sequences), []
        for i, sequence in enumerate(sequences):
            parent = _own_run(sequence).parent
            found = next((free[run] for run in _near(parent) if free.get(run)), None)
            if found is None:
                new.append(i)
            else:
                rows[i] = found.pop()
        last = self._parents[-1] if self._parents else None

        def place(i: int) -> tuple[bool, list[int]]:
            parent = _own_run(sequences[i]).parent
            assert parent is not None
            return parent is not last, [run.uid for run in parent.path()]

        for row, i in enumerate(sorted(new, key=place), len(self.live)):
            rows[i] = row
        return rows

    def _grow(self, count: int) -> None:
        """New rows, each with a run and a span over it."""
        if not count:
            return
        plan, rows, inputs = self._plan, self.rows, self.inputs
        run_index = np.arange(plan.num_runs, plan.num_runs + count)
        span_index = np.arange(plan.num_spans, plan.num_spans + count)
        self.rows = replace(
            rows,
            run_index=np.concatenate((rows.run_index, run_index)),
            span_index=np.concatenate((rows.span_index, span_index)),
        )
        self._set_plan(
            replace(
                plan,
                runs=longer(plan.runs, count),
                spans=longer(plan.spans, count),
                row_position=longer(plan.row_position, count),
            )
        )
        self.inputs = replace(
            self.inputs,
            token_ids=longer(inputs.token_ids, count),
            positions=longer(inputs.positions, count),
            slots=longer(inputs.slots, count),
            logit_rows=np.arange(len(inputs.slots) + count),
        )
        self.live = longer(self.live, count)
        self._page_start = longer(self._page_start, count)
        self._place = longer(self._place, count)
        self._first_place = longer(self._first_place, count)
        self._held = longer(self._held, count)
        self._parents.extend([None] * count)
        rows.sequences.extend(rows.sequences[:1] * count)  # until they have their own
        rows.runs.extend(rows.runs[:1] * count)

    def _set_plan(self, plan: AttentionPlan) -> None:
        self._plan = plan
        plans = {window: windowed(plan, window) for window in self.inputs.plans}
        self.inputs = replace(self.inputs, plans=plans, decodes=self.rows)

    def _give_pages(self, rows: list[int], sequences: Seq[Sequence]) -> None:
        """Room in the lists of page ids: what the row had, if that is enough."""
        parts = [self._plan.run_pages]
        at = len(parts[0])
        for row, sequence in zip(rows, sequences, strict=True):
            ids = _own_run(sequence).page_ids()
            if self._held[row] < len(ids) + SLACK_PAGES:
                self._page_start[row], self._held[row] = at, len(ids) + SLACK_PAGES
                parts.append(np.zeros(self._held[row], np.int32))
                at += int(self._held[row])
        if len(parts) > 1:
            self._set_plan(replace(self._plan, run_pages=np.concatenate(parts)))

    def _begin(self, row: int, sequence: Sequence) -> None:
        """The row as it was when the last token of the prompt was computed."""
        run, plan, size = _own_run(sequence), self._plan, self._cache.pool.page_size
        ids = run.page_ids()
        index, start = int(self.rows.run_index[row]), int(self._page_start[row])
        place = run.offset + run.computed - 1
        plan.run_pages[start : start + len(ids)] = ids
        plan.runs[index] = (start, run.offset, run.computed, run.position)
        plan.spans[self.rows.span_index[row]] = (row, 1, index, 0, run.computed, 0)
        plan.row_position[row] = self.inputs.positions[row] = run.position + run.computed - 1
        self.inputs.slots[row] = ids[place // size] * size + place % size
        self._place[row], self._first_place[row] = place, run.offset - run.start
        self._parents[row] = _parent(sequence, run)
        self.live[row] = True
        self.rows.sequences[row], self.rows.runs[row] = sequence, run

    def _see_above(self, row: int) -> None:
        """Spans of a new row over what is above its own run: those of the row before it go on,
        those of another that sees the same are repeated, the others are its own."""
        parent = self._parents[row]
        assert parent is not None
        like = [other for other in range(row - 1, -1, -1) if self._parents[other] is parent]
        others = [row - 1, *like[:1]] if row else []
        seen = [(*self._seen_alike(other, parent), other) for other in others]
        spans, end, other = max(seen, key=lambda one: one[1], default=(np.zeros(0, int), 0, -1))
        if self._share and other == row - 1:
            self._plan.spans[spans, ROWS] += 1
        elif len(spans):
            repeated = self._plan.spans[spans]
            repeated[:, ROW], repeated[:, ROWS] = row, 1
            self._add_spans(repeated)
        self._see_alone(row, [run for run in parent.path() if run.start >= end])

    def _see_more(self, row: int, above: Run | None) -> None:
        """What one that took an empty row sees below what all those rows see."""
        parent = self._parents[row]
        assert parent is not None
        assert above is not None
        self._see_alone(row, [run for run in parent.path() if run.start >= above.end])

    def _seen(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Indices of the spans over what a row sees above its own run, from the root down, and how
        many tokens of its path each ends behind."""
        spans, runs = self._plan.spans, self._plan.runs
        seen = (spans[:, ROW] <= row) & (row < spans[:, ROW] + spans[:, ROWS]) & (spans[:, END] > 0)
        seen[self.rows.span_index[row]] = False
        found = np.flatnonzero(seen)
        found = found[np.argsort(runs[spans[found, RUN], POSITION], kind="stable")]
        return found, np.cumsum(spans[found, END])

    def _seen_alike(self, row: int, parent: Run) -> tuple[np.ndarray, int]:
        """Those of a row's spans that one below `parent` sees too, and behind how many tokens they
        end."""
        deepest = self._parents[row]
        if deepest is None:
            return np.zeros(0, int), 0
        ends = [a.end for a, b in zip(deepest.path(), parent.path(), strict=False) if a is b]
        spans, stops = self._seen(row)
        alike = spans[stops <= max(ends, default=0)]
        return alike, int(stops[len(alike) - 1]) if len(alike) else 0

    def _see_alone(self, row: int, path: list[Run]) -> None:
        plan = self._plan
        if not path:
            return
        parts = [plan.run_pages, *(run.page_ids() for run in path)]
        starts = np.cumsum([len(part) for part in parts])
        runs = [
            (start, run.offset, len(run.tokens), run.position)
            for start, run in zip(starts, path, strict=False)
        ]
        spans = np.zeros((len(path), plan.spans.shape[1]), np.int32)
        spans[:, ROW], spans[:, ROWS], spans[:, FIRST] = row, 1, 0
        spans[:, RUN] = np.arange(plan.num_runs, plan.num_runs + len(path))
        spans[:, END] = [len(run.tokens) for run in path]
        self._set_plan(
            replace(
                plan,
                run_pages=np.concatenate(parts),
                runs=np.concatenate((plan.runs, np.array(runs, np.int32))),
            )
        )
        self._add_spans(spans)

    def _add_spans(self, spans: np.ndarray) -> None:
        self._set_plan(replace(self._plan, spans=np.concatenate((self._plan.spans, spans))))


def _own_run(sequence: Sequence) -> Run:
    assert sequence.run is not None
    return sequence.run


def _near(run: Run | None) -> Iterator[Run]:
    """A run and those above it that few of its path's tokens are behind."""
    end = 0 if run is None else run.end
    while run is not None and end - run.end <= CHANCE_TOKENS:
        yield run
        run = run.parent


def _ancestor(run: Run | None, end: int) -> Run | None:
    """The one of a run's path that ends behind so many tokens."""
    while run is not None and run.end > end:
        run = run.parent
    return run if run is not None and run.end == end else None


def _parent(sequence: Sequence, run: Run) -> Run | None:
    return None if sequence.modules is not None else run.parent


def longer(values: np.ndarray, count: int) -> np.ndarray:
    """With so many zeros behind."""
    return np.concatenate((values, np.zeros((count, *values.shape[1:]), values.dtype)))
