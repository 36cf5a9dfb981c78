"""Random plans, and what a packed work list shows each row: shared by the tests of work lists and
of kernels that read them."""

from __future__ import annotations

import dataclasses

import numpy as np

from onestem.ops import AttentionPlan, PlanBuilder, windowed
from onestem.ops.work import CostModel, Tile
from onestem.ops.work.lists import ENTRY, HEADER, QUEUED, RECORD

# Small tiles cut and split small plans; the last two make every group an item or none.
SMALL = (Tile(16, 16), Tile(32, 16), Tile(64, 32))
COSTS = {
    "default": CostModel(SMALL, programs=(8, 8)),
    "many cuts": CostModel(SMALL, programs=(512, 512), min_tokens=16, merge_tokens=0, cut_ns=0.0),
    "together": CostModel(SMALL, programs=(40, 20), together=True, min_tokens=32, cut_ns=0.0),
    "never share": CostModel(SMALL, programs=(64, 64), merge_tokens=10**6, min_tokens=16),
}


def random_plan(
    rng: np.random.Generator,
    *,
    page_size: int,
    num_runs: int = 4,
    num_seqs: int = 8,
    window: int | None = None,
    max_rows: int = 24,
    max_len: int = 70,
    num_pages: int = 512,
    moves: bool = True,
) -> AttentionPlan:
    """A forest plus modules, chunks and decodes; runs begin anywhere in a page, pages stand in
    random order with slack behind them; some rows see nothing. In half of the plans the shared runs
    are one, cut anywhere; in half, if it `moves`, some rows see some of them elsewhere."""
    builder = PlanBuilder(page_size)
    page_ids = rng.permutation(num_pages).astype(np.int32)
    used = 0

    def run(length: int, position: int) -> int:
        nonlocal used
        offset = int(rng.integers(0, page_size))
        count = -(-(offset + length) // page_size)
        pages = np.append(page_ids[used : used + count], np.int32(2**30))  # slack: garbage
        used += count
        return builder.add_run(pages, offset, length, position)

    edges = [0, 1, page_size - 1, page_size, page_size + 1, int(rng.integers(1, max_len))]
    lengths = [int(rng.choice(edges)) for _ in range(num_runs)]
    one = rng.random() < 0.5
    starts = np.cumsum([0, *[n + int(rng.integers(0, 1 if one else 5)) for n in lengths]])
    if one:
        first = int(rng.integers(0, page_size))
        pages = np.append(page_ids[used:], np.int32(2**30))
        used += -(-(first + int(starts[-1])) // page_size)
        shared = [
            builder.add_run(pages[(first + p) // page_size :], (first + p) % page_size, n, p)
            for n, p in zip(lengths, starts[:-1].tolist(), strict=True)
        ]
    else:
        shared = [run(n, int(p)) for n, p in zip(lengths, starts[:-1], strict=True)]
    positions: list[int] = []
    shifts = [0, *(rng.integers(-90, 90, 2).tolist() if moves and rng.random() < 0.5 else ())]
    for _ in range(num_seqs):
        rows = int(rng.choice([1, 1, 1, 2, int(rng.integers(1, max_rows))]))
        before = int(rng.choice([0, int(rng.integers(0, max_len))]))
        base, row = int(starts[-1]) + int(rng.integers(0, 3)), len(positions)
        own = run(before + rows, base)
        for index, length in zip(shared, lengths, strict=True):
            if rng.random() < 0.6:
                builder.add_span(row, rows, index, length, shift=int(rng.choice(shifts)))
        if rng.random() < 0.9:
            builder.add_span(row, rows, own, before + 1, step=1)
        if rng.random() < 0.2 and rows > 2:  # its first rows see nothing of this
            other = run(rows, base + 500)
            builder.add_span(row, rows, other, -1 if rows > 3 else 0, step=1)
        positions.extend(range(base + before, base + before + rows))
    plan = builder.build(np.array(positions))
    order = rng.permutation(plan.num_spans)  # spans may come in any order
    plan = dataclasses.replace(plan, spans=np.ascontiguousarray(plan.spans[order]))
    return windowed(plan, window)


def written_slots(plan: AttentionPlan) -> np.ndarray:
    """int64: every slot that some span shows (all others may hold NaN)."""
    parts = [np.zeros(0, np.int64)]
    for _, rows, run, first, end, step in plan.spans.tolist():
        parts.append(plan.slots(run, first, max(first, end + (rows - 1) * step)))
    return np.unique(np.concatenate(parts))


@dataclasses.dataclass
class Shown:
    """What a packed work list tells a kernel, read word by word.

    keys: per query, the (slot, position) pairs of every part that shows them.
    parts: per query, its states (-1: final).
    """

    keys: list[list[tuple[int, int]]]
    parts: list[list[int]]
    merges: dict[int, tuple[int, int]]


def assert_dealt(words: np.ndarray, reading: int, wide: int, num_tiles: int) -> None:
    """Every item is taken once for each KV head, by halves of programs in its own role; those of
    the narrowest of three tiles last. A queue also holds its first item's record."""
    multiply, read = words[10:12].tolist()
    packed = words[HEADER : words[12]].reshape(-1, QUEUED)
    queues = packed[:, [6, 7, 0, 15]].tolist()
    assert len(queues) == 2 * (multiply + read)
    for queue, (start, stop, _, _) in zip(packed, queues, strict=True):
        record = words[words[12] + RECORD * start :][:RECORD]
        assert start == stop or np.array_equal(queue[1:6], record[1:6])
        assert start == stop or np.array_equal(queue[8:15], record[8:15])
    taken = np.zeros((reading + wide, max(queue[2] for queue in queues) + 1), np.int64)
    kinds = words[words[12] :][: RECORD * (reading + wide) : RECORD]
    for i, (start, stop, head, few) in enumerate(queues):
        multiplies = few == -1
        assert multiplies == (i < 2 * multiply)
        if not multiplies:
            narrowest = np.arange(start, stop) >= few
            assert ((kinds[start:stop] == 0) & (num_tiles > 2) == narrowest).all()
        assert start == stop or (start >= reading if multiplies else stop <= reading)
        if multiplies and i % 2:
            assert [start, stop, head] == queues[i - 1][:3]
        else:
            taken[start:stop, head] += 1
    assert (taken == 1).all()


def read_packed(
    words: np.ndarray, num_queries: int, page_size: int, cost: CostModel, group: int
) -> Shown:
    """Follows `words` as the kernel does; asserts that no row of a tile's clear range is blind."""
    reading, wide, num_merges, walk, rows, dest, merges, pages, positions, window = words[
        :10
    ].tolist()
    assert (words[10:12] >= 0).all()
    assert not cost.together or 0 < words[10:12].sum() <= cost.programs[1]
    assert not words[13:16].any()
    if cost.together:
        assert_dealt(words, reading, wide, len(cost.tiles))
    shown = Shown([[] for _ in range(num_queries)], [[] for _ in range(num_queries)], {})
    for item in range(reading + wide):
        record = words[words[12] + RECORD * item :]
        kind, count, row_start, num_walk, walk_start, shared = record[:6].tolist()
        partial = words[dest + row_start :][:count] >= 0
        assert shared == (1 if partial.all() else 2 if partial.any() else 0)
        assert (kind == len(cost.tiles) - 1) == (item >= reading)
        assert 1 <= count <= cost.tiles[kind].block_m // group
        entries = [record[8:16]]
        entries += [words[walk + ENTRY * (walk_start + i) :][:ENTRY] for i in range(num_walk - 1)]
        for j in range(count):
            row = int(words[rows + row_start + j])
            shown.parts[row].append(int(words[dest + row_start + j]))
            for lo, clear_lo, clear_hi, hi, end, step, shift, _ in (e.tolist() for e in entries):
                oldest = int(words[positions + row]) - window + 1 - shift
                first, stop = max(lo, oldest), min(hi, end + j * step)
                assert clear_hi <= clear_lo or (first <= clear_lo and clear_hi <= stop)
                for x in range(first, stop):
                    slot = int(words[pages + x // page_size]) * page_size + x % page_size
                    shown.keys[row].append((slot, x + shift))
    for row, start, count, _ in (
        words[merges:].reshape(-1)[: 4 * num_merges].reshape(-1, 4).tolist()
    ):
        shown.merges[row] = (start, count)
    return shown
