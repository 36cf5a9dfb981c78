"""Who walks what: rows that see the same runs, and how many of them make an item.

An *atom* is a set of consecutive rows with the same spans: a decode's row, a chunk's rows. What one
atom sees is walked by one item, run after run, and needs no merge. A run that several atoms see is
a *group*: it gets items of its own where reading it once saves more than merging costs, else it is
dealt out to its atoms. A *unit* is a group or an atom; a *block* is as much of it as fits a tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onestem.ops.plan import AttentionPlan
from onestem.ops.work.arrays import argsort, before, ragged
from onestem.ops.work.model import CostModel

__all__ = ["Blocks", "Pairs", "Units", "blocks_of", "pairs_of", "shared_groups", "units_of"]


@dataclass(frozen=True, eq=False)
class Pairs:
    """Which atom sees which span: atom `atom[i]` sees span `span[i]`.

    spans: int64 `[6, num_spans]`; bounds: `[num_atoms + 1]`, the rows between atoms.
    """

    spans: np.ndarray
    bounds: np.ndarray
    span: np.ndarray
    atom: np.ndarray


@dataclass(frozen=True, eq=False)
class Units:
    """Rows that walk together, `[num_units]`: where they begin in `rows` and how many; where their
    entries begin and how many. An entry is a span, whose row `skip` is its unit's first."""

    rows: np.ndarray
    row_start: np.ndarray
    num_rows: np.ndarray
    entry_start: np.ndarray
    num_entries: np.ndarray
    entry_span: np.ndarray
    entry_skip: np.ndarray


@dataclass(frozen=True, eq=False)
class Blocks:
    """Units cut to tiles, `[num_blocks]`; their entries, `[num_entries]`, in tokens of a run."""

    rows: np.ndarray  # of the units
    row_start: np.ndarray
    num_rows: np.ndarray
    kind: np.ndarray
    block: np.ndarray  # of each entry
    span: np.ndarray
    lo: np.ndarray
    clear_lo: np.ndarray
    end: np.ndarray
    hi: np.ndarray


def pairs_of(plan: AttentionPlan) -> Pairs:
    spans = np.ascontiguousarray(plan.spans.T).astype(np.int64)
    row, rows = spans[0], spans[1]
    flags = np.zeros(plan.num_rows + 1, bool)
    flags[row] = flags[row + rows] = True
    flags[0] = flags[-1] = True
    atom_of = np.cumsum(flags) - 1
    atom = atom_of[row]
    count = atom_of[row + rows] - atom
    span = np.repeat(np.arange(len(row)), count)
    return Pairs(spans, np.flatnonzero(flags), span, ragged(atom, count))


def shared_groups(
    plan: AttentionPlan, pairs: Pairs, cost: CostModel, tile_rows: int, room: int | None
) -> np.ndarray:
    """int64 `[num_pairs]`: the group that gets items of its own and that the pair is in, or -1.

    `room`: how many states groups may leave.
    """
    none = np.full(len(pairs.span), -1)
    _, rows, run, first, end, step = pairs.spans
    whole = (step == 0) | (rows == 1)
    if room == -1 or len(run) == 0:
        return none
    group, leader = _same_tokens(run, first, end, whole)
    atom_rows = np.diff(pairs.bounds)[pairs.atom]
    together = whole[pairs.span] & (atom_rows < tile_rows)
    pair_group = group[pairs.span]
    size = len(leader)
    atoms = np.bincount(pair_group, together, size)
    num_rows = np.bincount(pair_group, atom_rows * together, size)
    tokens = _tokens_seen(plan, pairs, pair_group, leader)
    saved = tokens * (atoms - np.ceil(num_rows / tile_rows))
    pays = (atoms > 1) & (saved > 0) & (saved >= cost.merge_tokens * num_rows)
    if room is not None:
        pays &= _fits(saved, num_rows * pays, room)
    number = np.where(pays, np.cumsum(pays) - 1, -1)
    return np.where(together, number[pair_group], -1)


def _fits(saved: np.ndarray, num_rows: np.ndarray, room: int) -> np.ndarray:
    """Which groups' states fit, those first that save most per state."""
    order = np.argsort(-saved / np.maximum(num_rows, 1), kind="stable")
    fits = np.empty(len(saved), bool)
    fits[order] = np.cumsum(num_rows[order]) <= room
    return fits


def _tokens_seen(
    plan: AttentionPlan, pairs: Pairs, pair_group: np.ndarray, leader: np.ndarray
) -> np.ndarray:
    """int64 `[num_groups]`: tokens that some row of the group sees."""
    _, _, run, first, end, _ = pairs.spans[:, leader]
    if plan.window is None:
        return end - first
    lowest = np.minimum.reduceat(plan.row_position.astype(np.int64), pairs.bounds[:-1])
    oldest = np.full(len(leader), 2**31)
    np.minimum.at(oldest, pair_group, lowest[pairs.atom])
    oldest = oldest - plan.window + 1 - plan.run_position[run]
    return np.maximum(end - np.maximum(first, oldest), 0)


def _same_tokens(
    run: np.ndarray, first: np.ndarray, end: np.ndarray, whole: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Group of each span, and a span of each group: whole spans over the same tokens."""
    n = len(run)
    if not (np.bincount(run[whole]) > 1).any():
        return np.arange(n), np.arange(n)
    order = np.lexsort((end, first, run))
    same = np.diff(run[order]) == 0
    same &= (np.diff(first[order]) == 0) & (np.diff(end[order]) == 0)
    same &= whole[order][1:] & whole[order][:-1]
    group = np.empty(n, np.int64)
    group[order] = np.concatenate(([0], np.cumsum(~same)))
    return group, order[np.flatnonzero(np.concatenate(([True], ~same)))]


def units_of(pairs: Pairs, group_of: np.ndarray, num_rows: int) -> Units:
    """Groups with items of their own, then atoms."""
    num_groups = int(group_of.max(initial=-1)) + 1
    bounds, atom_rows = pairs.bounds, np.diff(pairs.bounds)
    picked = np.flatnonzero(group_of >= 0)
    picked = picked[np.lexsort((pairs.atom[picked], group_of[picked]))]
    group, atom = group_of[picked], pairs.atom[picked]
    rows = np.concatenate((ragged(bounds[atom], atom_rows[atom]), np.arange(num_rows)))
    group_rows = np.bincount(group, atom_rows[atom], num_groups).astype(np.int64)
    unit_rows = np.concatenate((group_rows, atom_rows))
    leader = pairs.span[picked[np.flatnonzero(np.diff(group, prepend=-1))]]

    rest = np.flatnonzero(group_of < 0)
    rest = rest[argsort(pairs.atom[rest])]
    span, atom = pairs.span[rest], pairs.atom[rest]
    entries = np.bincount(atom, minlength=len(atom_rows))
    num_entries = np.concatenate((np.ones(num_groups, np.int64), entries))
    return Units(
        rows=rows,
        row_start=before(unit_rows),
        num_rows=unit_rows,
        entry_start=before(num_entries),
        num_entries=num_entries,
        entry_span=np.concatenate((leader, span)),
        entry_skip=np.concatenate(
            (np.zeros(num_groups, np.int64), bounds[atom] - pairs.spans[0][span])
        ),
    )


def blocks_of(plan: AttentionPlan, pairs: Pairs, units: Units, tile_rows: np.ndarray) -> Blocks:
    """Rows cut to tiles, and of each entry what some row of the block sees."""
    most = int(tile_rows[-1])
    count = np.where(units.num_entries > 0, -(-units.num_rows // most), 0)
    unit = np.repeat(np.arange(len(count)), count)
    nth = ragged(np.zeros(len(count), np.int64), count) * most
    num_rows = np.minimum(most, units.num_rows[unit] - nth)
    row_start = units.row_start[unit] + nth
    entries = units.num_entries[unit]
    block = np.repeat(np.arange(len(unit)), entries)
    index = ragged(units.entry_start[unit], entries)
    span, skip = units.entry_span[index], units.entry_skip[index] + nth[block]
    _, _, run, first, end, step = pairs.spans[:, span]
    end = end + skip * step
    hi = end + (num_rows[block] - 1) * step
    lo = clear_lo = first
    if plan.window is not None and len(unit):
        position = plan.row_position[units.rows[ragged(row_start, num_rows)]].astype(np.int64)
        start = before(num_rows)
        shift = plan.run_position[run] + plan.window - 1
        lo = np.maximum(first, np.minimum.reduceat(position, start)[block] - shift)
        clear_lo = np.maximum(first, np.maximum.reduceat(position, start)[block] - shift)
    keep = np.flatnonzero(hi > lo)
    kind = np.searchsorted(tile_rows, num_rows)
    return Blocks(
        units.rows, row_start, num_rows, kind,
        *(part[keep] for part in (block, span, lo, clear_lo, end, hi)),
    )  # fmt: skip
