"""Weights of all experts of a layer in one tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

# Values that share a scale in mxfp4 (OCP Microscaling Formats 1.0, section 5.2).
MX_BLOCK = 32

# The largest scale (2) that a product widens inside: weights of up to 12.
MAX_POWER = 128

_POSITIVE = (0, 1, 2, 3, 4, 6, 8, 12)
E2M1 = (*_POSITIVE, *(-value for value in _POSITIVE))
"""What codes of e2m1 (sign, two bits of exponent, one of mantissa) stand for, doubled: whole
numbers."""


class Beside(NamedTuple):
    """What rows take beside their experts.

    Attributes:
        rows: `[n, hidden_size]`.
        gate: float32 `[n, 1]`, rows are multiplied by its sigmoid; None: they are not.
    """

    rows: Tensor
    gate: Tensor | None

    def added(self, routed: Tensor) -> Tensor:
        """The sum with the experts' results, in the memory of `rows`."""
        if self.gate is not None:
            self.rows.mul_(self.gate.sigmoid().to(self.rows.dtype))
        return self.rows.add_(routed)


@dataclass(frozen=True, eq=False)
class GroupedWeight:
    """A weight of every expert, and their biases.

    Attributes:
        values: `[num, out_features, in_features]`.
        bias: `[num, out_features]`.
    """

    values: Tensor
    bias: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """All tensors held, for counting bytes."""
        return [one for one in (self.values, self.bias) if one is not None]
