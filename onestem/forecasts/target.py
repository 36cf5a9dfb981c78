"""A model on a device, which need not be this machine's, and what jobs take there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch

from onestem.build import GPU_SHARE, kv_memory_bytes, kv_sizes, pick_device, pick_dtype, set_threads
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
from onestem.cost.work import IntArray
from onestem.errors import ConfigError
from onestem.forecasts.dealt import (
    STEAL_REQUESTS,
    Dealt,
    ReplicasForecast,
    dealt_otherwise,
    dealt_parts,
)
from onestem.models.config import ModelConfig
from onestem.models.part import part_of
from onestem.models.ranks import Ranks
from onestem.models.sizes import formats_of, weight_bytes
from onestem.options import EngineOptions, Quantize, ShareMode, parse_memory
from onestem.planner import Deal, JobPlan
from onestem.planner.deal import simulate

if TYPE_CHECKING:
    from onestem.llm import LLM

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
        if predicts and config.delta is not None:
            raise ConfigError(
                f"{config.architecture} keeps recurrent states, and no rates of these are known: "
                "give --no-predict"
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
            find = partial(_given, None)
        most, size = llm.engine.limits.step_tokens, llm.options.page_size
        return Target(shape, llm.kv_tokens, find, size, most, llm.options.max_num_seqs)

    def settled(self) -> Target:
        """The same, for another process: with the rates that are known here."""
        return replace(self, find_rates=partial(_given, self.rates))

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
            return dealt_otherwise(plan, work, replicas, how), 0
        costs = deal_costs(plan, np.arange(len(plan.order)), self.weights(work, share))
        deal = Deal(costs, np.ones(replicas))
        simulate(deal, deal.speeds, STEAL_REQUESTS)
        return deal.owner.astype(np.int64), deal.num_cuts

    def report(self, work: Work) -> dict[str, Any] | None:
        """What a job will take in each mode; None where nothing is to be predicted."""
        if self.rates is None:
            return None
        return {
            "device": self.rates.device,
            "rates": self.rates.source,
            **{share: asdict(self.forecast(work, share)) for share in MODES},
        }

    def report_dealt(self, plan: JobPlan, work: Work, replicas: int) -> dict[str, Any]:
        """What a job will take on several engines like this, for each way to deal it."""
        found: dict[str, Any] = {"replicas": replicas}
        for how in get_args(Dealt):
            dealt = self.forecast_dealt(plan, work, "full", replicas, how)
            found[how] = dealt.to_dict()
        best = self.forecast(work, "full").computed_prompt_tokens
        again = found["groups"]["computed_prompt_tokens"] - best
        found["groups"]["computed_again_tokens"] = again
        return found


def _given(rates: Rates | None) -> Rates | None:
    return rates


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
    pages, _ = kv_sizes(memory, options, shape.token_bytes, shape.state_bytes)
    most = options.max_step_tokens or 0
    return Target(shape, pages * size, find, size, most, options.max_num_seqs)
