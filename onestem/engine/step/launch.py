"""Steps on their way: launched with what the one before sampled, before that is known here."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onestem.engine.sampling.sampled import Pending, PendingLogprobs
from onestem.engine.sampling.sampler import Sampler, Step
from onestem.engine.schedule.edits import Edits
from onestem.engine.step.flight import Flight
from onestem.engine.step.inputs import ScoreRow
from onestem.engine.step.order import Order
from onestem.engine.step.runner import Runner
from onestem.engine.step.slots import Slots

__all__ = ["Launcher"]


class Launcher:
    """Launches steps: the model's forward pass over the order's rows, then their samples.

    Attributes:
        runner: of the model.
        flights: steps that are not committed, the oldest first.
        began: when the last one was launched, in seconds.
    """

    def __init__(self, runner: Runner, sampler: Sampler, slots: Slots) -> None:
        self.runner = runner
        self.flights: list[Flight] = []
        self._sampler = sampler
        self._slots = slots
        self._step: Step | None = None  # how rows sample, while they stay the same
        self._is_watched = True  # some of them, as their tokens come
        self.began = 0.0

    @property
    def has_masks(self) -> bool:
        """Whether some sequences have a grammar."""
        return bool(self._slots.masked)

    def follows(self, order: Order) -> bool:
        """Whether the step launched last samples the token of each row that decodes, or nothing is
        in flight: else what is in flight is taken before the next launch."""
        return not self.flights or bool((self._slots.flight_row[order.rows.slot] >= 0).all())

    def forward(self, order: Order) -> Tensor:
        """Logits float32 `[num_logits, vocab]` of the order's step."""
        self.began = time.perf_counter()
        prepared: Any = self.runner.prepare(order.inputs, order.change)
        return self.runner.run(order.inputs, prepared, self._ids(order))

    def _ids(self, order: Order) -> Tensor | None:
        """The decodes' tokens on the device; None: the step's inputs have them."""
        slots = order.rows.slot
        if not self.flights or not len(order):
            order.inputs.token_ids[: len(order)] = self._slots.last_id[slots]
            return None
        sampled = self.flights[-1].sampled
        assert sampled is not None
        rows = self._slots.flight_row[slots]
        if np.array_equal(rows, np.arange(len(rows))):
            return sampled.ids[: len(rows)]
        return sampled.ids[self.runner.on_device(rows)]

    def sample(self, order: Order, edits: Edits, logits: Tensor) -> Flight:
        """Sample and score the step's rows. Nothing is waited for."""
        columns, slots = self._slots, order.sampled
        with torch.inference_mode():
            sampled = self._sample(order, logits[: len(slots)]) if len(slots) else None
            scored = self._score(order.inputs.scores, logits[len(slots) :])
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

    def _sample(self, order: Order, logits: Tensor) -> Pending:
        masked = self._masked(order)
        if order.change is None or masked or self._step is None:
            records = self._slots.records[order.sampled].copy()
            records["token"] = (self._slots.computed - self._slots.num_prompt)[order.sampled]
            rows = order.sampled.tolist()
            self._step = Step(
                records,
                lambda i: self._slots.sampling_row(rows[i]),
                self._sampler,
                masked=masked,
            )
        pending = self._sampler.launch(logits, self._step)
        if masked:
            self._step = None
        return pending

    def _masked(self, order: Order) -> list[int]:
        """Samples that a grammar masks; the host has seen all their tokens."""
        if not self._slots.masked:
            return []
        found = np.flatnonzero(np.isin(order.sampled, list(self._slots.masked)))
        return [i for i in found.tolist() if self._slots.fill_mask(int(order.sampled[i]))]

    def _score(self, scores: list[ScoreRow], logits: Tensor) -> PendingLogprobs | None:
        if not scores:
            return None
        targets = [row.sequence.tokens[row.index + 1] for row in scores]
        counts = [row.sequence.num_alternatives for row in scores]
        return self._sampler.logprobs(logits, targets, counts)

    def abandon(self) -> None:
        """What is in flight is computed again."""
        self.flights.clear()
        self._step = None
