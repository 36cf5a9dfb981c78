"""What a job will take, and afterwards what came true: the cost model of a model on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from onestem.cost import (
    Forecast,
    Limits,
    ModelShape,
    Rates,
    StepCost,
    Work,
    forecast,
    named_devices,
    named_rates,
)
from onestem.cost.measure import known_rates, rates_here
from onestem.errors import ConfigError
from onestem.llm import GPU_SHARE, kv_memory_bytes, pages_of, pick_device, pick_dtype, set_threads
from onestem.models.config import ModelConfig
from onestem.models.weights import formats_of, weight_bytes
from onestem.options import EngineOptions, Quantize, ShareMode, parse_memory
from onestem.request import Request, RequestOutput

if TYPE_CHECKING:
    from onestem.batch import SpooledPrompts
    from onestem.llm import LLM
    from onestem.planner import JobPlan

__all__ = ["JobWatch", "Target", "Verdict"]

IntArray = npt.NDArray[np.int64]

MODES: tuple[ShareMode, ...] = ("full", "storage", "off")


@dataclass(frozen=True)
class Target:
    """A model on a device, which need not be here.

    Attributes:
        kv_tokens: what its KV memory holds.
        find_rates: gives the device's rates; None: nothing is to be predicted.
        page_size: tokens in a page of it.
        step_tokens: rows of a step; 0: as many as the rates say.
    """

    shape: ModelShape
    kv_tokens: int
    find_rates: Callable[[], Rates | None]
    page_size: int
    step_tokens: int

    @cached_property
    def rates(self) -> Rates | None:
        """The device's; looked for, or measured, when they are first asked for."""
        return self.find_rates()

    @staticmethod
    def of(options: EngineOptions, config: ModelConfig, *, predicts: bool) -> Target:
        """Of the engine that options describe; its device may be one of `named_devices`.

        Raises:
            ConfigError: there is no such device, or the model does not fit.
        """
        if options.device in named_devices():
            return _named(options, config, predicts)
        set_threads(options.threads)
        try:
            device = pick_device(options.device)
        except ConfigError as error:
            known = ", ".join(named_devices())
            raise ConfigError(f"{error}, or for a plan: {known}") from None
        dtype = pick_dtype(options.dtype, config, device)
        shape = ModelShape.of(config, dtype.itemsize, on_gpu=device.type == "cuda")
        config, form = _formed(options, config)
        loading = weight_bytes(config, dtype, device, formats_of(config, options.quantization))
        memory = kv_memory_bytes(options.kv_memory, device, loading=loading)
        find = partial(rates_here, config, dtype, device, form) if predicts else lambda: None
        return _target(options, shape, memory, find)

    @staticmethod
    def of_llm(llm: LLM) -> Target:
        """Of an engine that is here; without rates where they were never measured."""
        on_gpu = llm.device.type == "cuda"
        shape = ModelShape.of(llm.config, llm.dtype.itemsize, on_gpu=on_gpu)
        _, form = _formed(llm.options, llm.config)
        find = partial(known_rates, llm.config, llm.dtype, llm.device, form)
        most, size = llm.engine.scheduler.budget.most, llm.options.page_size
        return Target(shape, llm.kv_tokens, find, size, most)

    def forecast(self, work: Work, share: ShareMode) -> Forecast:
        """Of a job in one of the engine's modes.

        Raises:
            ConfigError: no rates are known.
        """
        if self.rates is None:
            raise ConfigError("no rates of this device are known: onestem plan measures them")
        cost = StepCost(self.shape, self.rates, shared=share == "full")
        most = self.step_tokens or self.rates.step_tokens
        limits = Limits(most, self.kv_tokens, self.page_size)
        return forecast(cost, work.unshared() if share == "off" else work, limits)

    def report(
        self, plan: JobPlan, prompts: SpooledPrompts, outputs: IntArray
    ) -> dict[str, Any] | None:
        """What a plan will take in each mode; None where nothing is to be predicted.

        Args:
            outputs: `[num_requests]` tokens that all answers to each may have; 0: not said.
        """
        if self.rates is None:
            return None
        work = Work.of(plan, np.maximum(outputs, 1), prompts.answers())
        return {
            "device": self.rates.device,
            "rates": self.rates.source,
            "unknown_lengths": int((outputs == 0).sum()),
            **{share: self.forecast(work, share).to_dict() for share in MODES},
        }


def _formed(options: EngineOptions, config: ModelConfig) -> tuple[ModelConfig, Quantize | None]:
    """The configuration of the weights that are there, and the format that their rates are measured
    in."""
    if options.makes_weights_up:
        config = replace(config, quantization=None)
    stored = config.quantization
    return config, options.quantization or (None if stored is None else stored.nearest)


def _named(options: EngineOptions, config: ModelConfig, predicts: bool) -> Target:
    """On a device that is not here."""
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
    return Target(shape, pages * size, find, size, options.max_step_tokens or 0)


# ------------------------------------------------------------------------------------- afterwards


@dataclass(frozen=True)
class Verdict:
    """What came true of a prediction.

    Attributes:
        predicted: before the job, of the lengths that its lines allow.
        at_lengths: of the lengths that its answers had.
        seconds, steps, rows: what it took.
    """

    predicted: Forecast
    at_lengths: Forecast
    seconds: float
    steps: int
    rows: int

    def lines(self) -> Iterator[str]:
        """As a person is told."""
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
    """Watches a job of an `LLM`, to say afterwards what came true of its prediction.

    Attributes:
        target: where it runs.
    """

    def __init__(self, llm: LLM) -> None:
        self.target = Target.of_llm(llm)
        self._llm = llm
        self._plan: JobPlan | None = None
        self._outputs: IntArray | None = None
        self._answers: IntArray | None = None
        self._prompts: SpooledPrompts | None = None
        self._lengths: dict[str, int] = {}

    def planner(self, planner: Callable[..., JobPlan]) -> Callable[..., JobPlan]:
        """The same planner, whose first plan is noted: those after it are of lines that an engine
        died at, one at a time."""

        def plan(prompts: SpooledPrompts, *, output_lengths: IntArray | None) -> JobPlan:
            made = planner(prompts, output_lengths=output_lengths)
            if self._plan is None and self.target.rates is not None:
                self._plan, self._prompts, self._outputs = made, prompts, output_lengths
                self._answers = prompts.answers()
            return made

        return plan

    def run(
        self, run: Callable[[Iterable[Request]], Iterator[RequestOutput]]
    ) -> Callable[[Iterable[Request]], Iterator[RequestOutput]]:
        """The same engine, whose answers' lengths are noted."""

        def answered(requests: Iterable[Request]) -> Iterator[RequestOutput]:
            for output in run(requests):
                self._lengths[output.request_id] = sum(len(o.token_ids) for o in output.outputs)
                yield output

        return answered if self.target.rates is not None else run

    def verdict(self, seconds: float) -> Verdict | None:
        """After a job that took so long; None where nothing was predicted."""
        if self._plan is None:
            return None
        share, stats = self._llm.engine.share, self._llm.engine.stats
        came = self._outputs_that_came()
        before = Work.of(self._plan, self._outputs, self._answers)
        after = Work.of(self._plan, came, self._answers)
        firsts = len(came) if self._answers is None else int(self._answers.sum())
        rows = stats.processed_prompt_tokens + stats.output_tokens - firsts
        return Verdict(
            predicted=self.target.forecast(before, share),
            at_lengths=self.target.forecast(after, share),
            seconds=seconds,
            steps=stats.steps,
            rows=rows,
        )

    def _outputs_that_came(self) -> IntArray:
        """`[num_requests]` in the order of the plan's input."""
        assert self._plan is not None
        assert self._prompts is not None
        came = np.ones(len(self._plan.order), np.int64)
        for name, tokens in self._lengths.items():
            came[self._prompts.place_of(name)] = tokens
        return came
