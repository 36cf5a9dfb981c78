"""When decode steps run as a streak, and when the streak ends."""

from __future__ import annotations

import time

import torch

from onestem.cache import PrefixCache, Run
from onestem.engine.advance import Advance
from onestem.engine.inputs import StepInputs
from onestem.engine.interrupts import uninterrupted
from onestem.engine.results import Results
from onestem.engine.runner import Runner
from onestem.engine.sampler import Sampler
from onestem.engine.scheduler import Scheduler
from onestem.engine.sequence import Sequence
from onestem.engine.stats import EngineStats
from onestem.engine.streak import Streak, StreakHost, fits_streak
from onestem.request import Request

__all__ = ["Streaks"]

# Steps that the scheduler makes after a row of a streak needed more of the sampler.
STEPS_AFTER_UNSURE = 16
MOST_STEPS_AFTER_UNSURE = 1024
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
        device: torch.device,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self.present: Streak | None = None
        self.runner = runner
        self.host = StreakHost(
            accept=results.accept,
            append=results.append_many,
            finish=results.finish,
            num_left=results.num_left,
            eos_token_ids=eos_token_ids,
            depth=runner.depth,
        )
        self._cache = cache
        self._scheduler = scheduler
        self._sampler = sampler
        self._results = results
        self._stats = stats
        self._device = device
        self._head_before: object = None  # who waited first when the streak began
        self._num_jobs = 0  # its rows that are jobs'
        self._sure_from = 0  # the scheduler's step from which streaks are tried again
        self._pause = STEPS_AFTER_UNSURE

    def begin(self, inputs: StepInputs) -> None:
        """Go on without the scheduler, if all who run were in this step of decodes and fit."""
        assert inputs.decodes is not None
        rows = inputs.decodes
        running, paused = len(self._scheduler.running), self._scheduler.num_paused
        if len(rows.sequences) + paused != running or self._sure_from > self._scheduler.step:
            return
        if not all(map(self._fits, rows.sequences, rows.runs)):
            return
        sampling = [self._results.row(sequence) for sequence in rows.sequences]
        drawing = self._sampler.drawing(sampling, self._device)
        if drawing is None:
            return
        advance = Advance(inputs, self._cache, self.runner.scratch_slot)
        self._head_before = self._head()
        self._num_jobs = sum(sequence.is_job for sequence in rows.sequences)
        waiting = self._head_before is not None
        self.present = Streak(inputs, advance, self.runner, drawing, self.host, waiting=waiting)

    def step(self) -> bool:
        """Whether a streak computed a step."""
        if self.present is None:
            return False
        with uninterrupted():
            if self._newcomer() or self._is_long(self.present):
                self.close()
                return False
            return self._step(self.present)

    def close(self) -> None:
        """Take what a streak still computes; its news come with the next step."""
        if self.present is not None:
            self.present.close()
            self._note_closed()

    def _fits(self, sequence: Sequence, run: Run) -> bool:
        return (
            sequence.finish_reason is None
            and fits_streak(sequence)
            and sequence.run is run
            and run.end == len(sequence.tokens)
            and self._cache.may_grow(run)
        )

    def _head(self) -> Sequence | Request | None:
        """Who would be admitted next."""
        waiting, first = self._scheduler.waiting, self._scheduler.queue.peek()
        if waiting and (first is None or first.priority == "job" or not waiting[0].is_job):
            return waiting[0]
        return first

    def _newcomer(self) -> bool:
        """Whether a request came since the streak began, that might be admitted."""
        head = self._head()
        return head is not None and head is not self._head_before

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
        return streak.num_steps >= most and (paused > 0 or self._job_waits())

    def _job_waits(self) -> bool:
        """Whether who would be admitted next is a job."""
        head = self._head()
        if isinstance(head, Sequence):
            return head.is_job
        return head is not None and head.priority == "job"

    def _step(self, streak: Streak) -> bool:
        started, host, steps = time.perf_counter(), streak.host_seconds, streak.num_steps
        spared = streak.shared_read_tokens
        try:
            streak.step()
            self._note_closed()
        except BaseException:
            streak.abandon()
            self.present = None
            raise
        self._scheduler.step += 1
        self._stats.shared_read_tokens += streak.shared_read_tokens - spared
        self._count(streak, streak.num_steps - steps, streak.host_seconds - host, started)
        return streak.num_steps > steps

    def _count(self, streak: Streak, steps: int, host: float, started: float) -> None:
        stats, pool = self._stats, self._cache.pool
        seconds = time.perf_counter() - started
        stats.steps += steps
        stats.host_seconds += host
        stats.model_seconds += seconds - host
        stats.note_held(pool.num_held * pool.page_size)
        launched_only = 2 * (self.host.depth - 1)
        if streak.num_steps > launched_only:
            interactive = len(streak.sequences) - self._num_jobs
            self._scheduler.note_decodes(interactive, self._num_jobs, seconds)

    def _note_closed(self) -> None:
        """A closed streak is let go. After one that began with an unsure row they are tried ever
        more rarely: its rows will be unsure again."""
        streak = self.present
        if streak is None or not streak.closed:
            return
        if streak.unsure:
            short = streak.num_steps < STEPS_AFTER_UNSURE
            longer = min(2 * self._pause, MOST_STEPS_AFTER_UNSURE)
            self._pause = longer if short else STEPS_AFTER_UNSURE
            self._sure_from = self._scheduler.step + self._pause
        self.present = None
