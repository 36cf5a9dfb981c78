"""The interface of sampling on a device: what it does with rows of logits."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onestem.ops.sampling.rows import RowTable

__all__ = ["Drawn", "Penalties", "Sampling"]


class Drawn(NamedTuple):
    """Attributes:
    ids: int64 `[n]`, the sampled tokens.
    status: int32 `[n]`: `STATUS_OK`, or why there is no token.
    """

    ids: Tensor
    status: Tensor


class Penalties(Protocol):
    """The tokens that rows have seen, kept on the logits' device. States have places from 0 on."""

    def assign(
        self, place: int, prompt: NDArray[np.integer] | None, output: NDArray[np.integer]
    ) -> None:
        """Replace the state of a place.

        Args:
            prompt: ids that count for repetition alone; None: the row has no repetition penalty.
            output: ids that count for all penalties, in any order.
        """
        ...

    def release(self, place: int) -> None:
        """Free the state of a place until it is assigned again."""
        ...

    def apply(self, logits: Tensor, rows: RowTable) -> None:
        """Change the logits `[n, vocab]` of the rows that have a state, in place. First repetition
        (CTRL's, Keskar et al. 2019: a seen token's logit / p if positive, else * p), then OpenAI's
        penalties (minus frequency * count + presence, over sampled tokens)."""
        ...

    def note(self, rows: RowTable, ids: Tensor) -> None:
        """Note that the rows have sampled these tokens, int64 `[n]`."""
        ...


class Sampling(Protocol):
    """Sampling on one device. `index`, int64 `[m]`, selects rows of logits float32 `[n, vocab]`."""

    @property
    def name(self) -> str: ...

    def draw(self, logits: Tensor, rows: RowTable) -> Drawn:
        """A token for each row, as `onestem.ops.sampling.reference.draw` defines it."""
        ...

    def log_sums(self, logits: Tensor, index: Tensor) -> Tensor:
        """Natural log of the sum of exponentials of each row, `[m]`."""
        ...

    def leading(self, logits: Tensor, index: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Logits and ids (int64) `[m, count]` of the leading tokens: higher logits first, equal
        ones by id. `count` is at most the vocabulary's size."""
        ...

    def ranks(self, logits: Tensor, index: Tensor, ids: Tensor) -> Tensor:
        """Number of tokens before a given one in the order of `leading`, int64 `[m]`."""
        ...

    def penalties(self, vocab_size: int, device: torch.device) -> Penalties:
        """A new store of states, for logits on a device."""
        ...
