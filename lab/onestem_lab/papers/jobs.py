"""Jobs of prompts that share text: gains of planning and sharing, and figures of the plan alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from operator import attrgetter, itemgetter
from typing import Any, Literal

from onestem.bench import BatchCase, Lengths, run_batch
from onestem.options import Levels, ShareMode
from onestem.planner import JobPlan, plan_job
from onestem.planner.report import saving_ratio
from onestem_lab.cases import batch_of, longest_of
from onestem_lab.lengths import Scaled
from onestem_lab.papers.bench import Bench
from onestem_lab.papers.experiment import Cell, Step
from onestem_lab.peers.vllm_process import absent_vllm

__all__ = [
    "JobRuns",
    "Mode",
    "PlanSavings",
    "Setting",
    "answered",
    "computed_with_lru",
    "job",
    "planned_prompts",
    "scaled_job",
]

ONLY_ATTENTION = "it is compared in attention alone"

Metric = Literal["requests_per_s", "output_tokens_per_s", "seconds"]


def job(
    groups: int,
    degrees: tuple[Lengths, ...],
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

    wanted, degrees = case.groups * bench.scale * bench.part, list[Lengths]()
    groups = max(1, round(wanted))
    share = min(1.0, wanted)  # of the branches below, that are left
    for degree in case.degrees:
        if not isinstance(degree, int):  # what is drawn stays
            degrees.append(degree)
            continue
        wanted, left = degree * share, max(2, round(degree * share))
        degrees.append(left)
        share = min(1.0, wanted / left)
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
    """A way to run a job.

    Attributes:
        name: in the table.
        options: of the engine.
        batch: at most as many sequences run at once as KV memory holds if of each job's prefixes
            the first `batch` levels are stored once, and nothing else is shared; None: no such cap.
    """

    name: str
    share: ShareMode = "full"
    options: Mapping[str, Any] = field(default_factory=dict)
    batch: int | None = None


@dataclass(frozen=True)
class Setting:
    """A job with its place in the table and its model."""

    at: Mapping[str, Any]
    job: BatchCase
    model: str


@dataclass(frozen=True)
class JobRuns:
    """Each job in each mode, measured by one figure of `run_batch`.

    Attributes:
        ranks: devices that hold the model together, at least.
        quantization: format of the papers' shapes; a model of the options has its own.
    """

    settings: tuple[Setting, ...]
    modes: tuple[Mode, ...]
    metric: Metric = "requests_per_s"
    ranks: int = 1
    quantization: Literal["int4"] | None = None

    def places(self) -> list[Mapping[str, Any]]:
        return [setting.at for setting in self.settings]

    def steps(self, bench: Bench) -> list[Step]:
        settings = bench.thin_table(self.settings, attrgetter("at"))
        longest: dict[str, int] = {}
        for one in settings:
            tokens = longest_of(scaled_job(one.job, bench))
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
        vllm, vocabulary = bench.vllm(setting.model, longest, **self._weights(bench))
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
        figures = answered(bench, setting, mode, longest, **self._weights(bench))
        ran = {"requests": figures["requests"], **figures["drawn"]}
        if figures["max_num_seqs"] is not None:
            ran["max_num_seqs"] = figures["max_num_seqs"]
        counted = ("logical_prompt_tokens", "processed_prompt_tokens", "shared_read_tokens")
        counts = {name: figures[name] for name in (*counted, "num_preempted", "saving")}
        counts["planning_share"] = figures["planning_seconds"] / figures["seconds"]
        yield Cell(setting.at, mode.name, figures[self.metric], ran, counts)

    def _weights(self, bench: Bench) -> dict[str, Any]:
        """Options of the engine for the model's weights, where they are not the bench's own."""
        ranks = bench.ranks(self.ranks)
        return {"tensor_parallel_size": ranks, "quantization": self.quantization}


def answered(
    bench: Bench, setting: Setting, mode: Mode, longest: int, **options: Any
) -> dict[str, Any]:
    """Figures of a setting's job in a mode, on a model with room for `longest` tokens."""
    job, told = scaled_job(setting.job, bench), {**mode.options, **options}
    llm = bench.llm(setting.model, longest, mode.share, **told)
    if mode.batch is not None:
        most = batch_of(job, llm.kv_tokens, mode.batch)
        llm = bench.llm(setting.model, longest, mode.share, **told, max_num_seqs=most)
    return run_batch(llm, job)


# ----------------------------------------------------------------------------- the plan alone

VOCABULARY = 32000
PLANS = 3
PAGE = 16  # vLLM's


@dataclass(frozen=True)
class PlanSavings:
    """Figures of each job's plan alone, without a model.

    Either the part of the prompt tokens that need not be computed (BatchLLM, eq. 1), or the seconds
    of planning (the minimum of three).

    Attributes:
        kv_tokens: KV memory of a prefix cache that the job is led through as it comes, in place of
            a plan: the series `lru` (see `computed_with_lru`). None: there is none.
    """

    settings: tuple[tuple[Mapping[str, Any], BatchCase], ...]
    levels: tuple[Levels, ...] = ("one", "all")
    metric: Literal["% saved", "seconds"] = "% saved"
    kv_tokens: int | None = None

    def places(self) -> list[Mapping[str, Any]]:
        return [at for at, _ in self.settings]

    def steps(self, bench: Bench) -> list[Step]:
        settings = bench.thin_table(self.settings, itemgetter(0))
        return [partial(self._measure, bench, *setting) for setting in settings]

    def _measure(self, bench: Bench, at: Mapping[str, Any], case: BatchCase) -> Iterable[Cell]:
        requests = planned_prompts(bench, case)
        total = sum(len(ids) for ids, _ in requests)
        ran = {"requests": len(requests), "prompt_tokens": total}
        for levels in self.levels:
            repeat = PLANS if self.metric == "seconds" else 1
            reports = [_plan(bench, requests, levels).report for _ in range(repeat)]
            report = min(reports, key=lambda each: each.planning_seconds)
            values = {"% saved": 100 * report.saving, "seconds": report.planning_seconds}
            counts = {"computed_tokens": report.processed_tokens}
            yield Cell(at, levels, values[self.metric], ran, counts)
        if self.kv_tokens is not None:
            # A smaller job has fewer tokens by both its requests and their lengths.
            smaller = bench.scale**2 * bench.part if _shares(bench) else 0
            kv_tokens = round(self.kv_tokens * smaller)
            computed = computed_with_lru(requests, kv_tokens, bench.size(PAGE))
            counts, ran = {"computed_tokens": computed}, ran | {"kv_tokens": kv_tokens}
            yield Cell(at, "lru", 100 * saving_ratio(computed, total), ran, counts)


def computed_with_lru(
    requests: Iterable[tuple[Sequence[int], int]], kv_tokens: int, page: int
) -> int:
    """Prompt tokens that a prefix cache computes whose least recently used pages go first. Requests
    run one after another, and each prompt's last token is computed.

    Args:
        requests: token ids of each prompt, and the tokens that are sampled.
        kv_tokens: that the cache holds, in whole pages.
        page: tokens of a page; only full ones are found again.
    """
    held: dict[object, None] = {}  # the least recently used first
    computed = 0
    for ids, output in requests:
        keys: list[object] = [None]
        for at in range(0, len(ids) - page + 1, page):
            keys.append(hash((keys[-1], *ids[at : at + page])))
        found = next((i for i, key in enumerate(keys[1:]) if key not in held), len(keys) - 1)
        computed += len(ids) - page * min(found, (len(ids) - 1) // page)
        own = -(-(len(ids) + output) // page) - len(keys) + 1
        # The ends of a request go before what is above them.
        for key in [*(object() for _ in range(own)), *keys[:0:-1]]:
            held.pop(key, None)
            held[key] = None
        for key in list(islice(held, max(0, len(held) - kv_tokens // page))):
            del held[key]
    return computed


def planned_prompts(bench: Bench, case: BatchCase) -> list[tuple[list[int], int]]:
    """Token ids and output length of each request of a job at the bench's scale."""
    return scaled_job(case, bench).requests(VOCABULARY)


def _plan(bench: Bench, requests: list[tuple[list[int], int]], levels: Levels = "all") -> JobPlan:
    """Plan requests; the plan shares nothing if the engine's options share nothing."""
    prompts, outputs = zip(*requests, strict=True)
    least = 1 if _shares(bench) else max(map(len, prompts))
    return plan_job(prompts, output_lengths=outputs, levels=levels, min_prefix_tokens=least)


def _shares(bench: Bench) -> bool:
    return bench.share("full") in ("full", "storage")
