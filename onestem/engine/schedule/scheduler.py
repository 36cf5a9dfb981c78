"""What each step computes: which rows of which sequences, within tokens and KV memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from onestem.cache import PrefixCache
from onestem.engine.schedule.answers import AnswerMemory
from onestem.engine.schedule.chunks import PromptChunks
from onestem.engine.schedule.draft import StepDraft
from onestem.engine.schedule.lane import Lane
from onestem.engine.schedule.pins import PinnedPrefixes
from onestem.engine.schedule.queue import RequestQueue
from onestem.engine.schedule.reserved import ReservedPages
from onestem.engine.schedule.room import Room
from onestem.engine.schedule.states import States
from onestem.engine.schedule.throttle import JobShare, StepLimits
from onestem.engine.schedule.waiting import WaitingLine
from onestem.engine.sequence import Chunk, Sequence, StepChanges

if TYPE_CHECKING:
    from onestem.engine.schedule.admission import SequenceFactory


class DecodingRows(Protocol):
    """The rows that decode at present (`onestem.engine.step.batch_rows`)."""

    def any_stays(self, leave: list[Sequence]) -> bool:
        """Whether a sequence decodes on, beside those that leave."""
        ...

    def page_ends(self) -> list[Sequence]:
        """Sequences whose next token goes into a new page."""
        ...


def _num_left(sequence: Sequence) -> int:
    """Tokens of its prompt that are neither computed nor scheduled."""
    return len(sequence.tokens) - sequence.frontier


class Scheduler:
    """Decodes first, then unfinished prompts, then new requests; then the same for jobs.

    A step is bounded by a token budget (for what is not a decode) and by KV memory (BatchLLM's
    memory-centric batching); by a number of sequences only with `max_num_seqs`. While interactive
    requests run, jobs have only as many rows of a step as slow it down little (`throttle`), and
    their memory goes first.

    Args:
        factory: makes a request's sequences when it is opened, and those that fork at its end.
        max_num_seqs: maximum sequences that are admitted; None: as many as memory holds.
        answers: host memory that answers may take.
        free_rows: decodes that hardly make a step longer; see `ReservedPages`.

    Attributes:
        interactive, jobs: sequences that are admitted.
        waiting: what is opened, but not (or no longer) admitted; before the queue.
        room: their memory.
        chunks: puts prompts into steps.
        states: recurrent states; None: the model's layers keep none.
        step: the number of the last one.
    """

    def __init__(
        self,
        cache: PrefixCache,
        queue: RequestQueue,
        factory: SequenceFactory,
        pins: PinnedPrefixes,
        *,
        limits: StepLimits,
        answers: AnswerMemory,
        max_num_seqs: int | None = None,
        free_rows: int = 0,
        states: States | None = None,
    ) -> None:
        self.answers = answers
        self.limits = limits
        self.factory = factory
        self.interactive = Lane(is_job=False)
        self.jobs = Lane(is_job=True, share=JobShare(most=limits.step_tokens))
        self.waiting = WaitingLine(queue, factory, self.answers, cache)
        self.room = Room(
            cache,
            self._lanes,
            self.waiting,
            pins,
            self.answers,
            ReservedPages(cache, free_rows),
            max_num_seqs=max_num_seqs,
            states=states,
        )
        self.chunks = PromptChunks(cache, self.room, states)
        self.states = states
        if states is not None:
            states.upcoming = self.waiting.peek_interactive
        self.step = 0
        self._cache = cache
        self._ended = 0.0  # when the last step did
        self._kinds = (False, False)  # whether it had interactive decodes, and jobs

    @property
    def _lanes(self) -> tuple[Lane, Lane]:
        return self.interactive, self.jobs

    def _lane_of(self, sequence: Sequence) -> Lane:
        return self._lanes[sequence.is_job]

    @property
    def running(self) -> list[Sequence]:
        """Sequences that are admitted, the oldest first, jobs last."""
        return list(self.room.running())

    @property
    def version(self) -> int:
        """Changes whenever a sequence's path may have."""
        return self._cache.tree.num_splits

    def decide(self, draft: StepDraft, rows: DecodingRows) -> None:
        """Choose the rows of the next step, unless it has to wait. `recover` takes that back if it
        is not computed.

        Args:
            draft: an empty one.
            rows: of the step before.

        Raises:
            SourceError: a request could not be read.
        """
        self.step += 1
        if self.states is not None:
            self.states.pool.begin_step()
        for lane in self._lanes:
            lane.release_placeholders()
        self._end_outgrown(draft)
        if not draft.waits:
            self._choose(draft, rows)
        while not draft.waits and not _has_rows(draft, rows):
            if not self.chunks.wait_for_copy():
                if not self.room.make_progress(draft):
                    break
                # Who gave way would be admitted again before the others have what they need.
                draft.admits = not self.room.num_running
            self._fill(draft)
        draft.handling = None
        if draft.waits:
            draft.drop(self.version, self.states)
        else:
            self._settle(draft)

    def _choose(self, draft: StepDraft, rows: DecodingRows) -> None:
        some = self.waiting or self.jobs.rows or not all(lane.is_steady for lane in self._lanes)
        if not some and draft.only is None and self.waiting.peek() is None:
            self.room.reserve_rows(draft, rows.page_ends())  # all decode on
            return
        if draft.only is None:
            self._review_jobs()
        for lane in self._lanes:
            lane.choose_rows(draft)
        self.room.reserve_rows(draft, [*rows.page_ends(), *draft.changes.enter])
        self._fill(draft)

    def _review_jobs(self) -> bool:
        """Set, now and then, how many rows jobs have. Returns whether interactive requests, which
        come before them, run or wait."""
        is_beside = bool(self.interactive.running) or self.waiting.is_interactive
        self.jobs.review(self.step, self.interactive.num_decoding if is_beside else None)
        return is_beside

    def _fill(self, draft: StepDraft) -> None:
        """Give what decodes leave of the step to prompts: interactive ones, then jobs'."""
        beside = self.interactive.running
        decodes = self.interactive.num_decoding if beside else len(self.jobs.rows)
        draft.left = self.limits.rows(decodes)
        self._fill_lane(draft, self.interactive)
        # One that is admitted in this step bounds the jobs' rows as well.
        if not draft.waits and draft.only is None and self._review_jobs():
            self.jobs.bound_prompts(draft)
        self._fill_lane(draft, self.jobs)

    def _fill_lane(self, draft: StepDraft, lane: Lane) -> None:
        """Schedule a lane's prompts, then new ones."""
        first = next(filter(draft.tries, lane.prompts), None)
        # A planned group's prompts come as planned.
        if first is not None and not lane.is_job and first.state.request.group is None:
            self._fill_with_short(draft, lane, _num_left(first))
        self._extend_each(draft, lane.prompts)
        self._fill_with_new(draft, lane)

    def _fill_with_short(self, draft: StepDraft, lane: Lane, oldest: int) -> None:
        """Schedule prompts that have fewer tokens left than the oldest one, the shortest first, in
        half of the step: so they do not wait for a long one."""
        others = min(oldest, (draft.left + 1) // 2)
        draft.left -= others
        short = (one for one in lane.prompts if draft.tries(one) and _num_left(one) < oldest)
        self._extend_each(draft, sorted(short, key=_num_left))
        self._fill_with_new(draft, lane, shorter_than=oldest)
        draft.left += others

    def _extend_each(self, draft: StepDraft, sequences: list[Sequence]) -> None:
        """Schedule prompts without rows in the step."""
        for sequence in list(sequences):
            if not draft.takes_rows:
                break
            if sequence.run is not None and draft.tries(sequence) and not draft.has_chunk(sequence):
                self.chunks.extend(draft, sequence)

    def _fill_with_new(
        self, draft: StepDraft, lane: Lane, *, shorter_than: int | None = None
    ) -> None:
        """Admit new sequences of a lane and schedule their prompts, up to the first that has
        `shorter_than` tokens left or more."""
        waiting, reserved = self.waiting, self.room.reserved
        if not (draft.takes_rows and draft.admits):
            return
        if not waiting and (draft.only is not None or waiting.peek() is None):
            return
        if draft.only is None and waiting.is_short(self.step):
            return
        reserved.keep_up(self.room.running(), self.step)
        while draft.takes_rows:
            admitted = self._admit(draft, lane)
            if admitted is None:
                break
            if shorter_than is not None and _num_left(admitted) >= shorter_than:
                reserved.add(admitted)
                break
            self.chunks.extend(draft, admitted)
            reserved.add(admitted)

    def _admit(self, draft: StepDraft, lane: Lane) -> Sequence | None:
        """Admit the next sequence of a lane if memory allows. Where it is short, what is reserved
        is counted again before that is noted."""
        admitted = self._admit_next(draft, lane)
        if admitted is not None or draft.waits or draft.only is not None:
            return admitted
        if not self.waiting.is_next(jobs=lane.is_job):
            return None
        if self.room.reserved.hurry(self.room.running(), self.step):
            admitted = self._admit_next(draft, lane)
        if admitted is None and not draft.waits and self.waiting.is_next(jobs=lane.is_job):
            self.waiting.note_short(self.step)
        return admitted

    def _admit_next(self, draft: StepDraft, lane: Lane) -> Sequence | None:
        """Admit the next sequence of a lane; waiting ones come before new requests."""
        alone = self.room.alone
        if alone is not None and alone.run is not None and (lane.is_job or not alone.is_job):
            return None
        sequence = self.waiting.next(draft, jobs=lane.is_job)
        if sequence is None or not self.room.admit(draft, sequence):
            return None
        self.waiting.remove(sequence)
        return sequence

    def _end_outgrown(self, draft: StepDraft) -> None:
        """End a request whose answers have no room in host memory any more."""
        found = self.answers.outgrown()
        if found is None:
            return
        if not draft.may_preempt:
            draft.waits = True
            return
        state, reason = found
        for sequence in state.sequences:
            if sequence.finish_reason is None:
                self.room.end(draft, sequence, reason)

    def _settle(self, draft: StepDraft) -> None:
        """Settle the chosen step: which sequences enter, leave, and sample after a prompt."""
        changes = draft.changes
        for lane in self._lanes:
            lane.settle(draft)
        changes.decodes = self.interactive.num_decoding
        changes.jobs = len(self.jobs.rows)
        for chunk in changes.chunks:
            sequence = chunk.sequence
            changes.jobs += (chunk.end - chunk.start) * sequence.is_job
            if chunk.module is None and chunk.end == len(sequence.tokens) and not sequence.choosing:
                if not sequence.score_only:
                    chunk.samples = self._end_prompt(sequence, chunk)
                self._lane_of(sequence).prompts.remove(sequence)

    def _end_prompt(self, sequence: Sequence, chunk: Chunk) -> list[Sequence]:
        """End a prompt whose last tokens are in a chunk. Returns sequences that sample after it,
        each with a run to write, before any of their tokens is known."""
        state, run = sequence.state, sequence.run
        assert run is not None
        sequences = [sequence]
        if not state.forked:
            state.forked = True
            sequences += [self._fork(chunk, i) for i in range(1, state.request.params.n)]
        run.answer_at = min(run.answer_at, sequence.num_prompt - state.request.prefilled_tokens)
        if len(sequences) == 1 and run.label == sequence.last_label and self._cache.may_grow(run):
            run.grows = True
        else:
            for one in sequences:
                one.run = self._cache.branch(run, (), one, one.last_label)
                one.run.answer_at = run.answer_at
                one.forget_path()
            self._cache.unpin(run)  # the branches have pinned the path for themselves
        for one in sequences:
            if one.state_slot is not None:
                one.state_slot.decodes = True
        standing = self._lane_of(sequence).standing
        standing.update((one, None) for one in sequences if one.num_left > 1)
        return sequences

    def _fork(self, chunk: Chunk, index: int) -> Sequence:
        """A sequence that goes on beside that of a chunk (n > 1)."""
        parent = chunk.sequence
        child = self.factory.sequence(parent.state, index)
        child.scoring = None
        child.modules = parent.modules.fork(child) if parent.modules is not None else None
        self.room.fork(parent, child, chunk)
        parent.state.sequences.append(child)
        return child

    def recover(self, draft: StepDraft) -> None:
        """Go on after a step that failed; what was in flight is lost. Sequences that lack a sample
        or a score are preempted, so that their last tokens are computed again. Others go on from
        what they have."""
        lost = {one for chunk in draft.changes.chunks for one in chunk.samples}
        draft.drop(self.version, self.states)
        for lane in self._lanes:
            lane.rows.clear()
            lane.standing.clear()
            for sequence in list(lane.running):
                sequence.leave_table()
                if self.states is not None:  # a state cannot be computed again in place
                    self.states.distrust(sequence)
                    self.room.preempt(sequence)
                    continue
                no_sample = sequence in lost or sequence.frontier >= len(sequence.tokens)
                if no_sample or sequence.wants_scores:
                    self.room.preempt(sequence)
                elif sequence not in lane.prompts:
                    lane.standing[sequence] = None

    def note_step(self, changes: StepChanges, began: float, ended: float) -> float:
        """Note when a step began and ended, for `throttle`. Returns the seconds that it took."""
        seconds, self._ended = ended - max(self._ended, began), ended
        kinds, self._kinds = self._kinds, (changes.decodes > 0, changes.jobs > 0)
        self.limits.note(changes.prompt_rows, seconds)
        is_steady = kinds == self._kinds
        if is_steady and changes.decodes and not changes.has_interactive_prompts:
            assert self.jobs.share is not None
            self.jobs.share.note(changes.decodes, changes.jobs, seconds)
        return seconds

    def idle(self) -> bool:
        """Whether nothing runs and nothing waits; planned groups are complete then."""
        if self.room.num_running or self.waiting or self.waiting.queue.peek() is not None:
            return False
        self.end_plans()
        return True

    def end_plans(self) -> None:
        """Keep nothing for planned requests: no more will come."""
        self.waiting.groups.release_all()
        if self.states is not None:
            self.states.end_plans()


def _has_rows(draft: StepDraft, rows: DecodingRows) -> bool:
    """Whether the step computes anything."""
    changes = draft.changes
    return bool(changes.chunks or changes.enter) or rows.any_stays(changes.leave)
