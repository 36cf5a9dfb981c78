"""When decode steps run as a streak, and when the streak ends."""

from __future__ import annotations

import time

from onestem.cache import PrefixCache, Run
from onestem.engine.advance import Advance
from onestem.engine.drawing import Drawing
from onestem.engine.inputs import StepInputs, decodes_behind, join_prompts
from onestem.engine.interrupts import uninterrupted
from onestem.engine.pins import PrefixRequest
from onestem.engine.results import Results
from onestem.engine.runner import Runner
from onestem.engine.sampler import Sampler
from onestem.engine.scheduler import Chunk, Scheduler
from onestem.engine.sequence import Sequence
from onestem.engine.stats import EngineStats
from onestem.engine.streak import Streak
from onestem.engine.streak_host import StreakHost
from onestem.request import Request

__all__ = ["Streaks"]

# Steps of a streak in which jobs run beside interactive requests, and in which they pause.
MIXED_STEPS = 16
REFERENCE_STEPS = 6


class Streaks:
    """Begins, runs and ends the engine's streaks, one at a time.

    Attributes:
        present: the one that runs.
        host: what it calls.
    """

    def __init__(
        self,
        cache: PrefixCache,
        scheduler: Scheduler,
        runner: Runner,
        sampler: Sampler,
        results: Results,
        stats: EngineStats,
        *,
        eos_token_ids: tuple[int, ...],
        share: bool,
    ) -> None:
        self.present: Streak | None = None
        self.runner = runner
        self.host = StreakHost(
            accept=results.accept,
            end_without_token=results.end_without_token,
            take=results.take,
            append=results.append_many,
            note_sampled=results.note_sampled,
            finish=results.finish,
            num_left=results.num_left,
            may_sit=self._may_sit,
            newcomers=self._newcomers,
            lay_out=self._lay_out,
            undo=scheduler.undo,
            put=self._put,
            note_computed=results.note_computed,
            note_prompts=scheduler.budget.note,
            eos_token_ids=eos_token_ids,
            depth=runner.depth,
        )
        self._share = share
        self._cache = cache
        self._scheduler = scheduler
        self._sampler = sampler
        self._results = results
        self._stats = stats
        self._head_before: object = None  # who waited first when the streak began
        self._num_jobs = 0  # its rows that are jobs'

    def begin(self) -> None:
        """Go on without the scheduler, if all who run fit: they have sampled behind their last
        step, or their prompts are being computed and may go on in a streak."""
        head = self._scheduler.head()
        if head is not None and not self._must_wait() and not self._may_join(head):
            return
        found = self._rows_and_prompts()
        if found is None or not found[0]:
            return
        advance = self._advance(found[0])
        rows = advance.rows.sequences
        drawing = Drawing(self._sampler, list(map(self._results.row, rows)))
        self._num_jobs = sum(sequence.is_job for sequence in rows)
        self._head_before = head
        self.present = Streak(advance, self.runner, drawing, self.host, prompts=found[1])

    def _advance(self, sequences: list[Sequence]) -> Advance:
        inputs = decodes_behind(
            sequences,
            page_size=self._cache.pool.page_size,
            windows=self.runner.windows,
            version=self._scheduler.version,
            share=self._share,
        )
        return Advance(inputs, self._cache, self.runner.scratch_slot, share=self._share)

    def _rows_and_prompts(self) -> tuple[list[Sequence], list[Sequence]] | None:
        """Who decodes, and whose prompts are being computed; None if one of them does not fit."""
        rows: list[Sequence] = []
        prompts: list[Sequence] = []
        jobs_pause = self._scheduler.num_paused > 0
        for sequence in self._scheduler.running:
            if jobs_pause and sequence.is_job and sequence.scheduled_step != self._scheduler.step:
                continue
            run = sequence.run
            assert run is not None
            if sequence.num_output and run.computed == len(run.tokens) - 1 > 0:
                if not self._fits(sequence, run):
                    return None
                rows.append(sequence)
            elif sequence.num_output == 0 and self._is_simple(sequence.state.request):
                prompts.append(sequence)
            else:
                return None
        alone = not jobs_pause and not any(sequence.is_job for sequence in rows)
        return (rows, prompts) if alone or not prompts else None

    def step(self) -> bool:
        """Whether a streak computed a step."""
        streak = self.present
        if streak is None:
            return False
        with uninterrupted():
            comes = self._newcomer()
            if self._is_long(streak) or (comes and not self._may_join_now(streak)):
                self.close()
                return False
            return self._step(streak, admit=comes)

    def close(self) -> None:
        """Take what a streak still computes; its news come with the next step."""
        if self.present is not None:
            self.present.close()
            self._note_closed()

    def abort(self, sequence: Sequence) -> None:
        """End a sequence that is admitted, or waits to be."""
        with uninterrupted():
            if self.present is None or sequence.run is None:
                self._results.finish(sequence, "abort")
            else:
                self.present.abort(sequence)

    def _fits(self, sequence: Sequence, run: Run) -> bool:
        return (
            sequence.finish_reason is None
            and sequence.grammar is None
            and sequence.run is run
            and run.end == len(sequence.tokens)
            and self._cache.may_grow(run)
        )

    def _newcomer(self) -> bool:
        """Whether a request waits that might be admitted: it came, or memory was freed, since
        memory was last found to be short."""
        head = self._scheduler.head()
        if head is None:
            return False
        return head is not self._head_before or not self._must_wait()

    def _must_wait(self) -> bool:
        """Whether nobody can be admitted now: memory is short, or the next is a job, whose share
        beside interactive requests is looked at now and then (`_is_long`)."""
        scheduler = self._scheduler
        jobs_alone = not scheduler.running or scheduler.running[0].is_job
        return scheduler.is_short or (scheduler.job_waits and not jobs_alone)

    # ----------------------------------------------------------------------------- newcomers

    def _may_join_now(self, streak: Streak) -> bool:
        """Whether the first who waits can be taken into a streak. Where jobs run, who has rows is
        settled step by step."""
        head = self._scheduler.head()
        quiet = self._num_jobs == 0 and self._scheduler.num_paused == 0 and not streak.crowded
        return quiet and head is not None and self._may_join(head)

    def _may_join(self, one: Sequence | Request) -> bool:
        """Whether a streak can compute its prompt and go on with it."""
        if isinstance(one, Request):
            return self._is_simple(one)
        return self._is_simple(one.state.request) and self._leaves_ends(one)

    def _is_simple(self, request: Request) -> bool:
        params = request.params
        return (
            request.priority != "job"
            and not isinstance(request, PrefixRequest)
            and request.pml is None
            and request.score_from is None
            and params.n == 1
            and not params.choices
            and not _ends_in_common(request)
            and params.prompt_logprobs is params.response_format is None
        )

    def _leaves_ends(self, sequence: Sequence) -> bool:
        """Whether all who run could go on writing the last runs of their paths: with nothing below
        them."""
        if sequence.order >= 0:  # it was set back, and may have sampled
            return False
        if not self._cache.enabled:
            return True
        tree, limit = self._cache.tree, sequence.match_limit
        above = tree.reached(sequence.ids(), limit, sequence.stretches)
        owner = above.owner
        return not (isinstance(owner, Sequence) and owner.run is above)

    def _newcomers(
        self, prompts: list[Sequence], admit: bool
    ) -> tuple[list[Chunk], list[Sequence]]:
        chunks, unfinished = self._scheduler.join(prompts, self._may_join if admit else None)
        if admit:
            self._head_before = self._scheduler.head()
        self._results.note_scheduled(chunks)
        return chunks, unfinished

    def _lay_out(self, advance: Advance, chunks: list[Chunk]) -> StepInputs:
        inputs = join_prompts(
            advance.inputs,
            chunks,
            page_size=self._cache.pool.page_size,
            version=self._scheduler.version,
            share=self._share,
        )
        self._stats.shared_read_tokens += inputs.shared_read_tokens
        return inputs

    def _may_sit(self, sequence: Sequence) -> bool:
        run = sequence.run
        return (
            run is not None
            and run.computed > 0
            and run.label == sequence.last_label
            and self._fits(sequence, run)
        )

    def _put(
        self, drawing: Drawing, places: list[int], sequences: list[Sequence], index: int
    ) -> None:
        rows = [self._results.row(sequence) for sequence in sequences]
        for row in rows:
            row.token_index = index
        drawing.put(places, rows)

    # ----------------------------------------------------------------------------- a step

    def _is_long(self, streak: Streak) -> bool:
        """Where jobs run beside interactive requests, their share is looked at now and then."""
        interactive = self._num_jobs < len(streak.sequences)
        if not interactive:
            return False
        if self._num_jobs:
            return streak.num_steps >= MIXED_STEPS
        if self._scheduler.job_share.limit == 0:
            return False
        paused = self._scheduler.num_paused
        most = REFERENCE_STEPS if paused else MIXED_STEPS
        return streak.num_steps >= most and (paused > 0 or self._scheduler.job_waits)

    def _step(self, streak: Streak, *, admit: bool) -> bool:
        started, host, steps = time.perf_counter(), streak.host_seconds, streak.num_steps
        spared, mixed = streak.shared_read_tokens, streak.mixed
        try:
            streak.step(admit=admit)
            self._note_closed()
        except BaseException:
            streak.abandon()
            self.present = None
            self._scheduler.retake()
            raise
        self._scheduler.step += 1
        self._stats.shared_read_tokens += streak.shared_read_tokens - spared
        self._count(streak, streak.num_steps - steps, streak.host_seconds - host, started)
        if not (mixed or streak.mixed):
            self._note_decodes(streak, time.perf_counter() - started)
        return streak.num_steps > steps

    def _count(self, streak: Streak, steps: int, host: float, started: float) -> None:
        stats, pool = self._stats, self._cache.pool
        seconds = time.perf_counter() - started
        stats.steps += steps
        stats.host_seconds += host
        stats.model_seconds += seconds - host
        stats.note_held(pool.num_held * pool.page_size)

    def _note_decodes(self, streak: Streak, seconds: float) -> None:
        launched_only = 2 * (self.host.depth - 1)
        if streak.num_steps > launched_only:
            interactive = len(streak.sequences) - self._num_jobs
            self._scheduler.note_decodes(interactive, self._num_jobs, seconds)

    def _note_closed(self) -> None:
        """A closed streak is let go."""
        if self.present is not None and self.present.closed:
            self.present = None


def _ends_in_common(request: Request) -> bool:
    """Whether what is sampled behind a prompt is of another space than the prompt's end."""
    beyond = request.common_prefix_tokens < len(request.prompt_token_ids)
    return bool(request.cache_salt) and not beyond
