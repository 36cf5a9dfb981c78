"""What each step computes: which rows of which sequences, within tokens and KV memory."""

from __future__ import annotations

import itertools
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from onestem.cache import ModuleRun, PrefixCache, Run
from onestem.engine.groups import PlannedGroups
from onestem.engine.modules import SequenceModules
from onestem.engine.pace import JobShare, StepBudget
from onestem.engine.promises import Promises
from onestem.engine.queue import RequestQueue
from onestem.engine.sequence import Sequence
from onestem.errors import CacheError
from onestem.request import Request

__all__ = ["Chunk", "Scheduler"]

# Steps of a streak after which it is counted anew what those who run will still ask for; it grows
# less with time, but for newcomers, who are counted as they come.
PROMISED_STEPS = 16


@dataclass(slots=True)
class Chunk:
    """Tokens start..end-1 of a sequence are rows of this step; or those of a module that it
    imports, which see the runs that it `attends` to."""

    sequence: Sequence
    start: int
    end: int
    module: ModuleRun | None = None
    attends: Seq[ModuleRun] = ()

    @property
    def num_prompt_rows(self) -> int:
        if self.module is not None:
            return self.end - self.start
        return max(0, min(self.end, self.sequence.num_prompt) - self.start)


class ModuleTiers(Protocol):
    """Memories behind the KV pages."""

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
    """Jobs come behind all interactive requests."""
    return sequence.is_job, sequence.order


def _place(sequence: Sequence) -> tuple[bool, float]:
    """Order of those who wait; the never admitted last, as they came."""
    return sequence.is_job, sequence.order if sequence.order >= 0 else float("inf")


class Scheduler:
    """Decodes first, then unfinished prompts, then new requests; then the same for jobs.

    A step is bounded by a token budget (for what is not a decode) and by KV memory, never by a
    number of requests (BatchLLM's memory-centric batching). While interactive requests run, jobs
    have so many rows of a step as slow it down little (`engine.pace`), and their memory goes first.

    Args:
        cache: the runs.
        queue: where new requests wait.
        open_request: makes a request's sequences when it is admitted.
        max_step_tokens: most rows of a step, half of them for prompts at least (`StepBudget`).
        max_step_seconds: what a step may take, by the measured time of a row; None: as it takes.
        lookahead_tokens: decodes that admission leaves room for, per sequence.
    """

    def __init__(
        self,
        cache: PrefixCache,
        queue: RequestQueue,
        open_request: Callable[[Request], list[Sequence]],
        *,
        max_step_tokens: int,
        max_step_seconds: float | None = None,
        lookahead_tokens: int = 32,
    ) -> None:
        self.cache = cache
        self.queue = queue
        self.budget = StepBudget(most=max_step_tokens, seconds=max_step_seconds)
        self.job_share = JobShare(most=max_step_tokens)
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()  # opened, but not (or no longer) admitted
        self.step = 0
        self.num_set_backs = 0
        self.num_paused = 0  # jobs' sequences that the present step leaves out
        self.is_short = False  # memory, for who waits first; none was freed since
        self.on_admitted: Callable[[Sequence], None] | None = None
        self.on_unfit: Callable[[Sequence, str], None] | None = None
        self.let_pins_go: Callable[[], bool] | None = None
        self._open_request = open_request
        self._orders = itertools.count()
        self.groups = PlannedGroups(cache, self._group_open)
        self._alone: Sequence | None = None
        self._chunks: list[Chunk] = []
        self.tiers: ModuleTiers | None = None  # where modules' keys and values may be kept as well
        self._promises = Promises(cache, lookahead_tokens)
        self._promised_at = -PROMISED_STEPS  # the step in which they were counted

    @property
    def version(self) -> int:
        """Changes whenever a sequence's path may have."""
        return self.cache.tree.num_splits

    # ----------------------------------------------------------------------------- a step

    def schedule(self) -> list[Chunk]:
        """Choose the rows of the next step. Their runs count as computed from here on; `undo` takes
        that back if the step is not computed."""
        self.step += 1
        self._chunks = []
        for sequence in self.running:
            if sequence.modules is not None:
                sequence.modules.release_placeholders()
        self._fill()
        while not self._chunks and self._make_progress_possible():
            self._fill()
        return self._chunks

    def undo(self) -> None:
        """The scheduled step was not computed: its tokens have no KV."""
        for chunk in self._chunks:
            if chunk.module is not None:
                chunk.module.computed = min(chunk.module.computed, chunk.start)
                continue
            if chunk.sequence.run is None:
                continue
            for run in chunk.sequence.path(self.version):
                if run.start < chunk.end and run.end > chunk.start:
                    run.computed = min(run.computed, max(0, chunk.start - run.start))
        self._chunks = []

    def retake(self) -> None:
        """The step was computed, but its results were not all taken: who lacks a sample or a score
        is set back, so that its last tokens are computed again."""
        for sequence in list(self.running):
            scores = sequence.scheduled_step == self.step and sequence.wants_scores
            if scores or sequence.frontier >= sequence.num_to_compute:
                self.set_back(sequence)

    def note_step(self, seconds: float) -> None:
        """How long the scheduled step took: `pace` goes by it."""
        decodes = jobs = prompt_rows = interactive_prompts = 0
        for chunk in self._chunks:
            rows = chunk.end - chunk.start
            prompt = chunk.num_prompt_rows > 0
            if chunk.sequence.is_job:
                jobs += rows
            elif prompt:
                interactive_prompts += rows
            else:
                decodes += rows
            prompt_rows += rows if prompt else 0
        self.budget.note(prompt_rows, seconds)
        if decodes and not interactive_prompts:
            self.job_share.note(decodes, jobs, seconds, streak=False)

    def note_decodes(self, interactive: int, jobs: int, seconds: float) -> None:
        """How long a step of decodes took that was not scheduled here (a streak's)."""
        if interactive:
            self.job_share.note(interactive, jobs, seconds, streak=True)

    def _fill(self) -> None:
        self.is_short = False
        decodes: tuple[list[Sequence], list[Sequence]] = ([], [])
        prompts: tuple[list[Sequence], list[Sequence]] = ([], [])
        for sequence in self.running:
            (decodes if sequence.decoding else prompts)[sequence.is_job].append(sequence)
        interactive = bool(decodes[False] or prompts[False])
        budget = self.budget.rows(len(decodes[not interactive]))  # beside them jobs may pause
        budget = self._fill_class(decodes[False], prompts[False], budget, jobs=False)
        if self._has_interactive():  # also who was admitted just now
            self._fill_jobs_beside(decodes, prompts[True], budget)
        else:
            self.num_paused = 0
            self._fill_class(decodes[True], prompts[True], budget, jobs=True)

    def _has_interactive(self) -> bool:
        """Whether an interactive request runs, or waits for memory. They stand before jobs."""
        return any(some and not some[0].is_job for some in (self.running, self.waiting))

    def _fill_jobs_beside(
        self, decodes: tuple[list[Sequence], list[Sequence]], prompts: list[Sequence], budget: int
    ) -> None:
        """So many rows for jobs as slow interactive requests down little; the others pause."""
        rows = self.job_share.rows(len(decodes[False]))
        first = decodes[True][:rows]
        self.num_paused = len(decodes[True]) - len(first)
        budget = min(budget, rows - len(first))
        if budget <= 0:
            self.num_paused += len(prompts)
            prompts = []
        self._fill_class(first, prompts, budget, jobs=True)

    def _fill_class(
        self, decodes: list[Sequence], prompts: list[Sequence], budget: int, *, jobs: bool
    ) -> int:
        """Schedule a class's decodes, its prompts, then new ones of it; what is left of the budget
        for prompts."""
        for sequence in decodes:
            if sequence.run is not None:
                self._extend_decode(sequence, sequence.run)
        for sequence in prompts:
            if sequence.run is not None and budget > 0:
                budget -= self._extend_prompt(sequence, budget)
        if budget > 0 and (self.waiting or self.queue.peek() is not None):
            budget = self._fill_with_new(budget, jobs=jobs)
        return budget

    def join(
        self, prompts: list[Sequence], may_join: Callable[[Sequence | Request], bool] | None
    ) -> tuple[list[Chunk], list[Sequence]]:
        """Rows of prompts for a step whose decodes a streak makes: of those that are being computed
        and of newcomers, as long as the next one may join (None: nobody may). No job runs.

        Returns:
            the chunks, and those of the sequences whose prompts go on behind them. `undo` is for
            this step.
        """
        self.step += 1
        self._chunks = []
        for sequence in self.running:  # whom nobody sets back to make room for newcomers
            sequence.scheduled_step = self.step
        budget, joined = self.budget.rows(len(self.running) - len(prompts)), list(prompts)
        for sequence in prompts:
            sequence.scheduled_step = -1
            budget -= self._extend_prompt(sequence, budget) if budget > 0 else 0
        if may_join is not None:
            joined += self._join_new(budget, may_join)
        unfinished = [s for s in joined if s.run is not None and s.frontier < s.num_to_compute]
        return self._chunks, unfinished

    def _join_new(
        self, budget: int, may_join: Callable[[Sequence | Request], bool]
    ) -> list[Sequence]:
        self.is_short = False
        if self.step >= self._promised_at + PROMISED_STEPS:
            self._count_promised()
        joined: list[Sequence] = []
        while budget > 0 and (head := self.head()) is not None and may_join(head):
            first = self._next(jobs=False)
            if first is None or not may_join(first):
                break
            admitted = self._admit(jobs=False)
            if admitted is None and self._promised_at != self.step:
                self._count_promised()  # some who were counted may have ended
                admitted = self._admit(jobs=False)
            self.is_short = admitted is None
            if admitted is None:
                break
            budget -= self._extend_prompt(admitted, budget)
            self._promises.add(admitted)
            joined.append(admitted)
        return joined

    def _count_promised(self) -> None:
        self._promised_at = self.step
        self._promises.count(self.running)

    def head(self) -> Sequence | Request | None:
        """Who would be admitted next."""
        first = self.queue.peek()
        if self.waiting and (
            first is None or first.priority == "job" or not self.waiting[0].is_job
        ):
            return self.waiting[0]
        return first

    @property
    def job_waits(self) -> bool:
        """Whether who would be admitted next is a job."""
        head = self.head()
        if isinstance(head, Sequence):
            return head.is_job
        return head is not None and head.priority == "job"

    def _fill_with_new(self, budget: int, *, jobs: bool) -> int:
        self._count_promised()
        while budget > 0:
            admitted = self._admit(jobs=jobs)
            if admitted is None:
                theirs = self.head() is not None and self.job_waits is jobs
                self.is_short = self.is_short or theirs
                break
            budget -= self._extend_prompt(admitted, budget)
            self._promises.add(admitted)
        return budget

    def _extend_decode(self, sequence: Sequence, run: Run) -> None:
        """`_extend` by one token, in the run that the sequence alone writes: most of a step."""
        computed = run.computed + 1
        if run.owner is not sequence or computed != len(run.tokens):
            self._extend(sequence, 1)
            return
        room = len(run.pages) * self.cache.pool.page_size - run.offset
        if computed > room and not self._reserve(sequence, run, computed):
            return
        sequence.scheduled_step = self.step
        end = run.start + computed
        self._chunks.append(Chunk(sequence, end - 1, end))
        run.computed = computed

    def _extend_prompt(self, sequence: Sequence, budget: int) -> int:
        """`_extend`, and before it jobs that compute what an interactive sequence waits for, as far
        as it does."""
        left = budget
        if not sequence.is_job:
            for owner, tokens in self._awaited(sequence).items():
                left -= self._extend(owner, min(left, tokens))
        if left > 0 and sequence.scheduled_step != self.step:
            left -= self._extend(sequence, left)
        return budget - left

    def _awaited(self, sequence: Sequence) -> dict[Sequence, int]:
        """Jobs that compute what a sequence reads, and in how many tokens of theirs it is there."""
        found: dict[Sequence, int] = {}
        for run in sequence.path(self.version):
            if (owner := _job_of(run)) is not None:
                ahead = min(run.end, sequence.num_to_compute) - owner.frontier
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
        nobody has computed; gives their number, `budget` at most."""
        modules, used = sequence.modules, 0
        if modules is not None and not modules.complete:
            used = self._extend_modules(sequence, modules, budget)
            if not modules.complete:
                return used
        return used + self._extend_path(sequence, budget - used)

    def _extend_modules(self, sequence: Sequence, modules: SequenceModules, budget: int) -> int:
        used = 0
        for index, run in modules.missing(lambda run: self._load(sequence, run)):
            attends = modules.attended(index)
            theirs = run.owner is not None and run.owner is not sequence
            if theirs or not all(other.complete for other in attends):
                continue
            start, take = run.computed, min(budget - used, len(run.tokens) - run.computed)
            if take <= 0 or not self._reserve(sequence, run, start + take):
                break
            sequence.scheduled_step = self.step
            self._chunks.append(Chunk(sequence, start, start + take, run, attends))
            run.owner = sequence
            run.computed += take
            used += take
        return used

    def _load(self, sequence: Sequence, run: ModuleRun) -> bool:
        """Have a module's keys and values copied from another tier, if one has them."""
        if self.tiers is None or not self.tiers.has(run):
            return False
        if run.owner is not None and run.owner is not sequence:
            return False
        if not self._reserve(sequence, run, len(run.tokens)) or not self.tiers.load(run):
            return False
        run.computed = len(run.tokens)
        return True

    def _extend_path(self, sequence: Sequence, budget: int) -> int:
        """Its own tokens, up to a run that another computes."""
        start = at = sequence.frontier
        chunk: Chunk | None = None
        for run in sequence.path(self.version):
            if run.end <= at:
                continue
            if run.owner is not None and run.owner is not sequence:
                break
            take = min(budget - (at - start), run.end - at, sequence.num_to_compute - at)
            if take <= 0 or not self._reserve(sequence, run, run.computed + take):
                break
            at += take
            chunk = self._note_rows(chunk, sequence, start, at)
            run.owner = sequence
            run.computed += take
        return at - start

    def _note_rows(self, chunk: Chunk | None, sequence: Sequence, start: int, end: int) -> Chunk:
        """Put tokens into the step, before they count as computed: `undo` takes them back then,
        wherever scheduling is interrupted."""
        if chunk is None:
            sequence.scheduled_step = self.step
            chunk = Chunk(sequence, start, end)
            self._chunks.append(chunk)
        chunk.end = end
        return chunk

    def _reserve(self, sequence: Sequence, run: Run, tokens: int) -> bool:
        """Pages for a run's first tokens; newer sequences that have no rows yet make room."""
        while not self.cache.reserve(run, tokens):
            newest = self.running[-1]
            if newest is sequence or newest.scheduled_step == self.step:
                return False
            self.set_back(newest)
        return True

    def _make_progress_possible(self) -> bool:
        """Nothing could be scheduled though something runs: give memory up, newest first."""
        if not self.running:
            return False
        if self.groups.num_pinned:
            self.groups.release_all()
            return True
        last = self.running[-1]
        own = self._num_own_runs(last)
        if len(self.running) > 1 or last is not self._alone or own > last.num_stretches:
            self.set_back(last)
            if not self.running:
                # The oldest alone, in an empty cache and undisturbed, fits: its path is one run (of
                # each stretch).
                self._alone = self.waiting[0]
                self._alone.stand_alone()
                self.cache.clear()
            return True
        return self._let_pins_go() or self._end_unfit(last)

    def _end_unfit(self, sequence: Sequence) -> bool:
        """A sequence that has KV memory for itself and cannot go on ends; others may."""
        pool = self.cache.pool
        reason = (
            f"a sequence of {len(sequence.tokens)} tokens does not fit in KV memory of "
            f"{pool.num_pages} pages of {pool.page_size}"
        )
        if self.on_unfit is None:
            raise CacheError(reason)
        self.on_unfit(sequence, reason)
        return True

    def _let_pins_go(self) -> bool:
        """Pinned prefixes can take more pages than they need (their runs may be many and short):
        they are computed anew then."""
        return self.let_pins_go is not None and self.let_pins_go()

    def _num_own_runs(self, sequence: Sequence) -> int:
        """Runs of its path that nobody else keeps (pinned prefixes are kept)."""
        return sum(run.pins == 1 for run in sequence.path(self.version))

    # ----------------------------------------------------------------------------- admission

    def _admit(self, *, jobs: bool) -> Sequence | None:
        """Admit the next sequence of a class if memory allows; waiting ones come before new
        requests."""
        alone = self._alone
        if alone is not None and alone.run is not None and (jobs or not alone.is_job):
            return None
        sequence = self._next(jobs=jobs)
        if sequence is None or not self._attach(sequence):
            return None
        self.waiting.popleft()
        return sequence

    def _next(self, *, jobs: bool) -> Sequence | None:
        """The first who waits, if it is of the class (jobs do not pass interactive requests)."""
        if not self.waiting or (self.waiting[0].is_job and not jobs):
            request = self.queue.peek()
            if request is not None and (request.priority == "job") is jobs:
                sequences = self._open_request(request)  # where this fails nothing is lost
                self.queue.pop()
                for sequence in sequences:
                    self._wait(sequence)
                self.groups.release_closed()
        first = self.waiting[0] if self.waiting else None
        return first if first is not None and first.is_job is jobs else None

    def _wait(self, sequence: Sequence) -> None:
        """Jobs wait behind interactive requests, what was never admitted behind what was."""
        insort(self.waiting, sequence, key=_place)

    def _attach(self, sequence: Sequence) -> bool:
        tokens = sequence.ids()[: sequence.num_to_compute].copy()
        run = self.cache.attach(tokens, sequence.match_limit, sequence, sequence.stretches)
        sequence.run = run
        if sequence.state.pml is not None:
            sequence.modules = SequenceModules(
                self.cache.modules, sequence.state.pml, sequence, private=not self.cache.enabled
            )
        sequence.forget_path()
        while self.running and not self._promises.have_room(sequence):
            if sequence.is_job or not self._give_up_job():
                self._detach(sequence)
                return False
        if sequence.order < 0:
            sequence.order = next(self._orders)
            if self.on_admitted is not None:
                self.on_admitted(sequence)
        # One that was set back keeps its age, so that it is not the first to go again.
        insort(self.running, sequence, key=_order)
        if sequence is not self._alone:
            self.groups.admitted(sequence)
        return True

    def _give_up_job(self) -> bool:
        """Take memory from jobs: the newest that has no rows in this step, then what their groups
        keep."""
        newest = self.running[-1]
        if newest.is_job and newest.scheduled_step != self.step:
            self._alone = None
            self._promises.take_back(newest)
            self.set_back(newest)
            return True
        return self.groups.release_jobs()

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let a sequence go on from what its parent has computed, beside it (n > 1)."""
        assert parent.run is not None
        self.cache.pin(parent.run)
        child.run = parent.run
        child.modules = parent.modules.fork(child) if parent.modules is not None else None
        child.forget_path()
        child.order = next(self._orders)
        insort(self.running, child, key=_order)

    def append(self, sequence: Sequence, token: int) -> None:
        """Add a sampled token to a sequence and to the run it writes."""
        sequence.tokens.append(token)
        run = sequence.run
        assert run is not None
        at_its_end = run.end == len(sequence.tokens) - 1 and run.label == sequence.last_label
        if at_its_end and self.cache.may_grow(run):
            run.tokens.append(token)
            return
        branch = self.cache.branch(run, [token], sequence, sequence.last_label)
        # The branch pinned the path for itself; the sequence's old pin on it goes.
        self.cache.unpin(run)
        sequence.run = branch
        sequence.forget_path()

    # ----------------------------------------------------------------------------- leaving

    def finish(self, sequence: Sequence) -> None:
        """A sequence has ended: let go of its runs (those that others may find stay)."""
        self.is_short = False
        if sequence is self._alone:
            self._alone = None
        if sequence.run is not None:
            self._detach(sequence)
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self.groups.finished(sequence.state)

    def set_back(self, sequence: Sequence) -> None:
        """Take a sequence's memory; its sampled tokens stay, and it is computed again."""
        self._detach(sequence)
        self.running.remove(sequence)
        self.num_set_backs += 1
        sequence.state.metrics.num_set_backs += 1
        self._wait(sequence)

    def _detach(self, sequence: Sequence) -> None:
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
        """Nothing runs and nothing waits; planned groups are complete then."""
        if self.running or self.waiting or self.queue.peek() is not None:
            return False
        self.groups.release_all()
        return True
