"""Weights of all experts of a layer, between the files that they are read from and the products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onestem.models.formats.held import Groups, Weight, dense
from onestem.ops.experts import E2M1, MX_BLOCK, GroupedWeight


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """A weight of every expert of a layer; of gate and up, gate first.

    Attributes:
        name: of the tensor that its scales are read from, or else of the weight.
        each: for each expert weights `[rows, in_features]`, which make up its weight one after the
            other.
        whole: `[num, out_features, in_features]`, of which `each` has views; None: some weights are
            quantised.
        bias: `[num, out_features]`.
    """

    name: str
    each: Sequence[Sequence[Weight]]
    whole: Tensor | None = None
    bias: Tensor | None = None

    @staticmethod
    def of(
        name: str, each: Sequence[Sequence[Weight]], bias: Tensor | None = None
    ) -> ExpertWeights:
        """Those of weights that were read one by one."""
        plain = [[one for one in parts if isinstance(one, Tensor)] for parts in each]
        if any(len(few) < len(all_) for few, all_ in zip(plain, each, strict=True)):
            return ExpertWeights(name, each, None, bias)
        whole = torch.stack([torch.cat(parts) for parts in plain])
        return ExpertWeights.of_whole(name, whole, bias)

    @staticmethod
    def of_whole(name: str, whole: Tensor, bias: Tensor | None) -> ExpertWeights:
        """Those of one tensor `[num, out_features, in_features]`."""
        return ExpertWeights(name, [[one] for one in whole], whole, bias)

    def bias_of(self, expert: int) -> Tensor | None:
        """An expert's bias `[out_features]`."""
        return None if self.bias is None else self.bias[expert]

    def dense(self, expert: int, dtype: torch.dtype) -> Tensor:
        """An expert's weight `[out_features, in_features]`, rounded once, from float32."""
        return torch.cat([dense(one, dtype) for one in self.each[expert]])

    def grouped(self, dtype: torch.dtype) -> GroupedWeight:
        """All experts' weights in a dtype."""
        whole = self.whole
        if whole is None:
            whole = torch.stack([self.dense(expert, dtype) for expert in range(len(self.each))])
        return GroupedWeight(whole, self.bias)


def of_mxfp4(values: Tensor, powers: Tensor) -> Groups:
    """An expert's weight in mxfp4. values: uint8 `[out_features, in_features / 2]`, two each, the
    lower four bits first; powers: uint8 `[out_features, in_features / 32]`, of two (127 is 1)."""
    codes = torch.stack((values & 15, values >> 4), dim=-1).flatten(-2)
    scales = torch.ldexp(torch.ones_like(powers, dtype=torch.float32), powers.int() - 128)
    return Groups(codes, scales, None, MX_BLOCK, 4, table=E2M1, name="mxfp4")
