"""Jobs of prompts that share text: gains of planning and sharing, and figures of the plan alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any, Literal

from onestem.bench import BatchCase, run_batch
from onestem.lengths import Lengths, Scaled
from onestem.options import Levels, ShareMode
from onestem.paper.bench import Bench
from onestem.paper.experiment import Cell, Step
from onestem.paper.vllm_process import absent_vllm
from onestem.planner import JobPlan, plan_job

__all__ = [
    "JobRuns",
    "Mode",
    "PlanSavings",
    "Setting",
    "answered",
    "job",
    "planned_prompts",
    "scaled_job",
]

ONLY_ATTENTION = "it is compared in attention alone"

Metric = Literal["requests_per_s", "output_tokens_per_s", "seconds"]


def job(
    groups: int,
    degrees: tuple[int, ...],
    prefixes: tuple[Lengths, ...],
    own: Lengths,
    output: Lengths,
) -> BatchCase:
    """A shuffled job (see `BatchCase`)."""
    return BatchCase(groups, degrees, prefixes, own, output, "shuffled", 0)


def scaled_job(case: BatchCase, bench: Bench) -> BatchCase:
    """The job with fewer groups and shorter lengths. Once a single group is left it gets fewer
    branches, from the outermost level on, so that jobs of equal size stay equal."""

    def shorter(lengths: Lengths) -> Lengths:
        if isinstance(lengths, int):
            return bench.size(lengths)
        assert not isinstance(lengths, Scaled)
        return lengths if bench.scale == 1 else Scaled(lengths, bench.scale)

    wanted, degrees = case.groups * bench.scale * bench.part, list[int]()
    groups = max(1, round(wanted))
    share = min(1.0, wanted)  # of the branches below, that are left
    for degree in case.degrees:
        wanted = degree * share
        degrees.append(max(2, round(wanted)))
        share = min(1.0, wanted / degrees[-1])
    return replace(
        case,
        groups=groups,
        degrees=tuple(degrees),
        prefixes=tuple(map(shorter, case.prefixes)),
        distinct=shorter(case.distinct),
        output=shorter(case.output),
    )


@dataclass(frozen=True)
class Mode:
    """A way to run a job: name in the table, share mode, and options of the engine."""

    name: str
    share: ShareMode = "full"
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Setting:
    """A job with its place in the table and its model."""

    at: Mapping[str, Any]
    job: BatchCase
    model: str


@dataclass(frozen=True)
class JobRuns:
    """Each job in each mode, measured by one figure of `run_batch`."""

    settings: tuple[Setting, ...]
    modes: tuple[Mode, ...]
    metric: Metric = "requests_per_s"

    def places(self) -> list[Mapping[str, Any]]:
        return [setting.at for setting in self.settings]

    def steps(self, bench: Bench) -> list[Step]:
        settings = bench.thin_table(self.settings, attrgetter("at"))
        longest: dict[str, int] = {}
        for one in settings:
            tokens = scaled_job(one.job, bench).longest
            longest[one.model] = max(tokens, longest.get(one.model, 0))
        steps: list[Step] = [
            partial(self._measure, bench, setting, mode, longest[setting.model])
            for mode in self.modes
            for setting in settings
        ]
        for name in bench.against:
            absent = ONLY_ATTENTION if name != "vllm" else absent_vllm()
            if absent is not None:
                bench.refused[name] = absent
                continue
            steps += [
                partial(self._measure_vllm, bench, setting, order, longest[setting.model])
                for order in ("input", "sorted")
                for setting in settings
            ]
        return steps

    def _measure_vllm(
        self, bench: Bench, setting: Setting, order: str, longest: int
    ) -> Iterable[Cell]:
        """vLLM's cell of a setting. Order `sorted`: prompts sorted by their tokens."""
        job = scaled_job(setting.job, bench)
        vllm, vocabulary = bench.vllm(setting.model, longest)
        requests = job.requests(vocabulary)
        asked = sorted(requests) if order == "sorted" else requests
        found, count = vllm.run(asked), len(requests)
        figures = {
            "seconds": found["seconds"],
            "requests_per_s": count / found["seconds"],
            "output_tokens_per_s": sum(output for _, output in requests) / found["seconds"],
        }
        counts = {"cached_tokens": found["cached_tokens"]}
        name = "vllm" if order == "input" else "vllm, sorted"
        yield Cell(setting.at, name, figures[self.metric], {"requests": count}, counts)

    def _measure(self, bench: Bench, setting: Setting, mode: Mode, longest: int) -> Iterable[Cell]:
        figures = answered(bench, setting, mode, longest)
        ran = {"requests": figures["requests"], **figures["drawn"]}
        counted = ("logical_prompt_tokens", "processed_prompt_tokens", "shared_read_tokens")
        counts = {name: figures[name] for name in (*counted, "num_preempted", "saving")}
        counts["planning_share"] = figures["planning_seconds"] / figures["seconds"]
        yield Cell(setting.at, mode.name, figures[self.metric], ran, counts)


def answered(
    bench: Bench, setting: Setting, mode: Mode, longest: int, **options: Any
) -> dict[str, Any]:
    """Figures of a setting's job in a mode, on a model with room for `longest` tokens."""
    llm = bench.llm(setting.model, longest, mode.share, **mode.options, **options)
    return run_batch(llm, scaled_job(setting.job, bench))


# ----------------------------------------------------------------------------- the plan alone

VOCABULARY = 32000
PLANS = 3


@dataclass(frozen=True)
class PlanSavings:
    """Figures of each job's plan alone, without a model.

    Either the part of the prompt tokens that need not be computed (BatchLLM, eq. 1), or the seconds
    of planning (the minimum of three).
    """

    settings: tuple[tuple[Mapping[str, Any], BatchCase], ...]
    levels: tuple[Levels, ...] = ("one", "all")
    metric: Literal["% saved", "seconds"] = "% saved"

    def places(self) -> list[Mapping[str, Any]]:
        return [at for at, _ in self.settings]

    def steps(self, bench: Bench) -> list[Step]:
        settings = bench.thin_table(self.settings, itemgetter(0))
        return [partial(self._measure, bench, *setting) for setting in settings]

    def _measure(self, bench: Bench, at: Mapping[str, Any], case: BatchCase) -> Iterable[Cell]:
        requests = planned_prompts(bench, case)
        for levels in self.levels:
            repeat = PLANS if self.metric == "seconds" else 1
            reports = [_plan(bench, requests, levels).report for _ in range(repeat)]
            report = min(reports, key=lambda each: each.planning_seconds)
            values = {"% saved": 100 * report.saving, "seconds": report.planning_seconds}
            ran = {"requests": report.requests, "prompt_tokens": report.logical_prompt_tokens}
            counts = {"computed_tokens": report.processed_tokens}
            yield Cell(at, levels, values[self.metric], ran, counts)


def planned_prompts(bench: Bench, case: BatchCase) -> list[tuple[list[int], int]]:
    """Token ids and output length of each request of a job at the bench's scale."""
    return scaled_job(case, bench).requests(VOCABULARY)


def _plan(bench: Bench, requests: list[tuple[list[int], int]], levels: Levels = "all") -> JobPlan:
    """Plan requests; the plan shares nothing if the engine's options share nothing."""
    prompts, outputs = zip(*requests, strict=True)
    shares = bench.share("full") in ("full", "storage")
    least = 1 if shares else max(map(len, prompts))
    return plan_job(prompts, output_lengths=outputs, levels=levels, min_prefix_tokens=least)
