"""What a job will take, and afterwards what came true: the cost model of a model on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch

from onestem.batch.lengths import expected_outputs
from onestem.build import GPU_SHARE, kv_memory_bytes, pages_of, pick_device, pick_dtype, set_threads
from onestem.cost import (
    TOKENS,
    Forecast,
    Limits,
    ModelShape,
    Rates,
    StepCost,
    Weights,
    Work,
    deal_costs,
    forecast,
    named_devices,
    named_rates,
)
from onestem.cost.kept import known_rates, rates_here
from onestem.errors import ConfigError
from onestem.models.config import ModelConfig
from onestem.models.part import part_of
from onestem.models.ranks import Ranks
from onestem.models.sizes import formats_of, weight_bytes
from onestem.options import EngineOptions, Quantize, ShareMode, parse_memory
from onestem.planner import Deal, JobPlan
from onestem.planner.deal import simulate
from onestem.request import Request, RequestOutput

if TYPE_CHECKING:
    from onestem.batch import SpooledPrompts
    from onestem.engine.outputs import EngineStats
    from onestem.llm import LLM

__all__ = ["Dealt", "JobWatch", "ReplicasForecast", "Target", "Verdict", "dealt_parts"]

IntArray = npt.NDArray[np.int64]

MODES: tuple[ShareMode, ...] = ("full", "storage", "off")


@dataclass(frozen=True)
class Target:
    """A model on a device, which need not be this machine's.

    Attributes:
        kv_tokens: what its KV memory holds.
        find_rates: gives the device's rates; None: nothing is to be predicted.
        page_size: tokens in a page of it.
        step_tokens: rows of a step; 0: as many as the rates say.
        num_seqs: sequences that run at once; None: any number.
    """

    shape: ModelShape
    kv_tokens: int
    find_rates: Callable[[], Rates | None]
    page_size: int
    step_tokens: int
    num_seqs: int | None = None

    @cached_property
    def rates(self) -> Rates | None:
        """The device's rates; looked up, or measured, when they are first asked for."""
        return self.find_rates()

    @staticmethod
    def of(options: EngineOptions, config: ModelConfig, *, predicts: bool) -> Target:
        """The target of the engine that options describe; its device may be a `named_devices` one.

        Raises:
            ConfigError: there is no such device, the model does not fit, or rates are asked for of
                several devices that hold it together.
        """
        ranks = options.tensor_parallel_size
        if predicts and ranks > 1:
            raise ConfigError(
                f"tensor_parallel_size is {ranks}, and rates are known of one device alone: give "
                "--no-predict"
            )
        config = part_of(config, Ranks(0, ranks, None))
        if options.device in named_devices():
            return _named(options, config, predicts)
        set_threads(options.threads, ranks)
        try:
            device = pick_device(options.device)
        except ConfigError as error:
            known = ", ".join(named_devices())
            raise ConfigError(f"{error}, or for a plan: {known}") from None
        dtype = pick_dtype(options.dtype, config, device)
        shape = ModelShape.of(config, dtype.itemsize, on_gpu=device.type == "cuda")
        config, form = _formed(options, config)
        formats = formats_of(config, options.quantization, dtype, device)
        loading = weight_bytes(config, dtype, device, formats)
        memory = kv_memory_bytes(options.kv_memory, device, loading=loading, ranks=ranks)
        find = partial(rates_here, config, dtype, device, form) if predicts else lambda: None
        return _target(options, shape, memory, find)

    @staticmethod
    def of_llm(llm: LLM) -> Target:
        """The target of a running engine; without rates where they were never measured."""
        on_gpu = llm.device.type == "cuda"
        shape = ModelShape.of(llm.config, llm.dtype.itemsize, on_gpu=on_gpu)
        _, form = _formed(llm.options, llm.config)
        find: Callable[[], Rates | None] = partial(
            known_rates, llm.config, llm.dtype, llm.device, form
        )
        if llm.team is not None:  # rates are those of one device
            find = _Known(None)
        most, size = llm.engine.scheduler.budget.most, llm.options.page_size
        return Target(shape, llm.kv_tokens, find, size, most, llm.options.max_num_seqs)

    def settled(self) -> Target:
        """The same, for another process: with the rates that are known here."""
        return replace(self, find_rates=_Known(self.rates))

    def forecast(self, work: Work, share: ShareMode) -> Forecast:
        """What a job takes in one of the engine's modes.

        Raises:
            ConfigError: no rates are known.
        """
        if self.rates is None:
            raise ConfigError("no rates of this device are known: onestem plan measures them")
        cost, limits = self._costs(share)
        return forecast(cost, work.unshared() if share == "off" else work, limits)

    def _costs(self, share: ShareMode) -> tuple[StepCost, Limits]:
        assert self.rates is not None
        cost = StepCost(self.shape, self.rates, shared=share == "full")
        most = self.step_tokens or self.rates.step_tokens
        return cost, Limits(most, self.kv_tokens, self.page_size, self.num_seqs)

    def weights(self, work: Work, share: ShareMode) -> Weights:
        """What a job's tokens cost here; tokens count alike where no rates are known."""
        if self.rates is None:
            return TOKENS
        return Weights.of(*self._costs(share), work)

    def forecast_dealt(
        self, plan: JobPlan, work: Work, share: ShareMode, replicas: int, how: Dealt = "groups"
    ) -> ReplicasForecast:
        """What a job takes that is dealt to `replicas` engines like this.

        Args:
            work: the job, in the plan's order. Each engine plans what it gets: it keeps this order.
            how: `groups`: as `onestem.replicas` deals. To compare with, requests are dealt
                at `random`, in turn (`round-robin`, in input order), or by the hash of their first
                tokens (`prefix-hash`).
        """
        owner, num_cuts = self.deal(plan, work, share, replicas, how)
        each = [self.forecast(part, share) for part in dealt_parts(work, owner, replicas)]
        return ReplicasForecast(each, replicas, num_cuts)

    def deal(
        self, plan: JobPlan, work: Work, share: ShareMode, replicas: int, how: Dealt
    ) -> tuple[IntArray, int]:
        """The replica of each request (`[num_requests]`, in the plan's order), and how many groups
        are cut; arguments as of `forecast_dealt`."""
        if how != "groups":
            return _dealt_otherwise(plan, work, replicas, how), 0
        costs = deal_costs(plan, np.arange(len(plan.order)), self.weights(work, share))
        deal = Deal(costs, np.ones(replicas))
        simulate(deal, deal.speeds, STEAL_REQUESTS)
        return deal.owner.astype(np.int64), deal.num_cuts

    def report(
        self, plan: JobPlan, prompts: SpooledPrompts, outputs: IntArray
    ) -> dict[str, Any] | None:
        """What a plan will take in each mode; None where nothing is to be predicted.

        Args:
            outputs: `[num_requests]` tokens of all answers to each.
        """
        if self.rates is None:
            return None
        work = Work.of(plan, outputs, prompts.answers())
        return {
            "device": self.rates.device,
            "rates": self.rates.source,
            **{share: self.forecast(work, share).to_dict() for share in MODES},
        }

    def report_dealt(
        self, plan: JobPlan, prompts: SpooledPrompts, outputs: IntArray, replicas: int
    ) -> dict[str, Any]:
        """What a plan will take on several engines like this; arguments as of `report`."""
        work = Work.of(plan, outputs, prompts.answers())
        found: dict[str, Any] = {"replicas": replicas}
        for how in get_args(Dealt):
            dealt = self.forecast_dealt(plan, work, "full", replicas, how)
            found[how] = dealt.to_dict()
        best = self.forecast(work, "full").computed_prompt_tokens
        again = found["groups"]["computed_prompt_tokens"] - best
        found["groups"]["computed_again_tokens"] = again
        return found


Dealt = Literal["groups", "random", "round-robin", "prefix-hash"]
# Requests of a piece that a simulated replica takes at a time.
STEAL_REQUESTS = 16
# Servers' routers hash this number of a prompt's first tokens, or fewer.
HASHED_TOKENS = 256


@dataclass(frozen=True)
class _Known:
    """Rates that are found already."""

    rates: Rates | None

    def __call__(self) -> Rates | None:
        return self.rates


@dataclass(frozen=True)
class ReplicasForecast:
    """What a job takes on several engines.

    Attributes:
        each: forecasts of the engines that have a part of it.
        replicas: how many there are.
        num_cuts: groups cut, once for each cut.
    """

    each: list[Forecast]
    replicas: int
    num_cuts: int

    @property
    def whole(self) -> Forecast:
        """Seconds until the last engine ends, the largest peak KV memory, and sums of the rest."""
        names = [field.name for field in fields(Forecast)]
        whole = {name: sum(getattr(one, name) for one in self.each) for name in names}
        for name in ("seconds", "peak_kv_tokens"):
            whole[name] = max((getattr(one, name) for one in self.each), default=0)
        return Forecast(**whole)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able dict: the whole, `num_cuts`, and the seconds of each engine."""
        seconds = [one.seconds for one in self.each] + [0.0] * (self.replicas - len(self.each))
        return {**self.whole.to_dict(), "num_cuts": self.num_cuts, "replica_seconds": seconds}


def dealt_parts(work: Work, owner: IntArray, replicas: int) -> Iterator[Work]:
    """The part of each replica that gets something.

    Args:
        owner: `[num_requests]` replica of each request, in the plan's order.
    """
    by_owner = np.argsort(owner.astype(np.int32), kind="stable")
    bounds = np.cumsum(np.bincount(owner, minlength=replicas))[:-1]
    parts = np.split(by_owner, bounds)
    return (work.part(positions) for positions in parts if len(positions))


def _dealt_otherwise(plan: JobPlan, work: Work, replicas: int, how: Dealt) -> IntArray:
    """`[num_requests]` replica of each request, in the plan's order."""
    if how == "round-robin":
        return plan.order % replicas
    if how == "random":
        return np.random.default_rng(0).integers(0, replicas, len(plan.order))
    # Requests that share their first HASHED_TOKENS tokens are below one node of that depth.
    depth, parent = plan.tree.depth, plan.tree.parent.tolist()
    deepest = np.minimum(depth, HASHED_TOKENS).tolist()
    key = list(range(len(parent)))
    for node in range(1, len(parent)):
        if deepest[parent[node]] == HASHED_TOKENS:
            key[node] = key[parent[node]]
    reached = np.array(deepest) == HASHED_TOKENS
    drawn = np.random.default_rng(0).integers(0, replicas, len(parent))
    alone = np.random.default_rng(1).integers(0, replicas, len(plan.order))
    return np.where(reached[work.tree.home], drawn[np.array(key)[work.tree.home]], alone)


def _formed(options: EngineOptions, config: ModelConfig) -> tuple[ModelConfig, Quantize | None]:
    """The configuration of the stored weights, and the format that their rates are measured in."""
    if options.makes_weights_up:
        config = replace(config, quantization=None)
    stored = config.quantization
    return config, options.quantization or (None if stored is None else stored.nearest)


def _named(options: EngineOptions, config: ModelConfig, predicts: bool) -> Target:
    """A target on a device that is not this machine's."""
    rates = named_rates(options.device)
    config, _ = _formed(options, config)
    if options.quantization is not None or config.quantization is not None:
        raise ConfigError(
            f"rates of {options.device} are for weights of {rates.dtype}, and the model's are "
            "quantised: plan on the device itself"
        )
    dtype = config.torch_dtype if options.dtype == "auto" else options.dtype
    if dtype != rates.dtype:
        raise ConfigError(
            f"rates of {options.device} are for {rates.dtype}, and the dtype is {dtype}: "
            f"give --dtype {rates.dtype}"
        )
    itemsize = getattr(torch, dtype).itemsize
    shape = ModelShape.of(config, itemsize)
    table = 0 if config.tie_embeddings else shape.hidden_size * shape.vocab_size
    table += config.num_layers * config.token_vectors * shape.vocab_size
    weights = shape.weight_bytes + table * itemsize
    left = rates.memory_bytes - weights
    if left <= 0:
        raise ConfigError(
            f"the model takes {weights / 2**30:.1f} GiB, {rates.device} has "
            f"{rates.memory_bytes / 2**30:.1f}: choose another device"
        )
    auto = options.kv_memory == "auto"
    memory = int(GPU_SHARE * left) if auto else parse_memory(options.kv_memory)
    if memory > left:
        raise ConfigError(
            f"kv_memory is {options.kv_memory}, {rates.device} has {left / 2**30:.1f} GiB beside "
            "the model: lower it"
        )
    return _target(options, shape, memory, lambda: rates if predicts else None)


def _target(
    options: EngineOptions, shape: ModelShape, memory: int, find: Callable[[], Rates | None]
) -> Target:
    size = options.page_size
    pages = pages_of(memory, size, shape.token_bytes * size)
    most = options.max_step_tokens or 0
    return Target(shape, pages * size, find, size, most, options.max_num_seqs)


# ------------------------------------------------------------------------------------- afterwards


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
        num_replicas: engines that the job is dealt to.

    Attributes:
        target: where it runs; of replicas, one of them.
        stats: of all engines together.
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
        self._share, self._num_replicas = share, num_replicas
        self._max_model_len = max_model_len
        self._plan: JobPlan | None = None
        self._outputs: IntArray | None = None
        self._answers: IntArray | None = None
        self._prompts: SpooledPrompts | None = None
        self._came: IntArray = np.ones(0, np.int64)  # tokens of each request's answers

    @staticmethod
    def of_llm(llm: LLM) -> JobWatch:
        """A watch of a running engine."""
        most = llm.engine.max_model_len
        return JobWatch(Target.of_llm(llm), llm.engine.share, lambda: llm.engine.stats, most)

    def planner(self, planner: Callable[..., JobPlan]) -> Callable[..., JobPlan]:
        """The same planner, whose first plan is noted. Later plans are of single lines at which an
        engine died."""

        def plan(prompts: SpooledPrompts, *, output_lengths: IntArray | None) -> JobPlan:
            made = planner(prompts, output_lengths=output_lengths)
            if self._plan is None and self.target.rates is not None:
                self._plan, self._prompts = made, prompts
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
        if self._plan is None:
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
        assert self._plan is not None
        work = Work.of(self._plan, outputs, self._answers)
        if self._num_replicas == 1:
            return self.target.forecast(work, self._share)
        return self.target.forecast_dealt(self._plan, work, self._share, self._num_replicas).whole
