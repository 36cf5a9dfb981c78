"""Weights of 16 or 32 bits rounded to a format when they are loaded, each to the nearest code."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from onestem.models.formats.held import Channels, Groups, Weight, of_columns
from onestem.models.ranks import ALONE, Ranks
from onestem.ops.rounding import rounded_rows, row_tops
from onestem.options import Quantize

__all__ = ["rounded_weight"]

INT4_GROUPS = (128, 64, 32)

_CODES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


def rounded_weight(weight: Tensor, form: Quantize, ranks: Ranks = ALONE) -> Weight:
    """Round a weight `[out_features, in_features]`, unless the format does not take its width.

    fp8 and int8 have a scale per channel, and products round their rows likewise. int4 is
    symmetric, in groups of 128 columns (64 or 32 where the width is no multiple). It takes widths
    that are multiples of 32.

    Args:
        ranks: each has some of the columns, in their order. Scales are those of the whole weight;
            a group that is divided becomes smaller ones of the same scale.
    """
    if form == "int4":
        return _int4(weight, ranks)
    tops = ranks.gather(row_tops(weight).t().contiguous()).view(ranks.size, -1).t()
    codes, scales = rounded_rows(weight, _CODES[form], tops)
    return Channels(codes, scales[:, 0].contiguous())


def _int4(weight: Tensor, ranks: Ranks) -> Weight:
    width = torch.tensor([[float(weight.shape[1])]], device=weight.device)
    widths = list(map(int, ranks.gather(width)[0].tolist()))
    size, start = sum(widths), sum(widths[: ranks.rank])
    group = next((group for group in INT4_GROUPS if size % group == 0), None)
    if group is None:
        return weight
    stop = start + weight.shape[1]
    # Groups that the span divides are filled up with zeros.
    before, first, last = start % group, start // group, -(-stop // group)
    values = F.pad(weight.float(), (before, -stop % group)).unflatten(1, (-1, group))
    scales = weight.new_zeros(len(weight), size // group, dtype=torch.float32)
    scales[:, first:last] = values.abs().amax(2)
    scales = ranks.gather(scales.view(1, -1)).view(ranks.size, *scales.shape).amax(0)
    # Codes are -8 to 7; the largest value is half a step away from its code.
    scales = torch.where(scales == 0, 1.0, scales / 7.5)
    codes = (values / scales[:, first:last, None]).round_().clamp_(-8, 7).add_(8).to(torch.uint8)
    codes = codes.flatten(1)[:, before : before + weight.shape[1]].contiguous()
    zeros = torch.full_like(scales, 8, dtype=torch.int16)
    return of_columns(Groups(codes, scales, zeros, group, 4), (start, stop), size)
