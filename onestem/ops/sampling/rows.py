"""The table of sampled rows that a device gets."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onestem.ops.copies import on_device

# Status of a draw, besides its token.
STATUS_OK, STATUS_NOT_FINITE, STATUS_MASKED = 0, 1, 2

#: Sixteen 32-bit words, which kernels know by their places. seed: of the request; sequence: index
#: among its n; token: tokens sampled so far. temperature: 0 is greedy. top_k: 0 is off. penalty:
#: the place of its state (`Penalties`), -1 for none. The rest is the sampler's own: told: number of
#: log-probabilities wanted besides the token's, plus one; min_tokens; biased.
ROW = np.dtype(
    [
        ("seed_low", np.uint32),
        ("seed_high", np.uint32),
        ("sequence", np.uint32),
        ("token", np.uint32),
        ("temperature", np.float32),
        ("top_k", np.int32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("repetition", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("penalty", np.int32),
        ("told", np.int32),
        ("min_tokens", np.int32),
        ("biased", np.int32),
        ("spare", np.int32),
    ]
)


IDLE = np.zeros((), ROW)
"""A row that stands for nobody: greedy, which costs least."""
IDLE["top_p"] = IDLE["repetition"] = 1
IDLE["penalty"] = -1


class RowTable:
    """The rows of a step. One table serves many steps of the same rows, as `steps` grows.

    Args:
        rows: `ROW` `[n]`.
        device: where the logits are.

    Attributes:
        steps: tokens that every row has sampled beyond its `token`.
        prepared: what an implementation has prepared from the rows, by its name.
    """

    def __init__(self, rows: NDArray[np.void], device: torch.device) -> None:
        self.rows = rows
        self.steps = 0
        self.prepared: dict[str, object] = {}
        self.device = device

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def words(self) -> Tensor:
        """int32 `[n, 16]` on the device."""
        words = self.rows.view(np.int32).reshape(len(self.rows), len(ROW.names or ()))
        return on_device(words, self.device)

    @cached_property
    def draws(self) -> NDArray[np.bool_]:
        """Which rows are not greedy."""
        drawn: NDArray[np.bool_] = self.rows["temperature"] > 0
        return drawn

    @cached_property
    def filtered(self) -> NDArray[np.bool_]:
        """Which rows draw from a part of the vocabulary."""
        rows = self.rows
        cut: NDArray[np.bool_] = (rows["top_k"] > 0) | (rows["top_p"] < 1) | (rows["min_p"] > 0)
        return cut & self.draws

    @cached_property
    def penalised(self) -> NDArray[np.int64]:
        """Rows that have a state of penalties."""
        return np.flatnonzero(self.rows["penalty"] >= 0)

    @cached_property
    def penalised_there(self) -> Tensor:
        """`penalised` on the device."""
        return self.index(self.penalised)

    def index(self, rows: NDArray[np.integer]) -> Tensor:
        """Row numbers, int64 on the device."""
        return on_device(np.ascontiguousarray(rows, np.int64), self.device)
