"""The work list on a grid of positions: a row's bits then depend on what it sees alone.

Segments of positions are the same for all rows (`SEGMENT`). A row's result is the fold of its
segments' states from left to right, and a kernel walks a segment in tiles that lie at multiples of
their size. So it makes no difference which item computes a segment. Rows that see the same whole
segments walk them together: in one item from their first one on, which folds them itself, and
after that in an item each. Where many single rows part inside a segment, one item walks the whole
tiles that they share and leaves its states as they are; each row's item goes on from them. What a
row sees besides is its own: one item, or one for each segment.

`GridUnits` in `csrc/work.cpp` divides a CPU's plans so: `tests/ops/test_grid_work.py` compares.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onestem.arrays import argsort, before, is_first, ragged
from onestem.errors import ConfigError
from onestem.ops.plan import RUN_OFFSET, RUN_PAGES, RUN_POSITION, AttentionPlan
from onestem.ops.work.groups import Pairs
from onestem.ops.work.lists import (
    CLEAR_HI,
    CLEAR_LO,
    END,
    ENTRY,
    GOES_ON,
    HI,
    LEAVES,
    LO,
    POSITION,
    STEP,
    Draft,
    Walks,
    WorkList,
    listed,
    parts_of,
)
from onestem.ops.work.units import pairs_of

# Positions of a segment. The first ones are shorter: rows share whole segments, and short prompts
# would have none.
SEGMENT, FIRST_SEGMENT, FIRST_TO = 256, 128, 512

# Items are cut that are longer than so many times what each program would walk if all walked the
# same, those of other tiles too, which run beside: short items cost more. With several tiles, few
# rows' and others: what is cut from an item costs twice as much, a few rows' tile less than one.
LONG = 1.2
LONG_BESIDE = 0.6, 1.45

_ATOM = 1 << 32  # more than there are positions


def segment_of(position: np.ndarray) -> np.ndarray:
    """The number of the segment that positions are in."""
    first = FIRST_TO // FIRST_SEGMENT
    later = first + (position - FIRST_TO) // SEGMENT
    return np.where(position < FIRST_TO, position // FIRST_SEGMENT, later)


def segment_start(number: np.ndarray) -> np.ndarray:
    """The first position of segments."""
    first = FIRST_TO // FIRST_SEGMENT
    later = FIRST_TO + (number - first) * SEGMENT
    return np.where(number < first, number * FIRST_SEGMENT, later)


def grid_work(
    plan: AttentionPlan,
    *,
    block_n: int,
    tile_rows: tuple[int, ...],
    num_kv_heads: int,
    programs: tuple[int, ...],
    share: bool = True,
    num_rows: int | None = None,
    max_states: int | None = None,
) -> WorkList:
    """The work list of a plan on the grid, for tiles of `block_n` tokens.

    Args:
        tile_rows: rows of each tile, narrow to wide. The first of several is for one segment alone.
            `WorkList.num_wide` counts the items of all but the first, `split` those of the second.
        programs: items of each tile that run at a time; if there are fewer, long ones are cut.
        share, num_rows, max_states: see `make_work`. Without room for their states, first few rows'
            items are not cut, then nothing is shared or cut.

    Raises:
        ConfigError: a row sees positions with a gap between them, begins inside a tile, or sees
            something moved.
    """
    if len(plan.moved):
        raise ConfigError("a row sees tokens at other positions than they were stored at")
    pairs = pairs_of(plan)
    seen = _Seen.of(plan, pairs, block_n)
    programs_each = np.array(programs) / num_kv_heads
    for cuts in (
        (len(tile_rows) > 1, programs_each, share),
        (False, programs_each, share),
        (False, programs_each * 0.0, False),
    ):
        draft, room = _draft(plan, seen, block_n, tile_rows, *cuts, num_kv_heads)
        if max_states is None or draft.num_states <= max_states:
            break
    return listed(plan, draft, plan.num_rows if num_rows is None else num_rows, None, room)


@dataclass(frozen=True, eq=False)
class _Seen:
    """What atoms see, atom after atom, each in the order of positions.

    Attributes:
        bounds, rows: of the atoms.
        atom, span, run, lo, hi, end, step: tokens lo..hi-1 of a run, of which the atom's row j sees
            those below end + j * step.
        start, stop: their positions.
        first: the first of each atom; one more at the end.
        kind: the same number where all that is seen before it, and its own beginning, are the same.
    """

    bounds: np.ndarray
    rows: np.ndarray
    atom: np.ndarray
    span: np.ndarray
    run: np.ndarray
    lo: np.ndarray
    hi: np.ndarray
    end: np.ndarray
    step: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    first: np.ndarray
    kind: np.ndarray

    @staticmethod
    def of(plan: AttentionPlan, pairs: Pairs, block_n: int) -> _Seen:
        row, _, run, lo, end, step = pairs.spans[:, pairs.span]
        rows, begin = np.diff(pairs.bounds), pairs.bounds[pairs.atom]
        end = end + (begin - row) * step
        hi = end + (rows[pairs.atom] - 1) * step
        position = plan.run_position[run].astype(np.int64)
        order = np.lexsort((position + lo, pairs.atom))
        order = order[(hi > lo)[order]]
        atom = pairs.atom[order]
        columns = (pairs.span, run, lo, hi, end, step, position + lo, position + hi)
        span, run, lo, hi, end, step, start, stop = (one[order] for one in columns)
        follows = np.flatnonzero(atom[1:] == atom[:-1])
        whole = (step[follows] == 0) | (rows[atom[follows]] == 1)
        if not (whole & (stop[follows] == start[follows + 1])).all():
            raise ConfigError("a row sees tokens at positions with a gap between them")
        first = np.searchsorted(atom, np.arange(len(rows) + 1))
        begins = start[first[:-1][np.diff(first) > 0]] % block_n
        if begins.any():
            raise ConfigError(f"what a row sees begins inside a tile of {block_n} positions")
        kind = _kinds(run, lo, np.arange(len(atom)) - first[atom])
        return _Seen(
            pairs.bounds, rows, atom, span, run, lo, hi, end, step, start, stop, first, kind
        )


def _kinds(run: np.ndarray, lo: np.ndarray, depth: np.ndarray) -> np.ndarray:
    kind = np.zeros(len(run), np.int64)
    wide, high = int(lo.max(initial=0)) + 1, int(run.max(initial=0)) + 1
    count = 0
    for d in range(int(depth.max(initial=-1)) + 1):
        at = np.flatnonzero(depth == d)
        above = kind[at - 1] + 1 if d else 0
        known, number = np.unique((above * high + run[at]) * wide + lo[at], return_inverse=True)
        kind[at] = count + number
        count += len(known)
    return kind


@dataclass(frozen=True, eq=False)
class _Units:
    """Rows that walk positions start..stop-1 together, as `atom` sees them, `[num_units]`; their
    rows `row_start..` of `rows`. `shared`: of several atoms, which all see all of it. `hand`:
    whether it `LEAVES` states or `GOES_ON` from some."""

    start: np.ndarray
    stop: np.ndarray
    atom: np.ndarray
    shared: np.ndarray
    hand: np.ndarray
    rows: np.ndarray
    row_start: np.ndarray
    num_rows: np.ndarray


def _units(seen: _Seen, together: np.ndarray, block_n: int, few: int | None) -> _Units:
    """The units of a plan. together: bool, by atom: it may walk with others. few: more rows than
    these may leave states; None: none do."""
    atoms = np.flatnonzero(np.diff(seen.first))
    begin = np.zeros(len(seen.rows), np.int64)
    begin[atoms] = seen.start[seen.first[atoms]]
    shared_to = begin.copy()
    units = [_shared(seen, together, shared_to)]
    hands = [np.zeros(len(units[0][0]), np.int64)]
    walked_to = shared_to
    if few is not None:
        single = np.flatnonzero(together & (seen.rows == 1) & (np.diff(seen.first) > 0))
        walked_to = shared_to.copy()
        for tiles in range(SEGMENT // block_n - 1, 0, -1):
            single = single[walked_to[single] == shared_to[single]]
            units.append(_handed(seen, single, walked_to, tiles * block_n, few))
            hands.append(np.full(len(units[-1][0]), LEAVES))
    # Of each atom: all that it sees, or each segment after what it shares.
    end, own_begin = seen.stop[seen.first[atoms + 1] - 1], walked_to[atoms]
    shares = own_begin > begin[atoms]
    number = segment_of(own_begin)
    own = np.where(shares, segment_of(end - 1) - number + 1, 1) * (own_begin < end)
    each, nth = np.repeat(np.arange(len(atoms)), own), ragged(np.zeros(len(own), np.int64), own)
    own_start = np.where(nth == 0, own_begin[each], segment_start(number[each] + nth))
    own_stop = np.where(shares[each], segment_start(number[each] + nth + 1), end[each])
    hands.append(np.where((nth == 0) & (walked_to > shared_to)[atoms[each]], GOES_ON, 0))
    own_units = (
        own_start,
        np.minimum(own_stop, end[each]),
        atoms[each],
        atoms[each],
        np.ones_like(each),
    )
    start, stop, atom, members, count = (
        np.concatenate(parts) for parts in zip(*units, own_units, strict=True)
    )
    hand = np.concatenate(hands)
    is_shared = np.arange(len(start)) < len(start) - len(each)
    # Each row's units in the order of positions.
    order = argsort(start)
    members = members[ragged(before(count)[order], count[order])]
    unit = np.repeat(np.arange(len(order)), count[order])
    num_rows = np.bincount(unit, seen.rows[members], len(order)).astype(np.int64)
    rows = ragged(seen.bounds[members], seen.rows[members])
    start, stop, atom, shared, hand = (x[order] for x in (start, stop, atom, is_shared, hand))
    return _Units(start, stop, atom, shared, hand, rows, before(num_rows), num_rows)


def _handed(
    seen: _Seen, atoms: np.ndarray, walked_to: np.ndarray, tokens: int, few: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Units as `_shared` has them, of what more than `few` of some atoms, single rows, see of the
    next `tokens` of a segment; these have been walked then, and more is left of it."""
    begin = walked_to[atoms]
    to = begin + tokens
    more = seen.stop[seen.first[atoms + 1] - 1]
    inside = (to < segment_start(segment_of(begin) + 1)) & (to < more)
    atoms, begin, to = atoms[inside], begin[inside], to[inside]
    pair = np.searchsorted(seen.atom * _ATOM + seen.stop, atoms * _ATOM + to - 1, "right")
    _, number, count = np.unique(
        seen.kind[pair] * _ATOM + to, return_inverse=True, return_counts=True
    )
    order = argsort(number)
    order = order[count[number[order]] > few]
    walked_to[atoms[order]] = to[order]
    first = order[before(count[count > few])]
    return begin[first], to[first], atoms[first], atoms[order], count[count > few]


def _shared(
    seen: _Seen, together: np.ndarray, shared_to: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Units of several atoms: their positions, an atom of each; all atoms of them, and how many of
    these each has. `shared_to` is set to where each atom's shared segments end.

    A cell is a segment of a kind of walk that several atoms have.
    """
    empty = np.zeros(0, np.int64)
    last = seen.first[1:] - 1
    whole_to = seen.start[last] - seen.lo[last] + seen.end[last] if len(seen.atom) else empty
    joins = together[seen.atom]
    joins &= np.bincount(seen.kind, joins, len(seen.atom) + 1)[seen.kind] > 1
    pair = np.flatnonzero(joins)
    if not len(pair):
        return empty, empty, empty, empty, empty
    number = segment_of(seen.start[pair])
    upto = segment_of(np.minimum(seen.stop[pair], whole_to[seen.atom[pair]]))
    segments = np.maximum(upto - number, 0)
    most = np.zeros(len(seen.atom), np.int64)
    np.maximum.at(most, seen.kind[pair], segments)
    cell = ragged(before(most)[seen.kind[pair]], segments)
    atom = np.repeat(seen.atom[pair], segments)
    if not len(cell):
        return empty, empty, empty, empty, empty
    size = int(most.sum())
    segment, root = np.zeros(size, np.int64), np.zeros(size, np.int64)
    segment[cell] = ragged(number, segments)
    count = np.bincount(cell, minlength=size)
    begins = is_first(atom).nonzero()[0]
    root[cell] = np.repeat(cell[begins], np.diff(np.append(begins, len(atom))))
    several = count > 1
    np.maximum.at(shared_to, atom, np.where(several, segment_start(segment + 1), 0)[cell])
    # Segments that the same atoms see from the first one on are one unit.
    in_first = several & (count == count[root])
    to = segment + 1
    np.maximum.at(to, root[in_first], to[in_first])
    cells = np.flatnonzero(several & ((root == np.arange(size)) | ~in_first))
    order = argsort(cell)
    start = before(count)
    members = atom[order][ragged(start[cells], count[cells])]
    one = atom[order][start[cells]]
    return (
        np.maximum(segment_start(segment[cells]), seen.start[seen.first[one]]),
        segment_start(to[cells]),
        one,
        members,
        count[cells],
    )


def _draft(
    plan: AttentionPlan,
    seen: _Seen,
    block_n: int,
    tile_rows: tuple[int, ...],
    cut_few: bool,
    at_a_time: np.ndarray,
    share: bool,
    num_kv_heads: int,
) -> tuple[Draft, int]:
    """The items, and how often they may grow.

    cut_few: items of the first of several tiles are cut into segments. at_a_time: items of one KV
    head and each tile that run at a time; 0: none of these is cut.
    """
    most_rows, several = tile_rows[-1], len(tile_rows) > 1
    few_rows = tile_rows[0] if cut_few and share else None
    units = _units(seen, (seen.rows < most_rows) & share, block_n, few_rows)
    # Blocks of rows that fit a tile.
    count = -(-units.num_rows // most_rows)
    unit = np.repeat(np.arange(len(count)), count)
    skip = ragged(np.zeros(len(count), np.int64), count) * most_rows
    num_rows = np.minimum(most_rows, units.num_rows[unit] - skip)
    row_start, atom = units.row_start[unit] + skip, units.atom[unit]
    shared, start = units.shared[unit], units.start[unit]
    last = seen.first[atom + 1] - 1
    ends = seen.start[last] - seen.lo[last] + seen.end[last]
    ends += (skip + num_rows - 1) * seen.step[last]
    stop = np.where(shared, units.stop[unit], np.minimum(units.stop[unit], ends))
    oldest = newest = np.full(len(unit), -_ATOM)
    if plan.window is not None and len(unit):
        position = plan.row_position[units.rows[ragged(row_start, num_rows)]].astype(np.int64)
        oldest = np.minimum.reduceat(position, before(num_rows)) - plan.window + 1
        newest = np.maximum.reduceat(position, before(num_rows)) - plan.window + 1
    begin = np.maximum(start, oldest)
    # Parts of blocks: the first may be of several segments if it begins with its rows' first one.
    tiles = np.where(begin < stop, -(-stop // block_n) - begin // block_n, 0)
    tile = np.searchsorted(np.array(tile_rows), num_rows)
    apart = (tile == 0) & cut_few
    kind = np.where(apart, tile, np.maximum(tile, several))
    long = np.where(apart, *LONG_BESIDE) if several else LONG
    fair = ((long * tiles).sum() / at_a_time)[kind] if at_a_time.all() else np.inf
    folds = start == seen.start[seen.first[atom]]
    is_cut = folds & (apart | (tiles > fair))
    length = np.maximum(np.minimum(fair, tiles), 1).astype(np.int64) * block_n
    length[apart] = 1
    cut = np.where(is_cut, segment_start(segment_of(begin + length - 1) + 1), stop)
    cut = np.minimum(cut, stop)
    more = np.where(cut < stop, segment_of(stop - 1) - segment_of(cut) + 1, 0)
    parts = np.where(begin < stop, 1 + more, 0)
    block, nth = np.repeat(np.arange(len(unit)), parts), ragged(np.zeros_like(parts), parts)
    number = segment_of(cut)[block] + nth
    from_ = np.where(nth == 0, begin[block], segment_start(number - 1))
    to = np.minimum(np.where(nth == 0, cut[block], segment_start(number)), stop[block])
    walks = _walks(plan, seen, atom[block], from_, to, shared[block], skip[block], newest[block])
    walked = -(-to // block_n) - from_ // block_n
    hands = np.where(nth == 0, units.hand[unit][block], 0)
    leaves = hands == LEAVES
    few = (tile[block] == 0) & (segment_of(from_) == segment_of(to - 1)) & ~leaves
    kind = np.where(few, 0, np.maximum(tile[block], several))
    turn = 3 * kind + np.where(leaves, 0, 1 + (hands == GOES_ON))
    most = int(walked.max(initial=0))
    rows = units.rows[ragged(row_start[block], num_rows[block])]
    parts, alone = parts_of(plan, rows[~np.repeat(leaves, num_rows[block])])
    draft = Draft(
        kind=kind,
        count=num_rows[block],
        walks=walks,
        order=argsort(most - walked + turn * (most + 1)),
        queues=np.zeros((0, 4), np.int32),
        split=(int(np.count_nonzero(kind == 1)), 0),
        rows=rows,
        parts=parts,
        alone=alone,
        walked=int((to - from_).sum()),
        num_wide=int(np.count_nonzero(kind)),
        wide_tokens=0,
        last_ns=0.0,
        hands=hands if leaves.any() else None,
        leaving=2 * int(np.count_nonzero(leaves)) * num_kv_heads,
    )
    # A row's own last segment may be filled up, an item that began with its first goes on.
    grows = (num_rows[block] == 1) & ~shared[block] & (to == stop[block])
    grows &= (nth > 0) | ~folds[block] | (few & several)
    room = segment_start(segment_of(to - 1) + 1) - to
    return draft, int(room[grows].min(initial=2**31))


def _walks(
    plan: AttentionPlan,
    seen: _Seen,
    atom: np.ndarray,
    start: np.ndarray,
    stop: np.ndarray,
    shared: np.ndarray,
    skip: np.ndarray,
    newest: np.ndarray,
) -> Walks:
    """Entries of items that walk positions start..stop-1 as an atom sees them, from its row `skip`
    on. newest: the first position in all windows."""
    first = np.searchsorted(seen.atom * _ATOM + seen.stop, atom * _ATOM + start, "right")
    count = np.searchsorted(seen.atom * _ATOM + seen.start, atom * _ATOM + stop) - first
    item, pair = np.repeat(np.arange(len(atom)), count), ragged(first, count)
    run = plan.runs[seen.run[pair]].astype(np.int64)
    base = run[:, RUN_PAGES] * plan.page_size + run[:, RUN_OFFSET]
    position = run[:, RUN_POSITION]
    lo = np.maximum(seen.lo[pair], start[item] - position)
    hi = np.minimum(seen.hi[pair], stop[item] - position)
    step = np.where(shared[item], 0, seen.step[pair])
    end = np.where(shared[item], hi, seen.end[pair] + skip[item] * step)
    words = np.zeros((len(item), ENTRY), np.int32)
    clear_lo = np.maximum(lo, newest[item] - position)
    for column, tokens in (
        (LO, lo), (CLEAR_LO, clear_lo), (CLEAR_HI, np.minimum(hi, end)), (HI, hi), (END, end),
    ):  # fmt: skip
        words[:, column] = base + tokens
    words[:, STEP], words[:, POSITION] = step, position - base
    last = (hi == seen.hi[pair]) & ~shared[item]
    return Walks(words, item, seen.span[pair], last, plan.run_pages)
