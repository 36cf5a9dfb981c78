"""Attention over plans with PyTorch alone: any device, no compiler.

On a CPU an item (see `ops.items`) is one call of PyTorch's fused attention, which returns its lse.
Elsewhere, and for ALiBi and softcap, it is written out in float32.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from onestem.ops.items import CostModel, Item, SharedItem, WalkItem, make_items
from onestem.ops.kv import read_kv, slot_index
from onestem.ops.plan import AttentionPlan
from onestem.ops.scores import PLAIN, Scores
from onestem.ops.state import State, empty_state, merge_into, merge_moved


@dataclass(frozen=True)
class TorchAttention:
    """PyTorch implementation of `AttentionImpl`."""

    name: str = "torch"
    cost: CostModel = field(default_factory=CostModel)
    deterministic = False
    takes_parts = False  # what it gathers would be in more stretches

    def head_major(self, head_dim: int, dtype: torch.dtype) -> bool:
        return False

    def prepare(self, plan: AttentionPlan, *, share: bool = True) -> PreparedTorch:
        return PreparedTorch(plan, make_items(plan, self.cost, share))


@dataclass
class _Ready:
    """An item on the device.

    Attributes:
        rows, slots: int64, or a slice where they are consecutive.
        each: each row has keys of its own, or reads a copy (`SharedItem.copies`).
        mask: bool, broadcastable to scores `[batch, heads, query rows, keys]`; True: seen.
        first: nothing was written to its rows before it.
        additive: the mask by the dtype of scores to which it is added.
    """

    rows: slice | Tensor
    slots: slice | Tensor
    positions: Tensor
    each: bool
    causal: bool
    mask: Tensor | None
    first: bool
    additive: dict[torch.dtype, Tensor] = field(default_factory=dict)


class PreparedTorch:
    """A plan as items; the first layer makes the device tensors, and the others use them."""

    def __init__(self, plan: AttentionPlan, items: list[Item]) -> None:
        self.plan = plan
        self.items = items
        self._ready: list[_Ready] | None = None

    def attend(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, scores: Scores = PLAIN) -> State:
        """See `PreparedAttention`."""
        num_queries, num_heads, head_dim = q.shape
        if self._ready is None:
            self._ready = self._make_ready(q.device, num_heads // k_pages.shape[2])
        if len(self._ready) == 1 and self._ready[0].rows == slice(0, self.plan.num_rows):
            state = self._attend_item(self._ready[0], q, k_pages, v_pages, scores)
            return State(state.out.to(q.dtype), state.lse)
        total = empty_state(num_queries, num_heads, head_dim, device=q.device)
        for ready in self._ready:
            part = self._attend_item(ready, q, k_pages, v_pages, scores)
            rows = ready.rows
            if ready.first:
                total.out[rows], total.lse[rows] = part.out.to(torch.float32), part.lse
                continue
            out, lse = total.out[rows], total.lse[rows]
            merge_into(out, lse, part.out, part.lse)
            if not isinstance(rows, slice):  # else these are views
                total.out[rows], total.lse[rows] = out, lse
        if len(self.plan.moved):
            total = merge_moved(total, self.plan.moved[:, 0])
        return State(total.out.to(q.dtype), total.lse)

    def _make_ready(self, device: torch.device, group: int) -> list[_Ready]:
        touched = np.zeros(self.plan.num_queries, bool)
        ready = []
        for item in self.items:
            first = not touched[item.rows].any()
            touched[item.rows] = True
            each = isinstance(item, WalkItem) or item.copies
            mask = None if item.seen is None else torch.from_numpy(item.seen).to(device)
            if mask is not None and each:
                mask = mask[:, None, None, :]
            elif mask is not None:
                mask = mask.repeat_interleave(group, 0)[None, None]
            flat = item.slots.ndim == 1
            slots = slot_index(item.slots, device) if flat else torch.from_numpy(item.slots)
            ready.append(
                _Ready(
                    slot_index(item.rows, device),
                    slots if isinstance(slots, slice) else slots.to(device),
                    torch.from_numpy(item.positions).to(device),
                    each,
                    isinstance(item, SharedItem) and item.causal,
                    mask,
                    first,
                )
            )
        return ready

    def _attend_item(
        self, ready: _Ready, q: Tensor, k_pages: Tensor, v_pages: Tensor, scores: Scores
    ) -> State:
        rows = q[ready.rows]
        n, num_heads, head_dim = rows.shape
        k, v = read_kv(k_pages, ready.slots), read_kv(v_pages, ready.slots)
        heads, keys = k.shape[-2], k.shape[-3]
        group = num_heads // heads
        bias = self._alibi(ready, q.device, scores)
        if ready.each:
            if k.dim() == 3:  # read again for each row
                k, v = k.expand(n, *k.shape), v.expand(n, *v.shape)
            query = rows.view(n, heads, group, head_dim)
            if bias is not None:
                bias = bias.view(heads, group, n, keys).permute(2, 0, 1, 3)
            state = _softmax(ready, query, k.transpose(1, 2), v.transpose(1, 2), bias, scores)
            return State(state.out.reshape(n, num_heads, head_dim), state.lse.reshape(n, num_heads))
        k, v = k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0)
        if ready.causal:
            # The triangle is over rows: query heads stay apart, and their KV head is repeated.
            k, v = _repeat_heads(k, group), _repeat_heads(v, group)
            bias = None if bias is None else bias.unsqueeze(0)
            state = _softmax(ready, rows.transpose(0, 1).unsqueeze(0), k, v, bias, scores)
            return State(state.out[0].transpose(0, 1), state.lse[0].transpose(0, 1))
        # A KV head's query heads are packed into the row axis, for one product.
        query = rows.view(n, heads, group, head_dim).transpose(0, 1)
        query = query.reshape(1, heads, n * group, head_dim)
        if bias is not None:
            bias = bias.view(heads, group, n, keys).transpose(1, 2).reshape(1, heads, -1, keys)
        state = _softmax(ready, query, k, v, bias, scores)
        out = state.out[0].reshape(heads, n, group, head_dim).transpose(0, 1)
        lse = state.lse[0].reshape(heads, n, group).transpose(0, 1)
        return State(out.reshape(n, num_heads, head_dim), lse.reshape(n, num_heads))

    def _alibi(self, ready: _Ready, device: torch.device, scores: Scores) -> Tensor | None:
        """slope * (p_key - p_row), `[num_q_heads, n, keys]`."""
        if scores.alibi_slopes is None:
            return None
        positions = torch.from_numpy(self.plan.row_position.astype(np.int64)).to(device)
        distance = ready.positions.float() - positions[ready.rows].float()[:, None]
        return scores.alibi_slopes[:, None, None] * distance


def _softmax(
    ready: _Ready, query: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scores: Scores
) -> State:
    """Attention of query `[batch, heads, rows, head_dim]` over k and v `[batch, heads, keys,
    head_dim]`; `bias`, as the scores, is added to them."""
    scale, mask = scores.factor(query.shape[3]), ready.mask
    if query.device.type == "cpu" and bias is None and scores.softcap is None:
        if mask is not None and query.dtype not in ready.additive:
            zeros = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device)
            ready.additive[query.dtype] = zeros.masked_fill_(~mask, float("-inf"))
        # The fused attention ignores strides of a head's elements.
        query, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, k, v))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, k, v, 0.0, ready.causal, attn_mask=ready.additive.get(query.dtype), scale=scale
        )
        return State(out, lse)
    if ready.causal:
        mask = torch.ones(k.shape[2], k.shape[2], dtype=torch.bool, device=k.device).tril()
    score = query.float() @ k.float().transpose(-1, -2) * scale
    if scores.softcap is not None:
        score = scores.softcap * torch.tanh(score / scores.softcap)
    if bias is not None:
        score = score + bias
    if mask is not None:
        score = score.masked_fill(~mask, float("-inf"))
    lse = torch.logsumexp(score, -1)
    safe = torch.where(lse == float("-inf"), torch.zeros_like(lse), lse)
    return State(torch.exp(score - safe.unsqueeze(-1)) @ v.float(), lse)


def _repeat_heads(values: Tensor, group: int) -> Tensor:
    """`[1, num_kv_heads, keys, head_dim]` -> `[1, num_kv_heads * group, ...]`."""
    return values if group == 1 else values.repeat_interleave(group, 1)
