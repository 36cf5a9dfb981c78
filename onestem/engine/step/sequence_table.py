"""What steps must know of each sequence that samples, in columns.

A sequence has a row from the launch that samples its first token until it ends or is preempted.
Which rows a step has, and in which order, is another matter (`onestem.engine.step.batch_rows`).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import ClassVar, Self

import numpy as np

from onestem.engine.sampling.rows import SamplingRow
from onestem.engine.sampling.sampler import Sampler
from onestem.engine.sequence import Sequence
from onestem.ops.sampling import IDLE, ROW
from onestem.request import TokenLogprobs


class Columns:
    """int64 arrays by name: the attributes that a subclass declares.

    Each is contiguous and not a field of a record: most work of a step reads or writes a single
    column, and strided ones take several times as long.
    """

    NAMES: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls) -> None:
        cls.NAMES = tuple(cls.__annotations__)

    def __init__(self, length: int = 0) -> None:
        self._set(np.zeros((len(self.NAMES), length), np.int64))

    def _set(self, columns: np.ndarray) -> Self:
        self._columns = columns
        for name, column in zip(self.NAMES, columns, strict=True):
            setattr(self, name, column)
        return self

    def __len__(self) -> int:
        return self._columns.shape[1]

    def lengthen(self, count: int) -> None:
        """Append `count` zeros to each; they are other arrays from then on."""
        self._set(np.pad(self._columns, ((0, 0), (0, count))))

    def kept(self, rows: np.ndarray) -> Self:
        """A copy with only bool `rows`."""
        return type(self)()._set(np.compress(rows, self._columns, axis=1))

    def inserted(self, at: int, other: Self) -> Self:
        """A copy with all of another's rows before row `at`."""
        mine = self._columns
        return type(self)()._set(np.hstack((mine[:, :at], other._columns, mine[:, at:])))


# Tokens that are not looked at as they come go to their sequences this many at a time.
FLUSH_TOKENS = 64


class SequenceTable(Columns):
    """The sequences of an engine that sample, each in a row `sid`.

    Attributes, each int64 `[size]`:
        generation: grows when the row is released: what was launched before is another's.
        computed: tokens of the sequence whose rows were launched.
        end: `computed` after the last row that may be launched.
        num_prompt: of the tokens, those that were not sampled.
        last_id: the sequence's last token that is known.
        launched_row: which sample of the step launched last it is; -1: none.
        flushed: up to which commit the sequence has its tokens.
        needs_host: 1 where each token is looked at as it comes.
        stops_at_eos: 1 where one of the model's end-of-sequence ids ends it.
        state: slot of its recurrent state; -1: the model's layers keep none.

    Others:
        records: `ROW` `[size]`, how each samples; `token` is set at a launch.
        sequences: of each row; None where it is free.
        masked: rows of sequences with a grammar.
        num_released: how many rows were released so far.
        broken: sequences whose row the sampler cannot make, and why: they are to be ended.
    """

    generation: np.ndarray
    computed: np.ndarray
    end: np.ndarray
    num_prompt: np.ndarray
    last_id: np.ndarray
    launched_row: np.ndarray
    flushed: np.ndarray
    needs_host: np.ndarray
    stops_at_eos: np.ndarray
    state: np.ndarray

    def __init__(self, sampler: Sampler, eos_token_ids: Seq[int]) -> None:
        super().__init__()
        self.records = np.zeros(0, ROW)
        self.sequences: list[Sequence | None] = []
        self.masked: set[int] = set()
        self.broken: list[tuple[Sequence, Exception]] = []
        self._sampler = sampler
        self._eos = eos_token_ids
        self._tokens = np.zeros((FLUSH_TOKENS, 0), np.int64)  # of each commit; -1: none
        self._entries: dict[int, list[TokenLogprobs]] = {}
        self.num_released = 0
        self._commits = 0  # since all rows were flushed
        self._free: list[int] = []

    def put(self, sequence: Sequence, computed: int) -> int:
        """Give a sequence a row and return its `sid`. `computed`: its tokens whose rows are
        launched; where its next token's is launched too, `note_launched` is called."""
        if not self._free:
            self._grow()
        sid = self._free.pop()
        sequence.table, sequence.sid = self, sid
        self.sequences[sid] = sequence
        request = sequence.state.request
        self.computed[sid], self.num_prompt[sid] = computed, sequence.num_prompt
        self.end[sid] = len(sequence.tokens) + sequence.num_left - 1
        self.last_id[sid], self.launched_row[sid] = sequence.tokens[-1], -1
        self.flushed[sid] = self._commits
        self.needs_host[sid] = (
            sequence.answer.detokenizer is not None
            or sequence.answer.grammar is not None
            or request.stream
            or len(request.params.stop_token_ids) > 0
        )
        self.stops_at_eos[sid] = not request.params.ignore_eos
        self.state[sid] = -1 if sequence.state_slot is None else sequence.state_slot.slot
        if sequence.answer.grammar is not None:
            self.masked.add(sid)
        try:
            self.records[sid] = self._sampler.records([self.row(sequence)])[0]
        except Exception as error:
            self.records[sid] = IDLE
            self.broken.append((sequence, error))
        return sid

    def _grow(self) -> None:
        """Lengthen all columns at once."""
        first = len(self.sequences)
        more = max(16, first)
        self.lengthen(more)
        self.records = np.concatenate((self.records, np.full(more, IDLE)))
        self._tokens = np.pad(self._tokens, ((0, 0), (0, more)), constant_values=-1)
        self.sequences.extend([None] * more)
        self._free.extend(range(first + more - 1, first - 1, -1))

    def row(self, sequence: Sequence) -> SamplingRow:
        """What the sampler needs of a sequence: one object, from its first token to its last."""
        row = sequence.sampling
        if row is None:
            params = sequence.state.request.params
            eos = () if params.ignore_eos else self._eos
            tokens, first = sequence.tokens, sequence.num_prompt
            row = sequence.sampling = SamplingRow(
                params=params,
                seed=sequence.state.seed,
                sequence_index=sequence.index,
                prompt_token_ids=sequence.state.request.prompt_token_ids,
                # Not of the sequence, which has the row: a cycle would outlive the request.
                output_token_ids=lambda: tokens[first:],
                stop_ids=frozenset((*eos, *params.stop_token_ids)),
            )
        row.token_index = sequence.num_output
        return row

    def sampling_row(self, sid: int) -> SamplingRow:
        """How a sequence samples, as of the next launch."""
        sequence = self.sequences[sid]
        assert sequence is not None
        row: SamplingRow = sequence.sampling
        row.token_index = int(self.computed[sid] - self.num_prompt[sid])
        return row

    def num_launched(self, sid: int) -> int:
        """Tokens of a sequence whose rows were launched."""
        return int(self.computed[sid])

    def release(self, sequence: Sequence) -> None:
        """Release the row of a sequence that ends or is preempted: it gets all its tokens, and
        what is launched for it is ignored."""
        sid = sequence.sid
        self.flush(sid)
        sequence.table, sequence.sid = None, -1
        self.generation[sid] += 1
        self.num_released += 1
        self.records[sid] = IDLE
        self.sequences[sid] = None
        self.masked.discard(sid)
        self._free.append(sid)

    def fill_mask(self, sid: int) -> bool:
        """Mask tokens that its grammar forbids next; False: that failed (see `broken`)."""
        sequence = self.sequences[sid]
        assert sequence is not None
        try:
            sequence.sampling.allowed_mask = sequence.answer.grammar.fill_mask()
        except Exception as error:
            self.broken.append((sequence, error))
            return False
        return True

    def note_launched(self, sids: np.ndarray) -> None:
        """Note that a token is sampled for each of `sids`, int64 `[n]`, in this order."""
        self.launched_row.fill(-1)
        self.launched_row[sids] = np.arange(len(sids))

    def note_committed(self, sids: np.ndarray, ids: np.ndarray) -> None:
        """Note tokens `ids` of `sids`, int64 `[n]`, that are not looked at as they come."""
        self._tokens[self._commits, sids] = ids
        self.last_id[sids] = ids

    def note_entry(self, sid: int, entry: TokenLogprobs) -> None:
        """Note the log-probabilities of a token of `note_committed`."""
        self._entries.setdefault(sid, []).append(entry)

    def end_commit(self) -> None:
        """Note that a step is committed: now and then all sequences get their tokens."""
        self._commits += 1
        if self._commits >= FLUSH_TOKENS:
            self.flush_all()

    def flush_all(self) -> None:
        """Hand all sequences their tokens."""
        for sid in np.flatnonzero((self._tokens >= 0).any(axis=0)).tolist():
            self.flush(sid)
        self._commits = 0
        self.flushed.fill(0)
        self._tokens.fill(-1)

    def flush(self, sid: int) -> None:
        """Hand a sequence its tokens."""
        sequence = self.sequences[sid]
        found = self._tokens[self.flushed[sid] : self._commits, sid].tolist()
        self.flushed[sid] = self._commits
        if not found or sequence is None:
            return
        entries = self._entries.pop(sid, ()) if self._entries else ()
        sequence.extend([token for token in found if token >= 0], entries)
