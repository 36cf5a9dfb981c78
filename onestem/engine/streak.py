"""Decode steps in a row, without the scheduler between them.

While the same sequences decode, a step differs from the one before it in lengths alone. A streak
runs such steps: inputs are edited in place (`engine.advance`), sampled ids stay on the device as
the next step's input, and on a GPU a step is launched before the ids of the one before it are read.
A sequence that ends leaves its row empty. Newcomers' prompts are rows of a step behind the decodes,
and once they are computed their sequences have rows of their own, so that traffic does not end a
streak. Whatever else needs the scheduler closes it: memory is short, or a row asks for what a
streak does not do.

What a step computes is what the scheduler's steps would compute: the same rows see the same keys.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from onestem.engine.advance import Advance, Change, longer
from onestem.engine.drawing import Drawing
from onestem.engine.runner import Runner
from onestem.engine.sampled import Pending, Sampled
from onestem.engine.scheduler import Chunk
from onestem.engine.sequence import Sequence
from onestem.engine.streak_host import StreakHost
from onestem.ops.sampling import STATUS_OK

__all__ = ["Streak"]

# A streak ends when so many of its rows, and more than this share of them, are empty.
EMPTY_ROWS, EMPTY_SHARE = 4, 0.125
# Steps after which all rows have their ids: while a device computes, so that little is left to be
# done when sequences end.
FLUSH_STEPS = 16


@dataclass(frozen=True, eq=False)
class _Flight:
    """A launched step.

    Attributes:
        rows: bool `[num_rows]`, those that count.
        last: bool `[num_rows]`, those of them that may sample no more behind it.
        joined: sequences that sample behind these rows, each its first token.
        num_prompt_rows: rows of prompts.
        pending: what they sample.
    """

    rows: np.ndarray
    last: np.ndarray
    joined: list[Sequence]
    num_prompt_rows: int
    pending: Pending


class Streak:
    """Steps of sequences that have sampled a token behind all that is computed of them.

    Args:
        advance: makes the steps; it begins with those sequences.
        drawing: how the rows sample.
        prompts: newcomers whose prompts are being computed.

    Attributes:
        sequences: of each row, also of one that has ended and left its row empty.
        mixed: whether the step launched last had rows of prompts.
    """

    def __init__(
        self,
        advance: Advance,
        runner: Runner,
        drawing: Drawing,
        host: StreakHost,
        *,
        prompts: list[Sequence],
    ) -> None:
        self.closed = False
        self.num_steps = 0
        self.num_joined = 0
        self.shared_read_tokens = 0
        self.host_seconds = 0.0
        self.mixed = False
        self._advance, self._runner = advance, runner
        self._drawing, self._host = drawing, host
        self.sequences = advance.rows.sequences
        self._place = {sequence: row for row, sequence in enumerate(self.sequences)}
        self._live = np.ones(len(self.sequences), bool)
        self._left = np.array([host.num_left(s) for s in self.sequences])  # not yet launched
        self._watched, self._heeds_eos = _watched(self.sequences), _heeds_eos(self.sequences)
        self._eos = np.array(sorted(host.eos_token_ids), np.int64)
        self._sampled: list[Sampled] = []  # of each committed step, by row
        self._flushed = np.zeros(len(self.sequences), np.int64)
        self._flights: list[_Flight] = []
        self._last_ids = np.array([s.tokens[-1] for s in self.sequences], np.int64)
        self._prompts = prompts
        self._computed: list[Sequence] = []  # whose prompts were in the step before
        self._source: np.ndarray | None = None  # which of the last samples is each row's input
        self._committed_at = time.perf_counter()
        self._closing = False

    @property
    def num_live(self) -> int:
        return int(self._live.sum())

    @property
    def crowded(self) -> bool:
        """Whether it should rather end than take newcomers."""
        return self._advance.crowded

    # ----------------------------------------------------------------------------- steps

    def step(self, *, admit: bool = False) -> None:
        """Launch a step, with newcomers if they may be admitted, and take the ids of the oldest one
        in flight; or close."""
        if self._closing or not self._launch(admit):
            self.close()
            return
        if len(self._flights) >= self._host.depth:
            self._commit()
        if self._closing and not self._flights:
            self._end()

    def close(self) -> None:
        """Take what is in flight, and end. Where that is interrupted, it can be called again."""
        self._closing = True
        while self._flights:
            self._commit()
        self._end()

    def abandon(self) -> None:
        """End without what is in flight: it will be computed again."""
        self._flights.clear()
        self._end()

    def abort(self, sequence: Sequence) -> None:
        """End a sequence now, whether it has a row or its prompt is being computed."""
        row = self._place.get(sequence)
        if row is not None:
            self._flush(row)
        elif sequence in self._prompts:
            self._prompts.remove(sequence)
        self._host.finish(sequence, "abort")
        self._leave([] if row is None else [row])

    def _launch(self, admit: bool) -> bool:
        started = time.perf_counter()
        if not self._seat():
            return False
        advance = self._advance
        if bool((spent := advance.live & (self._left <= 0)).any()):
            advance.drop(spent)
            self._drawing.leave(np.flatnonzero(spent).tolist())
        rows = advance.live.copy()
        change = advance.step() if bool(rows.any()) else None
        if change is None:
            return False
        self._left -= rows
        self.shared_read_tokens += advance.shared_read_tokens
        joins = admit or bool(self._prompts)
        try:
            self._fly(rows, change, self._newcomers(admit) if joins else [], started)
        except BaseException:
            if joins:
                self._host.undo()
            raise
        return True

    def _newcomers(self, admit: bool) -> list[Chunk]:
        chunks, self._prompts = self._host.newcomers(self._prompts, admit)
        if self._prompts and not chunks:
            self._closing = True  # they wait for what the scheduler must see to
        return chunks

    def _fly(self, rows: np.ndarray, change: Change, chunks: list[Chunk], started: float) -> None:
        ids = self._input_ids()
        inputs, joined = self._advance.inputs, []
        if chunks:
            inputs = self._host.lay_out(self._advance, chunks)
            joined = [row.sequence for row in inputs.wanted]
            prepared = self._runner.prepare(inputs)
            self._put_behind(joined)
            self._advance.note_structure()
        else:
            prepared = self._runner.prepare_decode(inputs, change)
        self.host_seconds += time.perf_counter() - started
        logits = self._runner.decode(inputs, prepared, ids)
        last = rows & (self._left <= 0)
        pending = self._drawing.start(logits)
        num_prompt_rows = sum(chunk.num_prompt_rows for chunk in chunks)
        self._flights.append(_Flight(rows, last, joined, num_prompt_rows, pending))
        self._host.note_computed(chunks)
        self._computed, self.mixed = joined, bool(chunks)
        self.num_steps += 1

    def _put_behind(self, joined: list[Sequence]) -> None:
        first = len(self.sequences)
        self._host.put(self._drawing, list(range(first, first + len(joined))), joined, 0)

    def _input_ids(self) -> Tensor | None:
        """The rows' tokens on the device; None: the step's inputs have them."""
        source, self._source = self._source, None
        if not self._flights:
            self._advance.inputs.token_ids[:] = self._last_ids
            return None
        ids = self._flights[-1].pending.ids
        if source is not None:
            return ids[self._runner.on_device(source)]
        return ids[: len(self.sequences)]

    # ----------------------------------------------------------------------------- newcomers

    def _seat(self) -> bool:
        """Rows for those whose prompts were in the step before; False: one may have none."""
        joined = [s for s in self._computed if s.finish_reason is None and self._num_left(s) > 0]
        if not joined:
            return True
        if not all(map(self._host.may_sit, joined)):
            return False
        before = len(self.sequences)
        rows = self._advance.seat(joined, ~self._live)
        self._lengthen(len(self.sequences) - before)
        self._live[rows] = True
        self._left[rows] = [self._num_left(sequence) for sequence in joined]
        self._watched[rows], self._heeds_eos[rows] = _watched(joined), _heeds_eos(joined)
        # What is in flight was launched before them.
        self._flushed[rows] = len(self._sampled) + len(self._flights)
        self._last_ids[rows] = [sequence.tokens[-1] for sequence in joined]
        self._place.update(zip(joined, rows, strict=True))
        self._host.put(self._drawing, rows, joined, 1)
        if self._flights:
            self._source = np.minimum(np.arange(len(self.sequences)), before - 1)
            self._source[rows] = [before + self._computed.index(s) for s in joined]
        self.num_joined += len(joined)
        return True

    def _num_left(self, sequence: Sequence) -> int:
        """Tokens that it may sample behind its first, which is sampled or in flight."""
        return self._host.num_left(sequence) - (sequence.num_output == 0)

    def _lengthen(self, count: int) -> None:
        self._live, self._left = longer(self._live, count), longer(self._left, count)
        self._watched = longer(self._watched, count)
        self._heeds_eos = longer(self._heeds_eos, count)
        self._flushed = longer(self._flushed, count)
        self._last_ids = longer(self._last_ids, count)

    # ----------------------------------------------------------------------------- results

    def _commit(self) -> None:
        """Take the oldest step in flight; it stays in flight until its ids are here."""
        flight = self._flights[0]
        sampled = flight.pending.take()
        self._flights.pop(0)
        count = len(flight.rows)
        ids = sampled.ids[:count]
        self._note_time(flight)
        live = flight.rows & self._live[:count]
        none = live & (sampled.status[:count] != STATUS_OK)
        ended = self._end_without_token(np.flatnonzero(none), sampled)
        rows = live & ~none
        self._sampled.append(sampled)
        self._last_ids[:count] = ids
        stops = rows & self._heeds_eos[:count] & np.isin(ids, self._eos)
        shown = rows & self._watched[:count] & ~stops
        self._host.note_sampled(int(rows.sum() - shown.sum()))
        ended += self._show(np.flatnonzero(shown), sampled)
        for row in np.flatnonzero(stops | (rows & flight.last)).tolist():
            if row not in ended:
                self._flush(row)
                self._host.finish(self.sequences[row], "stop" if stops[row] else "length")
                ended.append(row)
        self._leave(ended + self._accept_joined(flight, sampled))
        if len(self._sampled) >= FLUSH_STEPS:
            self._flush_all()

    def _note_time(self, flight: _Flight) -> None:
        before, self._committed_at = self._committed_at, time.perf_counter()
        if flight.num_prompt_rows:
            self._host.note_prompts(flight.num_prompt_rows, self._committed_at - before)

    def _end_without_token(self, rows: np.ndarray, sampled: Sampled) -> list[int]:
        """Rows that no token can follow."""
        for row in rows.tolist():
            self._flush(row)
            self._host.end_without_token(self.sequences[row], int(sampled.status[row]))
        return rows.tolist()

    def _show(self, rows: np.ndarray, sampled: Sampled) -> list[int]:
        """Show the step's tokens of these rows to the engine; which of them end with it."""
        sequences, runs, take = self.sequences, self._advance.rows.runs, self._host.take
        tokens, entry = sampled.ids.tolist(), sampled.entries.get
        # First: what an interrupt leaves out is computed again, and never taken twice.
        self._flushed[rows] = len(self._sampled)
        return [
            row for row in rows.tolist() if take(sequences[row], runs[row], tokens[row], entry(row))
        ]

    def _accept_joined(self, flight: _Flight, sampled: Sampled) -> list[int]:
        """First tokens of newcomers; rows of those that end with them."""
        ended: list[int] = []
        for row, sequence in enumerate(flight.joined, len(flight.rows)):
            if sequence.finish_reason is not None:
                continue
            if sampled.status[row] != STATUS_OK:
                self._host.end_without_token(sequence, int(sampled.status[row]))
            else:
                self._host.accept(sequence, int(sampled.ids[row]), sampled.entries.get(row))
            if sequence.finish_reason is not None and sequence in self._place:
                ended.append(self._place[sequence])
        return ended

    def _leave(self, rows: list[int]) -> None:
        """Rows that have ended are empty from now on."""
        if not rows:
            return
        ended = np.zeros(len(self._live), bool)
        ended[rows] = True
        self._live &= ~ended
        self._advance.drop(ended)
        self._drawing.leave(rows)
        for flight in self._flights:  # a newcomer may take the row before they are here
            flight.rows[:] &= ~ended[: len(flight.rows)]
        for row in rows:
            del self._place[self.sequences[row]]
        empty = len(self._live) - self.num_live
        many = empty > max(EMPTY_ROWS, EMPTY_SHARE * len(self._live))
        self._closing = self._closing or many

    def _flush(self, row: int) -> None:
        """Hand a row's committed tokens to its sequence, which has none of them yet."""
        first, self._flushed[row] = self._flushed[row], len(self._sampled)
        steps = self._sampled[first:]
        if not steps:
            return
        entries = [entry for step in steps if (entry := step.entries.get(row)) is not None]
        self._advance.rows.runs[row].computed += len(steps)
        self._host.append(self.sequences[row], [int(step.ids[row]) for step in steps], entries)

    def _flush_all(self) -> None:
        ahead = self._flushed > len(self._sampled)  # newcomers whose first decode is in flight
        for row in np.flatnonzero(self._live & ~ahead).tolist():
            self._flush(row)
        self._flushed = np.where(ahead, self._flushed - len(self._sampled), 0)
        self._sampled.clear()

    def _end(self) -> None:
        if not self.closed:
            self.closed = True
            for row in np.flatnonzero(self._live).tolist():
                self._flush(row)


def _watched(sequences: list[Sequence]) -> np.ndarray:
    """bool `[n]`: whose every token is shown to the engine as it comes."""
    return np.array(
        [
            s.detokenizer is not None
            or s.state.request.stream
            or len(s.state.request.params.stop_token_ids) > 0
            for s in sequences
        ]
    )


def _heeds_eos(sequences: list[Sequence]) -> np.ndarray:
    """bool `[n]`: whom a token of the model's own ends."""
    return np.array([not s.state.request.params.ignore_eos for s in sequences])
