"""The leading tokens of rows of logits, and the weight of all tokens, in two reads of the rows.

The first read sums the weights and counts tokens by their distance from the row's highest logit,
in bins that grow with the distance; the second puts the tokens of the nearest bins side by side.
So many bins are taken that their tokens fit. A token of a nearer bin has a higher logit, so what is
put together is a leading part of the order, up to sorting it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["MOST", "Leading", "leading_tokens"]

MOST = 1024  # leading tokens of a row
# Sixteen bins for each power of two from 2^-8 to 2^8: the upper bits of a float32 say which. What
# is nearer is in the first, what is farther in the last, which is never taken.
_BINS, _SHIFT, _FIRST = 256, 19, (127 - 8) << 4
_BLOCK = 1024
_PROGRAMS = 1024  # about, over all rows: few rows are read by several programs each


@dataclass(frozen=True, eq=False)
class Leading:
    """Of each row, on its device.

    Attributes:
        totals: int64 `[m]`, the sum of all weights.
        values, ids: float32 and int64 `[m, MOST]`: higher logits first, equal ones by id; -inf
            behind the last.
        count: int64 `[m]`, how many there are: all tokens before them stand here.
    """

    totals: Tensor
    values: Tensor
    ids: Tensor
    count: Tensor


@triton.jit
def _bin_of(highest, x, BINS: tl.constexpr, SHIFT: tl.constexpr, FIRST: tl.constexpr):
    """The bin of each logit; also of NaN, some bin."""
    distance = (highest - x).to(tl.int32, bitcast=True)
    return tl.minimum(tl.maximum((distance >> SHIFT) - FIRST, 0), BINS - 1)


@triton.jit
def _weigh(
    logits, stride, rows, top, temperature, totals, counts, vocab, split, unit,
    BLOCK: tl.constexpr, BINS: tl.constexpr, SHIFT: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    base = logits + tl.load(rows + row) * stride
    highest, heat = tl.load(top + row), tl.load(temperature + row)
    stop = tl.minimum((part + 1) * split, vocab)
    total = tl.zeros([BLOCK], tl.int64)
    found = tl.zeros([BINS], tl.int32)
    for start in range(part * split, stop, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(base + ids, mask=ids < stop, other=-float("inf"))
        scaled = (x.to(tl.float64) - highest.to(tl.float64)) / heat
        total += (tl.exp(scaled) * unit).to(tl.int64)
        found += tl.histogram(_bin_of(highest, x, BINS, SHIFT, FIRST), BINS)
    at = row * tl.num_programs(1) + part
    tl.store(totals + at, tl.sum(total, 0))
    tl.store(counts + at.to(tl.int64) * BINS + tl.arange(0, BINS), found)


@triton.jit
def _put_together(
    logits, stride, rows, top, bins, places, values, tokens, vocab, split,
    BLOCK: tl.constexpr, MOST: tl.constexpr,
    BINS: tl.constexpr, SHIFT: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    base = logits + tl.load(rows + row) * stride
    highest, taken = tl.load(top + row), tl.load(bins + row)
    place = tl.load(places + row * tl.num_programs(1) + part)
    stop = tl.minimum((part + 1) * split, vocab)
    out = row.to(tl.int64) * MOST
    for start in range(part * split, stop, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(base + ids, mask=ids < stop, other=-float("inf"))
        chosen = (ids < stop) & (_bin_of(highest, x, BINS, SHIFT, FIRST) < taken)
        one = chosen.to(tl.int32)
        at = out + place + tl.cumsum(one, 0) - 1
        tl.store(values + at, x, mask=chosen)
        tl.store(tokens + at, ids.to(tl.int64), mask=chosen)
        place += tl.sum(one, 0)


def leading_tokens(
    logits: Tensor, rows: Tensor, top: Tensor, temperature: Tensor, *, weight_bits: int
) -> Leading:
    """Of the rows `rows` int64 `[m]` of logits float32 `[n, vocab]`; the device is not waited for.

    Args:
        top: float32 `[m]`, the highest logit of each of these rows.
        temperature: float64 `[m]`, above 0. A token's weight is
            `int(exp((logit - top) / temperature) * 2^weight_bits)`, in float64.
    """
    count, vocab = len(rows), logits.shape[1]
    parts = max(1, min(_PROGRAMS // count, triton.cdiv(vocab, _BLOCK)))
    split = triton.cdiv(triton.cdiv(vocab, parts), _BLOCK) * _BLOCK
    parts = triton.cdiv(vocab, split)
    totals = torch.empty(count, parts, dtype=torch.int64, device=logits.device)
    counts = torch.empty(count, parts, _BINS, dtype=torch.int32, device=logits.device)
    bits = {"BLOCK": _BLOCK, "BINS": _BINS, "SHIFT": _SHIFT, "FIRST": _FIRST}
    read = (logits, logits.stride(0), rows, top)
    _weigh[(count, parts)](
        *read, temperature, totals, counts, vocab, split, 2.0**weight_bits, **bits
    )
    bins, places, found = _what_fits(counts)
    values = torch.full((count, MOST), -torch.inf, device=logits.device)
    ids = torch.zeros(count, MOST, dtype=torch.int64, device=logits.device)
    _put_together[(count, parts)](*read, bins, places, values, ids, vocab, split, MOST=MOST, **bits)
    values, order = values.sort(dim=-1, descending=True, stable=True)  # they stand by id
    return Leading(totals.sum(dim=-1), values, ids.gather(1, order), found)


def _what_fits(counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of counts int32 `[m, parts, bins]`: how many bins are taken (int32 `[m]`), where each part
    puts its tokens (int32 `[m, parts]`), and how many all are (int64 `[m]`)."""
    upto = counts.cumsum(dim=-1, dtype=torch.int32)
    bins = (upto.sum(dim=1)[:, :-1] <= MOST).sum(dim=-1)
    each = upto.gather(2, (bins - 1).clamp(min=0)[:, None, None].expand(-1, upto.shape[1], 1))
    each = torch.where(bins[:, None] > 0, each.squeeze(2), 0)
    ends = each.cumsum(dim=-1, dtype=torch.int32)
    return bins.int(), ends - each, ends[:, -1].long()
