"""Where items are cut, so that all programs end at about the same time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onestem.arrays import before, is_first, ragged
from onestem.ops.work.deal import dealt, late_hands
from onestem.ops.work.model import CostModel
from onestem.ops.work.units import Blocks


@dataclass(frozen=True, eq=False)
class Segments:
    """Pieces of entries: the entry, its range, and the item that walks it (ascending)."""

    entry: np.ndarray
    lo: np.ndarray
    hi: np.ndarray
    item: np.ndarray


def cuts_of(
    blocks: Blocks, cost: CostModel, num_kv_heads: int, group: int, cached: float = 1.0
) -> tuple[np.ndarray, tuple[int, int]]:
    """int64, ascending: where walks are cut, counted in tokens over all blocks' walks; and
    `WorkList.split`. cached: the part of the memory's time that what is walked takes; `cost.crowd`
    counts it."""
    length = np.bincount(blocks.block, blocks.hi - blocks.lo, len(blocks.kind)).astype(np.int64)
    is_wide = blocks.kind == len(cost.tiles) - 1
    reading, wide = (
        _Side.of(blocks.kind, length, np.flatnonzero(side & (length > 0)), cost)
        for side in (~is_wide, is_wide)
    )
    read, multiply = cost.programs
    split = (multiply, multiply)
    if cost.together:
        split = _split(wide, reading, cost, num_kv_heads)
        read = 2 * split[1]
        reading = _Side.of(blocks.kind, length, reading.block, cost.crowded(read))
    start, hands = before(length), max(1, read // num_kv_heads)
    cuts = reading.cuts(start, hands, cost)
    alike = hands if cached < 1 else hands // 2
    if cost.together and len(wide.block) == 0 and 0 < len(reading.block) <= alike:
        # Fewer pieces, which the halves of programs that begin sooner take, may end sooner. With
        # more walks some programs would have two, and be late where the memory is the limit.
        even = reading.even_cuts(start, max(1, hands // 2), cost)
        if not np.array_equal(cuts, even):
            rest = start, hands, num_kv_heads, group, cached, cost
            ends = [_end_ns(reading, blocks, each, *rest) for each in (cuts, even)]
            cuts = cuts if ends[0] <= ends[1] else even
    wide_cuts = wide.cuts(start, max(1, split[0] // num_kv_heads), cost)
    return np.unique(np.concatenate((cuts, wide_cuts))), split


def _end_ns(
    side: _Side,
    blocks: Blocks,
    cuts: np.ndarray,
    start: np.ndarray,
    hands: int,
    num_kv_heads: int,
    group: int,
    cached: float,
    cost: CostModel,
) -> float:
    """About when a step ends whose blocks, all on this side, are cut at `cuts`."""
    first, length = start[side.block], side.length
    begin = np.union1d(first, cuts)
    piece = np.searchsorted(first, begin, "right") - 1
    stop = np.minimum(np.append(begin[1:], first[-1] + length[-1]), (first + length)[piece])
    readers = min(hands, len(begin)) * num_kv_heads
    tiles = tile_columns(cost.crowded(readers, cost.crowd), blocks.kind[side.block[piece]])
    time, late = item_times(stop - begin, *tiles), late_hands(hands, cost)
    hand = dealt(time, late)
    load = np.bincount(hand, time, hands)
    num_rows = blocks.num_rows[side.block]
    rows = blocks.rows[ragged(blocks.row_start[side.block], num_rows)]
    parts = np.bincount(rows, np.repeat(np.bincount(piece), num_rows))
    memory_ns = cached * float(length.sum()) * num_kv_heads * cost.memory_ns
    num_states = int(parts[parts > 1].sum()) * num_kv_heads * group
    last_ns = float((load + late * (load > 0)).max())
    return cost.end_ns(last_ns, memory_ns, num_states, int(parts.max()))


def _split(wide: _Side, reading: _Side, cost: CostModel, num_kv_heads: int) -> tuple[int, int]:
    """Numbers of programs that multiply and that read, so that the last ends soonest."""
    most = cost.programs[1]
    if len(wide.block) == 0 or len(reading.block) == 0:
        return (0, most) if len(wide.block) == 0 else (most, 0)
    hands = np.arange(1, (most - (num_kv_heads + 1) // 2) // num_kv_heads + 1)
    programs = hands * num_kv_heads
    once = float(reading.length.sum()) * num_kv_heads * cost.memory_ns
    memory = once + _read_again(wide, hands, num_kv_heads, cost)
    multiplied = wide.ends(hands, cost)
    read = reading.ends(2 * (most - programs) // num_kv_heads, cost)
    sides = np.maximum(multiplied, read)
    end = np.maximum(sides, memory)
    good = np.flatnonzero(end <= 1.02 * end.min())
    best = good[0]
    if once >= sides[good].min():
        # The memory is the limit. Both sides wait for it: they should have the same to spare.
        # Programs that multiply as many blocks each walk the same keys at the same time.
        sides = np.maximum(cost.bound_factor * multiplied, read)
        best = good[np.argmin(sides[good])]
        alike = good[(good >= best) & (len(wide.block) % hands[good] == 0)]
        if len(alike) and sides[alike[0]] <= 1.25 * sides[best]:
            best = alike[0]
    chosen = int(programs[best])
    return chosen, most - chosen


def _read_again(wide: _Side, hands: np.ndarray, num_kv_heads: int, cost: CostModel) -> np.ndarray:
    """float64 `[len(hands)]`: the memory's time for walks of shared runs, which own runs push out
    of the cache. Blocks of rows that walk the same keys at the same time read them once. Laid end
    to end and cut for `hands` hands, they begin at `hands / gcd` places."""
    walk = float(wide.length.max()) * num_kv_heads * cost.memory_ns
    return walk * np.minimum(len(wide.block), hands // np.gcd(hands, len(wide.block)))


def tile_columns(cost: CostModel, kind: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """block_n, item_ns and token_ns of tiles."""
    columns = [(tile.block_n, tile.item_ns, tile.token_ns) for tile in cost.tiles]
    block_n, item_ns, token_ns = np.array(columns).T
    return block_n[kind].astype(np.int64), item_ns[kind], token_ns[kind]


def item_times(
    tokens: np.ndarray, block_n: np.ndarray, item_ns: np.ndarray, token_ns: np.ndarray
) -> np.ndarray:
    """float64: the time of items with these numbers of tokens, in ns. Tiles are walked whole."""
    return item_ns + -(-tokens // block_n) * block_n * token_ns


@dataclass(frozen=True, eq=False)
class _Side:
    """Blocks that share programs: their indices, tokens of their walks, and tiles' columns."""

    block: np.ndarray
    length: np.ndarray
    block_n: np.ndarray
    item_ns: np.ndarray
    token_ns: np.ndarray

    @property
    def time(self) -> np.ndarray:
        return item_times(self.length, self.block_n, self.item_ns, self.token_ns)

    @staticmethod
    def of(kind: np.ndarray, length: np.ndarray, block: np.ndarray, cost: CostModel) -> _Side:
        return _Side(block, length[block], *tile_columns(cost, kind[block]))

    def ends(self, hands: np.ndarray, cost: CostModel) -> np.ndarray:
        """float64 `[len(hands)]`: about when `hands` hands end: without cuts if these save little,
        else with a cut each."""
        time = np.sort(self.time)[::-1]
        mean = float(time.sum()) / hands
        in_rounds = np.array([float(time[::number].sum()) for number in hands.tolist()])
        if self.length.max() < 2 * cost.min_tokens:
            return in_rounds
        return np.minimum(in_rounds, mean + max(cost.cut_ns, float(self.item_ns.max())))

    def cuts(self, start: np.ndarray, at_once: int, cost: CostModel) -> np.ndarray:
        """Where these walks are cut, for `at_once` programs.

        Long walks are laid end to end and cut at equal distances. So each program gets the same
        length, and few walks are cut (as Stream-K does with products, arXiv 2301.03598, section 4).
        """
        time = self.time
        mean = float(time.sum()) / at_once
        long = np.flatnonzero(time > mean / 4)
        if len(long) == 0 or _longest(time, at_once) <= mean + cost.cut_ns:
            return np.zeros(0, np.int64)
        pieces = max(1, round(float(time[long].sum()) / mean))
        length, token_ns, block_n = self.length[long], self.token_ns[long], self.block_n[long]
        stop = np.cumsum(length * token_ns)
        begin = stop - length * token_ns
        piece = max(float(stop[-1]) / pieces, float((cost.min_tokens * token_ns).max()))
        first = (begin // piece).astype(np.int64) + 1
        count = np.maximum(np.ceil(stop / piece - 1e-6).astype(np.int64) - first, 0)
        i = np.repeat(np.arange(len(long)), count)
        at = (ragged(first, count) * piece - begin[i]) / token_ns[i]
        at = np.rint(at / block_n[i]).astype(np.int64) * block_n[i]
        shortest = np.maximum(cost.min_tokens, block_n[i])
        keep = (at >= shortest) & (at <= length[i] - shortest)
        return start[self.block[long[i]]][keep] + at[keep]

    def even_cuts(self, start: np.ndarray, at_once: int, cost: CostModel) -> np.ndarray:
        """Where these walks are cut into `at_once` pieces, if they are fewer: each into equal
        pieces, as many as are its share."""
        walk = self.length * self.token_ns
        tiles = -(-self.length // self.block_n)
        pieces = np.floor(at_once * walk / walk.sum() + 1e-9).astype(np.int64)
        pieces = np.maximum(1, np.minimum(pieces, self.length // cost.min_tokens))
        i = np.repeat(np.arange(len(tiles)), pieces - 1)
        at = np.rint(
            ragged(np.ones(len(tiles), np.int64), pieces - 1) * tiles[i] / pieces[i]
        ).astype(np.int64)
        return start[self.block[i]] + at * self.block_n[i]


def _longest(time: np.ndarray, hands: int) -> float:
    """Time at which the last hand ends."""
    return float(np.bincount(dealt(time, np.zeros(hands)), time).max())


def segments_of(blocks: Blocks, cuts: np.ndarray) -> Segments:
    """Entries cut at `cuts`. A cut begins a new item, and so does a block."""
    length = blocks.hi - blocks.lo
    start = before(length)
    begin = np.union1d(start, cuts) if len(cuts) else start
    stop = np.append(begin[1:], start[-1] + length[-1] if len(length) else 0)[: len(begin)]
    entry = np.searchsorted(start, begin, "right") - 1
    piece = np.searchsorted(cuts, begin, "right")
    block = blocks.block[entry]
    new = is_first(block) | is_first(piece)
    lo = blocks.lo[entry] + begin - start[entry]
    return Segments(entry, lo, lo + stop - begin, new.cumsum() - 1)
