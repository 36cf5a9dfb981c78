"""Plan -> work items, vectorised: no Python loop over rows, runs, spans or sequences.

An *atom* is a set of consecutive rows with the same spans: a decode's row, a chunk's rows. Spans of
one atom are walked by one item, one after the other, and need no merge. A run that several atoms
see gets an item of its own where reading it once saves more than merging costs (`Cost`); what does
not pay is dealt out to the atoms. Long items are cut by tokens, wide ones by rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onestem.ops import AttentionPlan

__all__ = ["HEADER", "Cost", "Items", "make_items"]

HEADER = 16  # int32 words before the sections of a packed buffer


@dataclass(frozen=True)
class Cost:
    """When a shared run is read by items of its own, and how items are cut.

    Attributes:
        merge_tokens: what one more partial state costs a row, in tokens read.
        block_rows: rows of an item at most.
        items: number of items to aim at; sets the length at which items are cut.
        min_tokens: no item is cut shorter.
    """

    merge_tokens: int = 16
    block_rows: int = 16
    items: int = 256
    min_tokens: int = 256


@dataclass(frozen=True, eq=False)
class Items:
    """Work items of a plan, int32.

    Attributes:
        items: `[num_items, 4]`: where its rows begin in `rows`, how many, where its walk begins,
            how long.
        walk: `[num_walk, 8]`: run, first, first_step, end, end_step, lo, hi, 0. Row j of the item
            sees `max(lo, first + j * first_step) .. min(hi, end + j * end_step) - 1` of the run.
        rows: `[num_parts]`: rows of all items.
        dest: `[num_parts]`: where in the workspace the row's state goes; -1: it is the row's only
            one, and final.
        merges: `[num_merges, 4]`: row, where its states begin in the workspace, how many (0: the
            row is empty), 0.
    """

    items: np.ndarray
    walk: np.ndarray
    rows: np.ndarray
    dest: np.ndarray
    merges: np.ndarray

    def pack(self, plan: AttentionPlan, out: np.ndarray, window: int = 0) -> int:
        """Write counts, items and the plan's arrays into one int32 buffer; gives the words used.

        Word 0: items, 1: merges, 2..9: where items, walk, rows, dest, merges, runs, pages and row
        positions begin, 10: window. Sections begin at multiples of 4 words (16 bytes).
        """
        runs = np.stack([plan.run_page_start, plan.run_offset, plan.run_len, plan.run_position], 1)
        out[0], out[1], out[10] = len(self.items), len(self.merges), window or 2**30
        at = HEADER
        sections = (
            self.items,
            self.walk,
            self.rows,
            self.dest,
            self.merges,
            runs,
            plan.run_pages,
            plan.row_position,
        )
        for word, part in enumerate(sections, 2):
            out[word] = at
            out[at : at + part.size] = part.reshape(-1)
            at += -(-part.size // 4) * 4
        return at


def _ragged(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """starts[0], starts[0] + 1, ..., (counts[0] of them), then starts[1], ..."""
    ends = np.cumsum(counts)
    return np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(
        starts - (ends - counts), counts
    )


def _order(keys: np.ndarray) -> np.ndarray:
    """Stable argsort of small non-negative keys (a radix sort below 65,536)."""
    return np.argsort(
        keys.astype(np.uint16) if len(keys) and keys.max() < 65536 else keys, kind="stable"
    )


def make_items(plan: AttentionPlan, cost: Cost, window: int = 0) -> Items:
    """Work items of a plan.

    `window` (0: none) tries a window that is a field of the plan instead of cut spans: items are
    trimmed to what some row of theirs still sees, and the kernel masks by position.
    """
    spans = plan.spans.T.astype(np.int64)  # [7, num_spans], columns contiguous
    row, rows, run, first, first_step, end, end_step = spans
    flags = np.zeros(plan.num_rows + 1, bool)
    flags[row] = flags[row + rows] = True
    flags[0] = flags[-1] = True
    bounds = np.flatnonzero(flags)  # atoms are the rows between two neighbours
    atom_of = np.cumsum(flags) - 1
    atom = atom_of[row]
    num_atoms = atom_of[row + rows] - atom

    # Spans over the same tokens (of a module: several; of a tree node: one) form a group.
    whole = (first_step == 0) & (end_step == 0)
    group, leader = _groups(run, first, end, whole)
    group_rows = np.bincount(group, rows, len(leader)).astype(np.int64)
    group_atoms = np.bincount(group, num_atoms, len(leader)).astype(np.int64)
    tokens = (end - first)[leader]
    saved = tokens * (group_atoms - -(-group_rows // cost.block_rows))
    own = whole[leader] & (group_atoms > 1) & (saved >= cost.merge_tokens * group_rows)
    is_own = own[group]

    # Units: own groups first, then atoms. Rows of a unit are segments of rows.
    picked = np.flatnonzero(is_own)
    if len(picked):
        unit_of_group = np.cumsum(own) - 1
        picked = picked[_order(unit_of_group[group[picked]])]
    own_leader = leader[own]
    num_own = len(own_leader)
    rest = np.flatnonzero(~is_own)
    count = num_atoms[rest]
    spread = np.repeat(rest, count)
    spread_atom = _ragged(atom[rest], count)
    order = _order(spread_atom)
    spread, spread_atom = spread[order], spread_atom[order]
    skipped = bounds[spread_atom] - row[spread]  # rows of the span before this atom

    unit_rows = np.concatenate((group_rows[own], np.diff(bounds)))
    own_rows = _ragged(row[picked], rows[picked])
    unit_row_start = np.cumsum(unit_rows) - unit_rows
    all_rows = np.concatenate((own_rows, np.arange(plan.num_rows)))
    entry = np.concatenate((own_leader, spread))
    entry_unit = np.concatenate((np.arange(num_own), num_own + spread_atom))
    entry_skip = np.concatenate((np.zeros(num_own, np.int64), skipped))
    entries_of_unit = np.bincount(entry_unit, minlength=len(unit_rows))
    entry_start = np.cumsum(entries_of_unit) - entries_of_unit

    # Row blocks.
    blocks = np.where(entries_of_unit > 0, -(-unit_rows // cost.block_rows), 0)
    unit = np.repeat(np.arange(len(unit_rows)), blocks)
    nth = _ragged(np.zeros(len(unit_rows), np.int64), blocks) * cost.block_rows
    block_rows = np.minimum(cost.block_rows, unit_rows[unit] - nth)
    block_start = unit_row_start[unit] + nth
    index = _ragged(entry_start[unit], entries_of_unit[unit])
    block = np.repeat(np.arange(len(unit)), entries_of_unit[unit])
    e, skip = entry[index], entry_skip[index] + nth[block]
    w_first, w_end = first[e] + skip * first_step[e], end[e] + skip * end_step[e]
    hi = w_end + (block_rows[block] - 1) * end_step[e]
    w_lo = w_first
    if window:
        lowest = (
            np.minimum.reduceat(
                plan.row_position[all_rows[_ragged(block_start, block_rows)]],
                np.cumsum(block_rows) - block_rows,
            )
            if len(unit)
            else block_rows
        )
        w_lo = np.maximum(w_first, lowest[block] - window + 1 - plan.run_position[run[e]])
    length = np.maximum(hi - w_lo, 0)

    # Token cuts: piece i of a block holds its tokens i * cut .. (i + 1) * cut - 1.
    ends = np.cumsum(length)
    cut = max(cost.min_tokens, -(-int(ends[-1]) // cost.items) if len(ends) else 1)
    before = ends - length
    block_first = np.flatnonzero(np.diff(block, prepend=-1))
    before -= np.repeat(before[block_first], np.diff(np.append(block_first, len(block))))
    piece0 = before // cut
    pieces = np.where(length > 0, (before + length - 1) // cut - piece0 + 1, 0)
    src = np.repeat(np.arange(len(e)), pieces)
    piece = _ragged(piece0, pieces)
    lo = w_lo[src] + np.maximum(piece * cut - before[src], 0)
    hi = np.minimum(hi[src], w_lo[src] + (piece + 1) * cut - before[src])
    e, block = e[src], block[src]

    new = np.flatnonzero((np.diff(block, prepend=-1) != 0) | (np.diff(piece, prepend=-1) != 0))
    item_block = block[new]
    num_item_rows = block_rows[item_block]
    walk = np.zeros((len(e), 8), np.int32)
    for column, values in enumerate(
        (run[e], w_first[src], first_step[e], w_end[src], end_step[e], lo, hi)
    ):
        walk[:, column] = values
    items = np.empty((len(new), 4), np.int32)
    items[:, 0] = np.cumsum(num_item_rows) - num_item_rows
    items[:, 1] = num_item_rows
    items[:, 2] = new
    items[:, 3] = np.diff(np.append(new, len(e)))
    item_rows = all_rows[_ragged(block_start[item_block], num_item_rows)]
    return Items(items, walk, item_rows.astype(np.int32), *_merges(item_rows, plan.num_rows))


def _groups(
    run: np.ndarray, first: np.ndarray, end: np.ndarray, whole: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Group of each span, and a span of each group: spans over the same tokens, not moving."""
    n = len(run)
    if n == 0 or not (np.bincount(run)[run[whole]] > 1).any():
        return np.arange(n), np.arange(n)
    order = np.lexsort((end, first, run))
    same = np.diff(run[order]) == 0
    same &= (
        (np.diff(first[order]) == 0)
        & (np.diff(end[order]) == 0)
        & whole[order][1:]
        & whole[order][:-1]
    )
    number = np.concatenate(([0], np.cumsum(~same)))
    group = np.empty(n, np.int64)
    group[order] = number
    return group, order[np.flatnonzero(np.concatenate(([True], ~same)))]


def _merges(item_rows: np.ndarray, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """`dest` and `merges`: a row's states stand side by side in the workspace."""
    parts = np.bincount(item_rows, minlength=num_rows)
    slots = np.where(parts > 1, parts, 0)
    start = np.cumsum(slots) - slots
    order = _order(item_rows)
    nth = np.empty(len(item_rows), np.int64)
    nth[order] = np.arange(len(item_rows)) - np.repeat(np.cumsum(parts) - parts, parts)
    dest = np.where(parts[item_rows] > 1, start[item_rows] + nth, -1)
    merged = np.flatnonzero(parts != 1)
    merges = np.zeros((len(merged), 4), np.int32)
    merges[:, 0], merges[:, 1], merges[:, 2] = merged, start[merged], parts[merged]
    return dest.astype(np.int32), merges
