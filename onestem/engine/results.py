"""What becomes of a step's logits: scores, sampled tokens, texts, ends."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from torch import Tensor

from onestem.cache import Run
from onestem.engine.detokenize import IncrementalDetokenizer
from onestem.engine.inputs import LogitRow
from onestem.engine.masked import why_masked
from onestem.engine.outputs import BROKEN
from onestem.engine.sampler import Sampler
from onestem.engine.sampling_row import SamplingRow
from onestem.engine.scheduler import Chunk, Scheduler
from onestem.engine.sequence import RequestState, Sequence
from onestem.engine.stats import EngineStats
from onestem.engine.tokenizer import Tokenizer
from onestem.ops.sampling import STATUS_MASKED, STATUS_OK
from onestem.request import FinishReason, TokenLogprobs

__all__ = ["Results"]

NOT_FINITE = "the logits are not finite: the weights are damaged, or overflow in this dtype"

log = logging.getLogger(__name__)


class Results:
    """Takes what steps computed.

    Args:
        scheduler: told of sampled tokens, forks and ends.
        sampler: draws tokens.
        tokenizer: None: there is no text.
        eos_token_ids: tokens that end a sequence.
        stats: output tokens are counted there.
        new_sequence: makes a request's sequence of an index (n > 1).
        on_finished: told when a request's last sequence has ended, and how.

    Attributes:
        touched: requests that had news, in order; whoever hands them on empties it.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        sampler: Sampler,
        tokenizer: Tokenizer | None,
        eos_token_ids: tuple[int, ...],
        stats: EngineStats,
        new_sequence: Callable[[RequestState, int], Sequence],
        on_finished: Callable[[RequestState, FinishReason], None],
    ) -> None:
        self.touched: dict[RequestState, None] = {}
        self._scheduler = scheduler
        self._sampler = sampler
        self._tokenizer = tokenizer
        self._eos = eos_token_ids
        self._stats = stats
        self._new_sequence = new_sequence
        self._on_finished = on_finished

    def note_scheduled(self, chunks: list[Chunk]) -> None:
        """Chunks are rows of a step."""
        now = time.monotonic()
        for chunk in chunks:
            metrics = chunk.sequence.state.metrics
            metrics.first_scheduled_time = metrics.first_scheduled_time or now

    def note_computed(self, chunks: list[Chunk]) -> None:
        """The step of the chunks was computed."""
        for chunk in chunks:
            rows = chunk.num_prompt_rows
            chunk.sequence.state.metrics.num_computed_tokens += rows
            self._stats.processed_prompt_tokens += rows

    def note_sampled(self, count: int) -> None:
        """So many tokens of a streak are sampled, and not shown yet."""
        self._stats.output_tokens += count

    def append_many(
        self, sequence: Sequence, token_ids: list[int], entries: list[TokenLogprobs]
    ) -> None:
        """Tokens of a streak, seen by nobody so far, with their log-probabilities where they are
        wanted; they are counted already."""
        run = sequence.run
        assert run is not None
        for token, entry in zip(token_ids, entries, strict=bool(entries)):
            _note_logprobs(sequence, token, entry)
        sequence.tokens.extend(token_ids)
        run.tokens.extend(token_ids)
        sequence.state.metrics.num_output_tokens += len(token_ids)

    def score(self, wanted: list[LogitRow], logits: Tensor) -> None:
        """Note the log-probabilities of given tokens."""
        rows = [i for i, row in enumerate(wanted) if not row.samples]
        if not rows:
            return
        targets = [wanted[i].sequence.tokens[wanted[i].index + 1] for i in rows]
        counts = [self._num_alternatives(wanted[i].sequence) for i in rows]
        entries = self._sampler.logprobs(logits, rows, targets, counts)
        for i, target, entry in zip(rows, targets, entries, strict=True):
            sequence = wanted[i].sequence
            if sequence.finish_reason is not None:
                continue
            self.touched[sequence.state] = None
            try:
                self._take_score(wanted[i], target, entry)
            except Exception as error:
                self._end_broken(sequence, error)

    def _take_score(self, row: LogitRow, target: int, entry: TokenLogprobs) -> None:
        sequence = row.sequence
        if not math.isfinite(entry[target]):
            sequence.stop_reason = NOT_FINITE
            self.finish(sequence, "error")
            return
        self._note_score(row, target, entry)
        if sequence.score_only and row.index + 2 == len(sequence.tokens):
            self.finish(sequence, "stop")

    def _num_alternatives(self, sequence: Sequence) -> int:
        params = sequence.state.request.params
        if sequence.score_only:
            return params.logprobs or 0
        return params.prompt_logprobs or 0

    def _note_score(self, row: LogitRow, target: int, entry: TokenLogprobs) -> None:
        known = row.index + 1 in row.sequence.scores  # computed again after a set-back
        row.sequence.scores[row.index + 1] = entry[target]
        if not row.sequence.score_only:
            row.sequence.state.prompt_logprobs[row.index + 1] = entry
        elif not known:
            row.sequence.logprobs.append(entry)

    def sample(self, wanted: list[LogitRow], logits: Tensor) -> None:
        """Sample behind the rows that want it."""
        rows: list[int] = []
        sequences: list[Sequence] = []
        for i, row in enumerate(wanted):
            sequence = row.sequence
            if not row.samples or sequence.finish_reason is not None:
                continue
            if sequence.state.forked:
                sequences.append(sequence)
                rows.append(i)
            else:
                forks = self._fork(sequence)
                sequences.extend(forks)
                rows.extend([i] * len(forks))
        if not rows:
            return
        same = rows == list(range(len(wanted)))
        self._take(sequences, logits if same else logits[rows])

    def _take(self, sequences: list[Sequence], logits: Tensor) -> None:
        """Sample a token for each sequence from its row of the logits, and append it."""
        rows = [self._row_or_end(sequence) for sequence in sequences]
        good = [i for i, row in enumerate(rows) if row is not None]
        if len(good) < len(rows):
            if good:
                self._take([sequences[i] for i in good], logits[good])
            return
        sampled = self._sampler.sample(logits, [row for row in rows if row is not None])
        for i, sequence in enumerate(sequences):
            if sampled.status[i] != STATUS_OK:
                self.end_without_token(sequence, int(sampled.status[i]))
            else:
                self.accept(sequence, int(sampled.ids[i]), sampled.entries.get(i))

    def end_without_token(self, sequence: Sequence, status: int) -> None:
        """No token can follow: a grammar at its end before min_tokens, weights that overflow."""
        params = sequence.state.request.params
        reason = why_masked(params) if status == STATUS_MASKED else None
        sequence.stop_reason = reason or NOT_FINITE
        self.finish(sequence, "error")

    def _fork(self, sequence: Sequence) -> list[Sequence]:
        """A request's n sequences, which part at its prompt's end."""
        state = sequence.state
        state.forked = True
        for index in range(1, state.request.params.n):
            child = self._new_sequence(state, index)
            child.score_from = None
            self._scheduler.fork(sequence, child)
            state.sequences.append(child)
        # The parent last: its run may grow again once the others have branched off and ended.
        return [*state.sequences[1:], sequence]

    def _row_or_end(self, sequence: Sequence) -> SamplingRow | None:
        """`row`; None where there is none (a grammar's fault): the sequence has ended then."""
        try:
            row = self.row(sequence)
            self._sampler.admit(row)
            return row
        except Exception as error:
            self._end_broken(sequence, error)
            return None

    def row(self, sequence: Sequence) -> SamplingRow:
        """What the sampler needs of a sequence; one object per sequence, brought up to date."""
        row = sequence.sampling
        if row is None:
            params = sequence.state.request.params
            eos = () if params.ignore_eos else self._eos
            row = sequence.sampling = SamplingRow(
                params=params,
                seed=sequence.state.seed,
                sequence_index=sequence.index,
                prompt_token_ids=sequence.state.request.prompt_token_ids,
                output_token_ids=lambda: sequence.output_ids,
                stop_ids=frozenset((*eos, *params.stop_token_ids)),
            )
        row.token_index = sequence.num_output
        if sequence.grammar is not None:
            row.allowed_mask = sequence.grammar.fill_mask()
        return row

    def num_left(self, sequence: Sequence) -> int:
        """Tokens that a sequence may still sample."""
        room = sequence.most_tokens - len(sequence.tokens)
        most = sequence.state.request.params.max_tokens
        return room if most is None else min(room, most - sequence.num_output)

    def accept(self, sequence: Sequence, token: int, entry: TokenLogprobs | None = None) -> None:
        """Append a sampled token and see whether it ends the sequence."""
        state = sequence.state
        metrics = state.metrics
        self.touched[state] = None
        metrics.num_output_tokens += 1
        if metrics.first_token_time is None:
            metrics.first_token_time = time.monotonic()
        self._stats.output_tokens += 1
        self._scheduler.append(sequence, token)
        try:
            reason = self._note_sampled(sequence, token, entry)
        except Exception as error:
            self._end_broken(sequence, error)
            return
        if reason is not None:
            self.finish(sequence, reason)

    def _note_sampled(
        self, sequence: Sequence, token: int, entry: TokenLogprobs | None
    ) -> FinishReason | None:
        """A token was appended; how the sequence ends with it."""
        if entry is not None:
            _note_logprobs(sequence, token, entry)
        if sequence.grammar is not None:
            sequence.grammar.accept(token)
        return self._ending(sequence, token)

    def take(self, sequence: Sequence, run: Run, token: int, entry: TokenLogprobs | None) -> bool:
        """`accept` of a token in a streak, which knows that the sequence's run goes on, and sees
        for itself which ids and lengths end it. Whether it has ended here."""
        state = sequence.state
        self.touched[state] = None
        sequence.tokens.append(token)
        run.tokens.append(token)
        run.computed += 1
        state.metrics.num_output_tokens += 1
        self._stats.output_tokens += 1
        if entry is not None:
            _note_logprobs(sequence, token, entry)
        params = state.request.params
        if sequence.detokenizer is None and not params.stop_token_ids:
            return False
        try:
            may_stop = sequence.num_output >= params.min_tokens
            if not self._is_stopped(sequence, token, may_stop=may_stop):
                return False
        except Exception as error:
            self._end_broken(sequence, error)
            return True
        self.finish(sequence, "stop")
        return True

    def _ending(self, sequence: Sequence, token: int) -> FinishReason | None:
        params = sequence.state.request.params
        may_stop = sequence.num_output >= params.min_tokens
        if may_stop and not params.ignore_eos and token in self._eos:
            return "stop"
        if self._is_stopped(sequence, token, may_stop=may_stop):
            return "stop"
        if sequence.grammar is not None and sequence.grammar.is_finished:
            if may_stop:
                return "stop"
            sequence.stop_reason = why_masked(params)
            return "error"
        return "length" if self.num_left(sequence) <= 0 else None

    def _is_stopped(self, sequence: Sequence, token: int, *, may_stop: bool) -> bool:
        """By a stop id of its own, or by a text; else the token's text is added."""
        if may_stop and token in sequence.state.request.params.stop_token_ids:
            sequence.stop_reason = token
            return True
        detokenizer = sequence.detokenizer
        if detokenizer is None:
            return False
        sequence.text += detokenizer.append(token, check_stop=may_stop)
        sequence.stop_reason = detokenizer.stop_reason
        return detokenizer.stop_reason is not None

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence: its text is completed, its runs are let go."""
        sequence.finish_reason = reason
        if self._tokenizer is not None:
            try:
                self._finish_text(sequence, self._tokenizer)
            except Exception as error:
                self._note_broken(sequence, error)
        self._let_go(sequence)

    def _end_broken(self, sequence: Sequence, error: Exception) -> None:
        """Taking a sequence's result failed: that ends it, and nobody else."""
        self._note_broken(sequence, error)
        self._let_go(sequence)

    def _note_broken(self, sequence: Sequence, error: Exception) -> None:
        name = sequence.state.request.request_id
        log.error("request %s: its result cannot be taken", name, exc_info=error)
        sequence.finish_reason = "error"
        sequence.stop_reason = f"{BROKEN}{type(error).__name__}: {error}"

    def _let_go(self, sequence: Sequence) -> None:
        """Of the runs of a sequence that has ended, and of its request after its last one."""
        state, reason = sequence.state, sequence.finish_reason
        assert reason is not None
        if sequence.sampling is not None:
            self._sampler.release(sequence.sampling)
        if reason in ("abort", "error") and not state.forked:
            self._end_unforked(sequence, reason)
        self.touched[state] = None
        if state.finished:
            state.metrics.finished_time = time.monotonic()
        self._scheduler.finish(sequence)
        if state.finished:
            self._on_finished(state, reason)

    def _end_unforked(self, sequence: Sequence, reason: FinishReason) -> None:
        """Sequences of a request that have not parted yet end like the one that stands for them."""
        state = sequence.state
        state.forked = True
        for index in range(len(state.sequences), state.request.params.n):
            other = self._new_sequence(state, index)
            other.finish_reason, other.stop_reason = reason, sequence.stop_reason
            state.sequences.append(other)

    def _finish_text(self, sequence: Sequence, tokenizer: Tokenizer) -> None:
        """The rest of the text; all of it where nobody needed it before."""
        detokenizer = sequence.detokenizer
        if detokenizer is not None and detokenizer.stop_reason is not None:
            return
        if detokenizer is None:
            request = sequence.state.request
            detokenizer = IncrementalDetokenizer(
                tokenizer, request.params, request.prompt_token_ids
            )
            sequence.text = "".join(map(detokenizer.append, self._visible_ids(sequence)))
        sequence.text += detokenizer.finish()
        if detokenizer.stop_reason is not None and sequence.finish_reason != "abort":
            # An unfinished character's replacement completed a stop string.
            sequence.stop_reason, sequence.finish_reason = detokenizer.stop_reason, "stop"

    def _visible_ids(self, sequence: Sequence) -> list[int]:
        """Ids that make the text: not the one that ended it."""
        ids = sequence.output_ids.tolist()
        ended = sequence.finish_reason == "stop" and not sequence.score_only and ids
        return ids[:-1] if ended and self._ends(sequence, ids[-1]) else ids

    def _ends(self, sequence: Sequence, token: int) -> bool:
        params = sequence.state.request.params
        return token in params.stop_token_ids or (not params.ignore_eos and token in self._eos)


def _note_logprobs(sequence: Sequence, token: int, entry: TokenLogprobs) -> None:
    sequence.logprobs.append(entry)
    sequence.cumulative_logprob += entry[token]
