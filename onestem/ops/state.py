"""`State`: attention over part of the keys, and the merging of parts.

Softmax over a union of disjoint key sets is a weighted mean of the softmaxes over the parts. With
`lse = log(sum(exp(score)))` (natural log) of each part, part i weighs `exp(lse_i - lse)` where
`lse = log(sum_i exp(lse_i))` (RelayAttention's alpha; Hydragen, eq. 5, for many parts).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class State(NamedTuple):
    """Attention of rows over some keys.

    Attributes:
        out: `[num_rows, num_q_heads, head_dim]`.
        lse: float32 (float64 from the reference) `[num_rows, num_q_heads]`, natural log.

    A row that sees no key is `(0, -inf)`.
    """

    out: Tensor
    lse: Tensor


def empty_state(
    num_rows: int,
    num_heads: int,
    head_dim: int,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> State:
    """Rows that have seen nothing yet."""
    out = torch.zeros(num_rows, num_heads, head_dim, device=device, dtype=dtype)
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    lse = torch.full((num_rows, num_heads), float("-inf"), device=device, dtype=lse_dtype)
    return State(out, lse)


def merge_into(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merge a part, over other keys, into float32 accumulators in place (views are fine).
    Associative and commutative up to rounding, and never NaN."""
    merged = torch.logaddexp(lse, part_lse)
    # If both parts are empty, -inf - -inf would be NaN; any finite value gives weights of zero.
    safe = torch.where(merged == float("-inf"), torch.zeros_like(merged), merged)
    out.mul_(torch.exp(lse - safe).unsqueeze(-1))
    out.addcmul_(part_out.to(out.dtype), torch.exp(part_lse - safe).unsqueeze(-1))
    lse.copy_(merged)


def merge_moved(total: State, sources: np.ndarray) -> State:
    """States of rows, then of moved ones (`AttentionPlan.moved`), merged into those of the rows:
    moved row i into row `sources[i]`. float32 accumulators, changed in place."""
    rows = len(total.lse) - len(sources)
    order = np.argsort(sources, kind="stable")
    first = np.searchsorted(sources[order], sources[order])  # of the same row
    nth = np.arange(len(order)) - first
    for number in range(int(nth.max(initial=-1)) + 1):  # no row twice in one
        some = order[nth == number]
        into, part = torch.from_numpy(sources[some]), torch.from_numpy(some + rows)
        into, part = (index.to(total.lse.device, torch.int64) for index in (into, part))
        out, lse = total.out[into], total.lse[into]
        merge_into(out, lse, total.out[part], total.lse[part])
        total.out[into], total.lse[into] = out, lse
    return State(total.out[:rows], total.lse[:rows])
