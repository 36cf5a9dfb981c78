"""Attention over plans with PyTorch alone: any device, no compiler.

A plan becomes *items*. Each item attends a set of rows to a stretch of one run (or, for rows that
alone see short stretches, to a padded batch of walks over several) and gives a partial state;
items that touch the same rows are merged. On a CPU an item is one call of PyTorch's fused attention,
which returns its lse; elsewhere, and for ALiBi and softcap, it is written out in float32.

Which stretches get items of their own is decided by `CostModel`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from onestem.ops.kv import read_kv
from onestem.ops.plan import AttentionPlan
from onestem.ops.state import State, empty_state, merge_into

__all__ = ["CostModel", "TorchAttention"]

Stretch = tuple[int, int, int]  # run, first token, end token


@dataclass(frozen=True)
class CostModel:
    """When a stretch that several rows see is read by an item of its own.

    In a walk each row's keys are gathered (copied) and read once per row; an item reads them once
    for all rows but costs a call and a merge. In units of gathered tokens.

    Attributes:
        item_tokens: what an item's call and merge cost, in gathered tokens. On 2 cores a call and a
            merge take about 80 us and a token of a walk (GQA, 2 x 128 values) about 0.1 us.
        view_tokens: from this many consecutive slots on, a row's stretch is read in place instead
            of being gathered.
    """

    item_tokens: int = 512
    view_tokens: int = 512

    def own_item(self, rows: int, tokens: int) -> bool:
        return rows >= 8 or (rows >= 2 and rows * tokens >= self.item_tokens)


@dataclass(frozen=True)
class TorchAttention:
    """PyTorch implementation of `AttentionImpl`."""

    name: str = "torch"
    cost: CostModel = field(default_factory=CostModel)

    def prepare(self, plan: AttentionPlan, *, share: bool = True) -> PreparedTorch:
        return PreparedTorch(plan, _make_items(plan, self.cost, share))


# --------------------------------------------------------------------------------------------------
# Plan -> items


@dataclass(frozen=True)
class _Item:
    """Rows that see the same stretch whole.

    rows: int64 `[n]`; slots: int64 `[keys]`; `copies`: the stretch is read once for each row
    (`share=False`). `causal`: row j sees keys 0..j.
    """

    rows: np.ndarray
    slots: np.ndarray
    positions: np.ndarray
    causal: bool = False
    copies: bool = False


@dataclass(frozen=True)
class _MaskedItem:
    """Rows of one span with a moving lower bound: row j sees keys `firsts[j] <= k < ends[j]`."""

    rows: np.ndarray
    slots: np.ndarray
    positions: np.ndarray
    firsts: np.ndarray
    ends: np.ndarray


@dataclass(frozen=True)
class _WalkItem:
    """Rows that each see keys of their own, padded: slots int64 `[n, keys]`, lengths `[n]`."""

    rows: np.ndarray
    slots: np.ndarray
    positions: np.ndarray
    lengths: np.ndarray


def _make_items(plan: AttentionPlan, cost: CostModel, share: bool) -> list[_Item | _MaskedItem | _WalkItem]:
    whole: dict[Stretch, list[np.ndarray]] = defaultdict(list)
    items: list[_Item | _MaskedItem | _WalkItem] = []
    for row, rows, run, first, first_step, end, end_step in plan.spans.tolist():
        span_rows = np.arange(row, row + rows)
        if rows == 1 or (first_step == 0 and end_step == 0):
            whole[run, first, end].append(span_rows)
        elif first_step == 0:
            # What all rows see, then the triangle in which row j sees j + 1 tokens.
            if end - 1 > first:
                whole[run, first, end - 1].append(span_rows)
            start = max(end - 1, first)
            skipped = start - (end - 1)  # rows that see nothing yet (an empty first range)
            if rows > skipped:
                items.append(_square(plan, span_rows[skipped:], run, start, rows - skipped))
        else:
            items.append(_masked(plan, span_rows, run, first, end, end_step))
    walks: dict[int, list[Stretch]] = defaultdict(list)
    for stretch, parts in whole.items():
        if share:
            items.extend(_shared_or_walk(plan, cost, np.concatenate(parts), stretch, walks))
        else:
            items.extend(_unshared(plan, cost, parts, stretch, walks))
    items.extend(_walk_items(plan, cost, walks))
    return items


def _positions(plan: AttentionPlan, run: int, first: int, end: int) -> np.ndarray:
    return np.arange(first, end) + int(plan.run_position[run])


def _whole_item(plan: AttentionPlan, rows: np.ndarray, stretch: Stretch, *, copies: bool = False) -> _Item:
    return _Item(np.sort(rows), plan.slots(*stretch), _positions(plan, *stretch), copies=copies)


def _square(plan: AttentionPlan, rows: np.ndarray, run: int, start: int, size: int) -> _Item:
    return _Item(rows, plan.slots(run, start, start + size), _positions(plan, run, start, start + size),
                 causal=True)


def _masked(plan: AttentionPlan, rows: np.ndarray, run: int, first: int, end: int, end_step: int) -> _MaskedItem:
    step = np.arange(len(rows))
    last = end + (len(rows) - 1) * end_step
    return _MaskedItem(rows, plan.slots(run, first, last), _positions(plan, run, first, last),
                       firsts=step, ends=end - first + step * end_step)


def _shared_or_walk(
    plan: AttentionPlan, cost: CostModel, rows: np.ndarray, stretch: Stretch,
    walks: dict[int, list[Stretch]],
) -> Iterable[_Item]:
    if cost.own_item(len(rows), stretch[2] - stretch[1]):
        yield _whole_item(plan, rows, stretch)
    else:
        yield from _walk(plan, cost, rows, stretch, walks)


def _unshared(
    plan: AttentionPlan, cost: CostModel, parts: list[np.ndarray], stretch: Stretch,
    walks: dict[int, list[Stretch]],
) -> Iterable[_Item]:
    """Each span reads the stretch for itself; single rows do so in one batched call."""
    singles = [part for part in parts if len(part) == 1]
    for part in parts:
        if len(part) > 1:
            yield _whole_item(plan, part, stretch)
    if singles:
        rows = np.concatenate(singles)
        if cost.own_item(len(rows), stretch[2] - stretch[1]):
            yield _whole_item(plan, rows, stretch, copies=True)
        else:
            yield from _walk(plan, cost, rows, stretch, walks)


def _walk(
    plan: AttentionPlan, cost: CostModel, rows: np.ndarray, stretch: Stretch,
    walks: dict[int, list[Stretch]],
) -> Iterable[_Item]:
    """Put a stretch on its rows' walks, but long parts that lie in consecutive slots."""
    run, first, end = stretch
    if end - first >= cost.view_tokens:
        for a, b in _consecutive(plan.slots(run, first, end), cost.view_tokens):
            for row in rows:
                yield _whole_item(plan, np.array([row]), (run, first + a, first + b))
            stretch = (run, first, first + a)
            if a > 0:
                yield from _walk(plan, cost, rows, stretch, walks)
            if first + b < end:
                yield from _walk(plan, cost, rows, (run, first + b, end), walks)
            return
    for row in rows.tolist():
        walks[row].append((run, first, end))


def _consecutive(slots: np.ndarray, at_least: int) -> list[tuple[int, int]]:
    """The longest range over which slots grow by one, if it has `at_least` entries."""
    cuts = np.flatnonzero(np.diff(slots) != 1) + 1
    starts, stops = np.concatenate(([0], cuts)), np.concatenate((cuts, [len(slots)]))
    best = int(np.argmax(stops - starts))
    a, b = int(starts[best]), int(stops[best])
    return [(a, b)] if b - a >= at_least else []


def _walk_items(
    plan: AttentionPlan, cost: CostModel, walks: dict[int, list[Stretch]]
) -> Iterable[_WalkItem]:
    """Batches of walks of similar length, so that padding stays below half."""
    lengths = {row: sum(end - first for _, first, end in parts) for row, parts in walks.items()}
    batch: list[int] = []
    for row in sorted(walks, key=lambda r: (lengths[r], r)):
        if batch and lengths[row] > 2 * lengths[batch[0]] + 64:
            yield _walk_item(plan, batch, walks, lengths)
            batch = []
        batch.append(row)
    if batch:
        yield _walk_item(plan, batch, walks, lengths)


def _walk_item(
    plan: AttentionPlan, rows: list[int], walks: dict[int, list[Stretch]], lengths: dict[int, int]
) -> _WalkItem:
    rows = sorted(rows)
    longest = max(lengths[row] for row in rows)
    slots = np.empty((len(rows), longest), np.int64)
    positions = np.zeros((len(rows), longest), np.int64)
    for i, row in enumerate(rows):
        at = 0
        for run, first, end in walks[row]:
            slots[i, at : at + end - first] = plan.slots(run, first, end)
            positions[i, at : at + end - first] = _positions(plan, run, first, end)
            at += end - first
        # Padding repeats a written slot: an unused one may hold NaN, and 0 * NaN is NaN.
        slots[i, at:] = slots[i, 0]
    return _WalkItem(np.array(rows), slots, positions, np.array([lengths[row] for row in rows]))


# --------------------------------------------------------------------------------------------------
# Items -> state


Index = slice | Tensor


def _index(rows: np.ndarray, device: torch.device) -> Index:
    """A slice where rows are consecutive (no copy), else an index tensor."""
    if int(rows[-1]) - int(rows[0]) + 1 == len(rows):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return torch.from_numpy(rows).to(device)


@dataclass
class _Ready:
    """An item on the device. `first`: nothing was written to its rows before it."""

    item: _Item | _MaskedItem | _WalkItem
    index: Index
    slots: slice | Tensor
    key_positions: Tensor
    mask: Tensor | None  # bool, broadcastable to [batch, 1, query rows, keys]; True: seen
    first: bool
    untouched_before: bool


class PreparedTorch:
    """A plan as items; device tensors are made at the first layer and serve the others."""

    def __init__(self, plan: AttentionPlan, items: list[_Item | _MaskedItem | _WalkItem]) -> None:
        self.plan = plan
        self.items = items
        self._ready: list[_Ready] | None = None
        self._masks: dict[tuple[int, torch.dtype, int], Tensor] = {}

    def attend(
        self, q: Tensor, k_pages: Tensor, v_pages: Tensor, *,
        scale: float | None = None, alibi_slopes: Tensor | None = None,
        softcap: float | None = None,
    ) -> State:
        """See `ops.attention`."""
        num_rows, num_heads, head_dim = q.shape
        if self._ready is None:
            self._ready = self._make_ready(q.device)
        total = empty_state(num_rows, num_heads, head_dim, device=q.device)
        scores = _Scores(1 / math.sqrt(head_dim) if scale is None else scale, alibi_slopes, softcap)
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

    def _make_ready(self, device: torch.device) -> list[_Ready]:
        touched = np.zeros(self.plan.num_rows, bool)
        ready = []
        for item in self.items:
            first = not touched[item.rows].any()
            touched[item.rows] = True
            ready.append(_Ready(
                item, _index(item.rows, device), _slots(item, device),
                torch.from_numpy(item.positions).to(device), _mask(item, device), first, first,
            ))
        return ready

    def _attend_item(
        self, number: int, ready: _Ready, q: Tensor, k_pages: Tensor, v_pages: Tensor, scores: _Scores
    ) -> State:
        rows = q[ready.index]  # [n, num_q_heads, head_dim]
        item = ready.item
        k, v = _read(k_pages, ready.slots), _read(v_pages, ready.slots)
        if isinstance(item, _WalkItem) or (isinstance(item, _Item) and item.copies):
            return self._attend_each(number, ready, rows, k, v, scores)
        return self._attend_together(number, ready, rows, k, v, scores)

    def _attend_together(
        self, number: int, ready: _Ready, rows: Tensor, k: Tensor, v: Tensor, scores: _Scores
    ) -> State:
        """All rows over the same keys `[keys, num_kv_heads, head_dim]`."""
        n, num_heads, head_dim = rows.shape
        group = num_heads // k.shape[1]
        causal = isinstance(ready.item, _Item) and ready.item.causal
        k, v = k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0)
        if causal or ready.mask is not None:
            # Masks run along rows: query heads stay heads, and share their KV head by expansion.
            query = rows.transpose(0, 1).unsqueeze(0)  # [1, num_q_heads, n, head_dim]
            k, v = _repeat_heads(k, group), _repeat_heads(v, group)
            state = self._softmax(number, ready, query, k, v, scores, causal)
            return State(state.out[0].transpose(0, 1), state.lse[0].transpose(0, 1))
        # A KV head's query heads are packed into the row axis: one product serves them all.
        query = rows.view(n, -1, group, head_dim).permute(1, 0, 2, 3).reshape(1, -1, n * group, head_dim)
        state = self._softmax(number, ready, query, k, v, scores, False)
        out = state.out[0].reshape(-1, n, group, head_dim).transpose(0, 1)
        lse = state.lse[0].reshape(-1, n, group).transpose(0, 1)
        return State(out.reshape(n, num_heads, head_dim), lse.reshape(n, num_heads))

    def _attend_each(
        self, number: int, ready: _Ready, rows: Tensor, k: Tensor, v: Tensor, scores: _Scores
    ) -> State:
        """Each row over keys of its own, `[n, keys, num_kv_heads, head_dim]` (or `[keys, ...]`,
        read anew for each)."""
        n, num_heads, head_dim = rows.shape
        if k.dim() == 3:
            k, v = k.expand(n, *k.shape), v.expand(n, *v.shape)
        query = rows.view(n, k.shape[2], -1, head_dim)  # [n, num_kv_heads, group, head_dim]
        state = self._softmax(number, ready, query, k.transpose(1, 2), v.transpose(1, 2), scores, False)
        return State(state.out.reshape(n, num_heads, head_dim), state.lse.reshape(n, num_heads))

    def _softmax(
        self, number: int, ready: _Ready, query: Tensor, k: Tensor, v: Tensor, scores: _Scores,
        causal: bool,
    ) -> State:
        if query.device.type == "cpu" and not scores.special:
            mask = self._additive(number, ready.mask, query.dtype)
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query, k, v, 0.0, causal, attn_mask=mask, scale=scores.scale
            )
            return State(out, lse)
        mask = _triangle(k.shape[2], query.device) if causal else ready.mask
        bias = self._alibi(ready, query, k, scores)
        return _explicit(query, k, v, mask, bias, scores)

    def _additive(self, number: int, mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        if mask is None:
            return None
        key = (number, dtype, 0)
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
        slopes = scores.alibi_slopes.float()
        batch, heads, rows, keys = query.shape[0], query.shape[1], query.shape[2], k.shape[2]
        if batch != 1 or p_key.dim() == 2 or (isinstance(ready.item, _Item) and ready.item.copies):
            distance = (p_key - p_row[:, None]).view(len(p_row), 1, 1, keys)
            return slopes.view(1, heads, rows, 1) * distance
        distance = p_key[None, :] - p_row[:, None]  # [n, keys]
        bias = slopes.view(-1, 1, 1) * distance  # [num_q_heads, n, keys]
        if heads == len(slopes) and rows == len(p_row):
            return bias.unsqueeze(0)
        group = rows // len(p_row)
        bias = bias.view(heads, group, len(p_row), keys).transpose(1, 2)
        return bias.reshape(1, heads, rows, keys)


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


def _slots(item: _Item | _MaskedItem | _WalkItem, device: torch.device) -> slice | Tensor:
    slots = item.slots
    if slots.ndim == 1 and int(slots[-1]) - int(slots[0]) + 1 == len(slots) and (np.diff(slots) == 1).all():
        return slice(int(slots[0]), int(slots[-1]) + 1)
    return torch.from_numpy(slots).to(device)


def _read(pages: Tensor, slots: slice | Tensor) -> Tensor:
    if isinstance(slots, slice):
        return pages.view(-1, *pages.shape[2:])[slots]
    return read_kv(pages, slots)


def _mask(item: _Item | _MaskedItem | _WalkItem, device: torch.device) -> Tensor | None:
    if isinstance(item, _WalkItem):
        keys = np.arange(item.slots.shape[1])
        seen = keys[None, :] < item.lengths[:, None]
        return None if seen.all() else torch.from_numpy(seen).to(device)[:, None, None, :]
    if isinstance(item, _MaskedItem):
        keys = np.arange(len(item.slots))
        seen = (keys >= item.firsts[:, None]) & (keys < item.ends[:, None])
        return torch.from_numpy(seen).to(device)[None, None]
    return None


def _triangle(size: int, device: torch.device) -> Tensor:
    return torch.ones(size, size, dtype=torch.bool, device=device).tril()


def _repeat_heads(values: Tensor, group: int) -> Tensor:
    """`[1, num_kv_heads, keys, head_dim]` -> `[1, num_kv_heads * group, ...]`."""
    return values if group == 1 else values.repeat_interleave(group, 1)
