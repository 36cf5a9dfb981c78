"""`Scores`: what attention does to the products of queries and keys."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from onestem.errors import ConfigError


@dataclass(frozen=True, eq=False)
class Scores:
    """What attention does to the products of queries and keys.

    Attributes:
        scale: a factor, above 0 for Triton; None: `1 / sqrt(head_dim)`.
        softcap: above 0; scores become `softcap * tanh(score / softcap)` before ALiBi.
        alibi_slopes: float32 `[num_q_heads]` on q's device; adds `slope * (p_key - p_row)`.
    """

    scale: float | None = None
    softcap: float | None = None
    alibi_slopes: Tensor | None = None

    def factor(self, head_dim: int) -> float:
        """The scale for heads of this size."""
        return 1 / math.sqrt(head_dim) if self.scale is None else self.scale

    def check(self, q: Tensor) -> None:
        """Raise `ConfigError` unless all fit q `[num_rows, num_q_heads, head_dim]`."""
        if self.scale is not None and not math.isfinite(self.scale):
            raise ConfigError(f"scale is {self.scale}, expected a finite number")
        if self.softcap is not None and not 0 < self.softcap < math.inf:
            raise ConfigError(
                f"softcap is {self.softcap}, expected a positive number, or None for none"
            )
        if self.alibi_slopes is None:
            return
        slopes = self.alibi_slopes
        kind = (slopes.dtype, slopes.device, tuple(slopes.shape))
        if kind != (torch.float32, q.device, (q.shape[1],)):
            raise ConfigError(
                f"alibi_slopes are {kind[0]} {list(kind[2])} on {kind[1]}, expected torch.float32 "
                f"[{q.shape[1]}] on {q.device}: one slope for each query head"
            )


PLAIN = Scores()
