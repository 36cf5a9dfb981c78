"""The work list on the grid: against C++, item for item, and what it promises to kernels."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch

from onestem.errors import ConfigError
from onestem.ops import AttentionPlan, PlanBuilder, windowed
from onestem.ops.cpu import CpuAttention, is_built
from onestem.ops.plan import RUN_OFFSET, RUN_PAGES
from onestem.ops.work.grid import grid_work, segment_of, segment_start
from onestem.ops.work.lists import (
    AWAITED,
    END,
    ENTRY,
    FIRST_ENTRY,
    GOES_ON,
    HANDED,
    HI,
    LEAVES,
    LO,
    NUM_ROWS,
    NUM_WALK,
    POSITION,
    ROW_START,
    STEP,
    WALK_START,
    WorkList,
)
from tests.ops.test_grid import Pages, Run, chunk_of, texts_of, together

SEEDS = range(12)


def random_plan(seed: int) -> AttentionPlan:
    """Chunks and decodes over a forest of runs, cut anywhere."""
    rng = np.random.default_rng(seed)
    texts = texts_of(rng, 1, 1, 8, torch.float32)
    _, plan = together(rng, texts, [chunk_of(rng, text) for text in texts])
    return windowed(plan, [None, None, 1, 100, 300][seed % 5])


def made(
    plan: AttentionPlan, rows: tuple[int, ...] = (10**6,), hands: int = 1, **options
) -> WorkList:
    """The list with tiles of so many rows, and `hands` programs for items of each."""
    sizes = {"block_n": 1, "tile_rows": rows, "num_kv_heads": 1, "programs": (hands,) * len(rows)}
    return grid_work(plan, **{**sizes, **options})


def walked(work: WorkList) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Of each item its rows, its states and its entries."""
    found = []
    for record in work.records:
        start, count = record[ROW_START], record[NUM_ROWS]
        more = work.walk[record[WALK_START] : record[WALK_START] + record[NUM_WALK] - 1]
        entries = np.concatenate((record[None, FIRST_ENTRY : FIRST_ENTRY + ENTRY], more))
        part = slice(start, start + count)
        found.append((work.rows[part], work.dest[part], entries))
    return found


def pieces_of(plan: AttentionPlan, entries: np.ndarray) -> tuple[tuple[int, ...], ...]:
    """Entries as (run, lo, hi, end, step)."""
    bases = plan.runs[:, RUN_PAGES] * plan.page_size + plan.runs[:, RUN_OFFSET]
    found = []
    for entry in entries:
        run = int(np.flatnonzero((bases <= entry[LO]) & (entry[HI] <= bases + plan.run_len))[0])
        tokens = entry[[LO, HI, END]] - bases[run]
        found.append((run, *tokens.tolist(), int(entry[STEP])))
    return tuple(found)


def whole_items(
    plan: AttentionPlan, items: list[dict[str, Any]]
) -> list[tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]]:
    """A CPU's items by rows and pieces; those that go on from states, with what led to these."""
    handed: dict[int, list[tuple[int, ...]]] = {}
    found = []
    for item in items:
        rows = tuple(item["rows"])
        pieces = [(run, lo, hi, end, step) for run, lo, hi, _, end, step in item["pieces"]]
        if item["hand"] == LEAVES:
            assert len(rows) > 1
            handed |= dict.fromkeys(rows, pieces)
            continue
        if item["hand"] == GOES_ON:
            before = seen_of(plan, rows[0], handed.get(rows[0], []))
            if before and before[-1][0] == pieces[0][0]:
                _, begin, middle, *_ = before.pop()
                assert middle == pieces[0][1]
                pieces[0] = (pieces[0][0], begin, *pieces[0][2:])
            pieces = before + pieces
        found.append((rows, tuple(pieces)))
    return found


def seen_of(plan: AttentionPlan, row: int, pieces: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """What of pieces is in a row's window."""
    oldest = 0 if plan.window is None else int(plan.row_position[row]) - plan.window + 1
    cut = [
        (run, max(lo, oldest - int(plan.run_position[run])), hi, *more)
        for run, lo, hi, *more in pieces
    ]
    return [piece for piece in cut if piece[1] < piece[2]]


@pytest.mark.skipif(not is_built(), reason="the C++ extension is not built")
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_items_are_those_of_a_cpu(seed: int, share: bool) -> None:
    plan = random_plan(seed)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    theirs = CpuAttention(deterministic=True).prepare(plan, share=share)
    want = sorted(whole_items(plan, theirs.describe(torch.float32, 1, 1, 8)))
    torch.set_num_threads(threads)
    items = walked(made(plan, share=share))
    assert sorted((tuple(rows.tolist()), pieces_of(plan, each)) for rows, _, each in items) == want
    assert max(len(rows) for rows, _ in want) > 1 or not share


@pytest.mark.skipif(not is_built(), reason="the C++ extension is not built")
def test_where_rows_part_one_item_of_a_cpu_walks_what_they_share() -> None:
    """Segments end at 768 and 1024, tiles each 64 positions: of 1,000 each row reads 40."""
    builder = PlanBuilder(16)
    shared = builder.add_run(np.arange(63, dtype=np.int32), 0, 1000, 0)
    builder.add_span(0, 3, shared, 1000)
    for row in range(3):
        own = builder.add_run(np.array([63 + row], np.int32), 0, 5, 1000)
        builder.add_span(row, 1, own, 5)
    plan = builder.build(np.full(3, 1004))
    items = CpuAttention(deterministic=True).prepare(plan).describe(torch.float32, 1, 1, 8)
    walks = [(item["hand"], item["rows"], [p[:3] for p in item["pieces"]]) for item in items]
    assert walks[0] == (LEAVES, [0, 1, 2], [(shared, 768, 960)])
    assert walks[1:-3] == [(0, [0, 1, 2], [(shared, 0, 768)])]
    own = [(GOES_ON, [row], [(shared, 960, 1000), (row + 1, 0, 5)]) for row in range(3)]
    assert sorted(walks[-3:], key=lambda walk: walk[1]) == own


@pytest.mark.skipif(not is_built(), reason="the C++ extension is not built")
@pytest.mark.parametrize("seed", SEEDS)
def test_states_are_handed_over_as_on_a_cpu(seed: int) -> None:
    """Those that leave states come first, and each other row goes on behind the one that it got."""
    plan = random_plan(seed)
    leave, go_on = set(), set()
    for item in CpuAttention(deterministic=True).prepare(plan).describe(torch.float32, 1, 1, 8):
        pieces = tuple((run, lo, hi, end, step) for run, lo, hi, _, end, step in item["pieces"])
        if item["hand"] == LEAVES:
            leave.add((tuple(item["rows"]), pieces))
        elif item["hand"] == GOES_ON:
            go_on.add((*item["rows"], *pieces[0][:2]))
    work = made(plan, (1, 10**6), block_n=64)
    state: dict[int, int] = {}
    got: dict[int, int] = {}
    for record, (rows, dest, entries) in zip(work.records, walked(work), strict=True):
        pieces = pieces_of(plan, entries)
        if record[HANDED] < 0:
            leave.remove((tuple(rows.tolist()), pieces))
            state |= dict(zip(rows.tolist(), dest.tolist(), strict=True))
        elif record[HANDED] > 0:
            got[int(rows[0])] = record[HANDED] - 1
            go_on.remove((int(rows[0]), *pieces[0][:2]))
    assert not leave
    assert state == got
    assert (work.records[:, AWAITED] == 2 * np.count_nonzero(work.records[:, HANDED] < 0)).all()


@pytest.mark.parametrize("hands", [1, 8, 4000])
@pytest.mark.parametrize("seed", SEEDS)
def test_rows_see_each_segment_once_and_in_order(seed: int, hands: int) -> None:
    """Each row sees what its spans show, states follow positions, and an item that does not begin
    where its row's tokens do is inside one segment."""
    plan = random_plan(seed)
    work = made(plan, (int(np.random.default_rng(seed).integers(1, 20)),), hands)
    seen: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for rows, dest, entries in walked(work):
        assert len(rows) <= 20
        begin, end = entries[0][LO] + entries[0][POSITION], entries[-1][HI] + entries[-1][POSITION]
        for j, (row, state) in enumerate(zip(rows.tolist(), dest.tolist(), strict=True)):
            last = entries[-1][END] + j * entries[-1][STEP] + entries[-1][POSITION]
            seen[row].append((int(begin), int(min(end, last)), state))
    for row, position in enumerate(plan.row_position.tolist()):
        parts = sorted(seen[row], key=lambda part: part[2])
        assert [state - parts[0][2] for *_, state in parts] == list(range(len(parts)))
        assert (parts[0][2] == -1) == (len(parts) == 1)
        oldest = 0 if plan.window is None else max(0, position - plan.window + 1)
        assert parts[0][0] <= oldest
        assert max(end for _, end, _ in parts) == position + 1
        for (_, before, _), (begin, end, _) in itertools.pairwise(parts):
            if begin > oldest:  # else its window begins there, or behind
                assert begin == before or begin > position  # rows beside it see further
                assert segment_start(segment_of(np.array(begin))) == begin
            assert end <= begin or segment_of(np.array(begin)) == segment_of(np.array(end - 1))


def test_few_states_share_and_cut_nothing() -> None:
    plan = random_plan(0)
    assert made(plan, (4,), 4000).num_states > 0
    for rows in ((4,), (2, 4)):
        work = made(plan, rows, 4000, max_states=1)
        assert work.num_states == 0
        assert len(np.unique(work.rows)) == len(work.rows) == plan.num_rows


@pytest.mark.parametrize("seed", SEEDS)
def test_items_have_the_narrowest_tile_that_holds_them(seed: int) -> None:
    """The first of several tiles is for items of one segment, where few rows' are cut."""
    plan = random_plan(seed)
    work = made(plan, (2, 4, 8))
    few = len(work.records) - work.num_wide
    kind = np.repeat([0, 1, 2], [few, work.split[0], work.num_wide - work.split[0]])
    for tile, (rows, _, entries) in zip(kind, walked(work), strict=True):
        tokens = entries[[0, -1], [LO, HI]] + entries[[0, -1], POSITION]
        assert tile >= np.searchsorted([2, 4, 8], len(rows))
        assert tile > 0 or np.ptp(segment_of(tokens - [0, 1])) == 0
    # With room for the states of shared items alone, single rows' are not cut.
    fewer = made(plan, (2, 4, 8), max_states=made(plan, (8,)).num_states)
    leaving = np.count_nonzero(work.records[:, HANDED] < 0)
    assert work.num_states == fewer.num_states or leaving or fewer.num_wide > work.num_wide


@pytest.mark.parametrize("length", [10, 128, 200, 511, 600])
def test_it_grows_to_the_end_of_a_segment(length: int) -> None:
    """One long row, cut into segments; behind the last one's end it is made again."""
    builder = PlanBuilder(16)
    builder.add_run(np.arange(60, dtype=np.int32), 0, length, 0)
    builder.add_span(0, 1, 0, length)
    plan = builder.build(np.array([length - 1]))
    whole, cut = made(plan), made(plan, hands=1000)
    assert whole.room == 2**31
    end = int(segment_start(segment_of(np.array(length - 1)) + 1))
    assert cut.room == (end - length if length > 128 else 2**31)
    assert made(plan, (1, 2)).room == end - length


def test_a_gap_between_positions_is_an_error() -> None:
    pages = Pages(np.random.default_rng(0), torch.zeros(600, 1, 8))
    text = texts_of(np.random.default_rng(1), 1, 1, 8, torch.float32)[0]
    run = pages.run(text, 0, 1)
    later = Run(pages.builder.add_run(np.arange(9, dtype=np.int32), 0, 5, 7), 7, 12)
    for one in (run, later):
        pages.show(0, range(11, 12), one)
    with pytest.raises(ConfigError, match="with a gap between them"):
        made(pages.builder.build(np.array([11])))


def test_a_walk_that_begins_inside_a_tile_is_an_error() -> None:
    builder = PlanBuilder(16)
    builder.add_run(np.arange(9, dtype=np.int32), 0, 50, 7)
    builder.add_span(0, 1, 0, 50)
    plan = builder.build(np.array([56]))
    with pytest.raises(ConfigError, match="begins inside a tile of 64 positions"):
        made(plan, block_n=64)
