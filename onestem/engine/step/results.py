"""Results of a step: scores, sampled tokens, texts, ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from onestem.engine.outputs import EngineStats, broken
from onestem.engine.sampling.pending import Sampled, TakenChosen
from onestem.engine.sampling.sampler import Sampler
from onestem.engine.schedule.scheduler import Scheduler
from onestem.engine.sequence import Choosing, Chunk, RequestState, ScoreSpan, Sequence
from onestem.engine.step.choices import ChoiceRows, choice_bounds
from onestem.engine.step.launch import InFlightStep
from onestem.engine.step.sequence_table import SequenceTable
from onestem.ops.sampling import STATUS_MASKED, STATUS_OK
from onestem.request import FinishReason, TokenLogprobs, why_masked

NOT_FINITE = "the logits are not finite: the weights are damaged, or overflow in this dtype"

log = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class Results:
    """Takes what steps computed.

    Attributes:
        touched: requests that had news, in order; the reader empties it.
        ended: those whose last sequence has ended; see `take_ended`.
    """

    _scheduler: Scheduler
    _table: SequenceTable
    _sampler: Sampler
    _eos: tuple[int, ...]
    _stats: EngineStats
    touched: dict[RequestState, None] = field(default_factory=dict)
    ended: list[RequestState] = field(default_factory=list)

    def note_launched(self, chunks: list[Chunk]) -> None:
        """Note that chunks are launched as rows of a step."""
        now = time.monotonic()
        for chunk in chunks:
            rows, metrics = chunk.num_prompt_rows, chunk.sequence.state.metrics
            metrics.first_scheduled_time = metrics.first_scheduled_time or now
            metrics.num_computed_tokens += rows
            self._stats.processed_prompt_tokens += rows

    def commit(self, step: InFlightStep) -> None:
        """Take what a step has scored and sampled; wait for it, if it is not there yet."""
        if step.scored is not None:
            self._take_scores(step.scores, step.scored.take())
        if step.attended is not None:
            self._take_attended(step.choices, step.attended.take())
        if step.sampled is not None:
            self._take_samples(step, step.sampled.take())

    def _take_attended(self, choices: Seq[ChoiceRows], attended: np.ndarray) -> None:
        """Note what questions attend to; where one has ended, its prompt is repaired by that."""
        for rows, part in zip(choices, np.split(attended, choice_bounds(choices)), strict=True):
            sequence, choosing = rows.sequence, rows.sequence.choosing
            if choosing is None or sequence.finish_reason is not None:
                continue
            rows.add(part, choosing.attended)
            if rows.end == len(sequence.tokens):
                self._repair(sequence.state, choosing)

    def _repair(self, state: RequestState, choosing: Choosing) -> None:
        """Let the sequences of a request go on with what is repaired of its documents."""
        factory, room = self._scheduler.factory, self._scheduler.room
        if not np.isfinite(choosing.attended).all():
            for sequence in list(state.sequences):
                sequence.stop_reason = NOT_FINITE
                self.finish(sequence, "error")
            return
        factory.set_pml(state, choosing.prompt.repaired(choosing.attended))
        assert state.pml is not None
        scoring = factory.scoring_given(state)
        for sequence in state.sequences:
            if sequence.choosing is not None and sequence.finish_reason is None:
                room.begin_again(sequence, state.pml, scoring)
        state.sequences = scoring or state.sequences

    def _take_samples(self, step: InFlightStep, sampled: Sampled) -> None:
        """Take samples; those that are not looked at as they come, all at once."""
        table, sids, ids = self._table, step.sids, sampled.ids
        if (
            step.is_plain
            and step.num_released == table.num_released
            and not sampled.status.any()
            and not any((ids == token).any() for token in self._eos)
        ):
            self._keep(step, sampled, np.ones(len(ids), bool))
            table.end_commit()
            return
        rows = table.generation[sids] == step.generations
        bad = sampled.status != STATUS_OK
        if bad.any():
            for i in np.flatnonzero(rows & bad).tolist():
                self._end_without_token(self._sequence(sids[i]), int(sampled.status[i]))
            rows &= ~bad
        stops = np.zeros(len(ids), bool)
        for token in self._eos:
            stops |= ids == token
        stops &= rows & (table.stops_at_eos[sids] > 0)
        shown = rows & ((table.needs_host[sids] > 0) | step.last | stops)
        shown[step.num_decodes :] = rows[step.num_decodes :]
        self._keep(step, sampled, rows & ~shown)
        table.last_id[sids[shown]] = ids[shown]
        for i in np.flatnonzero(shown).tolist():
            ending: FinishReason | None = "length" if step.last[i] else None
            if not table.needs_host[sids[i]]:
                self._table.flush(int(sids[i]))
            self._take(
                self._sequence(sids[i]),
                int(ids[i]),
                sampled.entries.get(i),
                "stop" if stops[i] else ending,
            )
        self._table.end_commit()

    def _keep(self, step: InFlightStep, sampled: Sampled, rows: NDArray[np.bool_]) -> None:
        """Keep samples of bool `rows`, which are not looked at as they come."""
        sids = step.sids[rows]
        self._table.note_committed(sids, sampled.ids[rows])
        self._stats.output_tokens += len(sids)
        for i, entry in sampled.entries.items():
            if rows[i]:
                self._table.note_entry(int(step.sids[i]), entry)

    def _sequence(self, sid: int) -> Sequence:
        sequence = self._table.sequences[sid]
        assert sequence is not None
        return sequence

    def _take(
        self,
        sequence: Sequence,
        token: int,
        entry: TokenLogprobs | None,
        ending: FinishReason | None,
    ) -> None:
        """Append a sampled token and see whether it ends the sequence; `ending`: it does."""
        metrics = sequence.state.metrics
        self.touched[sequence.state] = None
        if metrics.first_token_time is None:
            metrics.first_token_time = time.monotonic()
        self._stats.output_tokens += 1
        sequence.extend((token,))
        try:
            reason = self._note_sampled(sequence, token, entry, ending)
        except Exception as error:
            self.end_broken(sequence, error)
            return
        if reason is not None:
            self.finish(sequence, reason)

    def _note_sampled(
        self,
        sequence: Sequence,
        token: int,
        entry: TokenLogprobs | None,
        ending: FinishReason | None,
    ) -> FinishReason | None:
        """Note an appended token. Returns how the sequence ends with it, if it does."""
        answer = sequence.answer
        if entry is not None:
            answer.note_logprobs(token, entry)
        if answer.grammar is not None:
            answer.grammar.accept(token)
        if ending == "stop":
            return ending
        params = sequence.state.request.params
        may_stop = sequence.num_output >= params.min_tokens
        if self._is_stopped(sequence, token, may_stop=may_stop):
            return "stop"
        if answer.grammar is not None and answer.grammar.is_finished:
            if may_stop:
                return "stop"
            sequence.stop_reason = why_masked(params)
            return "error"
        return ending

    def _take_scores(self, spans: list[ScoreSpan], chosen: TakenChosen) -> None:
        """Note the log-probabilities of given tokens."""
        at = 0
        for span in spans:
            part, at = chosen.part(at, at + span.end - span.first), at + span.end - span.first
            if span.sequence.finish_reason is not None:
                continue
            self.touched[span.sequence.state] = None
            try:
                self._take_span(span, part)
            except Exception as error:
                self.end_broken(span.sequence, error)

    def _take_span(self, span: ScoreSpan, chosen: TakenChosen) -> None:
        sequence, scoring = span.sequence, span.sequence.scoring
        assert scoring is not None
        if not np.isfinite(chosen.own).all():
            sequence.stop_reason = NOT_FINITE
            self.finish(sequence, "error")
            return
        scoring.logprobs[span.first : span.end] = chosen.own
        scoring.is_greedy[span.first : span.end] = chosen.ids[:, 0] == span.targets
        if scoring.num_alternatives is not None:
            counts = [scoring.num_alternatives] * len(chosen.own)
            scoring.entries += chosen.entries(span.targets.tolist(), counts)
        scoring.num_known = span.end
        if sequence.score_only and scoring.is_complete:
            self.finish(sequence, "stop")

    def _end_without_token(self, sequence: Sequence, status: int) -> None:
        """No token can follow: its grammar ends before min_tokens, or weights overflow."""
        params = sequence.state.request.params
        reason = why_masked(params) if status == STATUS_MASKED else None
        sequence.stop_reason = reason or NOT_FINITE
        self.finish(sequence, "error")

    def _is_stopped(self, sequence: Sequence, token: int, *, may_stop: bool) -> bool:
        """Whether a stop id of its own, or a stop string, ends it. Adds the token's text."""
        if may_stop and token in sequence.state.request.params.stop_token_ids:
            sequence.stop_reason = token
            return True
        detokenizer = sequence.answer.detokenizer
        if detokenizer is None:
            return False
        sequence.answer.text += detokenizer.append(token, check_stop=may_stop)
        sequence.stop_reason = detokenizer.stop_reason
        return detokenizer.stop_reason is not None

    def take_ended(self) -> list[RequestState]:
        """Requests whose last sequence has ended since the last time."""
        ended, self.ended = self.ended, []
        return ended

    def end_unfit(self, unfit: list[tuple[Sequence, str]]) -> None:
        """End sequences that a step's draft has given up for lack of memory, and why."""
        for sequence, reason in unfit:
            if sequence.finish_reason is None:
                sequence.stop_reason = reason
                self.finish(sequence, "error")

    def end_unsampled(self) -> None:
        """End sequences that cannot be sampled."""
        broken, self._table.broken = self._table.broken, []
        for sequence, error in broken:
            if sequence.finish_reason is None:
                self.end_broken(sequence, error)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence: complete its text and release its runs."""
        sequence.leave_table()
        sequence.finish_reason = reason
        try:
            if not sequence.score_only:
                self._finish_text(sequence)
        except Exception as error:
            self._note_broken(sequence, error)
        self._let_go(sequence)

    def end_broken(self, sequence: Sequence, error: Exception) -> None:
        """End a sequence, and no other, for an error that is its own."""
        sequence.leave_table()
        self._note_broken(sequence, error)
        self._let_go(sequence)

    def _note_broken(self, sequence: Sequence, error: Exception) -> None:
        name = sequence.state.request.request_id
        log.error("request %s: its answer cannot be computed or taken", name, exc_info=error)
        sequence.finish_reason = "error"
        sequence.stop_reason = broken(error)

    def _let_go(self, sequence: Sequence) -> None:
        """Release the runs of a sequence that has ended, and its request after the last one."""
        state, reason = sequence.state, sequence.finish_reason
        assert reason is not None
        if sequence.sampling is not None:
            self._sampler.release(sequence.sampling)
        if reason in ("abort", "error") and not state.forked:
            self._end_unforked(sequence, reason)
        self.touched[state] = None
        if state.finished:
            state.metrics.finished_time = time.monotonic()
        self._scheduler.room.finish(sequence)
        if state.finished:
            self.ended.append(state)

    def _end_unforked(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a request's sequences that have not forked yet like the one that stands for them."""
        state = sequence.state
        state.forked = True
        for index in range(len(state.sequences), state.request.params.n):
            other = self._scheduler.factory.sequence(state, index)
            other.finish_reason, other.stop_reason = reason, sequence.stop_reason
            state.sequences.append(other)

    def _finish_text(self, sequence: Sequence) -> None:
        """Make the rest of the text; all of it where it was not needed before."""
        answer, detokenizer = sequence.answer, sequence.answer.detokenizer
        if detokenizer is not None and detokenizer.stop_reason is not None:
            return
        if detokenizer is None:
            detokenizer = self._scheduler.factory.detokenizer(sequence.state.request)
            if detokenizer is None:
                return
            answer.text = "".join(map(detokenizer.append, self._visible_ids(sequence)))
        answer.text += detokenizer.finish()
        if detokenizer.stop_reason is not None and sequence.finish_reason != "abort":
            # An unfinished character's replacement completed a stop string.
            sequence.stop_reason, sequence.finish_reason = detokenizer.stop_reason, "stop"

    def _visible_ids(self, sequence: Sequence) -> list[int]:
        """Ids that make the text: not the one that ended it."""
        ids = sequence.output_ids.tolist()
        ended = sequence.finish_reason == "stop" and ids
        return ids[:-1] if ended and self._ends(sequence, ids[-1]) else ids

    def _ends(self, sequence: Sequence, token: int) -> bool:
        params = sequence.state.request.params
        return token in params.stop_token_ids or (not params.ignore_eos and token in self._eos)
