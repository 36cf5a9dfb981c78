"""`State`: attention over part of the keys, and the merging of parts.

Softmax over a union of disjoint key sets is a weighted mean of the softmaxes over the parts. With
`lse = log(sum(exp(score)))` (natural log) of each part, part i weighs `exp(lse_i - lse)` where
`lse = log(sum_i exp(lse_i))` (RelayAttention's alpha; Hydragen, eq. 5, for many parts).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["State", "empty_state", "merge_into", "merge_states"]


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


def merge_states(states: Sequence[State]) -> State:
    """One state over the union of the parts' keys (which must be disjoint).

    Associative and commutative up to rounding, and never NaN: if every part is empty, so is the
    result. `out` keeps the first part's dtype; the sum is in float32 (float64 for float64).
    """
    if len(states) == 1:
        return states[0]
    wide = torch.float64 if states[0].lse.dtype == torch.float64 else torch.float32
    lse = torch.stack([state.lse for state in states])  # [parts, num_rows, num_q_heads]
    top = lse.amax(0)
    top = torch.where(top == float("-inf"), torch.zeros_like(top), top)
    weight = torch.exp(lse - top)
    total = weight.sum(0)
    out = torch.zeros_like(states[0].out, dtype=wide)
    for part, state in zip(weight, states, strict=True):
        out += part.unsqueeze(-1) * state.out.to(wide)
    out /= torch.where(total == 0, torch.ones_like(total), total).unsqueeze(-1)
    return State(out.to(states[0].out.dtype), top + torch.log(total))


def merge_into(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merge a part into float32 accumulators in place (views into them are fine)."""
    merged = torch.logaddexp(lse, part_lse)
    # If both parts are empty, -inf - -inf would be NaN; any finite value gives weights of zero.
    safe = torch.where(merged == float("-inf"), torch.zeros_like(merged), merged)
    out.mul_(torch.exp(lse - safe).unsqueeze(-1))
    out.addcmul_(part_out.to(out.dtype), torch.exp(part_lse - safe).unsqueeze(-1))
    lse.copy_(merged)
