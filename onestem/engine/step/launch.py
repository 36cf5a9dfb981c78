"""Steps in flight: launched with what the one before sampled, before the host knows that."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onestem.engine.sampling.pending import Pending, PendingBlocks, PendingLogprobs
from onestem.engine.sampling.sampler import Sampler, Step
from onestem.engine.sequence import Edits, ScoreSpan
from onestem.engine.step.order import Order
from onestem.engine.step.runner import Logits, Runner, StepRunner
from onestem.garbage import keep_freed_memory
from onestem.models.decoder import Decoder
from onestem.ops import AttentionImpl

__all__ = ["Flight", "Launcher", "make_runner"]


@dataclass(frozen=True, eq=False)
class Flight:
    """What a launched step will give.

    Attributes:
        edits: how it differed from the one before it.
        slots, generations: int64 `[n]`, of each sample; a slot of another generation by now is
            another sequence's.
        num_released: slots that had been released when it was launched.
        last: bool `[n]`, samples after which their sequences may have no more.
        is_plain: no sample is looked at as it comes, unless it is an end-of-sequence id.
        num_decodes: samples of rows that decode; the others are the first after prompts.
        sampled: the samples; None: there are none.
        scores: given tokens that are scored, and `scored` their log-probabilities.
        began: when it was launched, in seconds.
    """

    edits: Edits
    slots: NDArray[np.int64]
    generations: NDArray[np.int64]
    num_released: int
    last: NDArray[np.bool_]
    is_plain: bool
    num_decodes: int
    sampled: PendingBlocks | None
    scores: list[ScoreSpan]
    scored: PendingLogprobs | None
    began: float


class Launcher:
    """Launches steps: the model's forward pass over the order's rows, then their samples.

    Attributes:
        runner: of the model.
        sampler: of their samples.
        flights: steps that are not committed, the oldest first.
        began: when the last one was launched, in seconds.
    """

    def __init__(self, runner: StepRunner, sampler: Sampler) -> None:
        self.runner = runner
        self.flights: list[Flight] = []
        self.sampler = sampler
        self._steps: list[Step] = []  # how rows sample, while they stay the same: of each block
        self._is_watched = True  # whether some are looked at as they come
        self.began = 0.0

    def follows(self, order: Order) -> bool:
        """Whether the step launched last samples the token of each row that decodes, or nothing is
        in flight: else what is in flight is taken before the next launch."""
        return not self.flights or bool((order.slots.flight_row[order.rows.slot] >= 0).all())

    def forward(self, order: Order) -> Logits:
        """Logits of the order's step."""
        self.began = time.perf_counter()
        prepared: Any = self.runner.prepare(order.inputs, order.change)
        return self.runner.run(order.inputs, prepared, self._ids(order))

    def _ids(self, order: Order) -> Tensor | None:
        """The decodes' tokens on the device; None: the step's inputs have them."""
        slots = order.rows.slot
        if not self.flights or not len(order):
            order.inputs.token_ids[: len(order)] = order.slots.last_id[slots]
            return None
        sampled = self.flights[-1].sampled
        assert sampled is not None
        rows = order.slots.flight_row[slots]
        if np.array_equal(rows, np.arange(len(rows))):
            return sampled.ids[: len(rows)]
        return sampled.ids[self.runner.on_device(rows)]

    def sample(self, order: Order, edits: Edits, logits: Logits) -> Flight:
        """Sample and score the step's rows. Nothing is waited for."""
        columns, slots = order.slots, order.sampled
        with torch.inference_mode():
            sampled = self._sample(order, logits.samples) if len(slots) else None
            scored = self._score(order.inputs.scores, logits)
        if order.change is None:
            columns.note_launched(slots)
            self._is_watched = bool(columns.is_watched[slots].any())
        last = columns.computed[slots] >= columns.end[slots]
        is_plain = not self._is_watched and len(order) == len(slots) and not last.any()
        flight = Flight(
            edits=edits,
            slots=slots,
            generations=order.generations,
            num_released=columns.num_released,
            last=last,
            is_plain=is_plain,
            num_decodes=len(order),
            sampled=sampled,
            scores=order.inputs.scores,
            scored=scored,
            began=self.began,
        )
        self.flights.append(flight)
        return flight

    def _sample(self, order: Order, blocks: Iterable[Tensor]) -> PendingBlocks:
        masked = self._masked(order)
        if order.change is None or masked:
            self._steps = []
        parts: list[Pending] = []
        first = 0
        for logits in blocks:
            if len(parts) == len(self._steps):
                rows = order.sampled[first : first + len(logits)]
                self._steps.append(self._step(order, rows, [row - first for row in masked]))
            parts.append(self.sampler.launch(logits, self._steps[len(parts)]))
            first += len(logits)
            del logits  # before the next block is made
        if masked:
            self._steps = []
        return PendingBlocks(parts)

    def _step(self, order: Order, slots: NDArray[np.int64], masked: list[int]) -> Step:
        """How these slots sample. `masked`: counted from the first of them; may be out of range."""
        records, listed = order.slots.records[slots].copy(), slots.tolist()
        records["token"] = (order.slots.computed - order.slots.num_prompt)[slots]
        return Step(
            records,
            lambda i: order.slots.sampling_row(listed[i]),
            self.sampler,
            masked=[row for row in masked if 0 <= row < len(listed)],
        )

    def _masked(self, order: Order) -> list[int]:
        """Samples that a grammar masks; the host has seen all their tokens."""
        if not order.slots.masked:
            return []
        found = np.flatnonzero(np.isin(order.sampled, list(order.slots.masked)))
        return [i for i in found.tolist() if order.slots.fill_mask(int(order.sampled[i]))]

    def _score(self, scores: list[ScoreSpan], logits: Logits) -> PendingLogprobs | None:
        if not scores:
            return None
        wanted = [one.sequence.scoring.num_alternatives for one in scores if one.sequence.scoring]
        return self.sampler.logprobs(
            logits.scored,
            np.concatenate([one.at for one in scores]),
            np.concatenate([one.targets for one in scores]),
            most=max((count for count in wanted if count is not None), default=None),
        )

    def abandon(self) -> None:
        """Drop what is in flight, which is computed again."""
        self.flights.clear()
        self._steps = []


def make_runner(decoder: Decoder, impl: AttentionImpl, **options: Any) -> Runner:
    """The model's runner: with CUDA graphs where they can hold the attention."""
    if decoder.device.type == "cpu":
        keep_freed_memory()
    if decoder.device.type != "cuda" or impl.name != "triton":
        return Runner(decoder, impl, **options)
    from onestem.engine.step.graphs import GraphRunner

    runner = GraphRunner(decoder, impl, **options)
    runner.warm_up()
    return runner
