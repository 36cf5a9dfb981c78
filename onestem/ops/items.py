"""A plan as work items: rows and the keys that they attend to in one operation.

An item attends a set of rows to a stretch of one run. Rows that alone see short stretches share an
item: a padded batch of walks over them. Each item gives a partial state; states of the same rows
are merged. `CostModel` decides which stretches get items of their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from onestem.ops.plan import AttentionPlan

Stretch = tuple[int, int, int]  # run, first token, end token


@dataclass(frozen=True)
class CostModel:
    """Decides when a stretch that several rows see gets an item of its own.

    In a walk each row's keys are gathered (copied) and read once per row; an item reads them once
    for all rows but costs a call and a merge. In units of gathered tokens.

    Attributes:
        item_tokens: what an item's call and merge cost, in gathered tokens. On 2 cores a call and a
            merge take about 80 us and a token of a walk (GQA, 2 x 128 values) about 0.1 us.
        view_tokens: consecutive slots from which a row's stretch is read in place instead of being
            gathered.
    """

    item_tokens: int = 512
    view_tokens: int = 512

    def own_item(self, rows: int, tokens: int) -> bool:
        """Whether a stretch of `tokens` that `rows` rows see gets one."""
        return rows >= 8 or (rows >= 2 and rows * tokens >= self.item_tokens)


@dataclass(frozen=True)
class SharedItem:
    """Rows over one stretch.

    Attributes:
        rows: int64 `[n]`, ascending.
        slots, positions: int64 `[keys]`.
        seen: bool `[n, keys]`, or None if every row sees every key.
        causal: row j sees keys 0..j, and `seen` is None.
        copies: the stretch is read once for each row (`share=False`).
    """

    rows: np.ndarray
    slots: np.ndarray
    positions: np.ndarray
    seen: np.ndarray | None = None
    causal: bool = False
    copies: bool = False


@dataclass(frozen=True)
class WalkItem:
    """Rows that each see keys of their own, padded.

    Attributes:
        rows: int64 `[n]`, ascending.
        slots, positions: int64 `[n, keys]`; padding repeats a slot that is written.
        seen: bool `[n, keys]`, or None if there is no padding.
    """

    rows: np.ndarray
    slots: np.ndarray
    positions: np.ndarray
    seen: np.ndarray | None = None


Item = SharedItem | WalkItem


def make_items(plan: AttentionPlan, cost: CostModel, share: bool) -> list[Item]:
    """Items that together show each row what the plan shows it, each token once.

    With `share=False` a stretch is read once per span, or per row if spans have one row.
    """
    whole: dict[Stretch, list[np.ndarray]] = defaultdict(list)
    items: list[Item] = []
    for row, rows, run, first, end, step in plan.spans.tolist():
        span_rows = np.arange(row, row + rows)
        if step == 0 or rows == 1:
            whole[run, first, end].append(span_rows)
            continue
        # First the tokens that all rows see, then the triangle in which row j sees j + 1 tokens.
        # Rows that see nothing yet (an empty range at first) come before the triangle.
        if end - 1 > first:
            whole[run, first, end - 1].append(span_rows)
        start = max(end - 1, first)
        rest = span_rows[start - (end - 1) :]
        if len(rest):
            items.append(_triangle(plan, rest, run, start))
    walks: dict[int, list[Stretch]] = defaultdict(list)
    for stretch, parts in whole.items():
        for rows, copies in _readers(parts, share):
            items.extend(_place(plan, cost, rows, stretch, walks, copies))
    items.extend(_walk_items(plan, walks))
    return items


def _readers(parts: list[np.ndarray], share: bool) -> Iterable[tuple[np.ndarray, bool]]:
    """Rows that read a stretch together, and whether each reads a copy: all rows; or, unshared,
    each span, with single rows in one call that reads it again for each."""
    if share:
        yield np.sort(np.concatenate(parts)), False
        return
    yield from ((part, False) for part in parts if len(part) > 1)
    singles = [part for part in parts if len(part) == 1]
    if singles:
        yield np.sort(np.concatenate(singles)), True


def _place(
    plan: AttentionPlan,
    cost: CostModel,
    rows: np.ndarray,
    stretch: Stretch,
    walks: dict[int, list[Stretch]],
    copies: bool,
) -> Iterable[Item]:
    """Give a stretch an item of its own, or add it to its rows' walks."""
    if plan.window is not None:
        rows, stretch = _in_window(plan, rows, stretch, plan.window)
    if len(rows) == 0:
        return
    if cost.own_item(len(rows), stretch[2] - stretch[1]):
        yield _shared(plan, rows, stretch, copies)
    else:
        for row in rows.tolist():
            yield from _walk(plan, cost, row, stretch, walks)


def _first_seen(plan: AttentionPlan, rows: np.ndarray, run: int, window: int) -> np.ndarray:
    """int64 `[n]`: the first token of a run in each row's window (may be < 0)."""
    return plan.row_position[rows].astype(np.int64) - window + 1 - int(plan.run_position[run])


def _in_window(
    plan: AttentionPlan, rows: np.ndarray, stretch: Stretch, window: int
) -> tuple[np.ndarray, Stretch]:
    """The rows that see some of a stretch, and the part of it that some of them see."""
    run, first, end = stretch
    lower = _first_seen(plan, rows, run, window)
    rows, lower = rows[lower < end], lower[lower < end]
    return rows, (run, max(first, int(lower.min(initial=end))), end)


def _shared(plan: AttentionPlan, rows: np.ndarray, stretch: Stretch, copies: bool) -> SharedItem:
    seen = _window_mask(plan, rows, stretch)
    return SharedItem(
        rows, plan.slots(*stretch), plan.positions(*stretch), seen=seen, copies=copies
    )


def _window_mask(plan: AttentionPlan, rows: np.ndarray, stretch: Stretch) -> np.ndarray | None:
    if plan.window is None:
        return None
    run, first, end = stretch
    seen = np.arange(first, end) >= _first_seen(plan, rows, run, plan.window)[:, None]
    return None if seen.all() else seen


def _triangle(plan: AttentionPlan, rows: np.ndarray, run: int, start: int) -> SharedItem:
    stretch = (run, start, start + len(rows))
    seen = _window_mask(plan, rows, stretch)
    if seen is not None:
        seen = np.tril(seen)
    return SharedItem(
        rows, plan.slots(*stretch), plan.positions(*stretch), seen=seen, causal=seen is None
    )


def _walk(
    plan: AttentionPlan,
    cost: CostModel,
    row: int,
    stretch: Stretch,
    walks: dict[int, list[Stretch]],
) -> Iterable[SharedItem]:
    """Add a stretch to a row's walk; long parts in consecutive slots get items."""
    run, first, end = stretch
    if plan.window is not None:
        alone = np.array([row])
        first = max(first, int(_first_seen(plan, alone, run, plan.window)[0]))
    if end - first >= cost.view_tokens:
        a, b = _consecutive(plan.slots(run, first, end))
        if b - a >= cost.view_tokens:
            yield _shared(plan, np.array([row]), (run, first + a, first + b), False)
            yield from _walk(plan, cost, row, (run, first, first + a), walks)
            yield from _walk(plan, cost, row, (run, first + b, end), walks)
            return
    if end > first:
        walks[row].append((run, first, end))


def _consecutive(slots: np.ndarray) -> tuple[int, int]:
    """The longest range over which slots grow by one."""
    cuts = np.flatnonzero(np.diff(slots) != 1) + 1
    starts, stops = np.concatenate(([0], cuts)), np.concatenate((cuts, [len(slots)]))
    best = int(np.argmax(stops - starts))
    return int(starts[best]), int(stops[best])


def _walk_items(plan: AttentionPlan, walks: dict[int, list[Stretch]]) -> Iterable[WalkItem]:
    """Batches of walks of similar length, so that padding stays below half."""
    lengths = {row: sum(end - first for _, first, end in parts) for row, parts in walks.items()}
    batch: list[int] = []
    for row in sorted(walks, key=lambda r: (lengths[r], r)):
        if batch and lengths[row] > 2 * lengths[batch[0]] + 64:
            yield _walk_item(plan, sorted(batch), walks, lengths)
            batch = []
        batch.append(row)
    if batch:
        yield _walk_item(plan, sorted(batch), walks, lengths)


def _walk_item(
    plan: AttentionPlan,
    rows: list[int],
    walks: dict[int, list[Stretch]],
    lengths: dict[int, int],
) -> WalkItem:
    longest = max(lengths[row] for row in rows)
    slots = np.empty((len(rows), longest), np.int64)
    positions = np.zeros((len(rows), longest), np.int64)
    for i, row in enumerate(rows):
        at = 0
        for run, first, end in walks[row]:
            stop = at + end - first
            slots[i, at:stop] = plan.slots(run, first, end)
            positions[i, at:stop] = plan.positions(run, first, end)
            at = stop
        # An unused slot may hold NaN, and 0 * NaN is NaN: padding repeats a written slot.
        slots[i, at:] = slots[i, 0]
    seen = np.arange(longest) < np.array([lengths[row] for row in rows])[:, None]
    return WalkItem(np.array(rows), slots, positions, None if seen.all() else seen)
