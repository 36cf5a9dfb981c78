"""Units of rows that walk the same runs, and their cut into tiles.

An *atom* is a set of consecutive rows with the same spans: a decode's row, a chunk's rows. One item
walks what one atom sees, run after run, without a merge. A run that several atoms see is a *group*
(`groups`). A *unit* is an atom, or a group with items of its own, which also walk the groups around
it that have none. A *block* is as much of a unit as fits a tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onestem.arrays import argsort, before, ragged
from onestem.ops.plan import AttentionPlan
from onestem.ops.work.groups import Groups, Pairs


@dataclass(frozen=True, eq=False)
class Units:
    """Rows that walk together, `[num_units]`: start in `rows` and count, start of their entries and
    count. An entry is a span, whose row `skip` is its unit's first."""

    rows: np.ndarray
    row_start: np.ndarray
    num_rows: np.ndarray
    entry_start: np.ndarray
    num_entries: np.ndarray
    entry_span: np.ndarray
    entry_skip: np.ndarray


@dataclass(frozen=True, eq=False)
class Blocks:
    """Units cut into tiles, `[num_blocks]`; their entries, `[num_entries]`, in tokens of a run."""

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
    """The atoms of a plan: rows between two places where some span begins or ends."""
    spans = np.ascontiguousarray(plan.spans.T).astype(np.int64)
    row, rows = spans[0], spans[1]
    flags = np.zeros(plan.num_queries + 1, bool)
    flags[row] = flags[row + rows] = True
    flags[0] = flags[-1] = True
    atom_of = np.cumsum(flags) - 1
    atom = atom_of[row]
    count = atom_of[row + rows] - atom
    span = np.repeat(np.arange(len(row)), count)
    return Pairs(spans, np.flatnonzero(flags), span, ragged(atom, count))


def units_of(pairs: Pairs, groups: Groups, num_queries: int) -> Units:
    """The units of a plan: groups with items of their own, then atoms."""
    bounds, atom_rows = pairs.bounds, np.diff(pairs.bounds)
    picked = np.flatnonzero((groups.walker >= 0) & (groups.walker == groups.group))
    picked = picked[np.lexsort((pairs.atom[picked], groups.group[picked]))]
    own, unit = np.unique(groups.group[picked], return_inverse=True)
    atom = pairs.atom[picked]
    rows = np.concatenate((ragged(bounds[atom], atom_rows[atom]), np.arange(num_queries)))
    group_rows = np.bincount(unit, atom_rows[atom], len(own)).astype(np.int64)
    unit_rows = np.concatenate((group_rows, atom_rows))
    size = len(groups.leader)
    walked = np.flatnonzero(groups.walker >= 0)
    walks = np.unique(groups.walker[walked] * size + groups.group[walked])

    rest = np.flatnonzero(groups.walker < 0)
    rest = rest[argsort(pairs.atom[rest])]
    span, atom = pairs.span[rest], pairs.atom[rest]
    num_entries = np.concatenate((
        np.bincount(np.searchsorted(own, walks // size), minlength=len(own)),
        np.bincount(atom, minlength=len(atom_rows)),
    ))  # fmt: skip
    return Units(
        rows=rows,
        row_start=before(unit_rows),
        num_rows=unit_rows,
        entry_start=before(num_entries),
        num_entries=num_entries,
        entry_span=np.concatenate((groups.leader[walks % size], span)),
        entry_skip=np.concatenate(
            (np.zeros(len(walks), np.int64), bounds[atom] - pairs.spans[0][span])
        ),
    )


def blocks_of(plan: AttentionPlan, pairs: Pairs, units: Units, tile_rows: np.ndarray) -> Blocks:
    """Units cut into tiles, each entry reduced to what some row of its block sees."""
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
