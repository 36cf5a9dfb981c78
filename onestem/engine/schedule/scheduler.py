"""What each step computes: which rows of which sequences, within tokens and KV memory."""

from __future__ import annotations

import itertools
from bisect import insort
from collections import Counter, deque
from collections.abc import Container
from typing import Any, Protocol

from onestem.cache import ModuleRun, PrefixCache, Run
from onestem.engine.schedule.answers import AnswerLimit, AnswerMemory
from onestem.engine.schedule.groups import PlannedGroups
from onestem.engine.schedule.pins import PinnedPrefixes
from onestem.engine.schedule.queue import RequestQueue
from onestem.engine.schedule.reuse import explain
from onestem.engine.schedule.room import ReservedPages
from onestem.engine.schedule.throttle import JobShare, StepBudget
from onestem.engine.sequence import Chunk, Edits, RequestState, Sequence
from onestem.request import Request

__all__ = ["Scheduler", "SourceError"]

# Steps after which the pages that running sequences will still need are counted anew. They become
# fewer with time, but for new sequences, which are counted when admitted.
RESERVED_STEPS = 16
# Steps in which jobs run beside interactive requests, and in which they pause.
MIXED_STEPS = 16
REFERENCE_STEPS = 6
# Sequences that wait for host memory while requests after them are looked for that need none.
MOST_PARKED = 256


class CommitFirst(Exception):
    """Memory is short, and what is in flight may free some: nothing is preempted before that."""


class SourceError(Exception):
    """A request could not be read from where it comes from; the cause says why."""


class SequenceFactory(Protocol):
    """Makes sequences of requests."""

    def open(self, request: Request) -> RequestState: ...
    def sequence(self, state: RequestState, index: int) -> Sequence: ...
    def detokenizer(self, request: Request) -> Any: ...
    def refuse(self, request: Request, error: Exception) -> None:
        """Note that a request cannot be opened."""
        ...


class DecodingRows(Protocol):
    """The rows that decode at present (`onestem.engine.step.order`)."""

    @property
    def sequences(self) -> list[Sequence | None]: ...

    def any_stays(self, leave: list[Sequence]) -> bool:
        """Whether a sequence decodes on, beside those that leave."""
        ...

    def page_ends(self) -> list[Sequence]:
        """Sequences whose next token stands in a new page."""
        ...


class ModuleTiers(Protocol):
    """Memories below the KV pages, for modules."""

    def has(self, run: ModuleRun) -> bool:
        """Whether a module's keys and values are kept, and copying them beats computing them."""
        ...

    def load(self, run: ModuleRun) -> bool:
        """Copy them to the run's pages, before the next step reads them; False if they turn out to
        be damaged."""
        ...


def _job_of(run: Run) -> Sequence | None:
    """The job that computes a run."""
    owner = run.owner
    if isinstance(owner, Sequence) and owner.is_job and owner.run is not None:
        return owner
    return None


def _order(sequence: Sequence) -> tuple[bool, int]:
    """Sort key of admitted sequences: jobs after all interactive requests, then by age."""
    return sequence.is_job, sequence.order


def _num_left(sequence: Sequence) -> int:
    """Tokens of its prompt that are neither computed nor scheduled."""
    return len(sequence.tokens) - sequence.frontier


def _place(sequence: Sequence) -> tuple[bool, float]:
    """Sort key of waiting sequences: those never admitted last, as they came."""
    return sequence.is_job, sequence.order if sequence.order >= 0 else float("inf")


class Scheduler:
    """Decodes first, then unfinished prompts, then new requests; then the same for jobs.

    A step is bounded by a token budget (for what is not a decode) and by KV memory (BatchLLM's
    memory-centric batching); by a number of sequences only with `max_num_seqs`. While interactive
    requests run, jobs have only as many rows of a step as slow it down little (`throttle`), and
    their memory goes first.

    Args:
        cache: the runs.
        queue: where new requests wait.
        pins: prefixes that are kept.
        max_step_tokens: maximum rows of a step, at least half for prompts (`StepBudget`).
        max_step_seconds: what a step may take, by the measured time of a row; None: no limit.
        max_num_seqs: maximum sequences that are admitted; None: as many as memory holds.
        answers: host memory that answers may take; None: any.
        lookahead_tokens: decodes that admission leaves room for, per sequence whose length is not
            known.
        free_rows: decodes that hardly make a step longer; see `ReservedPages`.

    Attributes:
        factory: makes a request's sequences when it is opened, and those that fork at its end.
        running: sequences that are admitted, the oldest first, jobs last.
        prompts: those of them that do not decode yet, in the same order.
        waiting: opened, but not (or no longer) admitted.
        num_paused: jobs' sequences that the present step leaves out.
        opened: ids of the interactive requests that the present step has taken from the queue.
        is_short: memory is short for the first that waits, and none was freed since.
        handling: the sequence that is being scheduled, to which an error is attributed.
    """

    def __init__(
        self,
        cache: PrefixCache,
        queue: RequestQueue,
        factory: SequenceFactory,
        pins: PinnedPrefixes,
        *,
        max_step_tokens: int,
        max_step_seconds: float | None = None,
        max_num_seqs: int | None = None,
        answers: AnswerMemory | None = None,
        lookahead_tokens: int = 32,
        free_rows: int = 0,
    ) -> None:
        self.max_num_seqs = max_num_seqs
        no_limit = AnswerLimit(most=None, max_model_len=1, kv_tokens=1)
        self.answers = answers or AnswerMemory(no_limit)
        self.cache = cache
        self.queue = queue
        self.budget = StepBudget(most=max_step_tokens, seconds=max_step_seconds)
        self.job_share = JobShare(most=max_step_tokens)
        self.running: list[Sequence] = []
        self.prompts: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.opened: list[str] = []
        self.step = 0
        self.num_preempted = 0
        self.num_paused = 0
        self.is_short = False
        self.handling: Sequence | None = None
        self.groups = PlannedGroups(cache, self._group_open)
        self.tiers: ModuleTiers | None = None  # where modules' keys and values may be kept as well
        self.factory = factory
        self._pins = pins
        self._orders = itertools.count()
        self._edits = Edits()
        self._chunked: set[Sequence] = set()  # that have chunks in the step
        self._only: Container[Sequence] | None = None
        self._may_preempt = True
        self._is_launched = False
        self._alone: Sequence | None = None
        self._standing: dict[Sequence, None] = {}  # that decode and have no row
        self._job_rows: dict[Sequence, None] = {}  # jobs that have one
        self._job_limit: int | None = None  # of these; None: no limit
        self._review_at = 0  # the step in which that is set again
        self._coming: int | None = None  # sequences that fork from prompts, by the last count
        self._reserved = ReservedPages(cache, lookahead_tokens, free_rows)
        self._reserved_at = -RESERVED_STEPS  # the step in which they were counted
        self._refreshed_at = -RESERVED_STEPS  # in which those that change were
        self._short_at = -RESERVED_STEPS
        self._short_head: object = None

    @property
    def version(self) -> int:
        """Changes whenever a sequence's path may have."""
        return self.cache.tree.num_splits

    # ----------------------------------------------------------------------------- a step

    def edits(
        self, rows: DecodingRows, *, may_preempt: bool, only: Container[Sequence] | None = None
    ) -> Edits | None:
        """Choose the rows of the next step. Runs of its chunks count as computed from here on;
        `recover` takes that back if the step is not computed.

        Args:
            rows: of the step before.
            may_preempt: whether nothing is in flight. Otherwise None is returned where memory is
                short: take what is in flight first.
            only: no others have rows, or are admitted.

        Raises:
            SourceError: a request could not be read.
        """
        self.step += 1
        self._edits, self._only, self._may_preempt = Edits(), only, may_preempt
        self._chunked.clear()
        self.opened.clear()
        self._is_launched, self._coming = False, None
        for sequence in itertools.chain(self.prompts, self._standing):
            if sequence.modules is not None:
                sequence.modules.release_placeholders()
        try:
            self._end_outgrown()
            self._choose(rows)
            while not self._has_rows(rows) and self._make_progress_possible():
                self._fill()
        except CommitFirst:
            self._undo()
            return None
        self.handling = None
        self._settle()
        return self._edits

    def _choose(self, rows: DecodingRows) -> None:
        some = self.prompts or self.waiting or self._standing or self._job_rows
        if not some and self._only is None and self._peek() is None:
            self.num_paused = 0
            self._reserve_rows(rows.page_ends())  # all decode on
            return
        self._choose_rows(rows)
        self._reserve_rows([*rows.page_ends(), *self._edits.enter])
        self._fill()

    def _reserve_rows(self, sequences: list[Sequence]) -> None:
        """Reserve pages for the next token of each, at once where there are enough."""
        size = self.cache.pool.page_size
        runs = [
            run
            for sequence in sequences
            if (run := sequence.run) is not None and sequence.next_place >= size * len(run.pages)
        ]
        if self.cache.add_pages(runs):
            return
        for sequence in sorted(sequences, key=_order):
            if sequence.run is not None:
                self._reserve_row(sequence)

    def _has_rows(self, rows: DecodingRows) -> bool:
        """Whether the step computes anything."""
        edits = self._edits
        return bool(edits.chunks or edits.enter) or rows.any_stays(edits.leave)

    def _settle(self) -> None:
        """Settle the chosen step: which sequences enter, leave, and sample after a prompt."""
        edits = self._edits
        for sequence in edits.enter:
            self._standing.pop(sequence, None)
            if sequence.is_job:
                self._job_rows[sequence] = None
        for sequence in edits.leave:
            self._job_rows.pop(sequence, None)
            if sequence.run is not None:
                self._standing[sequence] = None
        edits.decodes = self._num_interactive()
        edits.jobs = len(self._job_rows)
        for chunk in edits.chunks:
            sequence = chunk.sequence
            edits.jobs += (chunk.end - chunk.start) * sequence.is_job
            if chunk.module is None and chunk.end == len(sequence.tokens):
                if sequence.score_only:
                    self.prompts.remove(sequence)
                else:
                    chunk.samples = self._end_prompt(sequence)

    def _end_prompt(self, sequence: Sequence) -> list[Sequence]:
        """End a prompt whose last tokens are in this step. Returns the sequences that sample after
        it, each with a run to write, before any of their tokens is known."""
        state, run = sequence.state, sequence.run
        assert run is not None
        self.prompts.remove(sequence)
        sequences = [sequence]
        if not state.forked:
            state.forked = True
            sequences += [self._fork(sequence, i) for i in range(1, state.request.params.n)]
        run.answer_at = min(run.answer_at, sequence.num_prompt - state.request.prefilled_tokens)
        if len(sequences) == 1 and run.label == sequence.last_label and self.cache.may_grow(run):
            run.grows = True
        else:
            for one in sequences:
                one.run = self.cache.branch(run, (), one, one.last_label)
                one.run.answer_at = run.answer_at
                one.forget_path()
            self.cache.unpin(run)  # the branches have pinned the path for themselves
        self._standing.update((one, None) for one in sequences if one.num_left > 1)
        return sequences

    def _fork(self, parent: Sequence, index: int) -> Sequence:
        """A sequence that goes on beside its parent (n > 1)."""
        child = self.factory.sequence(parent.state, index)
        child.scoring = None
        child.modules = parent.modules.fork(child) if parent.modules is not None else None
        child.order = next(self._orders)
        parent.state.sequences.append(child)
        insort(self.running, child, key=_order)
        return child

    def _undo(self) -> None:
        """Take back the step, which is not computed: its tokens have no KV."""
        for chunk in self._edits.chunks:
            if chunk.module is not None:
                chunk.module.computed = min(chunk.module.computed, chunk.start)
                continue
            if chunk.sequence.run is None:
                continue
            for run in chunk.sequence.path(self.version):
                if run.start < chunk.end and run.end > chunk.start:
                    run.computed = min(run.computed, max(0, chunk.start - run.start))
            if not chunk.samples and chunk.sequence not in self.prompts:
                insort(self.prompts, chunk.sequence, key=_order)  # its scores were to come
        self._edits.chunks = []

    def forget_step(self) -> None:
        """Drop the step chosen last, which is taken: nothing runs."""
        self._edits, self._short_head = Edits(), None
        self._chunked.clear()

    def note_launched(self) -> None:
        """Note that the step chosen last is launched: its chunks have keys and values."""
        self._is_launched = True

    def recover(self) -> None:
        """Go on after a failed step; what was in flight is lost. Sequences that lack a sample or a
        score are preempted, so that their last tokens are computed again. Others go on from what
        they have."""
        lost = {one for chunk in self._edits.chunks for one in chunk.samples}
        if not self._is_launched:
            self._undo()
        self._edits, self._may_preempt, self.handling = Edits(), True, None
        self._job_rows.clear()
        self._standing.clear()
        for sequence in list(self.running):
            sequence.leave_slot()
            no_sample = sequence in lost or sequence.frontier >= len(sequence.tokens)
            if no_sample or sequence.wants_scores:
                self.preempt(sequence)
            elif sequence not in self.prompts:
                self._standing[sequence] = None

    def note_step(self, edits: Edits, seconds: float, *, is_steady: bool) -> None:
        """Note how long a step took, for `throttle`. `is_steady`: the one before it had rows of the
        same kinds."""
        self.budget.note(edits.prompt_rows, seconds)
        if is_steady and edits.decodes and not edits.has_interactive_prompts:
            self.job_share.note(edits.decodes, edits.jobs, seconds)

    # ----------------------------------------------------------------------------- rows

    def _choose_rows(self, rows: DecodingRows) -> None:
        """Choose which sequences decode; only this method does."""
        edits = self._edits
        if self._only is not None:
            there = [sequence for sequence in rows.sequences if sequence is not None]
            edits.leave = [sequence for sequence in there if sequence not in self._only]
            edits.enter = [sequence for sequence in self._standing if sequence in self._only]
            return
        edits.enter = [sequence for sequence in self._standing if not sequence.is_job]
        jobs = [sequence for sequence in self._standing if sequence.is_job]
        self._review_jobs()
        if self._job_limit is None:
            edits.enter += jobs
            self.num_paused = 0
            return
        free = self._job_limit - len(self._job_rows)
        if free < 0:
            edits.leave = sorted(self._job_rows, key=_order)[free:]
        edits.enter += sorted(jobs, key=_order)[: max(0, free)]
        self.num_paused = max(0, len(jobs) + len(self._job_rows) - self._job_limit)

    def _review_jobs(self) -> None:
        """Set, now and then, how many rows jobs have beside interactive requests."""
        if not self._has_interactive():
            self._job_limit = None
        elif self._job_limit is None or self.step >= self._review_at:
            self._job_limit = self.job_share.rows(self._num_interactive())
            steps = MIXED_STEPS if self._job_limit else REFERENCE_STEPS
            self._review_at = self.step + steps

    def _num_interactive(self) -> int:
        """Interactive sequences that decode."""
        jobs = len(self._job_rows) + sum(s.is_job for s in self._standing)
        return len(self.running) - len(self.prompts) - jobs

    def _has_interactive(self) -> bool:
        """Whether an interactive request runs or waits: these come before jobs."""
        if any(some and not some[0].is_job for some in (self.running, self.waiting)):
            return True
        first = self._peek()
        return first is not None and first.priority != "job"

    def _reserve_row(self, sequence: Sequence) -> None:
        """Reserve a page for its next token; the newest sequences make room, it itself last."""
        self.handling = sequence
        while sequence.run is not None and sequence not in self.prompts:
            run = sequence.run
            if self.cache.reserve(run, sequence.num_launched + 1 - run.start):
                break
            newest = self.running[-1]
            if newest is not sequence:
                self.preempt(newest)
            else:
                self._make_progress_possible()
        self.handling = None

    # ----------------------------------------------------------------------------- prompts

    def _fill(self) -> None:
        decodes = self._num_interactive()
        beside = decodes + sum(not sequence.is_job for sequence in self.prompts) > 0
        budget = self.budget.rows(decodes if beside else len(self._job_rows))
        budget = self._fill_class(budget, jobs=False)
        if self._has_interactive() and self._only is None:  # also one admitted in this step
            self._review_jobs()
            assert self._job_limit is not None
            entering = sum(sequence.is_job for sequence in self._edits.enter)
            rows = len(self._job_rows) - len(self._edits.leave) + entering
            budget = min(budget, self._job_limit - rows)
            if budget <= 0:
                self.num_paused += sum(sequence.is_job for sequence in self.prompts)
        self._fill_class(budget, jobs=True)

    def _fill_class(self, budget: int, *, jobs: bool) -> int:
        """Schedule a class's prompts, then new ones. Returns what is left of the budget."""
        prompts = [s for s in self.prompts if s.is_job is jobs and self._is_tried(s)]
        # A planned group's prompts come as planned.
        if prompts and not jobs and prompts[0].state.request.group is None:
            budget -= self._fill_with_short(_num_left(prompts[0]), prompts, budget)
            prompts = [s for s in self.prompts if not s.is_job and self._is_tried(s)]
        return self._fill_with_new(self._extend_each(prompts, budget), jobs=jobs)

    def _fill_with_short(self, oldest: int, prompts: list[Sequence], budget: int) -> int:
        """Schedule interactive prompts that have fewer tokens left than the oldest one, the
        shortest first, in half of the step: so they do not wait for a long one. Returns the rows
        that they take."""
        half = budget - min(oldest, (budget + 1) // 2)
        short = sorted((s for s in prompts if _num_left(s) < oldest), key=_num_left)
        left = self._extend_each(short, half)
        return half - self._fill_with_new(left, jobs=False, shorter_than=oldest)

    def _extend_each(self, sequences: list[Sequence], budget: int) -> int:
        """Schedule prompts without rows in the step. Returns what is left of the budget."""
        for sequence in sequences:
            if sequence.run is not None and budget > 0 and sequence not in self._chunked:
                self.handling = sequence
                budget -= self._extend_prompt(sequence, budget)
        self.handling = None
        return budget

    def _is_tried(self, sequence: Sequence) -> bool:
        return self._only is None or sequence in self._only

    def _fill_with_new(self, budget: int, *, jobs: bool, shorter_than: int | None = None) -> int:
        """Admit new sequences of a class and schedule their prompts, up to the first that has
        `shorter_than` tokens left or more. Returns what is left of the budget."""
        if budget <= 0 or not (self.waiting or (self._only is None and self._peek() is not None)):
            return budget
        head = self._head() if self._only is None else None
        known = self.is_short and head is self._short_head
        if known and self.step < self._short_at + RESERVED_STEPS:
            return budget
        if self.step >= self._reserved_at + RESERVED_STEPS:
            self._count_reserved()
        while budget > 0:
            admitted = self._admit(jobs=jobs)
            refresh = self._refreshed_at != self.step and self._only is None
            if admitted is None and refresh and self._waits(jobs=jobs):
                self._refreshed_at = self.step
                self._reserved.refresh(self.running)
                admitted = self._admit(jobs=jobs)
            if admitted is None:
                if self._only is None and self._waits(jobs=jobs):
                    self.is_short, self._short_at = True, self.step
                    self._short_head = self._head()
                break
            if shorter_than is not None and _num_left(admitted) >= shorter_than:
                self._reserved.add(admitted)
                break
            self.handling = admitted
            budget -= self._extend_prompt(admitted, budget)
            self._reserved.add(admitted)
            self.handling = None
        return budget

    def _count_reserved(self) -> None:
        self._reserved_at = self._refreshed_at = self.step
        self._reserved.count(self.running)

    def _peek(self) -> Request | None:
        try:
            return self.queue.peek()
        except Exception as error:
            raise SourceError from error

    def _head(self) -> Sequence | Request | None:
        """The sequence or request that would be admitted next."""
        first, waiting = self._peek(), self._first()
        if waiting is not None and (first is None or first.priority == "job" or not waiting.is_job):
            return waiting
        return first if first is not None and self._passes(first) else None

    def _waits(self, *, jobs: bool) -> bool:
        """Whether the next to be admitted is of the class."""
        head = self._head()
        if isinstance(head, Sequence):
            return head.is_job is jobs
        return head is not None and (head.priority == "job") is jobs

    def _extend_prompt(self, sequence: Sequence, budget: int) -> int:
        """`_extend` a sequence; if it is interactive, first the jobs that compute what it waits
        for, as far as it does."""
        left = budget
        if not sequence.is_job:
            for owner, tokens in self._awaited(sequence).items():
                left -= self._extend(owner, min(left, tokens))
        if left > 0 and sequence not in self._chunked:
            left -= self._extend(sequence, left)
        return budget - left

    def _awaited(self, sequence: Sequence) -> dict[Sequence, int]:
        """Jobs that compute what a sequence reads, and how many tokens each is away from it."""
        found: dict[Sequence, int] = {}
        for run in sequence.path(self.version):
            if (owner := _job_of(run)) is not None:
                ahead = min(run.end, len(sequence.tokens)) - owner.frontier
                modules = sum(len(one.run.tokens) - one.run.computed for one in owner.imports)
                found[owner] = max(found.get(owner, 0), ahead + modules)
        modules_of: Counter[Sequence] = Counter()
        for run in (one.run for one in sequence.imports):
            if (owner := _job_of(run)) is not None:
                modules_of[owner] += len(run.tokens) - run.computed
        for owner, tokens in modules_of.items():
            found[owner] = max(found.get(owner, 0), tokens)
        return found

    def _extend(self, sequence: Sequence, budget: int) -> int:
        """Schedule a sequence's next tokens, and before them the modules that it imports and that
        are not computed. Returns their number, at most `budget`."""
        used = self._extend_modules(sequence, budget)
        if sequence.modules is not None and not sequence.modules.complete:
            return used
        return used + self._extend_path(sequence, budget - used)

    def _extend_modules(self, sequence: Sequence, budget: int) -> int:
        modules, used = sequence.modules, 0
        if modules is None or modules.complete:
            return 0
        for index, run in modules.missing(lambda run: self._load(sequence, run)):
            attends = modules.attended(index)
            theirs = run.owner is not None and run.owner is not sequence
            if theirs or not all(other.complete for other in attends):
                continue
            start, take = run.computed, min(budget - used, len(run.tokens) - run.computed)
            if take <= 0 or not self._reserve(sequence, run, start + take):
                break
            self._add_chunk(Chunk(sequence, start, start + take, run, attends))
            run.owner = sequence
            run.computed += take
            used += take
        return used

    def _load(self, sequence: Sequence, run: ModuleRun) -> bool:
        """Copy a module's keys and values from another tier, if one has them."""
        if self.tiers is None or not self.tiers.has(run):
            return False
        if run.owner is not None and run.owner is not sequence:
            return False
        if not self._reserve(sequence, run, len(run.tokens)) or not self.tiers.load(run):
            return False
        run.computed = len(run.tokens)
        return True

    def _extend_path(self, sequence: Sequence, budget: int) -> int:
        """Schedule its own tokens, up to a run that another computes. Returns their number."""
        start = at = sequence.frontier
        chunk: Chunk | None = None
        for run in sequence.path(self.version):
            if run.end <= at:
                continue
            if run.owner is not None and run.owner is not sequence:
                break
            take = min(budget - (at - start), run.end - at, len(sequence.tokens) - at)
            if take <= 0 or not self._reserve(sequence, run, run.computed + take):
                break
            at += take
            chunk = self._note_rows(chunk, sequence, start, at)
            run.owner = sequence
            run.computed += take
        return at - start

    def _note_rows(self, chunk: Chunk | None, sequence: Sequence, start: int, end: int) -> Chunk:
        """Put tokens into the step before they count as computed, so that `_undo` takes them back
        wherever scheduling is interrupted."""
        if chunk is None:
            chunk = self._add_chunk(Chunk(sequence, start, end))
        chunk.end = end
        return chunk

    def _add_chunk(self, chunk: Chunk) -> Chunk:
        self._edits.chunks.append(chunk)
        self._chunked.add(chunk.sequence)
        return chunk

    def _reserve(self, sequence: Sequence, run: Run, tokens: int) -> bool:
        """Reserve pages for a run's first tokens; newer sequences without rows make room."""
        while not self.cache.reserve(run, tokens):
            newest = self.running[-1]
            if newest is sequence or self._has_row(newest):
                return False
            self.preempt(newest)
        return True

    def _has_row(self, sequence: Sequence) -> bool:
        """Whether a sequence has rows in the step that is being chosen."""
        if sequence not in self.prompts:
            return sequence not in self._standing or sequence in self._edits.enter
        return sequence in self._chunked

    def _make_progress_possible(self) -> bool:
        """Free memory, newest first, where something runs and nothing could be scheduled."""
        if not self.running or self._only is not None:
            return False
        if not self._may_preempt:
            raise CommitFirst
        if self.groups.num_pinned:
            self.groups.release_all()
            return True
        last = self.running[-1]
        own = self._num_own_runs(last)
        if len(self.running) > 1 or last is not self._alone or own > last.num_stretches:
            self.preempt(last)
            if not self.running:
                # The oldest alone, in an empty cache and undisturbed, fits: its path is one run (of
                # each stretch).
                self._alone = self.waiting[0]
                self._alone.stand_alone()
                self.cache.clear()
            return True
        return self._pins.let_go() or self._end_unfit(last)

    def _end_unfit(self, sequence: Sequence) -> bool:
        """End a sequence that has KV memory for itself and cannot go on; others may."""
        pool = self.cache.pool
        reason = (
            f"a sequence of {len(sequence.tokens)} tokens does not fit in KV memory of "
            f"{pool.num_pages} pages of {pool.page_size}"
        )
        self.finish(sequence)
        self._edits.unfit.append((sequence, reason))
        return True

    def _end_outgrown(self) -> None:
        """End a request whose answers have no room in host memory any more."""
        found = self.answers.outgrown()
        if found is None:
            return
        if not self._may_preempt:
            raise CommitFirst
        state, reason = found
        for sequence in state.sequences:
            if sequence.finish_reason is None:
                self.finish(sequence)
                self._edits.unfit.append((sequence, reason))

    def _num_own_runs(self, sequence: Sequence) -> int:
        """Runs of its path that nothing else keeps (pinned prefixes are kept)."""
        return sum(run.pins == 1 for run in sequence.path(self.version))

    # ----------------------------------------------------------------------------- admission

    def _admit(self, *, jobs: bool) -> Sequence | None:
        """Admit the next sequence of a class if memory allows; waiting ones come before new
        requests."""
        alone = self._alone
        if alone is not None and alone.run is not None and (jobs or not alone.is_job):
            return None
        sequence = self._next(jobs=jobs)
        if sequence is None or not self._has_place(sequence) or not self._attach(sequence):
            return None
        self.waiting.remove(sequence)
        return sequence

    def _next(self, *, jobs: bool) -> Sequence | None:
        """The first that waits, if it is of the class (jobs do not pass interactive requests)."""
        if self._only is not None:
            return next((s for s in self.waiting if s in self._only and s.is_job is jobs), None)
        first = self._first()
        if first is None or (first.is_job and not jobs):
            request = self._peek()
            if (
                request is not None
                and (request.priority == "job") is jobs
                and self._passes(request)
            ):
                self._open(request)
                first = self._first()
        return first if first is not None and first.is_job is jobs else None

    def _first(self) -> Sequence | None:
        """The first that waits for KV memory; who waits for host memory holds up no others."""
        return self.answers.first_with_room(self.waiting)

    def _passes(self, request: Request) -> bool:
        """Whether a request may be opened while others wait for host memory: jobs, which wait
        after the interactive ones, keep none of these out."""
        parked = len(self.waiting) >= MOST_PARKED
        if parked and request.priority != "job":
            parked = not self.waiting[MOST_PARKED - 1].is_job
        return not parked or not self.answers.needed(request)

    def _open(self, request: Request) -> None:
        if request.priority != "job":
            self.opened.append(request.request_id)
        try:
            sequences = list(self.factory.open(request).sequences)
        except Exception as error:
            self.queue.pop()
            self.factory.refuse(request, error)
            return
        self.queue.pop()
        for sequence in sequences:
            self._wait(sequence)
        self.groups.release_closed()

    def _wait(self, sequence: Sequence) -> None:
        """Let a sequence wait: jobs after interactive ones, never admitted after preempted ones."""
        insort(self.waiting, sequence, key=_place)

    def _has_place(self, sequence: Sequence) -> bool:
        """Whether a sequence, with those that fork from it, may run beside the others; jobs are
        preempted for interactive ones."""
        while self.max_num_seqs is not None and self.running:
            if self._coming is None:
                self._coming = sum(prompt.num_forks for prompt in self.prompts)
            coming = self._coming + 1 + sequence.num_forks
            if len(self.running) + coming <= self.max_num_seqs:
                break
            if sequence.is_job or not self._give_up_newest_job():
                return False
        return True

    def _attach(self, sequence: Sequence) -> bool:
        self.handling = sequence
        run = self.cache.attach(
            sequence.ids().copy(), sequence.match_limit, sequence, sequence.stretches
        )
        sequence.run = run
        sequence.import_modules(self.cache)
        sequence.forget_path()
        try:
            while self.running and not self._reserved.have_room(sequence):
                if sequence.is_job or not self._give_up_job():
                    self._detach(sequence)
                    self.handling = None
                    return False
        except CommitFirst:
            self._detach(sequence)
            raise
        if sequence.order < 0:
            sequence.order = next(self._orders)
            self.answers.take(sequence.state)
            self._note_admitted(sequence)
        # One that was preempted keeps its age, so that it is not the first to go again.
        insort(self.running, sequence, key=_order)
        insort(self.prompts, sequence, key=_order)
        if self._coming is not None:
            self._coming += sequence.num_forks
        if sequence is not self._alone:
            self.groups.admitted(sequence)
        self.handling = None
        return True

    def _note_admitted(self, sequence: Sequence) -> None:
        path = sequence.path(self.version)
        self.cache.note_use(path[-1], sequence)
        for one in sequence.imports:
            self.cache.modules.note_use(one.run, sequence)
        prefix = self._pins.admitted(sequence, path)
        if self.cache.enabled and sequence.state.reuse is None:
            sequence.state.reuse = explain(sequence, path, prefix)

    def _give_up_job(self) -> bool:
        """Take memory from jobs: the newest's, then what their groups keep."""
        return self._give_up_newest_job() or self.groups.release_jobs()

    def _give_up_newest_job(self) -> bool:
        """Preempt the newest job, unless it has a chunk in this step."""
        newest = self.running[-1]
        if newest.is_job and newest not in self._chunked:
            self._alone = None
            self.preempt(newest)
            return True
        return False

    # ----------------------------------------------------------------------------- leaving

    def finish(self, sequence: Sequence) -> None:
        """Release the runs of a sequence that has ended (those that others may find stay)."""
        self.is_short, self._short_head = False, None
        if sequence is self._alone:
            self._alone = None
        if sequence.run is not None:
            self._detach(sequence)
            self._forget(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self.groups.finished(sequence.state)
        if sequence.state.finished:
            self.answers.release(sequence.state)
        else:
            self.answers.keep(sequence.state)

    def preempt(self, sequence: Sequence) -> None:
        """Take a sequence's memory; its sampled tokens stay, and it is computed again.

        Raises:
            CommitFirst: a step is in flight.
        """
        if not self._may_preempt:
            raise CommitFirst
        self._detach(sequence)
        self._forget(sequence)
        self.num_preempted += 1
        sequence.state.metrics.num_preempted += 1
        self.answers.keep(sequence.state)
        self._wait(sequence)

    def preempt_all(self) -> None:
        """Take the memory of all running sequences, and of planned groups. Nothing may be in
        flight, and no step being chosen."""
        self._may_preempt, self._alone, self.is_short = True, None, False
        for sequence in list(self.running):
            self.preempt(sequence)
        self.groups.release_all()
        self._reserved_at = -RESERVED_STEPS

    def _forget(self, sequence: Sequence) -> None:
        """Forget one that is not admitted any more."""
        self.running.remove(sequence)
        for some in (self.prompts, self._edits.enter, self._edits.leave):
            if sequence in some:
                some.remove(sequence)
        self._standing.pop(sequence, None)
        self._job_rows.pop(sequence, None)
        self._reserved.drop(sequence)
        self._coming = None

    def _detach(self, sequence: Sequence) -> None:
        sequence.leave_slot()
        assert sequence.run is not None
        self.cache.disown(sequence.run, sequence)
        self.cache.unpin(sequence.run)
        sequence.run = None
        sequence.forget_path()
        if sequence.modules is not None:
            sequence.modules.release()
            sequence.modules = None

    def _group_open(self, group: int) -> bool:
        waiting = any(sequence.state.request.group == group for sequence in self.waiting)
        return waiting or self.queue.group_open(group)

    def idle(self) -> bool:
        """Whether nothing runs and nothing waits; planned groups are complete then."""
        if self.running or self.waiting or self.queue.peek() is not None:
            return False
        self.groups.release_all()
        return True
