"""Products of a layer's experts on a GPU, in the format of their weights where it has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from onestem.errors import WeightsError
from onestem.models.formats.experts import MXFP4_TABLE, ExpertWeights
from onestem.models.formats.held import Groups, joined
from onestem.models.formats.products import Target
from onestem.ops.experts import MAX_POWER, MX_BLOCK

if TYPE_CHECKING:
    from onestem.ops.triton.experts import GroupedExperts
    from onestem.ops.triton.tiled_experts import ExpertCodes, TiledExperts

__all__ = ["gpu_experts"]


def gpu_experts(
    up: ExpertWeights,
    down: ExpertWeights,
    target: Target,
    clamp: tuple[float, float] | None,
    *,
    gelu: bool,
) -> GroupedExperts | TiledExperts:
    """Experts of two weights, both in mxfp4 or both in the target's dtype.

    Args:
        clamp, gelu: see `GroupedExperts`.

    Raises:
        WeightsError: mxfp4 has scales that are too large.
    """
    from onestem.ops.triton.experts import GroupedExperts
    from onestem.ops.triton.tiled_experts import TiledExperts

    codes = [_codes(weights) for weights in (up, down)]
    if codes[0] is not None and codes[1] is not None and not gelu:
        return TiledExperts.of(codes[0], codes[1], (up.bias, down.bias), clamp)
    return GroupedExperts(up.grouped(target.dtype), down.grouped(target.dtype), clamp, gelu=gelu)


def _codes(weights: ExpertWeights) -> Sequence[ExpertCodes] | None:
    """The weights in mxfp4; None: some are not."""
    from onestem.ops.triton.tiled_experts import ExpertCodes

    found = []
    for parts in weights.each:
        one = joined(parts)
        if not isinstance(one, Groups) or (one.table, one.group) != (MXFP4_TABLE, MX_BLOCK):
            return None
        found.append(ExpertCodes(one.codes, _powers(one.scales.float(), weights.name)))
    return found


def _powers(scales: Tensor, name: str) -> Tensor:
    """Scales of `MXFP4_TABLE`, powers of two -> uint8 as files have them, where 127 is 1."""
    powers = scales.frexp().exponent + 127
    if (largest := int(powers.max())) > MAX_POWER:
        raise WeightsError(
            f"{name} has {largest}, limit on a GPU is {MAX_POWER} (weights of up to 12): use a "
            "CPU, or the model in 16 bits"
        )
    return powers.to(torch.uint8)
