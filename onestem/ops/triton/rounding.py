"""The rounding of rows for products with quantised weights, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onestem.ops.rounding import LARGEST, RoundedRows
from onestem.ops.triton.sizes import power_of_2

# Adding and subtracting it rounds a float32 to the nearest integer, halves to even.
_ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2 ** 23


@triton.jit
def round_codes(value, largest, IS_INT: tl.constexpr):
    """A row of float32, padded with zeros -> its codes, float32, and its scale.

    Divides as PyTorch does: a GPU's own division is off by a bit here and there."""
    most = tl.max(tl.abs(value), 0)
    scale = tl.where(most == 0.0, 1.0, tl.div_rn(most, largest))
    code = tl.div_rn(value, scale)
    if IS_INT:
        code = (code + _ROUNDER) - _ROUNDER
    return code, scale


@triton.jit
def _round_rows(x, codes, scales, size, largest, IS_INT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < size
    value = tl.load(x + row * size + at, mask=inside, other=0.0).to(tl.float32)
    code, scale = round_codes(value, largest, IS_INT)
    tl.store(codes + row * size + at, code.to(codes.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


def empty_rows(rows: int, size: int, dtype: torch.dtype, device: torch.device) -> RoundedRows:
    """Rows to be written."""
    scales = torch.empty(rows, 1, dtype=torch.float32, device=device)
    return RoundedRows(torch.empty(rows, size, dtype=dtype, device=device), scales)


def rounded_rows(x: Tensor, dtype: torch.dtype) -> RoundedRows:
    """`onestem.ops.rounding.rounded_rows` in Triton. x is contiguous."""
    rows, size = x.shape
    rounded = empty_rows(rows, size, dtype, x.device)
    if rows:
        _round_rows[(rows,)](
            x,
            rounded.codes,
            rounded.scales,
            size,
            LARGEST[dtype],
            IS_INT=dtype == torch.int8,
            BLOCK=power_of_2(size),
            num_warps=8 if size > 2048 else 4,
        )
    return rounded
