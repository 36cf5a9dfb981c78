"""Weights of 16 or 32 bits rounded to a format when they are loaded, each to the nearest code."""

from __future__ import annotations

import torch
from torch import Tensor

from onestem.models.formats.held import Channels, Groups, Weight
from onestem.models.ranks import ALONE, Ranks
from onestem.ops.rounding import rounded_rows
from onestem.options import Quantize

__all__ = ["rounded_weight"]

INT4_GROUPS = (128, 64, 32)


def rounded_weight(weight: Tensor, form: Quantize, ranks: Ranks = ALONE) -> Weight:
    """Round a weight `[out_features, in_features]`, unless the format does not take its width.

    fp8 and int8 have a scale per channel, and products round their rows likewise. int4 is
    symmetric, in groups of 128 columns (64 or 32 where the width is no multiple). It takes widths
    that are multiples of 32.

    Args:
        ranks: each has some of the columns. Channels have the scales of whole rows; groups are
            formed within these columns.
    """
    if form == "int4":
        return _int4(weight)
    rows = weight
    if ranks.size > 1:  # the maximum of each whole row as one more column
        largest = ranks.gather(weight.abs().amax(1)[None]).view(ranks.size, -1).amax(0)
        rows = torch.cat([weight, largest[:, None]], dim=1)
    codes, scales = rounded_rows(rows, torch.int8 if form == "int8" else torch.float8_e4m3fn)
    return Channels(codes[:, : weight.shape[1]].contiguous(), scales[:, 0].contiguous())


def _int4(weight: Tensor) -> Weight:
    size = weight.shape[1]
    group = next((group for group in INT4_GROUPS if size % group == 0), None)
    if group is None:
        return weight
    values = weight.float().unflatten(1, (-1, group))
    # Codes are -8 to 7; the largest value is half a step away from its code.
    scales = values.abs().amax(2) / 7.5
    scales = torch.where(scales == 0, 1.0, scales)
    codes = (values / scales[..., None]).round_().clamp_(-8, 7).add_(8).to(torch.uint8).flatten(1)
    return Groups(codes, scales, torch.full_like(scales, 8, dtype=torch.int16), group, 4)
