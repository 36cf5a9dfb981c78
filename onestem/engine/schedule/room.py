"""KV memory for sequences: which are admitted, and which give up memory for others."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from onestem.cache import PrefixCache, Run
from onestem.engine.modules.prompt import PmlPrompt, SequenceModules
from onestem.engine.schedule.answers import AnswerMemory
from onestem.engine.schedule.draft import StepDraft
from onestem.engine.schedule.lane import Lane
from onestem.engine.schedule.pins import PinnedPrefixes
from onestem.engine.schedule.reserved import ReservedPages
from onestem.engine.schedule.reuse import explain
from onestem.engine.schedule.states import States
from onestem.engine.schedule.waiting import WaitingLine
from onestem.engine.sequence import Chunk, Sequence


@dataclass(eq=False, repr=False)
class Room:
    """Gives and takes memory. What is short is taken from the newest sequence, jobs first.

    Attributes:
        max_num_seqs: maximum sequences that are admitted; None: as many as memory holds.
        alone: the oldest sequence, while it runs by itself since nothing else let it go on.
        num_preempted: how often a sequence has lost its memory.
        reserved: pages that running sequences will take.
        on_leave: called with a sequence before it gives up its pages.
        states: recurrent states; None: the model's layers keep none.
    """

    _cache: PrefixCache
    _lanes: tuple[Lane, ...]
    _waiting: WaitingLine
    _pins: PinnedPrefixes
    _answers: AnswerMemory
    reserved: ReservedPages
    max_num_seqs: int | None
    alone: Sequence | None = None
    num_preempted: int = 0
    on_leave: Callable[[Sequence], object] = lambda sequence: None
    states: States | None = None
    _orders: Iterator[int] = field(default_factory=itertools.count)

    @property
    def num_running(self) -> int:
        """Sequences that are admitted."""
        return sum(len(lane.running) for lane in self._lanes)

    def running(self) -> Iterator[Sequence]:
        """Admitted sequences, the oldest of each lane first."""
        return itertools.chain.from_iterable(lane.running for lane in self._lanes)

    @property
    def _newest(self) -> Sequence:
        return next(lane.running[-1] for lane in reversed(self._lanes) if lane.running)

    def _lane_of(self, sequence: Sequence) -> Lane:
        return self._lanes[sequence.is_job]

    def admit(self, draft: StepDraft, sequence: Sequence) -> bool:
        """Give a sequence memory, if there is room beside what is reserved for those that run. Jobs
        are preempted for interactive ones."""
        if not self._has_place(draft, sequence):
            return False
        alone, whole = not self.num_running, sequence is self.alone
        if self.states is not None and not self.states.admit(sequence, alone=alone, whole=whole):
            return False
        draft.handling = sequence
        ids, limit = sequence.ids().copy(), sequence.match_limit
        sequence.run = self._cache.attach(ids, limit, sequence, sequence.stretches)
        if (pml := sequence.state.pml) is not None:
            sequence.modules = SequenceModules(self._cache.modules, pml, sequence)
        while self.num_running and not self.reserved.have_room(sequence):
            if sequence.is_job or not self._give_up_job(draft):
                self._detach(sequence)
                draft.handling = None
                return False
        if sequence.order < 0:
            self._begin(sequence)
        if self.states is not None:  # who runs may come to where it wants a snapshot
            self.states.begin(draft, sequence)
        self._lane_of(sequence).add(sequence)
        if draft.num_forks is not None:
            draft.num_forks += sequence.num_forks
        if sequence is not self.alone:
            self._waiting.groups.admitted(sequence)
        draft.handling = None
        return True

    def _has_place(self, draft: StepDraft, sequence: Sequence) -> bool:
        """Whether a sequence, with those that fork from it, may run beside the others."""
        while self.max_num_seqs is not None and self.num_running:
            if draft.num_forks is None:
                prompts = itertools.chain.from_iterable(lane.prompts for lane in self._lanes)
                draft.num_forks = sum(prompt.num_forks for prompt in prompts)
            coming = draft.num_forks + 1 + sequence.num_forks
            if self.num_running + coming <= self.max_num_seqs:
                break
            if sequence.is_job or not self._give_up_newest_job(draft):
                return False
        return True

    def _begin(self, sequence: Sequence) -> None:
        """Note that a sequence is admitted for the first time."""
        sequence.order = next(self._orders)
        self._answers.take(sequence.state)
        path = sequence.path(self._cache.tree.num_splits)
        marked = sequence.state.request.in_conversation
        self._cache.note_use(path[-1], sequence, in_conversation=marked)
        for one in sequence.imports:
            self._cache.modules.note_use(one.run, sequence)
        prefix = self._pins.admitted(sequence, path)
        if self._cache.enabled and sequence.state.reuse is None:
            sequence.state.reuse = explain(sequence, path, prefix)

    def fork(self, parent: Sequence, child: Sequence, chunk: Chunk) -> None:
        """Admit a sequence that goes on beside its parent (n > 1) after a chunk."""
        if self.states is not None:
            self.states.fork(parent, child, chunk)
        child.order = next(self._orders)
        self._lane_of(parent).add(child, decodes=True)

    def reserve_rows(self, draft: StepDraft, sequences: list[Sequence]) -> None:
        """Reserve pages for the next token of each, at once where there are enough."""
        size = self._cache.pool.page_size
        runs = [
            run
            for sequence in sequences
            if (run := sequence.run) is not None and sequence.next_place >= size * len(run.pages)
        ]
        if self._cache.add_pages(runs):
            return
        for sequence in sorted(sequences, key=lambda one: (one.is_job, one.order)):
            draft.handling = sequence
            self._reserve_row(draft, sequence)
        draft.handling = None

    def _reserve_row(self, draft: StepDraft, sequence: Sequence) -> None:
        """Reserve a page for its next token; the newest sequences make room, it itself last."""
        prompts = self._lane_of(sequence).prompts
        while not draft.waits and sequence.run is not None and sequence not in prompts:
            run = sequence.run
            if self._cache.reserve(run, sequence.num_launched + 1 - run.start):
                break
            newest = self._newest
            # On trial, what others hold is not looked at: it waits.
            if newest is not sequence or draft.only is not None:
                self._give_up(draft, newest)
            else:
                self.make_progress(draft)

    def reserve(self, draft: StepDraft, sequence: Sequence, run: Run, tokens: int) -> bool:
        """Reserve pages for a run's first tokens; newer sequences without rows make room."""
        while not self._cache.reserve(run, tokens):
            newest = self._newest
            if newest is sequence or self._lane_of(newest).has_row(newest, draft):
                return False
            if not self._give_up(draft, newest):
                return False
        return True

    def _give_up(self, draft: StepDraft, sequence: Sequence) -> bool:
        """Preempt a sequence. False: the draft waits for what is in flight."""
        draft.waits = not draft.may_preempt
        if not draft.waits:
            self.preempt(sequence)
            draft.forget(sequence)
        return not draft.waits

    def _give_up_job(self, draft: StepDraft) -> bool:
        """Take memory from jobs: the newest's, then what their groups keep."""
        if self._give_up_newest_job(draft):
            return True
        return not draft.waits and self._waiting.groups.release_jobs()

    def _give_up_newest_job(self, draft: StepDraft) -> bool:
        """Preempt the newest job, unless it has a chunk in this step."""
        newest = self._newest
        if not newest.is_job or draft.has_chunk(newest):
            return False
        self.alone = None
        return self._give_up(draft, newest)

    def make_progress(self, draft: StepDraft) -> bool:
        """Free memory, newest first, where something runs and nothing could be scheduled."""
        if not self.num_running or draft.only is not None:
            return False
        if not draft.may_preempt:
            draft.waits = True
            return False
        if self._waiting.groups.num_pinned:
            self._waiting.groups.release_all()
            return True
        last = self._newest
        # Runs of its path that nothing else keeps (pinned prefixes are kept).
        own = sum(run.pins == 1 for run in last.path(self._cache.tree.num_splits))
        if self.num_running > 1 or last is not self.alone or own > last.num_stretches:
            self._give_up(draft, last)
            if not self.num_running:
                # The oldest alone, in an empty cache and undisturbed, fits: its path is one run (of
                # each stretch).
                self.alone = next(iter(self._waiting))
                self.alone.stand_alone()
                self._cache.clear()
            return True
        if not self._pins.let_go():
            # It has KV memory for itself and cannot go on; others may.
            pool = self._cache.pool
            reason = (
                f"a sequence of {len(last.tokens)} tokens does not fit in KV memory of "
                f"{pool.num_pages} pages of {pool.page_size}"
            )
            self.end(draft, last, reason)
        return True

    def end(self, draft: StepDraft, sequence: Sequence, reason: str) -> None:
        """End a sequence for lack of memory."""
        self.finish(sequence)
        draft.forget(sequence)
        draft.changes.unfit.append((sequence, reason))

    def preempt(self, sequence: Sequence) -> None:
        """Take a sequence's memory; its sampled tokens stay, and it is computed again."""
        self._release(sequence)
        self.num_preempted += 1
        sequence.state.metrics.num_preempted += 1
        self._answers.keep(sequence.state)
        self._waiting.put(sequence)

    def begin_again(
        self, sequence: Sequence, prompt: PmlPrompt, instead: Seq[Sequence] = ()
    ) -> None:
        """Let a sequence compute another prompt, or others of its request instead of it; it keeps
        its turn."""
        if sequence.run is not None:
            self._release(sequence)
            self._waiting.forget_short()
        else:
            self._waiting.remove(sequence)
        sequence.begin_again(prompt)
        for one in instead or (sequence,):
            self._waiting.put(one)

    def preempt_all(self) -> None:
        """Take the memory of all running sequences, and of planned groups. Nothing may be in
        flight, and no step being decided."""
        self.alone = None
        self._waiting.forget_short()
        for sequence in list(self.running()):
            self.preempt(sequence)
        self._waiting.groups.release_all()
        self.reserved.expire()

    def finish(self, sequence: Sequence) -> None:
        """Release the runs of a sequence that has ended (those that others may find stay)."""
        self._waiting.forget_short()
        if sequence is self.alone:
            self.alone = None
        if sequence.run is not None:
            self._release(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
        self._waiting.groups.finished(sequence.state)
        if sequence.state.finished:
            self._answers.release(sequence.state)
        else:
            self._answers.keep(sequence.state)

    def _release(self, sequence: Sequence) -> None:
        self._detach(sequence)
        self._lane_of(sequence).remove(sequence)
        self.reserved.drop(sequence)

    def _detach(self, sequence: Sequence) -> None:
        sequence.leave_table()
        assert sequence.run is not None
        self.on_leave(sequence)
        if self.states is not None:
            self.states.leave(sequence)
        self._cache.disown(sequence.run, sequence)
        self._cache.unpin(sequence.run)
        sequence.run = None
        sequence.forget_path()
        if sequence.choosing is not None:
            sequence.choosing.forget()
        if sequence.modules is not None:
            sequence.modules.release()
            sequence.modules = None
