"""Steps in flight: launched with what the one before sampled, before the host knows that."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onestem.engine.sampling.pending import Pending, PendingBlocks, PendingLogprobs, Words
from onestem.engine.sampling.sampler import Sampler, Step
from onestem.engine.sequence import ScoreSpan, StepChanges
from onestem.engine.step.batch_rows import BatchRows
from onestem.engine.step.choices import ChoiceRows
from onestem.engine.step.runner import Logits, Runner, StepRunner
from onestem.garbage import keep_freed_memory
from onestem.models.decoder import Decoder
from onestem.ops import AttentionImpl
from onestem.pml.documents import BLOCK


@dataclass(frozen=True, eq=False)
class InFlightStep:
    """What a launched step will give.

    Attributes:
        changes: how it differed from the one before it.
        sids, generations: int64 `[n]`, of each sample; a sid of another generation by now is
            another sequence's.
        num_released: rows of the table that had been released when it was launched.
        last: bool `[n]`, samples after which their sequences may have no more.
        is_plain: no sample is looked at as it comes, unless it is an end-of-sequence id.
        num_decodes: samples of rows that decode; the others are the first after prompts.
        sampled: the samples; None: there are none.
        scores: given tokens that are scored, and `scored` their log-probabilities.
        choices: rows of questions, and `attended` what they attend to (`Logits.attended`).
        began: when it was launched, in seconds.
    """

    changes: StepChanges
    sids: NDArray[np.int64]
    generations: NDArray[np.int64]
    num_released: int
    last: NDArray[np.bool_]
    is_plain: bool
    num_decodes: int
    sampled: PendingBlocks | None
    scores: list[ScoreSpan]
    scored: PendingLogprobs | None
    choices: Seq[ChoiceRows]
    attended: Words | None
    began: float


@dataclass(eq=False, repr=False)
class Launcher:
    """Launches steps: the model's forward pass over the batch's rows, then their samples.

    Attributes:
        in_flight: steps that are not committed, the oldest first.
        began: when the last one was launched, in seconds.
    """

    runner: StepRunner
    sampler: Sampler
    in_flight: list[InFlightStep] = field(default_factory=list)
    began: float = 0.0
    _steps: list[Step] = field(default_factory=list)  # how rows that stay sample: of each block
    _needs_host: bool = True  # whether some are looked at as they come

    def follows(self, batch_rows: BatchRows) -> bool:
        """Whether the step launched last samples the token of each row that decodes, or nothing is
        in flight: else what is in flight is taken before the next launch."""
        return not self.in_flight or bool(
            (batch_rows.table.launched_row[batch_rows.rows.sid] >= 0).all()
        )

    def forward(self, batch_rows: BatchRows) -> Logits:
        """Logits of the step."""
        self.began = time.perf_counter()
        prepared: Any = self.runner.prepare(batch_rows.inputs, batch_rows.new_pages)
        return self.runner.run(batch_rows.inputs, prepared, self._ids(batch_rows))

    def _ids(self, batch_rows: BatchRows) -> Tensor | None:
        """The decodes' tokens on the device; None: the step's inputs have them."""
        sids = batch_rows.rows.sid
        if not self.in_flight or not len(batch_rows):
            batch_rows.inputs.token_ids[: len(batch_rows)] = batch_rows.table.last_id[sids]
            return None
        sampled = self.in_flight[-1].sampled
        assert sampled is not None
        rows = batch_rows.table.launched_row[sids]
        if np.array_equal(rows, np.arange(len(rows))):
            return sampled.ids[: len(rows)]
        return sampled.ids[self.runner.on_device(rows)]

    def sample(self, batch_rows: BatchRows, changes: StepChanges, logits: Logits) -> None:
        """Sample and score the step's rows. Nothing is waited for."""
        table, sids = batch_rows.table, batch_rows.sampled
        with torch.inference_mode():
            sampled = self._sample(batch_rows, logits.samples) if len(sids) else None
            scored = self._score(batch_rows.inputs.scores, logits)
        if batch_rows.new_pages is None:
            table.note_launched(sids)
            self._needs_host = bool(table.needs_host[sids].any())
        last = table.computed[sids] >= table.end[sids]
        is_plain = not self._needs_host and len(batch_rows) == len(sids) and not last.any()
        launched = InFlightStep(
            changes=changes,
            sids=sids,
            generations=batch_rows.generations,
            num_released=table.num_released,
            last=last,
            is_plain=is_plain,
            num_decodes=len(batch_rows),
            sampled=sampled,
            scores=batch_rows.inputs.scores,
            scored=scored,
            choices=batch_rows.inputs.choices,
            attended=None if logits.attended is None else Words([logits.attended]),
            began=self.began,
        )
        self.in_flight.append(launched)

    def _sample(self, batch_rows: BatchRows, blocks: Iterable[Tensor]) -> PendingBlocks:
        masked = self._masked(batch_rows)
        if batch_rows.new_pages is None or masked:
            self._steps = []
        parts: list[Pending] = []
        first = 0
        for logits in blocks:
            if len(parts) == len(self._steps):
                rows = batch_rows.sampled[first : first + len(logits)]
                self._steps.append(self._step(batch_rows, rows, [row - first for row in masked]))
            parts.append(self.sampler.launch(logits, self._steps[len(parts)]))
            first += len(logits)
            del logits  # before the next block is made
        if masked:
            self._steps = []
        return PendingBlocks(parts)

    def _step(self, batch_rows: BatchRows, sids: NDArray[np.int64], masked: list[int]) -> Step:
        """How these sids sample. `masked`: counted from the first of them; may be out of range."""
        records, listed = batch_rows.table.records[sids].copy(), sids.tolist()
        records["token"] = (batch_rows.table.computed - batch_rows.table.num_prompt)[sids]
        return Step(
            records,
            lambda i: batch_rows.table.sampling_row(listed[i]),
            self.sampler,
            masked=[row for row in masked if 0 <= row < len(listed)],
        )

    def _masked(self, batch_rows: BatchRows) -> list[int]:
        """Samples that a grammar masks; the host has seen all their tokens."""
        if not batch_rows.table.masked:
            return []
        found = np.flatnonzero(np.isin(batch_rows.sampled, list(batch_rows.table.masked)))
        return [i for i in found.tolist() if batch_rows.table.fill_mask(int(batch_rows.sampled[i]))]

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
        self.in_flight.clear()
        self._steps = []
        self.runner.abandon()


def part_size(impl: AttentionImpl, decoder: Decoder, page_size: int) -> int:
    """`PagePool.part`."""
    whole = any(impl.head_major(size, decoder.dtype) for size, _ in decoder.part.head_shapes)
    if whole or not impl.takes_parts or decoder.config.asks_for_places:
        return 0
    return math.gcd(page_size, BLOCK)


def make_runner(decoder: Decoder, impl: AttentionImpl, **options: Any) -> Runner:
    """The model's runner: with CUDA graphs where they can hold the attention."""
    if decoder.device.type == "cpu":
        keep_freed_memory()
    if impl.name == "cpu":
        from onestem.engine.step.cpu import CpuRunner

        return CpuRunner(decoder, impl, **options)
    if decoder.device.type != "cuda" or impl.name != "triton":
        return Runner(decoder, impl, **options)
    from onestem.engine.step.graphs import GraphRunner

    runner = GraphRunner(decoder, impl, **options)
    runner.warm_up()
    return runner
