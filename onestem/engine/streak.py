"""Decode steps in a row, without the scheduler between them.

While the same sequences decode and nobody else can join, a step differs from the one before it in
lengths alone. A streak runs such steps: inputs are edited in place (`engine.advance`), sampled ids
stay on the device as the next step's input, and on a GPU a step is launched before the ids of the
one before it are read. A sequence that ends leaves its row empty. Whatever needs the scheduler
closes the streak: memory is short, a request could be admitted, a row asks for what a streak does
not do.

What a step computes is what the scheduler's steps would compute: the same rows see the same keys.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np

from onestem.engine.advance import Advance
from onestem.engine.drawing import Drawing, Pending
from onestem.engine.inputs import StepInputs
from onestem.engine.runner import Runner
from onestem.engine.sequence import Sequence
from onestem.request import FinishReason

__all__ = ["Streak", "StreakHost", "fits_streak"]

# A streak ends when so many of its rows, and more than this share of them, are empty.
EMPTY_ROWS, EMPTY_SHARE = 4, 0.125


@dataclass(frozen=True)
class StreakHost:
    """What a streak needs of the engine.

    Attributes:
        accept: takes a sampled token of a sequence whose text or stop ids are looked at.
        append: takes sampled tokens, seen by nobody so far, that do not end a sequence.
        finish: ends a sequence.
        num_left: tokens that a sequence may still sample.
        eos_token_ids: of the model.
        depth: steps in flight at most; 2 hides the host's work behind the device's.
    """

    accept: Callable[[Sequence, int], None]
    append: Callable[[Sequence, list[int]], None]
    finish: Callable[[Sequence, FinishReason], None]
    num_left: Callable[[Sequence], int]
    eos_token_ids: Collection[int]
    depth: int


@dataclass(frozen=True, eq=False)
class _Flight:
    """A launched step: its rows that count, those of them that may sample no more behind it (bool
    `[num_rows]`), and what they sample."""

    rows: np.ndarray
    last: np.ndarray
    pending: Pending


def fits_streak(sequence: Sequence) -> bool:
    """Whether a sequence's next sample needs nothing that the host learns from the last one."""
    params = sequence.state.request.params
    return (
        sequence.grammar is None
        and params.logprobs is None
        and sequence.num_output >= params.min_tokens
    )


class Streak:
    """Steps of the sequences of `inputs`, which have just been computed and sampled.

    Args:
        inputs: the step before the first; its arrays are taken over.
        drawing: how the rows sample.
        waiting: whether requests wait for memory, so that the first sequence to end closes the
            streak.
    """

    def __init__(
        self,
        inputs: StepInputs,
        advance: Advance,
        runner: Runner,
        drawing: Drawing,
        host: StreakHost,
        *,
        waiting: bool,
    ) -> None:
        self.closed = False
        self.unsure = False  # it ended because a row's sample was not sure
        self.num_steps = 0
        self.shared_read_tokens = 0
        self.host_seconds = 0.0
        self._inputs, self._advance, self._runner = inputs, advance, runner
        self._drawing, self._host = drawing, host
        self.sequences = advance.rows.sequences
        self._live = np.ones(len(self.sequences), bool)
        self._left = np.array([host.num_left(s) for s in self.sequences])  # not yet launched
        self._set_watched()
        self._tokens: list[np.ndarray] = []  # ids of each committed step, by row
        self._flushed = np.zeros(len(self.sequences), np.int64)
        self._flights: list[_Flight] = []
        self._last_ids = np.array([s.tokens[-1] for s in self.sequences], np.int64)
        self.waiting = waiting
        self._closing = False

    def _set_watched(self) -> None:
        """Rows whose every token is shown to the engine; for the others ids tell the end."""
        params = [sequence.state.request.params for sequence in self.sequences]
        self._watched = np.array(
            [
                s.detokenizer is not None or s.state.request.stream or len(p.stop_token_ids) > 0
                for s, p in zip(self.sequences, params, strict=True)
            ]
        )
        self._heeds_eos = np.array([not p.ignore_eos for p in params]) & ~self._watched
        self._eos = np.array(sorted(self._host.eos_token_ids), np.int64)

    @property
    def num_live(self) -> int:
        return int(self._live.sum())

    # ----------------------------------------------------------------------------- steps

    def step(self) -> None:
        """Launch a step, and take the ids of the oldest one in flight, or close."""
        if self._closing or not self._launch():
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

    def _launch(self) -> bool:
        started = time.perf_counter()
        advance = self._advance
        if bool((spent := advance.live & (self._left <= 0)).any()):
            advance.drop(spent)
        rows = advance.live.copy()
        change = advance.step() if bool(rows.any()) else None
        if change is None:
            return False
        self._left -= rows
        self.shared_read_tokens += advance.shared_read_tokens
        ids = self._flights[-1].pending.ids if self._flights else None
        if ids is None:
            self._inputs.token_ids[:] = self._last_ids
        prepared = self._runner.prepare_decode(self._inputs, change)
        self.host_seconds += time.perf_counter() - started
        logits = self._runner.decode(self._inputs, prepared, ids)
        last = rows & (self._left <= 0)
        self._flights.append(_Flight(rows, last, self._drawing.start(logits)))
        self.num_steps += 1
        return True

    # ----------------------------------------------------------------------------- results

    def _commit(self) -> None:
        """Take the oldest step in flight; it stays in flight until its ids are here."""
        flight = self._flights[0]
        ids, unsure = flight.pending.take()
        self._flights.pop(0)
        rows = flight.rows & self._live
        if bool((unsure & rows).any()):
            # The scheduler's next step computes these rows again, and samples with all its means.
            self._flights.clear()
            self._closing = self.unsure = True
            return
        self._tokens.append(ids)
        self._last_ids = ids
        stops = rows & self._heeds_eos & np.isin(ids, self._eos)
        ends = stops | (rows & flight.last & ~self._watched)
        watched = np.flatnonzero(rows & self._watched)
        self._accept(watched, ids)
        ending = np.flatnonzero(ends).tolist()
        for row in ending:
            self._flush(row)
            self._host.finish(self.sequences[row], "stop" if stops[row] else "length")
        sequences = self.sequences
        ended = [r for r in watched.tolist() if sequences[r].finish_reason is not None]
        self._leave(ended + ending)

    def _accept(self, watched: np.ndarray, ids: np.ndarray) -> None:
        """Show the step's tokens to the engine: those of rows whose every token it sees."""
        sequences, runs, accept = self.sequences, self._advance.rows.runs, self._host.accept
        tokens = ids.tolist()
        # First: what an interrupt leaves out is computed again, and never taken twice.
        self._flushed[watched] = len(self._tokens)
        for row in watched.tolist():
            runs[row].computed += 1
            accept(sequences[row], tokens[row])

    def _leave(self, rows: list[int]) -> None:
        """Rows that have ended are empty from now on."""
        if not rows:
            return
        ended = np.zeros(len(self._live), bool)
        ended[rows] = True
        self._live &= ~ended
        self._advance.drop(ended)
        empty = len(self._live) - self.num_live
        many = empty > max(EMPTY_ROWS, EMPTY_SHARE * len(self._live))
        self._closing = self._closing or self.waiting or many

    def _flush(self, row: int) -> None:
        """Hand a row's committed tokens to its sequence, which has none of them yet."""
        first, self._flushed[row] = self._flushed[row], len(self._tokens)
        ids = [int(ids[row]) for ids in self._tokens[first:]]
        if not ids:
            return
        self._advance.rows.runs[row].computed += len(ids)
        self._host.append(self.sequences[row], ids)

    def _end(self) -> None:
        if not self.closed:
            self.closed = True
            for row in np.flatnonzero(self._live).tolist():
                self._flush(row)
