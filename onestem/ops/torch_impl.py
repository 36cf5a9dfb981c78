"""Attention over plans with PyTorch alone: any device, no compiler.

On a CPU an item (see `ops.items`) is one call of PyTorch's fused attention, which returns its lse.
Elsewhere, and for ALiBi and softcap, it is written out in float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from onestem.ops.items import CostModel, Item, SharedItem, WalkItem, make_items
from onestem.ops.kv import read_kv, slot_index
from onestem.ops.plan import AttentionPlan
from onestem.ops.state import State, empty_state, merge_into

__all__ = ["TorchAttention"]


@dataclass(frozen=True)
class TorchAttention:
    """PyTorch implementation of `AttentionImpl`."""

    name: str = "torch"
    cost: CostModel = field(default_factory=CostModel)

    def head_major(self, head_dim: int, dtype: torch.dtype) -> bool:
        return False

    def prepare(self, plan: AttentionPlan, *, share: bool = True) -> PreparedTorch:
        return PreparedTorch(plan, make_items(plan, self.cost, share))


Index = slice | Tensor


def _index(rows: np.ndarray, device: torch.device) -> Index:
    """A slice if rows are consecutive (no copy), else an index tensor."""
    if int(rows[-1]) - int(rows[0]) + 1 == len(rows):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return torch.from_numpy(rows).to(device)


@dataclass
class _Ready:
    """An item on the device. `first`: nothing was written to its rows before it."""

    item: Item
    index: Index
    slots: slice | Tensor
    key_positions: Tensor
    mask: Tensor | None  # bool, broadcastable to [batch, 1, query rows, keys]; True: seen
    first: bool


class PreparedTorch:
    """A plan as items; the first layer makes the device tensors, and the others use them."""

    def __init__(self, plan: AttentionPlan, items: list[Item]) -> None:
        self.plan = plan
        self.items = items
        self._ready: list[_Ready] | None = None
        self._masks: dict[tuple[int, torch.dtype], Tensor] = {}

    def attend(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        *,
        scale: float | None = None,
        alibi_slopes: Tensor | None = None,
        softcap: float | None = None,
    ) -> State:
        """See `ops.attention`."""
        num_rows, num_heads, head_dim = q.shape
        if self._ready is None:
            self._ready = self._make_ready(q.device, num_heads // k_pages.shape[2])
        scores = _Scores(1 / math.sqrt(head_dim) if scale is None else scale, alibi_slopes, softcap)
        if len(self._ready) == 1 and self._ready[0].index == slice(0, num_rows):
            state = self._attend_item(0, self._ready[0], q, k_pages, v_pages, scores)
            return State(state.out.to(q.dtype), state.lse)
        total = empty_state(num_rows, num_heads, head_dim, device=q.device)
        for number, ready in enumerate(self._ready):
            part = self._attend_item(number, ready, q, k_pages, v_pages, scores)
            if ready.first:
                total.out[ready.index] = part.out.to(torch.float32)
                total.lse[ready.index] = part.lse
            elif isinstance(ready.index, slice):
                merge_into(total.out[ready.index], total.lse[ready.index], part.out, part.lse)
            else:
                out, lse = total.out[ready.index], total.lse[ready.index]
                merge_into(out, lse, part.out, part.lse)
                total.out[ready.index], total.lse[ready.index] = out, lse
        return State(total.out.to(q.dtype), total.lse)

    def _make_ready(self, device: torch.device, group: int) -> list[_Ready]:
        touched = np.zeros(self.plan.num_rows, bool)
        ready = []
        for item in self.items:
            first = not touched[item.rows].any()
            touched[item.rows] = True
            ready.append(
                _Ready(
                    item,
                    _index(item.rows, device),
                    _slots(item, device),
                    torch.from_numpy(item.positions).to(device),
                    _mask(item, group, device),
                    first,
                )
            )
        return ready

    def _attend_item(
        self,
        number: int,
        ready: _Ready,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        scores: _Scores,
    ) -> State:
        rows = q[ready.index]  # [n, num_q_heads, head_dim]
        item = ready.item
        k, v = read_kv(k_pages, ready.slots), read_kv(v_pages, ready.slots)
        if isinstance(item, WalkItem) or (isinstance(item, SharedItem) and item.copies):
            return self._attend_each(number, ready, rows, k, v, scores)
        return self._attend_together(number, ready, rows, k, v, scores)

    def _attend_together(
        self, number: int, ready: _Ready, rows: Tensor, k: Tensor, v: Tensor, scores: _Scores
    ) -> State:
        """Attention of all rows over the same keys `[keys, num_kv_heads, head_dim]`."""
        n, num_heads, head_dim = rows.shape
        group = num_heads // k.shape[1]
        k, v = k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0)
        if isinstance(ready.item, SharedItem) and ready.item.causal:
            # The triangle is over rows: query heads stay apart, and their KV head is repeated.
            query = rows.transpose(0, 1).unsqueeze(0)  # [1, num_q_heads, n, head_dim]
            k, v = _repeat_heads(k, group), _repeat_heads(v, group)
            state = self._softmax(number, ready, query, k, v, scores, True)
            return State(state.out[0].transpose(0, 1), state.lse[0].transpose(0, 1))
        # A KV head's query heads are packed into the row axis, for one product.
        query = rows.view(n, -1, group, head_dim).permute(1, 0, 2, 3)
        query = query.reshape(1, -1, n * group, head_dim)
        state = self._softmax(number, ready, query, k, v, scores, False)
        out = state.out[0].reshape(-1, n, group, head_dim).transpose(0, 1)
        lse = state.lse[0].reshape(-1, n, group).transpose(0, 1)
        return State(out.reshape(n, num_heads, head_dim), lse.reshape(n, num_heads))

    def _attend_each(
        self, number: int, ready: _Ready, rows: Tensor, k: Tensor, v: Tensor, scores: _Scores
    ) -> State:
        """Attention of each row over its own keys, `[n, keys, num_kv_heads, head_dim]` (or
        `[keys, ...]`, read again for each)."""
        n, num_heads, head_dim = rows.shape
        if k.dim() == 3:
            k, v = k.expand(n, *k.shape), v.expand(n, *v.shape)
        query = rows.view(n, k.shape[2], -1, head_dim)  # [n, num_kv_heads, group, head_dim]
        state = self._softmax(
            number, ready, query, k.transpose(1, 2), v.transpose(1, 2), scores, False
        )
        return State(state.out.reshape(n, num_heads, head_dim), state.lse.reshape(n, num_heads))

    def _softmax(
        self,
        number: int,
        ready: _Ready,
        query: Tensor,
        k: Tensor,
        v: Tensor,
        scores: _Scores,
        causal: bool,
    ) -> State:
        if query.device.type == "cpu" and not scores.special:
            mask = self._additive(number, ready.mask, query.dtype)
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *map(_neighbours, (query, k, v)), 0.0, causal, attn_mask=mask, scale=scores.scale
            )
            return State(out, lse)
        mask = _triangle(k.shape[2], query.device) if causal else ready.mask
        bias = self._alibi(ready, query, k, scores)
        return _explicit(query, k, v, mask, bias, scores)

    def _additive(self, number: int, mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        if mask is None:
            return None
        key = (number, dtype)
        if key not in self._masks:
            zero = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
            self._masks[key] = zero.masked_fill_(~mask, float("-inf"))
        return self._masks[key]

    def _alibi(self, ready: _Ready, query: Tensor, k: Tensor, scores: _Scores) -> Tensor | None:
        """slope * (p_key - p_row), broadcastable to the scores `[batch, heads, rows, keys]`."""
        if scores.alibi_slopes is None:
            return None
        row_positions = torch.from_numpy(self.plan.row_position.astype(np.int64)).to(query.device)
        p_row = row_positions[ready.index].float()
        p_key = ready.key_positions.float()
        slopes = scores.alibi_slopes
        batch, heads, rows, keys = query.shape[0], query.shape[1], query.shape[2], k.shape[2]
        if (
            batch != 1
            or p_key.dim() == 2
            or (isinstance(ready.item, SharedItem) and ready.item.copies)
        ):
            distance = (p_key - p_row[:, None]).view(len(p_row), 1, 1, keys)
            return slopes.view(1, heads, rows, 1) * distance
        distance = p_key[None, :] - p_row[:, None]  # [n, keys]
        bias = slopes.view(-1, 1, 1) * distance  # [num_q_heads, n, keys]
        if heads == len(slopes) and rows == len(p_row):
            return bias.unsqueeze(0)
        group = rows // len(p_row)
        bias = bias.view(heads, group, len(p_row), keys).transpose(1, 2)
        return bias.reshape(1, heads, rows, keys)


def _neighbours(x: Tensor) -> Tensor:
    """`x` with a head's elements adjacent: the fused attention ignores their stride."""
    return x if x.stride(-1) == 1 else x.contiguous()


@dataclass(frozen=True)
class _Scores:
    scale: float
    alibi_slopes: Tensor | None
    softcap: float | None

    @property
    def special(self) -> bool:
        return self.alibi_slopes is not None or self.softcap is not None


def _explicit(
    query: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, scores: _Scores
) -> State:
    score = query.float() @ k.float().transpose(-1, -2) * scores.scale
    if scores.softcap is not None:
        score = scores.softcap * torch.tanh(score / scores.softcap)
    if bias is not None:
        score = score + bias
    if mask is not None:
        score = score.masked_fill(~mask, float("-inf"))
    lse = torch.logsumexp(score, -1)
    safe = torch.where(lse == float("-inf"), torch.zeros_like(lse), lse)
    return State(torch.exp(score - safe.unsqueeze(-1)) @ v.float(), lse)


def _slots(item: Item, device: torch.device) -> slice | Tensor:
    if item.slots.ndim == 1:
        return slot_index(item.slots, device)
    return torch.from_numpy(item.slots).to(device)


def _mask(item: Item, group: int, device: torch.device) -> Tensor | None:
    """`seen`, broadcastable to the scores `[batch, heads, rows, keys]`."""
    if item.seen is None:
        return None
    seen = torch.from_numpy(item.seen).to(device)
    if isinstance(item, WalkItem) or item.copies:
        return seen[:, None, None, :]
    return seen.repeat_interleave(group, 0)[None, None]


def _triangle(size: int, device: torch.device) -> Tensor:
    return torch.ones(size, size, dtype=torch.bool, device=device).tril()


def _repeat_heads(values: Tensor, group: int) -> Tensor:
    """`[1, num_kv_heads, keys, head_dim]` -> `[1, num_kv_heads * group, ...]`."""
    return values if group == 1 else values.repeat_interleave(group, 1)
