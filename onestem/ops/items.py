"""A plan as work items: which rows attend to which keys in one go.

Each item attends a set of rows to a stretch of one run (or, for rows that alone see short
stretches, to a padded batch of walks over several) and gives a partial state; items that touch the
same rows are merged. Which stretches get items of their own is decided by `CostModel`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from onestem.ops.plan import AttentionPlan

__all__ = ["CostModel", "Item", "MaskedItem", "SharedItem", "WalkItem", "make_items"]

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
class SharedItem:
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
class MaskedItem:
    """Rows of one span with a moving lower bound: row j sees keys `firsts[j] <= k < ends[j]`."""

    rows: np.ndarray
    slots: np.ndarray
    positions: np.ndarray
    firsts: np.ndarray
    ends: np.ndarray


@dataclass(frozen=True)
class WalkItem:
    """Rows that each see keys of their own, padded: slots int64 `[n, keys]`, lengths `[n]`."""

    rows: np.ndarray
    slots: np.ndarray
    positions: np.ndarray
    lengths: np.ndarray


Item = SharedItem | MaskedItem | WalkItem


def make_items(plan: AttentionPlan, cost: CostModel, share: bool) -> list[Item]:
    whole: dict[Stretch, list[np.ndarray]] = defaultdict(list)
    items: list[Item] = []
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


def _whole_item(
    plan: AttentionPlan, rows: np.ndarray, stretch: Stretch, *, copies: bool = False
) -> SharedItem:
    return SharedItem(
        np.sort(rows), plan.slots(*stretch), _positions(plan, *stretch), copies=copies
    )


def _square(plan: AttentionPlan, rows: np.ndarray, run: int, start: int, size: int) -> SharedItem:
    return SharedItem(
        rows,
        plan.slots(run, start, start + size),
        _positions(plan, run, start, start + size),
        causal=True,
    )


def _masked(
    plan: AttentionPlan, rows: np.ndarray, run: int, first: int, end: int, end_step: int
) -> MaskedItem:
    step = np.arange(len(rows))
    last = end + (len(rows) - 1) * end_step
    return MaskedItem(
        rows,
        plan.slots(run, first, last),
        _positions(plan, run, first, last),
        firsts=step,
        ends=end - first + step * end_step,
    )


def _shared_or_walk(
    plan: AttentionPlan,
    cost: CostModel,
    rows: np.ndarray,
    stretch: Stretch,
    walks: dict[int, list[Stretch]],
) -> Iterable[SharedItem]:
    if cost.own_item(len(rows), stretch[2] - stretch[1]):
        yield _whole_item(plan, rows, stretch)
    else:
        yield from _walk(plan, cost, rows, stretch, walks)


def _unshared(
    plan: AttentionPlan,
    cost: CostModel,
    parts: list[np.ndarray],
    stretch: Stretch,
    walks: dict[int, list[Stretch]],
) -> Iterable[SharedItem]:
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
    plan: AttentionPlan,
    cost: CostModel,
    rows: np.ndarray,
    stretch: Stretch,
    walks: dict[int, list[Stretch]],
) -> Iterable[SharedItem]:
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
) -> Iterable[WalkItem]:
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
) -> WalkItem:
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
    return WalkItem(np.array(rows), slots, positions, np.array([lengths[row] for row in rows]))
