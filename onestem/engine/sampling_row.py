"""What the sampler is told of one row of a step."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from onestem.request import SamplingParams

__all__ = ["SamplingRow", "SamplingSettings"]


@dataclass(slots=True)
class SamplingRow:
    """One sequence that samples in this step. The engine may keep it and update what changed.

    Attributes:
        params: the request's; the same object at every step (what it means is cached by identity).
        seed: the request's 64-bit seed, `params.seed` or drawn.
        sequence_index: which of the request's n sequences.
        token_index: how many tokens it has sampled so far.
        prompt_token_ids: of the request; the same object at every step, never changed.
        output_token_ids: sampled so far. A list, `array`, or numpy array; both are read only where
            a penalty is set.
        stop_ids: ids that may not be sampled before `params.min_tokens` (end of sequence unless
            `ignore_eos`, and `stop_token_ids`).
        reads_output: whether `output_token_ids` is to be kept up to date (`Sampler.reads_output`).
        allowed_mask: from the grammar: bool `[vocab]`, or bits packed in int32
            `[ceil(vocab / 32)]`, lowest bit first; what a mask does not reach is forbidden.
    """

    params: SamplingParams
    seed: int
    sequence_index: int = 0
    token_index: int = 0
    prompt_token_ids: Sequence[int] | NDArray[np.integer] = ()
    output_token_ids: Sequence[int] | NDArray[np.integer] = ()
    stop_ids: Collection[int] = ()
    allowed_mask: Tensor | None = None
    reads_output: bool = False


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """`SamplingParams` with the model's defaults filled in and the neutral values named."""

    temperature: float
    top_k: int  # vocab size where off
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    bias_ids: NDArray[np.int64]
    bias_values: NDArray[np.float32]
    min_tokens: int
    logprobs: int | None

    @property
    def counts_output(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def changes_logits(self) -> bool:
        return self.repetition_penalty != 1.0 or self.counts_output or len(self.bias_ids) > 0
