"""A quantised weight, between the file that it is read from and the product that uses it.

Each stored format becomes one of two values here, in the order of the decoder's rows. So parts with
scales of their own can be fused, and products need not know the file format.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from onestem.models.cuts import Span

__all__ = ["Channels", "Groups", "Weight", "dense", "joined", "of_columns", "ordered"]


@dataclass(frozen=True, eq=False)
class Channels:
    """`weight[o, i] = codes[o, i] * scales[o]`, in products that round their rows likewise.

    Attributes:
        codes: float8_e4m3fn or int8 `[out_features, in_features]`.
        scales: float32 `[out_features]`.
    """

    codes: Tensor
    scales: Tensor

    def rows(self, at: Tensor) -> Channels:
        """The rows `at` (int64)."""
        return Channels(self.codes[at], self.scales[at])

    @property
    def in_features(self) -> int:
        """Inputs, one for each column."""
        return self.codes.shape[1]

    def dense(self) -> Tensor:
        """float32 `[out_features, in_features]`."""
        return self.codes.float() * self.scales[:, None]


@dataclass(frozen=True, eq=False)
class Groups:
    """`weight[o, i] = (codes[o, i] - zeros[o, g]) * scales[o, g]` with `g = i // group`.

    Attributes:
        codes: float8_e4m3fn, or uint8 below `2 ** bits`: `[out_features, columns]`.
        scales: float32 `[out_features, num_groups]`.
        zeros: int16 `[out_features, num_groups]`; None: all 0 (float8).
        group: columns that share a scale; the last group may be shorter.
        bits: of a code.
        order: int64 `[columns]`: column i is for input `order[i]`; None: for input i. More columns
            than inputs are possible: the extra ones have weight 0.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    group: int
    bits: int = 8
    order: Tensor | None = None

    def rows(self, at: Tensor) -> Groups:
        """The rows `at` (int64)."""
        zeros = None if self.zeros is None else self.zeros[at]
        return replace(self, codes=self.codes[at], scales=self.scales[at], zeros=zeros)

    @property
    def in_features(self) -> int:
        """Inputs, which may be fewer than columns (`order`)."""
        return self.codes.shape[1] if self.order is None else int(self.order.max()) + 1

    def dense(self) -> Tensor:
        """float32 `[out_features, in_features]`, columns in the order of inputs."""
        weight = self.codes.float()
        if self.zeros is not None:
            weight -= self._by_column(self.zeros.float())
        weight *= self._by_column(self.scales)
        if self.order is None:
            return weight
        inputs = weight.new_zeros(len(weight), self.in_features)
        return inputs.index_add_(1, self.order, weight)

    def _by_column(self, values: Tensor) -> Tensor:
        return values.repeat_interleave(self.group, dim=1)[:, : self.codes.shape[1]]


# A Tensor is a weight as it is, [out_features, in_features].
Weight: TypeAlias = Tensor | Channels | Groups


def dense(weight: Weight, dtype: torch.dtype) -> Tensor:
    """`[out_features, in_features]` in a dtype: rounded once, from float32."""
    return (weight if isinstance(weight, Tensor) else weight.dense()).to(dtype)


def ordered(weight: Weight, at: Tensor) -> Weight:
    """The weight's rows `at` (int64)."""
    return weight[at] if isinstance(weight, Tensor) else weight.rows(at)


def of_columns(weight: Groups, span: Span, size: int) -> Groups:
    """The columns `span` of a weight of `size` columns. Its codes are those of the span already,
    its scales and zero points those of all groups. A span that divides groups has smaller ones."""
    start, stop = span
    whole = weight.group
    if start // whole == (stop - 1) // whole:
        group = stop - start  # all have one scale
    elif start % whole == 0 and (stop % whole == 0 or stop == size):
        group = whole
    else:
        group = math.gcd(start, stop, whole)
    at = torch.arange(start, stop, group, device=weight.codes.device) // whole
    zeros = None if weight.zeros is None else weight.zeros[:, at]
    return replace(weight, scales=weight.scales[:, at], zeros=zeros, group=group)


def joined(parts: Sequence[Weight]) -> Weight | None:
    """Weights of the same inputs, concatenated by rows; None: they are of different kinds."""
    if len(parts) == 1:
        return parts[0]
    if all(isinstance(part, Tensor) for part in parts):
        return torch.cat([part for part in parts if isinstance(part, Tensor)])
    channels = [part for part in parts if isinstance(part, Channels)]
    if len(channels) == len(parts) and len({part.codes.dtype for part in channels}) == 1:
        codes = torch.cat([part.codes for part in channels])
        return Channels(codes, torch.cat([part.scales for part in channels]))
    groups = [part for part in parts if isinstance(part, Groups)]
    if len(groups) == len(parts) and all(_alike(groups[0], part) for part in groups):
        zeros = [part.zeros for part in groups if part.zeros is not None]
        return replace(
            groups[0],
            codes=torch.cat([part.codes for part in groups]),
            scales=torch.cat([part.scales for part in groups]),
            zeros=torch.cat(zeros) if zeros else None,
        )
    return None


def _alike(one: Groups, other: Groups) -> bool:
    kinds = [(part.group, part.bits, part.codes.dtype) for part in (one, other)]
    if kinds[0] != kinds[1]:
        return False
    if one.order is None or other.order is None:
        return one.order is other.order
    return torch.equal(one.order, other.order)
