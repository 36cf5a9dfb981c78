"""Work lists show each row exactly what the plan shows it, whatever is shared and cut."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onestem.errors import ConfigError
from onestem.ops import AttentionPlan, PlanBuilder, windowed
from onestem.ops.reference import visible
from onestem.ops.triton import load_config
from onestem.ops.work import CostModel, Tile, WorkList, make_work
from onestem.ops.work.cuts import item_times
from tests.ops.plans import COSTS, SMALL, random_plan, read_packed


def packed(work: WorkList) -> np.ndarray:
    words = np.full(work.num_words, -(2**31), np.int32)
    assert work.pack(words) == len(words)
    return words


def assert_shows(words, plan: AttentionPlan, cost: CostModel, group: int, num_states: int) -> None:
    shown = read_packed(words, plan.num_rows, plan.page_size, cost, group)
    used: set[int] = set()
    for row in range(plan.num_rows):
        slots, positions = visible(plan, row)
        want = sorted(zip(slots.tolist(), positions.tolist(), strict=True))
        assert sorted(shown.keys[row]) == want
        states = sorted(shown.parts[row])
        if len(states) == 1:
            assert states == [-1]
            assert row not in shown.merges
            continue
        start, count = shown.merges[row]
        assert count == len(states)
        assert states == list(range(start, start + count)) or count == 0
        assert not used & set(states)
        used |= set(states)
    assert used == set(range(num_states))


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    page_size=st.sampled_from([1, 3, 16, 64]),
    num_runs=st.integers(0, 6),
    num_seqs=st.integers(1, 12),
    group=st.sampled_from([1, 3, 4, 8, 16]),
    kv_heads=st.integers(1, 8),
    window=st.sampled_from([None, None, 1, 7, 33]),
    share=st.booleans(),
    max_states=st.sampled_from([None, None, 0, 10, 60]),
    cost=st.sampled_from(sorted(COSTS)),
)
def test_lists_show_what_the_plan_shows(
    seed, page_size, num_runs, num_seqs, group, kv_heads, window, share, max_states, cost
):
    rng = np.random.default_rng(seed)
    plan = random_plan(
        rng, page_size=page_size, num_runs=num_runs, num_seqs=num_seqs, window=window
    )
    model = COSTS[cost]
    work = make_work(
        plan, model, num_kv_heads=kv_heads, group=group, share=share, max_states=max_states
    )
    assert max_states is None or work.num_states <= max_states
    assert_shows(packed(work), plan, model, group, work.num_states)


def tree(num_seqs: int, *, shared: int = 300, own: int = 50, page_size: int = 16) -> AttentionPlan:
    builder = PlanBuilder(page_size)
    system = builder.add_run(np.arange(-(-shared // page_size), dtype=np.int32), 0, shared, 0)
    builder.add_span(0, num_seqs, system, shared)
    per_seq = -(-own // page_size) + 4
    for row in range(num_seqs):
        pages = 1000 + row * per_seq + np.arange(per_seq, dtype=np.int32)
        run = builder.add_run(pages.astype(np.int32), 3, own + row % 5, shared)
        builder.add_span(row, 1, run, own + row % 5)
    return builder.build(shared + own - 1 + np.arange(num_seqs) % 5)


def test_a_shared_run_is_read_once_and_own_runs_once_each():
    plan = tree(64)
    cost = CostModel(SMALL, programs=(1, 1))
    work = make_work(plan, cost, num_kv_heads=1, group=4)
    shared = work.records[work.records[:, 11] - work.records[:, 8] == 300]
    assert shared[:, 1].tolist() == [16, 16, 16, 16]  # rows of a 64-wide tile, 4 heads each
    assert len(work.records) == 4 + 64
    assert work.num_states == 2 * 64
    apart = make_work(plan, cost, num_kv_heads=1, group=4, share=False)
    assert len(apart.records) == 64
    assert apart.num_states == 0
    assert (apart.records[:, 3] == 2).all()


def test_a_chunk_that_fills_tiles_walks_a_shared_run_by_itself():
    builder = PlanBuilder(16)
    system = builder.add_run(np.arange(10, dtype=np.int32), 0, 160, 0)
    builder.add_span(0, 44, system, 160)
    for row in range(4):
        run = builder.add_run(np.array([20 + row], np.int32), 0, 5, 160)
        builder.add_span(row, 1, run, 5)
    own = builder.add_run(np.arange(30, 33, dtype=np.int32), 0, 40, 160)
    builder.add_span(4, 40, own, 1, step=1)
    plan = builder.build(np.r_[np.full(4, 164), 160 + np.arange(40)])
    cost = CostModel(SMALL, programs=(1, 1), merge_tokens=1)
    work = make_work(plan, cost, num_kv_heads=1, group=4)
    assert_shows(packed(work), plan, cost, 4, work.num_states)
    chunk = work.records[work.records[:, 3] == 2]
    assert sorted(chunk[:, 1].tolist()) == [8, 16, 16]
    assert work.num_states == 2 * 4  # the decodes' alone


def test_one_long_walk_is_cut_for_all_programs():
    plan = tree(1, shared=2048, own=128)
    cost = CostModel(
        (Tile(16, 64), Tile(64, 64), Tile(128, 64)), programs=(264, 132), min_tokens=128
    )
    work = make_work(plan, cost, num_kv_heads=8, group=4)
    assert 14 <= len(work.records) <= 17
    length = work.records[:, 11] - work.records[:, 8]
    assert length.max() <= 192
    assert_shows(packed(work), plan, cost, 4, work.num_states)


@pytest.mark.parametrize(("shared", "multiply"), [(2048, 64), (4096, 64), (8192, 96), (16384, 96)])
def test_an_h100_deals_a_decode_step_out_the_same_while_own_runs_grow(shared, multiply):
    """The splits that were measured to be the fastest, or within 4% of it."""
    config, tuned = load_config("NVIDIA H100 80GB HBM3", torch.bfloat16, 128, 4, True)
    assert tuned
    for own in (112, 126, 129, 156):
        plan = tree(256, shared=shared, own=own)
        work = make_work(plan, config.cost(132), num_kv_heads=8, group=4)
        assert work.split == (multiply, 132 - multiply)


def test_items_take_whole_tiles():
    times = item_times(np.array([1, 64, 65, 128]), 64, 1000.0, 10.0)
    assert times.tolist() == [1640, 1640, 2280, 2280]


def test_padding_rows_become_empty():
    plan = tree(3)
    work = make_work(plan, COSTS["default"], num_kv_heads=1, group=1, num_rows=8)
    merges = {row: count for row, _, count, _ in work.merges.tolist()}
    assert [merges.get(row, 1) for row in range(3, 8)] == [0] * 5


@pytest.mark.parametrize("window", [None, 40, 1000])
@pytest.mark.parametrize("cost", sorted(COSTS))
def test_growing_words_make_the_next_steps_list(cost, window):
    plan = windowed(tree(9, shared=150), window)
    model = COSTS[cost]
    work = make_work(plan, model, num_kv_heads=2, group=4)
    words = packed(work)
    own = np.arange(1, 10)
    grow = work.growing_words(own)
    assert len(np.unique(grow)) == len(grow)
    new_page = work.page_word(np.array([4]), np.array([5]))
    words[new_page] = 77
    for _ in range(20):
        words[grow] += 1
        spans, runs, pages = plan.spans.copy(), plan.runs.copy(), plan.run_pages.copy()
        spans[own, 4] += 1
        runs[own, 2] += 1
        pages[runs[4, 0] + 5] = 77
        plan = dataclasses.replace(
            plan, spans=spans, runs=runs, run_pages=pages, row_position=plan.row_position + 1
        )
        plan.check()
        assert_shows(words, plan, model, 4, work.num_states)


def test_limits_are_named():
    plan = tree(3)
    work = make_work(plan, COSTS["default"], num_kv_heads=1, group=4)
    with pytest.raises(ConfigError, match="raise max_words"):
        work.pack(np.zeros(40, np.int32))
    with pytest.raises(ConfigError, match="17 query heads share a KV head, tiles hold 16"):
        make_work(plan, COSTS["default"], num_kv_heads=1, group=17)


def test_no_rows_and_no_spans():
    for rows in (0, 5):
        plan = PlanBuilder(16).build(np.zeros(rows, np.int64))
        work = make_work(plan, COSTS["default"], num_kv_heads=1, group=1)
        assert work.num_items == 0
        assert work.merges[:, 0].tolist() == list(range(rows))
        assert_shows(packed(work), plan, COSTS["default"], 1, 0)
