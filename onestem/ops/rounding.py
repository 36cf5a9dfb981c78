"""Rows rounded to 8 bits, each by its own maximum: factors of 8-bit products."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

# The largest code of each type.
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


class RoundedRows(NamedTuple):
    """`x[n, i]` is about `codes[n, i] * scales[n]`.

    Attributes:
        codes: float8_e4m3fn or int8 `[n, size]`.
        scales: float32 `[n, 1]`, the row's maximum over the type's; 1 if a row is all zeros.
    """

    codes: Tensor
    scales: Tensor


class BothRows(NamedTuple):
    """Rows as they are, and rounded: some products take them so."""

    plain: Tensor
    rounded: RoundedRows


# Input of a product: rows as they are, or already rounded for it.
Rows: TypeAlias = Tensor | RoundedRows

# (x, dtype of codes) -> codes and scales, as `rounded_rows`.
RoundRows: TypeAlias = Callable[[Tensor, torch.dtype], RoundedRows]


def row_tops(x: Tensor) -> Tensor:
    """The largest size in each row of x `[n, size]`: float32 `[n, 1]`."""
    if not x.shape[1]:
        return x.new_zeros(len(x), 1, dtype=torch.float32)
    return torch.linalg.vector_norm(x, math.inf, dim=1, keepdim=True, dtype=torch.float32)


def rounded_rows(x: Tensor, dtype: torch.dtype, tops: Tensor | None = None) -> RoundedRows:
    """x `[n, size]` as codes of `dtype`, rounded to the nearest (halves to even), in PyTorch. A
    row's codes depend on that row alone.

    Args:
        tops: float32 `[n, parts]`, the largest sizes of each row's parts where x is one of them;
            None: x is whole.
    """
    values = x.float()
    scales = (row_tops(x) if tops is None else tops).amax(1, keepdim=True)
    scales = torch.where(scales == 0, 1.0, scales / LARGEST[dtype])
    values = values / scales
    codes = values.round_() if dtype == torch.int8 else values
    return RoundedRows(codes.to(dtype), scales)
