"""The rows that sample, and what their parameters mean for a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from onestem.request import SamplingParams


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
    output_token_ids: Callable[[], Sequence[int] | NDArray[np.integer]] = tuple
    stop_ids: Collection[int] = ()
    allowed_mask: Tensor | None = None
    place: int = -1
    record: bytes = b""
    prompt_ids: NDArray[np.int64] | None = field(default=None, repr=False)


class SamplingSettings(NamedTuple):
    """What `SamplingParams` mean for a model.

    Attributes:
        record: `ROW` `[]`, as far as all rows with these parameters have the same.
        bias_ids, bias_values: int64, float32 `[n]`, what is added to logits.
    """

    record: NDArray[np.void]
    bias_ids: NDArray[np.int64]
    bias_values: NDArray[np.float32]

    @property
    def penalised(self) -> bool:
        """Whether a penalty changes the logits."""
        counts = self.record["presence"] != 0 or self.record["frequency"] != 0
        return bool(counts or self.record["repetition"] != 1)
