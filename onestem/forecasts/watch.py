"""A job's prediction beside what it took."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from onestem.batch.lengths import expected_outputs
from onestem.cost import Forecast, Work
from onestem.cost.work import IntArray
from onestem.forecasts.target import Target
from onestem.options import ShareMode
from onestem.planner import JobPlan
from onestem.request import Request, RequestOutput

if TYPE_CHECKING:
    from onestem.batch import SpooledPrompts
    from onestem.engine.outputs import EngineStats
    from onestem.llm import LLM


@dataclass(frozen=True)
class Verdict:
    """A prediction beside what the job took.

    Attributes:
        predicted: before the job, from the lengths that its lines allow.
        at_lengths: predicted from the lengths that its answers had.
        seconds, steps, rows: what it took.
    """

    predicted: Forecast
    at_lengths: Forecast
    seconds: float
    steps: int
    rows: int

    def lines(self) -> Iterator[str]:
        """The verdict in words."""
        off = 100 * (self.seconds / self.predicted.seconds - 1)
        yield (
            f"predicted {self.predicted.seconds:.1f} s, took {self.seconds:.1f} s ({off:+.0f}%): "
            f"{self.predicted.steps} steps of {self.predicted.rows} rows predicted, "
            f"{self.steps} of {self.rows} came"
        )
        speed = self.at_lengths.seconds / self.seconds
        yield (
            f"with the answers' lengths as they came {self.at_lengths.seconds:.1f} s are "
            f"predicted: the device ran at {speed:.2f} of its rates"
        )


class JobWatch:
    """Watches a job, to compare it with its prediction afterwards.

    Args:
        share: the engines' mode.
        max_model_len: at which answers end.

    Attributes:
        target: where it runs; of replicas, one of them.
        stats: of all engines together.
        num_replicas: engines that the job is dealt to.
        plan: of the job; None: it has none yet, or nothing is predicted.
    """

    def __init__(
        self,
        target: Target,
        share: ShareMode,
        stats: Callable[[], EngineStats],
        max_model_len: int,
        num_replicas: int = 1,
    ) -> None:
        self.target, self.stats = target, stats
        self._share, self.num_replicas = share, num_replicas
        self._max_model_len = max_model_len
        self.plan: JobPlan | None = None
        self._outputs: IntArray | None = None
        self._answers: IntArray | None = None
        self._prompts: SpooledPrompts | None = None
        self._came: IntArray = np.ones(0, np.int64)  # tokens of each request's answers

    @staticmethod
    def of_llm(llm: LLM) -> JobWatch:
        """A watch of a running engine."""
        most = llm.engine.max_model_len
        return JobWatch(
            Target.of_llm(llm), llm.engine.options.share, lambda: llm.engine.stats, most
        )

    def planner(self, planner: Callable[..., JobPlan]) -> Callable[..., JobPlan]:
        """The same planner, whose first plan is noted. Later plans are of single lines at which an
        engine died."""

        def plan(prompts: SpooledPrompts, *, output_lengths: IntArray | None) -> JobPlan:
            made = planner(prompts, output_lengths=output_lengths)
            if self.plan is None and self.target.rates is not None:
                self.plan, self._prompts = made, prompts
                self._outputs = expected_outputs(prompts, self._max_model_len)
                self._answers = prompts.answers()
                self._came = np.ones(len(prompts), np.int64)
            return made

        return plan

    def run(
        self, run: Callable[[Iterable[Request]], Iterable[RequestOutput]]
    ) -> Callable[[Iterable[Request]], Iterable[RequestOutput]]:
        """The same engine, whose answers' lengths are noted."""

        def answered(requests: Iterable[Request]) -> Iterator[RequestOutput]:
            for output in run(requests):
                self._note(output)
                yield output

        return answered if self.target.rates is not None else run

    def _note(self, output: RequestOutput) -> None:
        if self._prompts is None:
            return
        place = self._prompts.place_of(output.request_id)
        if place is not None:
            self._came[place] = sum(len(one.token_ids) for one in output.outputs)

    def verdict(self, seconds: float) -> Verdict | None:
        """The verdict after a job that took `seconds`; None where nothing was predicted."""
        if self.plan is None:
            return None
        stats, came = self.stats(), self._came
        firsts = len(came) if self._answers is None else int(self._answers.sum())
        rows = stats.processed_prompt_tokens + stats.output_tokens - firsts
        return Verdict(
            predicted=self._predicted(self._outputs),
            at_lengths=self._predicted(came),
            seconds=seconds,
            steps=stats.steps,
            rows=rows,
        )

    def _predicted(self, outputs: IntArray | None) -> Forecast:
        assert self.plan is not None
        work = Work.of(self.plan, outputs, self._answers)
        if self.num_replicas == 1:
            return self.target.forecast(work, self._share)
        return self.target.forecast_dealt(self.plan, work, self._share, self.num_replicas).whole
