"""The rows that sample, and what their parameters mean for a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from onestem.request import SamplingParams

__all__ = ["SamplingDefaults", "SamplingRow", "SamplingSettings"]


def _nothing() -> Sequence[int]:
    return ()


@dataclass(slots=True, eq=False)
class SamplingRow:
    """One sequence that samples. The engine keeps it from the first token to the last.

    Attributes:
        params: the request's; the same object at every step (what it means is kept by identity, as
            long as there is the object).
        seed: the request's 64-bit seed, `params.seed` or drawn.
        sequence_index: which of the request's n sequences.
        token_index: how many tokens it has sampled so far.
        prompt_token_ids: of the request; the same object at every step, never changed.
        output_token_ids: gives the ids sampled so far; asked where a penalty is set.
        stop_ids: ids that may not be sampled before `params.min_tokens` (end of sequence unless
            `ignore_eos`, and `stop_token_ids`).
        allowed_mask: from the grammar: bits packed in int32 `[ceil(vocab / 32)]`, lowest bit first;
            what a mask does not reach is forbidden.
        place, record, prompt_ids: the sampler's own: of its state of penalties (-1: none), the
            `ROW` that the device gets, as far as it does not change, and the prompt's distinct ids.
    """

    params: SamplingParams
    seed: int
    sequence_index: int = 0
    token_index: int = 0
    prompt_token_ids: Sequence[int] | NDArray[np.integer] = ()
    output_token_ids: Callable[[], Sequence[int] | NDArray[np.integer]] = _nothing
    stop_ids: Collection[int] = ()
    allowed_mask: Tensor | None = None
    place: int = -1
    record: bytes = b""
    prompt_ids: NDArray[np.int64] | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """`SamplingParams` with the model's defaults filled in and the neutral values named."""

    temperature: float
    top_k: int  # 0 where off
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
    def penalised(self) -> bool:
        counts = self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        return counts or self.repetition_penalty != 1.0


class SamplingDefaults(Protocol):
    """The model's own defaults (`generation_config.json`); None where it is silent."""

    @property
    def temperature(self) -> float | None: ...
    @property
    def top_k(self) -> int | None: ...
    @property
    def top_p(self) -> float | None: ...
    @property
    def min_p(self) -> float | None: ...
    @property
    def repetition_penalty(self) -> float | None: ...
