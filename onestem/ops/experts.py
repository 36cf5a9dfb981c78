"""Weights of all experts of a layer in one tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["MAX_POWER", "MX_BLOCK", "GroupedWeight"]

# Values that share a scale in mxfp4 (OCP Microscaling Formats 1.0, section 5.2).
MX_BLOCK = 32

# The largest scale (2) that a product widens inside: weights of up to 12.
MAX_POWER = 128

# e2m1: sign, two bits of exponent, one of mantissa.
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1 = (*_POSITIVE, *(-value for value in _POSITIVE))


@dataclass(frozen=True, eq=False)
class GroupedWeight:
    """A weight of every expert, and their biases.

    Attributes:
        values: `[num, out_features, in_features]`, or in mxfp4 uint8 `[num, out_features,
            in_features / 2]`: two e2m1 values each, the lower four bits first.
        scales: of mxfp4, uint8 `[num, out_features, in_features / 32]`: powers of two, 127 is 1.
        bias: `[num, out_features]`.
    """

    values: Tensor
    scales: Tensor | None = None
    bias: Tensor | None = None

    def dense(self, expert: int, dtype: torch.dtype) -> Tensor:
        """An expert's `[out_features, in_features]`; mxfp4 values are exact in every dtype with
        their range."""
        if self.scales is None:
            return self.values[expert].to(dtype)
        table = torch.tensor(_E2M1, device=self.values.device)
        pairs, powers = self.values[expert].int(), self.scales[expert].int() - 127
        values = table[torch.stack((pairs & 15, pairs >> 4), dim=-1)]
        blocks = values.flatten(-2).unflatten(-1, (-1, MX_BLOCK))
        return torch.ldexp(blocks, powers[..., None]).flatten(-2).to(dtype)

    def tensors(self) -> list[Tensor]:
        """All tensors held, for counting bytes."""
        return [one for one in (self.values, self.scales, self.bias) if one is not None]
