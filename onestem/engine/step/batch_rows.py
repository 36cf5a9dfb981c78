"""The rows that decode, in tree order, and the inputs of a step, edited in place.

Rows that see the same are neighbours, so that one span shows a run to all of them. From one step
to the next only lengths change, and now and then a run takes a page: no sequence is visited. Rows
that leave are cut out of all columns at once; a new one is put beside those that it shares most
with. `rebuild` makes all of it from the sequences: when much has changed, and for tests to compare
with. Chunks of prompts are rows of one step, after all others.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np

from onestem.cache import PrefixCache, Run
from onestem.engine.sequence import Chunk, Sequence, StepChanges
from onestem.engine.step.inputs import DecodeLayout, NewPages, Rows, StepInputs, join_prompts
from onestem.engine.step.run_readers import RunReaders
from onestem.engine.step.sequence_table import SequenceTable
from onestem.ops import AttentionPlan, StateRows, windowed
from onestem.ops.plan import END, ROW, ROWS, RUN, RUN_LEN, RUN_PAGES, RUN_POSITION

# Rows are made anew if this many words of page lists are unused, if a new row would read more than
# this many tokens apart from others that read them too, or if more rows than this (share) are new.
SPARE_WORDS = 1 << 15
APART_TOKENS = 64
FEW, FEW_SHARE = 8, 0.125


class BatchRows:
    """The rows of steps.

    Args:
        windows: of the model's layers.
        share: False gives each sequence spans of its own, also over runs that several see.

    Attributes:
        rows: those that decode.
        inputs: of the step, with its chunks.
        new_pages: since the step before; None: rows, or what they see, have changed too.
        chunks: of prompts, in the step.
        sampled: int64 `[n]`, `sid`s of what samples in the step: of all rows, then of prompts;
            `generations`: theirs.
        shared_read_tokens: keys that its sequences see and need not read.
    """

    def __init__(
        self, cache: PrefixCache, table: SequenceTable, *, windows: Seq[int | None], share: bool
    ) -> None:
        self.table = table
        self.chunks: list[Chunk] = []
        self.new_pages: NewPages | None = None
        self._cache = cache
        self._windows = windows
        self.share = share
        self._changed = True  # whether rows did, since the last step
        self._readers = RunReaders(cache, table)
        self._spare_words = 0
        self.rows: Rows
        self.inputs: StepInputs
        self.sampled: np.ndarray
        self.generations: np.ndarray
        self.shared_read_tokens = 0
        self._decodes: StepInputs
        self._plan: AttentionPlan
        self._put([])

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def sequences(self) -> list[Sequence | None]:
        """The sequence of each row that decodes."""
        return [self.table.sequences[sid] for sid in self.rows.sid.tolist()]

    def apply(self, changes: StepChanges) -> None:
        """Make the next step: drop rows, add rows, one token more in each, and chunks."""
        self._drop(changes.leave)
        self._enter(changes.enter)
        was_mixed, self.chunks = bool(self.chunks), changes.chunks
        new_pages = self._advance()
        self.new_pages = None if self._changed or was_mixed else new_pages
        self._changed = False
        samples, generations = self.rows.sid, self.rows.generation
        inputs = self._decodes
        self.shared_read_tokens = inputs.shared_read_tokens
        if self.chunks:
            self.new_pages = None
            inputs = join_prompts(
                inputs,
                self.chunks,
                pool=self._cache.pool,
                version=self._cache.tree.num_splits,
                share=self.share,
            )
            self.shared_read_tokens += inputs.shared_read_tokens
            beginning = (sequence for chunk in inputs.ends for sequence in chunk.samples)
            joined = [self.table.put(sequence, len(sequence.tokens)) for sequence in beginning]
            samples = np.concatenate((samples, np.array(joined, np.int64)))
            generations = self.table.generation[samples]
        self.inputs, self.sampled, self.generations = inputs, samples, generations

    def _drop(self, leave: list[Sequence]) -> None:
        """Remove rows of sequences that leave, have ended, or sample no more; no gap is left."""
        keep, sids = self._staying(leave), self.rows.sid
        if keep.all():
            return
        self._changed = True
        self._readers.forget(sids[~keep].tolist())
        before = np.concatenate(([0], np.cumsum(keep)))
        plan, rows, num_before = self._plan, self.rows.kept(keep), len(keep)
        moved = plan.moved[keep[plan.moved[:, 0]]]
        moved[:, 0] = before[moved[:, 0]]
        before = np.concatenate(([0], np.cumsum(np.append(keep, keep[plan.moved[:, 0]]))))
        self._spare_words += int(self.rows.held[~keep].sum())
        spans = plan.spans.copy()
        first, end = spans[:, ROW], spans[:, ROW] + spans[:, ROWS]
        spans[:, ROW], spans[:, ROWS] = before[first], before[end] - before[first]
        spans = spans[spans[:, ROWS] > 0]
        own, shared = np.flatnonzero(keep), spans[len(rows) :, RUN]
        used, shared[:] = np.unique(shared, return_inverse=True)
        shared += len(rows)
        spans[: len(rows), RUN] = np.arange(len(rows))
        assert not len(used) or used[0] >= num_before
        self.rows = rows
        runs = plan.runs[np.concatenate((own, used))]
        self._set(replace(plan, runs=runs, spans=spans, moved=moved))

    def _enter(self, sequences: list[Sequence]) -> None:
        anew = self._spare_words >= SPARE_WORDS
        if not sequences and not anew:
            return
        for sequence in sequences:
            if sequence.sid < 0:  # its step came to nothing
                self.table.put(sequence, len(sequence.tokens) - 1)
        many = len(sequences) > max(FEW, FEW_SHARE * len(self.rows))
        if (
            anew
            or many
            or any(sequence.modules is not None for sequence in sequences)
            or not all(map(self._insert, self._alike(sequences)))
        ):
            self.rebuild(sequences)

    def _going(self, rows: slice | np.ndarray) -> np.ndarray:
        """bool: whether the sequences of these rows sample on."""
        table, sids = self.table, self.rows.sid[rows]
        known = table.generation[sids] == self.rows.generation[rows]
        return known & (table.computed[sids] < table.end[sids])

    def _staying(self, leave: list[Sequence]) -> np.ndarray:
        """bool `[num_rows]`: rows whose sequences sample on and do not leave."""
        going = self._going(slice(None))
        paused = [sequence.sid for sequence in leave if sequence.sid >= 0]
        return going & ~np.isin(self.rows.sid, paused) if paused else going

    def any_stays(self, leave: list[Sequence]) -> bool:
        """Whether a sequence decodes on, beside those that leave."""
        if not leave and self._going(slice(1)).any():  # mostly the first one does
            return True
        return bool(self._staying(leave).any())

    def page_ends(self) -> list[Sequence]:
        """Sequences whose next token goes into a new page, without those that have ended."""
        fresh = self._fresh()
        if not len(fresh):
            return []
        fresh = fresh[self._going(fresh)]
        found = [self.table.sequences[sid] for sid in self.rows.sid[fresh].tolist()]
        return [sequence for sequence in found if sequence is not None]

    def _fresh(self) -> np.ndarray:
        """Rows whose next token goes into a new page."""
        return np.flatnonzero((self._decodes.slots + 1) % self._cache.pool.page_size == 0)

    def _advance(self) -> NewPages:
        """Advance every row by one token."""
        rows, fresh, size = self.rows, self._fresh(), self._cache.pool.page_size
        pages = index = fresh
        if len(fresh):
            place = (self.table.computed[rows.sid] - rows.base + rows.offset)[fresh]
            index = place // size
            if (index >= rows.held[fresh]).any():  # a row's list of pages has no room for it
                self.rebuild()
                return self._advance()
            pages = np.array(self._next_pages(fresh), np.int64)
        new_pages = NewPages(fresh, index, pages)
        self._decodes.advance(new_pages)
        self.table.computed[rows.sid] += 1
        return new_pages

    def _next_pages(self, rows: np.ndarray) -> list[int]:
        """The page of each row's next token, which the scheduler has reserved. After a failed step
        a run may have more pages."""
        size, pages = self._cache.pool.page_size, []
        for sid in self.rows.sid[rows].tolist():
            sequence = self.table.sequences[sid]
            assert sequence is not None
            assert sequence.run is not None
            pages.append(sequence.run.pages[sequence.next_place // size])
        return pages

    def _alike(self, sequences: list[Sequence]) -> list[list[Sequence]]:
        """Those that see the same above their own runs, together (if anything is shared)."""
        groups: dict[object, list[Sequence]] = {}
        for sequence in sequences:
            assert sequence.run is not None
            key = sequence.run.parent if self.share else sequence
            groups.setdefault(key, []).append(sequence)
        return list(groups.values())

    def _insert(self, group: list[Sequence]) -> bool:
        """Add rows for sequences that see the same, beside the row that they share most with.
        False: all rows should be rebuilt."""
        path = group[0].path(self._cache.tree.num_splits)
        above = path[:-1]
        count, at, read = len(group), len(self.rows), 0
        alike = np.zeros(0, np.int64)
        sid, end = self._readers.neighbour(above) if self.share else (-1, 0)
        if sid >= 0:
            spans, stops = _seen(self._plan, int(np.flatnonzero(self.rows.sid == sid)[0]))
            alike = spans[stops <= end]
            read = int(stops[len(alike) - 1]) if len(alike) else 0
            if end - read > APART_TOKENS:
                return False
        spans = self._plan.spans
        if len(alike):
            at = int(spans[alike[-1], [ROW, ROWS]].sum())
        across = np.flatnonzero((spans[:, ROW] < at) & (spans[:, ROW] + spans[:, ROWS] > at))
        if not np.isin(across, alike).all():
            return False
        self._changed = True
        spans[spans[:, ROW] >= at, ROW] += count
        spans[alike, ROWS] += count
        self._add_rows(group, at, [run for run in above if run.start >= read])
        return True

    def _add_rows(self, group: list[Sequence], at: int, apart: list[Run]) -> None:
        """Put rows before row `at`, each with its own run, and their spans over runs `apart`."""
        count, before, plan = len(group), len(self.rows), self._plan
        layout = DecodeLayout(self._cache.pool.page_size, self.share)
        rows = self._seated(group, layout.add_own(group))
        for run in apart:
            layout.see_whole(run, 0, count)
        more = layout.plan(np.zeros(count, np.int64))
        # Own runs and spans stand first, in the order of rows.
        words, shared = len(plan.run_pages), plan.num_runs - before
        more.runs[:, RUN_PAGES] += words
        more.spans[:, ROW] += at
        more.spans[count:, RUN] += before + shared
        plan.spans[before:, RUN] += count
        runs = (plan.runs[:at], more.runs[:count], plan.runs[at:], more.runs[count:])
        spans = (plan.spans[:at], more.spans[:count], plan.spans[at:], more.spans[count:])
        self.rows = self.rows.inserted(at, rows)
        joined = np.concatenate(spans)
        joined[: len(self.rows), RUN] = np.arange(len(self.rows))
        moved = plan.moved + [count, 0] * (plan.moved[:, :1] >= at)
        self._set(
            replace(
                plan,
                run_pages=np.concatenate((plan.run_pages, more.run_pages)),
                runs=np.concatenate(runs),
                spans=joined,
                moved=moved.astype(np.int32),
            )
        )
        self._readers.note(group)

    def _seated(self, sequences: list[Sequence], rows: Rows) -> Rows:
        rows.sid[:] = [sequence.sid for sequence in sequences]
        rows.generation[:] = self.table.generation[rows.sid]
        return rows

    def rebuild(self, newcomers: Seq[Sequence] = ()) -> None:
        """Make all rows again, from their sequences and new ones."""
        there = dict.fromkeys(s for s in self.sequences if s is not None)
        self._put([*there, *(s for s in newcomers if s not in there)])

    def clear(self) -> None:
        """Remove all rows and chunks."""
        self._put([])
        self.forget_chunks()

    def forget_chunks(self) -> None:
        """Drop what the last step had beside rows that decode: nothing runs, and an idle engine
        keeps no sequence that has ended."""
        self.chunks, self.inputs, self._changed = [], self._decodes, True

    def _put(self, sequences: list[Sequence]) -> None:
        version = self._cache.tree.num_splits
        layout = DecodeLayout(self._cache.pool.page_size, self.share)
        sequences, rows = layout.add_all([(one, one.path(version)) for one in sequences])
        self.rows, self._changed, self._spare_words = self._seated(sequences, rows), True, 0
        self._readers.clear()
        self._set(layout.plan(np.zeros(len(rows), np.int64)))
        self._readers.note(sequences)
        self.inputs, self.sampled, self.generations = self._decodes, rows.sid, rows.generation

    def _set(self, plan: AttentionPlan) -> None:
        """Set another plan, and arrays of inputs as long as its rows."""
        count, num_queries = len(self.rows), len(self.rows) + len(plan.moved)
        if len(plan.row_position) != num_queries:
            plan = replace(plan, row_position=np.zeros(num_queries, np.int32))
        self._plan = plan
        plans = {window: windowed(plan, window) for window in set(self._windows)}
        length = self.table.computed[self.rows.sid] - self.rows.base
        positions = plan.runs[:count, RUN_POSITION].astype(np.int64) + length - 1
        plan.row_position[:count] = positions
        plan.row_position[count:] = positions[plan.moved[:, 0]] - plan.moved[:, 1]
        plan.runs[:count, RUN_LEN] = plan.spans[:count, END] = length
        slots = _slots(plan, self.rows.offset + length - 1, self._cache.pool.page_size)
        zeros = np.zeros(count, np.int64)
        self._decodes = StepInputs(
            zeros,
            positions,
            slots,
            plans,
            np.arange(count),
            [],
            zeros[:0],
            [],
            _num_shared(plan),
            None if self._cache.states is None else self._state_rows(positions),
        )

    def _state_rows(self, positions: np.ndarray) -> StateRows:
        """The states of all rows, each of which continues its own."""
        states = self.table.state[self.rows.sid].astype(np.int32)
        first = np.arange(len(states), dtype=np.int32)
        return StateRows(first, np.ones_like(first), positions.astype(np.int32), states, states)


def _seen(plan: AttentionPlan, row: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the spans over what a row sees above its own run, from the root down, and the
    number of tokens of its path up to each one's end."""
    spans = plan.spans
    seen = (spans[:, ROW] <= row) & (row < spans[:, ROW] + spans[:, ROWS])
    seen[row] = False
    found = np.flatnonzero(seen)
    found = found[np.argsort(plan.runs[spans[found, RUN], RUN_POSITION], kind="stable")]
    return found, np.cumsum(spans[found, END])


def _slots(plan: AttentionPlan, places: np.ndarray, page_size: int) -> np.ndarray:
    """int64 `[num_rows]`: slots at places of the rows' own runs, one each. Place -1, before the
    first token, is the last one of some page: what follows goes into a new page."""
    pages = plan.run_pages[plan.runs[: len(places), RUN_PAGES] + places // page_size]
    return pages.astype(np.int64) * page_size + places % page_size


def _num_shared(plan: AttentionPlan) -> int:
    """Keys that one read of a run spares all rows of a span but the first."""
    spans = plan.spans.astype(np.int64)
    return int(((spans[:, ROWS] - 1) * spans[:, END]).sum())
