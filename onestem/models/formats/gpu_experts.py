"""Products of a layer's experts on a GPU, in the format of their weights where it has them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from onestem.errors import WeightsError
from onestem.models.formats.experts import ExpertWeights
from onestem.models.formats.held import Channels, Groups, Levels, Pieces, joined
from onestem.models.formats.products import Target
from onestem.ops.experts import MAX_POWER

if TYPE_CHECKING:
    from onestem.ops.triton.experts import GroupedExperts
    from onestem.ops.triton.tiled_experts import TiledExperts


def gpu_experts(
    up: ExpertWeights,
    down: ExpertWeights,
    target: Target,
    clamp: tuple[float, float] | None,
    *,
    gelu: bool,
) -> GroupedExperts | TiledExperts:
    """Experts of two weights, both in codes or both in the target's dtype.

    Args:
        clamp, gelu: see `GroupedExperts`.

    Raises:
        WeightsError: mxfp4 has scales that are too large.
    """
    from onestem.ops.triton.experts import GroupedExperts
    from onestem.ops.triton.tiled_experts import TiledExperts

    codes = [_codes(weights, target) for weights in (up, down)]
    if codes[0] is not None and codes[1] is not None:
        biases = (up.bias, down.bias)
        return TiledExperts.of(codes[0], codes[1], biases, clamp, gelu=gelu)
    return GroupedExperts(up.grouped(target.dtype), down.grouped(target.dtype), clamp, gelu=gelu)


def _codes(weights: ExpertWeights, target: Target) -> Sequence[Groups] | None:
    """The weights in codes; None: there are no products of their format, or several formats."""
    whole = [joined(parts) for parts in weights.each]
    found = [_in_groups(one) for one in whole if isinstance(one, Channels | Groups | Pieces)]
    if len(found) < len(whole) or len(set(map(_form, found))) > 1 or not _takes(found[0], target):
        return None
    if found[0].table is not None:
        largest = max(float(one.scales.float().max()) for one in found)
        power = 127 + math.frexp(largest)[1]  # as files have it, where 127 is 1
        if power > MAX_POWER:
            raise WeightsError(
                f"{weights.name} has {power}, limit on a GPU is {MAX_POWER} (weights of up to 12): "
                "use a CPU, or the model in 16 bits"
            )
    return found


def _in_groups(weight: Channels | Groups | Pieces) -> Groups:
    """Channels are groups of all columns, whose rows are not rounded."""
    if not isinstance(weight, Channels):
        return weight.whole() if isinstance(weight, Pieces) else weight
    codes, scales, zeros = weight.codes, weight.scales[:, None], None
    if codes.dtype == torch.int8:
        codes = (codes.short() + 128).to(torch.uint8)
        zeros = torch.full_like(scales, 128, dtype=torch.int16)
    return Groups(codes, scales, zeros, codes.shape[1])


def _form(weight: Groups) -> tuple[object, ...]:
    """What the weights of all experts must have in common."""
    levels = [one for one in (weight.scales, weight.minimums) if isinstance(one, Levels)]
    there = (one is None for one in (weight.zeros, weight.minimums, weight.order))
    return (
        *(weight.codes.dtype, weight.codes.shape, weight.group, weight.bits, weight.table),
        *(one.each for one in levels),
        *there,
    )


def _takes(weight: Groups, target: Target) -> bool:
    from onestem.ops.triton.tiled_groups import TiledGroups

    floats = weight.codes.is_floating_point()
    if target.device.type == "cuda" and not target.multiplies(floats):
        return False
    return TiledGroups.takes(weight.codes.shape[1], weight.group, weight.bits)
