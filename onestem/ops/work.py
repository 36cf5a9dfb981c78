"""A plan as a work list: what the programs of one persistent kernel take on, in one int32 buffer.

An *atom* is a set of consecutive rows with the same spans: a decode's row, a chunk's rows. What one
atom sees is walked by one item, run after run, and needs no merge. A run that several atoms see is
a *group*: it gets items of its own where reading it once saves more than merging costs
(`CostModel`), else it is dealt out to its atoms. An item is at most a tile wide; long ones are cut
so that all programs end at about the same time. Nothing here loops over rows, runs or spans.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from onestem.errors import ConfigError
from onestem.ops.plan import AttentionPlan

__all__ = ["ENTRY", "HEADER", "QUEUE", "RECORD", "CostModel", "Tile", "WorkList", "make_work"]

HEADER = 16  # words before the records
RECORD = 16  # words of an item's record: 8 of its own, 8 of its first walk entry
ENTRY = 8  # words of a walk entry
QUEUE = 15  # word of the header: works taken beyond each program's first; kernels count in it

# Columns of a record and of a walk entry.
KIND, NUM_ROWS, ROW_START, NUM_WALK, WALK_START = range(5)
LO, CLEAR_LO, CLEAR_HI, HI, END, STEP, POSITION = range(7)


@dataclass(frozen=True)
class Tile:
    """A tile's shape, and what an item made of such tiles takes on one program.

    Attributes:
        block_m: rows times query heads of a KV head.
        block_n: tokens.
        item_ns: starting and ending an item, in ns.
        token_ns: each token of its walk, in ns.
    """

    block_m: int
    block_n: int
    item_ns: float = 2500.0
    token_ns: float = 45.0


@dataclass(frozen=True)
class CostModel:
    """When a shared run gets items of its own, and how items are cut.

    Attributes:
        tiles: narrow to wide. Rows that fill the widest walk all they see by themselves.
        programs: works (an item for one KV head) that run at the same time.
        merge_tokens: what one more state costs a row, in tokens read for it.
        min_tokens: no item is cut shorter.
        slack: nothing is cut where the longest program would take less than this times the mean.
    """

    tiles: tuple[Tile, ...]
    programs: int
    merge_tokens: int = 16
    min_tokens: int = 128
    slack: float = 1.15

    def tile_rows(self, group: int) -> np.ndarray:
        """int64 `[num_tiles]`: rows of each tile, with `group` query heads per KV head."""
        return np.array([tile.block_m // group for tile in self.tiles])


@dataclass(frozen=True, eq=False)
class WorkList:
    """Work items of a plan (int32 arrays), in the order in which programs take them.

    Attributes:
        plan: what it was made from.
        records: `[num_items, 16]`. Words 0 to 4: index of its tile, how many rows, where they begin
            in `rows`, how many walk entries, where the second begins in `walk`. Words 8 to 15: its
            first entry.
        walk: `[num_more_entries, 8]`: lo, clear_lo, clear_hi, hi, end, step, position, 0. They
            count in slots of the list of pages: token t of a run stands at x = base + t, in page
            `run_pages[x // page_size]`. Row j of the item sees lo <= x < end + j * step up to hi,
            less what its window hides; all rows see all of clear_lo .. clear_hi - 1. The position
            id of x is x + position.
        rows: `[num_parts]`: rows of all items.
        dest: `[num_parts]`: which state the row's part becomes; -1: it is the row's only one.
        merges: `[num_merges, 4]`: row, its first state, how many (0: the row is empty), 0.
        num_states: partial states in all.
    """

    plan: AttentionPlan
    records: np.ndarray
    walk: np.ndarray
    rows: np.ndarray
    dest: np.ndarray
    merges: np.ndarray
    num_states: int
    entries: _Entries = field(repr=False)

    @property
    def num_items(self) -> int:
        return len(self.records)

    def _starts(self) -> list[int]:
        """Where the sections begin in a packed buffer, and its length: records, walk, rows, dest,
        merges, pages, positions."""
        sizes = [part.size for part in self._sections()]
        return np.cumsum([HEADER] + [-(-size // 4) * 4 for size in sizes]).tolist()

    def _sections(self) -> tuple[np.ndarray, ...]:
        plan = self.plan
        return (
            self.records,
            self.walk,
            self.rows,
            self.dest,
            self.merges,
            plan.run_pages,
            plan.row_position,
        )

    @property
    def num_words(self) -> int:
        """Length of the packed buffer."""
        return self._starts()[-1]

    def pack(self, out: np.ndarray) -> int:
        """Write everything into `out` (int32 `[max_words]`); gives the words used.

        Word 0: items, 1: merges, 2 to 7: where walk, rows, dest, merges, pages and row positions
        begin, 8: the window. Records begin at word 16, sections at multiples of 4 words.
        """
        *starts, words = self._starts()
        if words > len(out):
            raise ConfigError(
                f"the work list takes {words} words, the buffer holds {len(out)}: raise max_words"
            )
        out[:HEADER] = 0
        out[0], out[1], out[2:8] = self.num_items, len(self.merges), starts[1:]
        out[8] = 2**30 if self.plan.window is None else self.plan.window
        for start, part in zip(starts, self._sections(), strict=True):
            out[start : start + part.size] = part.reshape(-1)
        return words

    def growing_words(self, spans: np.ndarray) -> np.ndarray:
        """int64: the words of a packed buffer that a decode step adds 1 to.

        `spans`: int `[n]`, the one-row spans whose `end` grows by one. All rows go on by one
        position. Valid until the plan changes in any other way (a page id that is written into
        the slack of a run's list is not such a change: see `page_word`).
        """
        starts, entries = self._starts(), self.entries
        grows = np.zeros(self.plan.num_spans, bool)
        grows[spans] = True
        words = np.where(
            entries.more,
            starts[1] + ENTRY * entries.place,
            HEADER + RECORD * entries.place + 8,
        )
        last = words[entries.last & grows[entries.span]]
        position = starts[6] + np.arange(self.plan.num_rows)
        # What a window hides from all rows begins one token later.
        hidden = words + CLEAR_LO if self.plan.window is not None else words[:0]
        return np.concatenate((last + CLEAR_HI, last + HI, last + END, position, hidden))

    def page_word(self, runs: np.ndarray, index: np.ndarray) -> np.ndarray:
        """int64: where the buffer holds page `index[i]` of run `runs[i]`."""
        return self._starts()[5] + self.plan.runs[runs, 0].astype(np.int64) + index


@dataclass(frozen=True, eq=False)
class _Entries:
    """Where each walk entry stands, `[num_entries]`: its span, whether it is the last piece of what
    its rows see of it, whether it is in `walk` (else in a record), and its index there."""

    span: np.ndarray
    last: np.ndarray
    more: np.ndarray
    place: np.ndarray


@dataclass(frozen=True, eq=False)
class _Pairs:
    """Which atom sees which span: atom `atom[i]` sees span `span[i]`.

    spans: int64 `[6, num_spans]`; bounds: `[num_atoms + 1]`, the rows between atoms.
    """

    spans: np.ndarray
    bounds: np.ndarray
    span: np.ndarray
    atom: np.ndarray


@dataclass(frozen=True, eq=False)
class _Units:
    """Rows that walk together, `[num_units]`: where they begin in `rows` and how many; where their
    entries begin and how many. An entry is a span; its unit's first row is the span's row `skip`."""

    rows: np.ndarray
    row_start: np.ndarray
    num_rows: np.ndarray
    entry_start: np.ndarray
    num_entries: np.ndarray
    entry_span: np.ndarray
    entry_skip: np.ndarray


@dataclass(frozen=True, eq=False)
class _Blocks:
    """Units cut to tiles, `[num_blocks]`, and their entries, `[num_entries]`, in tokens of a run."""

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


@dataclass(frozen=True, eq=False)
class _Segments:
    """Pieces of entries: which entry, from where to where, and which item walks it (ascending)."""

    entry: np.ndarray
    lo: np.ndarray
    hi: np.ndarray
    item: np.ndarray


def make_work(
    plan: AttentionPlan,
    cost: CostModel,
    *,
    num_kv_heads: int,
    group: int,
    share: bool = True,
    num_rows: int | None = None,
    max_states: int | None = None,
) -> WorkList:
    """The work list of a plan.

    Args:
        group: query heads per KV head.
        share: False reads a shared run once for each atom that sees it.
        num_rows: rows of the output, those behind the plan's being empty; default: the plan's.
        max_states: states that the workspace holds. Where they do not suffice, groups that save
            least are dealt out, then nothing is cut: it always fits.
    """
    tile_rows = cost.tile_rows(group)
    if tile_rows[0] < 1:
        raise ConfigError(
            f"{group} query heads share a KV head, tiles hold {cost.tiles[0].block_m}: "
            "use another implementation"
        )
    pairs = _pairs(plan)
    padded = plan.num_rows if num_rows is None else num_rows
    room = None if max_states is None else max_states - plan.num_rows
    group_of = _shared_groups(plan, pairs, cost, int(tile_rows[-1]), room if share else -1)
    blocks = _blocks(plan, pairs, _units(pairs, group_of, plan.num_rows), tile_rows)
    cuts = _cuts(blocks, cost, num_kv_heads)
    work = _listed(plan, cost, blocks, _segments(blocks, cuts), padded)
    if max_states is not None and work.num_states > max_states:
        work = _listed(plan, cost, blocks, _segments(blocks, cuts[:0]), padded)
    return work


def _ragged(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """starts[0], starts[0] + 1, ..., (counts[0] of them), then starts[1], ..."""
    ends = np.cumsum(counts)
    size = int(ends[-1]) if len(ends) else 0
    return np.arange(size) + np.repeat(starts - (ends - counts), counts)


def _argsort(keys: np.ndarray) -> np.ndarray:
    """Stable argsort of small non-negative keys (a radix sort below 65,536)."""
    small = len(keys) and keys.max() < 65536
    return np.argsort(keys.astype(np.uint16) if small else keys, kind="stable")


def _before(counts: np.ndarray) -> np.ndarray:
    """Sum of the counts before each."""
    return np.cumsum(counts) - counts


def _pairs(plan: AttentionPlan) -> _Pairs:
    spans = np.ascontiguousarray(plan.spans.T).astype(np.int64)
    row, rows = spans[0], spans[1]
    flags = np.zeros(plan.num_rows + 1, bool)
    flags[row] = flags[row + rows] = True
    flags[0] = flags[-1] = True
    atom_of = np.cumsum(flags) - 1
    atom = atom_of[row]
    count = atom_of[row + rows] - atom
    span = np.repeat(np.arange(len(row)), count)
    return _Pairs(spans, np.flatnonzero(flags), span, _ragged(atom, count))


def _shared_groups(
    plan: AttentionPlan, pairs: _Pairs, cost: CostModel, tile_rows: int, room: int | None
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
    plan: AttentionPlan, pairs: _Pairs, pair_group: np.ndarray, leader: np.ndarray
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


def _units(pairs: _Pairs, group_of: np.ndarray, num_rows: int) -> _Units:
    """Groups with items of their own, then atoms."""
    num_groups = int(group_of.max(initial=-1)) + 1
    bounds, atom_rows = pairs.bounds, np.diff(pairs.bounds)
    picked = np.flatnonzero(group_of >= 0)
    picked = picked[np.lexsort((pairs.atom[picked], group_of[picked]))]
    group, atom = group_of[picked], pairs.atom[picked]
    rows = np.concatenate((_ragged(bounds[atom], atom_rows[atom]), np.arange(num_rows)))
    group_rows = np.bincount(group, atom_rows[atom], num_groups).astype(np.int64)
    unit_rows = np.concatenate((group_rows, atom_rows))
    leader = pairs.span[picked[np.flatnonzero(np.diff(group, prepend=-1))]]

    rest = np.flatnonzero(group_of < 0)
    rest = rest[_argsort(pairs.atom[rest])]
    span, atom = pairs.span[rest], pairs.atom[rest]
    entries = np.bincount(atom, minlength=len(atom_rows))
    num_entries = np.concatenate((np.ones(num_groups, np.int64), entries))
    return _Units(
        rows=rows,
        row_start=_before(unit_rows),
        num_rows=unit_rows,
        entry_start=_before(num_entries),
        num_entries=num_entries,
        entry_span=np.concatenate((leader, span)),
        entry_skip=np.concatenate((np.zeros(num_groups, np.int64), bounds[atom] - pairs.spans[0][span])),
    )


def _blocks(plan: AttentionPlan, pairs: _Pairs, units: _Units, tile_rows: np.ndarray) -> _Blocks:
    """Rows cut to tiles, and of each entry what some row of the block sees."""
    most = int(tile_rows[-1])
    count = np.where(units.num_entries > 0, -(-units.num_rows // most), 0)
    unit = np.repeat(np.arange(len(count)), count)
    nth = _ragged(np.zeros(len(count), np.int64), count) * most
    num_rows = np.minimum(most, units.num_rows[unit] - nth)
    row_start = units.row_start[unit] + nth
    entries = units.num_entries[unit]
    block = np.repeat(np.arange(len(unit)), entries)
    index = _ragged(units.entry_start[unit], entries)
    span, skip = units.entry_span[index], units.entry_skip[index] + nth[block]
    _, _, run, first, end, step = pairs.spans[:, span]
    end = end + skip * step
    hi = end + (num_rows[block] - 1) * step
    lo = clear_lo = first
    if plan.window is not None and len(unit):
        position = plan.row_position[units.rows[_ragged(row_start, num_rows)]].astype(np.int64)
        start = _before(num_rows)
        shift = plan.run_position[run] + plan.window - 1
        lo = np.maximum(first, np.minimum.reduceat(position, start)[block] - shift)
        clear_lo = np.maximum(first, np.maximum.reduceat(position, start)[block] - shift)
    keep = np.flatnonzero(hi > lo)
    kind = np.searchsorted(tile_rows, num_rows)
    return _Blocks(
        units.rows, row_start, num_rows, kind,
        *(part[keep] for part in (block, span, lo, clear_lo, end, hi)),
    )  # fmt: skip


def _cuts(blocks: _Blocks, cost: CostModel, num_kv_heads: int) -> np.ndarray:
    """int64, ascending: where walks are cut, counted in tokens over all blocks' walks.

    Long walks are laid end to end and cut at equal distances, so that each program gets the same
    length and few walks are cut (as Stream-K does with products, arXiv 2301.03598, section 4).
    """
    none = np.zeros(0, np.int64)
    length = np.bincount(blocks.block, blocks.hi - blocks.lo, len(blocks.kind)).astype(np.int64)
    token_ns = np.array([tile.token_ns for tile in cost.tiles])[blocks.kind]
    item_ns = np.array([tile.item_ns for tile in cost.tiles])[blocks.kind]
    time = np.where(length > 0, item_ns + length * token_ns, 0)
    at_once = max(1, cost.programs // num_kv_heads)
    mean = float(time.sum()) / at_once
    long = np.flatnonzero((length > 0) & (time > mean / 2))
    in_rounds = float(np.sort(time)[::-1][::at_once].sum())
    if len(long) == 0 or in_rounds <= cost.slack * mean:
        return none
    piece = max(mean, float((cost.min_tokens * token_ns[long]).max()))
    walk = length[long] * token_ns[long]
    stop = np.cumsum(walk)
    start = stop - walk
    first = (start // piece).astype(np.int64) + 1
    count = np.maximum(np.ceil(stop / piece).astype(np.int64) - first, 0)
    which = np.repeat(np.arange(len(long)), count)
    block = long[which]
    at = (_ragged(first, count) * piece - start[which]) / token_ns[block]
    grain = np.array([tile.block_n for tile in cost.tiles])[blocks.kind[block]]
    at = np.rint(at / grain).astype(np.int64) * grain
    least = np.maximum(cost.min_tokens, grain)
    at, block = (part[(at >= least) & (at <= length[block] - least)] for part in (at, block))
    return np.unique(_before(length)[block] + at)


def _segments(blocks: _Blocks, cuts: np.ndarray) -> _Segments:
    """Entries cut at `cuts`; a cut begins a new item, and so does a block."""
    length = blocks.hi - blocks.lo
    start = _before(length)
    begin = np.union1d(start, cuts) if len(cuts) else start
    stop = np.append(begin[1:], start[-1] + length[-1] if len(length) else 0)[: len(begin)]
    entry = np.searchsorted(start, begin, "right") - 1
    piece = np.searchsorted(cuts, begin, "right")
    block = blocks.block[entry]
    new = (np.diff(block, prepend=-1) != 0) | (np.diff(piece, prepend=-1) != 0)
    lo = blocks.lo[entry] + begin - start[entry]
    return _Segments(entry, lo, lo + stop - begin, np.cumsum(new) - 1)


def _listed(
    plan: AttentionPlan, cost: CostModel, blocks: _Blocks, parts: _Segments, num_rows: int
) -> WorkList:
    """The arrays of a work list, its items in order."""
    head = np.flatnonzero(np.diff(parts.item, prepend=-1))  # the first segment of each item
    block = blocks.block[parts.entry[head]]
    kind, count = blocks.kind[block], blocks.num_rows[block]
    order = _order(_item_ns(cost, kind, parts), kind)
    rows = blocks.rows[_ragged(blocks.row_start[block], count)]
    entries = _entry_words(plan, blocks, parts)
    more = np.ones(len(parts.item), bool)
    more[head] = False

    records = np.zeros((len(head), RECORD), np.int32)
    num_walk = np.diff(np.append(head, len(parts.item)))
    columns = (kind, count, _before(count), num_walk, _before(num_walk - 1))
    for column, values in enumerate(columns):
        records[:, column] = values
    records[:, 8:] = entries[head]
    place_of_item = np.empty(len(head), np.int64)
    place_of_item[order] = np.arange(len(head))
    place = np.where(more, np.cumsum(more) - 1, place_of_item[parts.item])
    last = parts.hi == blocks.hi[parts.entry]
    dest, merges, num_states = _merges(rows, num_rows)
    return WorkList(
        plan, records[order], entries[more], rows.astype(np.int32), dest, merges, num_states,
        _Entries(blocks.span[parts.entry], last, more, place),
    )  # fmt: skip


def _entry_words(plan: AttentionPlan, blocks: _Blocks, parts: _Segments) -> np.ndarray:
    """int32 `[num_entries, 8]`, as in `WorkList.walk`."""
    e = parts.entry
    span = plan.spans[blocks.span[e]].astype(np.int64)
    run = plan.runs[span[:, 2]].astype(np.int64)
    base = run[:, 0] * plan.page_size + run[:, 1]
    clear_lo = np.maximum(parts.lo, blocks.clear_lo[e])
    clear_hi = np.minimum(parts.hi, blocks.end[e])
    entries = np.zeros((len(e), ENTRY), np.int32)
    for column, values in enumerate((parts.lo, clear_lo, clear_hi, parts.hi, blocks.end[e])):
        entries[:, column] = base + values
    entries[:, STEP] = span[:, 5]
    entries[:, POSITION] = run[:, 3] - base
    return entries


def _item_ns(cost: CostModel, kind: np.ndarray, parts: _Segments) -> np.ndarray:
    """float64 `[num_items]`: what each item takes."""
    tokens = np.bincount(parts.item, parts.hi - parts.lo, len(kind))
    item_ns = np.array([tile.item_ns for tile in cost.tiles])
    token_ns = np.array([tile.token_ns for tile in cost.tiles])
    return item_ns[kind] + token_ns[kind] * tokens


def _order(time: np.ndarray, kind: np.ndarray) -> np.ndarray:
    """The order in which items are taken: the longest first, those that multiply (many rows) and
    those that read (few rows) side by side."""
    key = np.zeros(len(time))
    for part in (kind > 0, kind == 0):
        chosen = np.flatnonzero(part)
        chosen = chosen[np.argsort(-time[chosen], kind="stable")]
        if len(chosen):
            key[chosen] = _before(time[chosen]) / time[chosen].sum()
    # None that multiplies starts so late that it would be the last to end.
    wide = kind > 0
    if wide.any() and not wide.all():
        key[wide] *= 0.5
    return np.argsort(key, kind="stable")


def _merges(item_rows: np.ndarray, num_rows: int) -> tuple[np.ndarray, np.ndarray, int]:
    """`dest`, `merges`, and the number of states: those of a row stand side by side."""
    parts = np.bincount(item_rows, minlength=num_rows)
    slots = np.where(parts > 1, parts, 0)
    start = _before(slots)
    order = _argsort(item_rows)
    nth = np.empty(len(item_rows), np.int64)
    nth[order] = np.arange(len(item_rows)) - np.repeat(_before(parts), parts)
    dest = np.where(parts[item_rows] > 1, start[item_rows] + nth, -1)
    merged = np.flatnonzero(parts != 1)
    merges = np.zeros((len(merged), 4), np.int32)
    merges[:, 0], merges[:, 1], merges[:, 2] = merged, start[merged], parts[merged]
    return dest.astype(np.int32), merges, int(slots.sum())
