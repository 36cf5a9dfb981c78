"""Work lists show each row exactly what the plan shows it, whatever is shared and cut."""

from __future__ import annotations

import dataclasses
from itertools import chain, product

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from onestem.errors import ConfigError
from onestem.ops import AttentionPlan, PlanBuilder, windowed
from onestem.ops.reference import visible
from onestem.ops.triton import States, Workspace, load_config
from onestem.ops.triton.attention import TritonAttention
from onestem.ops.triton.launch import Kernels
from onestem.ops.work import CostModel, Tile, WorkList, lists, make_work
from onestem.ops.work.cuts import item_times
from onestem.ops.work.deal import hands_in_rows
from onestem.ops.work.lists import Choice, ListTooLong
from onestem_lab.attention.cases import decode_step
from tests.ops.attend import check_plan
from tests.ops.plans import COSTS, SMALL, random_plan, read_packed


def packed(work: WorkList) -> np.ndarray:
    words = np.full(work.num_words, -(2**31), np.int32)
    assert work.pack(words) == len(words)
    return words


def assert_shows(words, plan: AttentionPlan, cost: CostModel, group: int, num_states: int) -> None:
    shown = read_packed(words, plan.num_queries, plan.page_size, cost, group)
    used: set[int] = set()
    for query in range(plan.num_queries):
        slots, positions = visible(plan, query)
        want = sorted(zip(slots.tolist(), positions.tolist(), strict=True))
        assert sorted(shown.keys[query]) == want
    for row, moved in enumerate(moved_rows(plan)):
        states = sorted(chain(shown.parts[row], *(shown.parts[query] for query in moved)))
        if len(states) == 1 and shown.parts[row]:
            assert states == [-1]
            assert row not in shown.merges
            continue
        start, count = shown.merges[row]
        assert count == len(states)
        assert states == list(range(start, start + count)) or count == 0
        assert not used & set(states)
        used |= set(states)
    assert used == set(range(num_states))


def moved_rows(plan: AttentionPlan) -> list[list[int]]:
    """The moved rows of each row, as queries."""
    found: list[list[int]] = [[] for _ in range(plan.num_rows)]
    for number, row in enumerate(plan.moved[:, 0].tolist()):
        found[row].append(plan.num_rows + number)
    return found


@settings(max_examples=80)
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
        rng,
        page_size=page_size,
        num_runs=num_runs,
        num_seqs=num_seqs,
        window=window,
        num_pages=2048,  # as many as the longest need, of one token each
    )
    model = COSTS[cost]
    options = {"num_kv_heads": kv_heads, "group": group, "share": share}
    try:
        work = make_work(plan, model, max_states=max_states, **options)
    except ListTooLong:
        assert max_states < 2 * len(plan.moved)
        work, max_states = make_work(plan, model, **options), None
    assert max_states is None or work.num_states <= max_states
    assert_shows(packed(work), plan, model, group, work.num_states)


@settings(max_examples=60)
@given(
    nodes=st.lists(st.integers(1, 40), min_size=2, max_size=4),
    lengths=st.lists(st.integers(1, 60), min_size=4, max_size=4),
    merge_tokens=st.sampled_from([0, 3, 16, 50]),
    max_states=st.sampled_from([None, None, 0, 30]),
)
@example(nodes=[1, 1, 2, 24], lengths=[7, 30, 9, 5], merge_tokens=16, max_states=None)
def test_a_tree_is_walked_at_the_least_cost(nodes, lengths, merge_tokens, max_states):
    """Tokens times items, and merges: as little as with any choice of nodes that have items."""
    counts = (min(nodes[0], 3), *sorted(nodes[1:]))
    assume(counts == tuple(sorted(counts)) and sum(counts[:-1]) <= 9)
    plan = decode_step(counts, tuple(lengths[: len(counts)])).plan
    cost = CostModel(SMALL, programs=(1, 1), merge_tokens=merge_tokens)
    work = make_work(plan, cost, num_kv_heads=1, group=4, max_states=max_states)
    assert_shows(packed(work), plan, cost, 4, work.num_states)
    if max_states is not None:
        assert work.num_states <= max_states
        return
    entries = np.concatenate((work.records[:, 8:], work.walk))
    walked = int((entries[:, 3] - entries[:, 0]).sum())
    merged = len(work.rows) - plan.num_rows
    assert walked + merge_tokens * merged == least_cost(plan, merge_tokens, tile_rows=16)


def least_cost(plan: AttentionPlan, merge_tokens: int, tile_rows: int) -> int:
    """Of all choices of nodes, each tried."""
    spans = [tuple(span[:5]) for span in plan.spans.tolist()]  # row, rows, run, first, end
    paths = [[s for s in spans if s[0] <= row < s[0] + s[1]] for row in range(plan.num_rows)]
    nodes = [span for span in spans if span[1] > 1]
    costs = []
    for chosen in product([False, True], repeat=len(nodes)):
        own = {node for node, has in zip(nodes, chosen, strict=True) if has}
        total = merge_tokens * sum(rows for _, rows, *_ in own)
        paid: set[tuple[int, ...]] = set()
        for path in paths:
            carried = 0
            for node in path:
                carried += node[4]
                if node in own:
                    total += 0 if node in paid else -(-node[1] // tile_rows) * carried
                    paid.add(node)
                    carried = 0
            total += carried
        costs.append(total)
    return min(costs)


def test_a_run_is_walked_by_the_items_of_the_runs_below_it_where_that_costs_nothing():
    """Two groups of 32 rows fill a tile each: who sees both levels has one state more, not two."""
    plan = decode_step((1, 2, 64), (512, 100, 20)).plan
    cost = CostModel((Tile(16, 16), Tile(128, 16)), programs=(1, 1))
    work = make_work(plan, cost, num_kv_heads=1, group=4)
    assert len(work.records) == 2 + 64
    assert work.num_states == 2 * 64
    assert sorted(work.records[:, 3].tolist()) == [1] * 64 + [2] * 2


def tree(num_seqs: int, *, shared: int = 300, own: int = 50, cuts: int = 0) -> AttentionPlan:
    """Sequences that share tokens, in `cuts` + 1 runs of about equal length."""
    builder = PlanBuilder(16)
    pages, bounds = np.arange(-(-shared // 16), dtype=np.int32), np.arange(cuts + 2)
    bounds = shared * bounds // (cuts + 1)
    for first, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        run = builder.add_run(pages[first // 16 : -(-end // 16)], first % 16, end - first, first)
        builder.add_span(0, num_seqs, run, end - first)
    per_seq = -(-own // 16) + 4
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


@pytest.mark.parametrize(
    ("counts", "lengths", "num_kv_heads", "group", "halves"),
    [
        # 4 runs of 64 queries each: the form with queries as rows, in second halves
        ((1, 4, 128), (8, 256, 32), 8, 2, [1]),
        ((64,), (128,), 1, 16, [1]),  # 64 items for 132 programs
        ((256,), (2048,), 8, 4, [0, 1]),  # 7 or 8 items for each half
    ],
)
def test_second_halves_take_what_they_can(counts, lengths, num_kv_heads, group, halves):
    # The first warpgroup's instructions come later (`CostModel.late_ns`).
    config, _ = load_config("NVIDIA H100 80GB HBM3", torch.bfloat16, 128, group, True)
    step = decode_step(counts, lengths, page_size=16)
    work = make_work(step.plan, config.cost(132), num_kv_heads=num_kv_heads, group=group)
    start, stop, few = (work.queues[:, word] for word in (6, 7, 15))
    rows = (few > start) & (start < stop)
    used = rows if rows.any() else start < stop
    assert sorted({i % 2 for i in np.flatnonzero(used)}) == halves
    if halves == [0, 1]:  # a program has one hand, for two heads
        assert np.array_equal(start[::2], start[1::2])
        assert np.array_equal(work.queues[::2, 0] + 1, work.queues[1::2, 0])


@pytest.mark.parametrize(
    ("counts", "lengths", "num_items", "num_states"),
    [
        # 16 hands begin soon: as many pieces as they are, although 33 could read
        ((1,), (8192,), 16, 16),
        ((2,), (2048,), 16, 16),
        ((16,), (512,), 16, 0),
        # Half of what two rows walk would come from memory, half from the cache: they share it
        ((1, 2), (16384, 64), 17, 32),
        # 20 rows share in tiles of 64 queries: programs that multiply would begin late
        ((1, 20), (1024, 64), 36, 180),
    ],
)
def test_few_walks_are_cut_for_programs_that_begin_soon(counts, lengths, num_items, num_states):
    """On an H100 with 32/8 heads: each of these takes 0.6 to 0.9 of the time of other cuts."""
    config, _ = load_config("NVIDIA H100 80GB HBM3", torch.bfloat16, 128, 4, True)
    kernels = Kernels(32, 8, 128, 16, config, 132, windowed=False, hopper=True, dependent=True)
    plan = decode_step(counts, lengths, page_size=16).plan
    work = make_work(plan, kernels.cost, num_kv_heads=8, group=4)
    assert (work.num_items, work.num_states) == (num_items, num_states)


def drafts_of(monkeypatch) -> list[tuple[lists.Draft, CostModel]]:
    """Each list that `make_work` deals out from now on, and its model."""
    made: list[tuple[lists.Draft, CostModel]] = []
    drafted = lists.draft_of

    def recorded(plan, cost, *args):
        made.append((drafted(plan, cost, *args), cost))
        return made[-1][0]

    monkeypatch.setattr(lists, "draft_of", recorded)
    return made


@pytest.mark.parametrize(
    ("counts", "lengths", "group", "multiply"),
    [
        ((1, 8, 512), (512, 512, 256), 2, 32),
        ((1, 256), (2048, 256), 4, 64),
        # 64 blocks of rows: 8 programs for each KV head walk 8 each, at the same time
        ((1, 4, 16, 64, 256, 1024), (256, 32, 256, 64, 32, 256), 8, 64),
    ],
)
def test_both_sides_have_to_spare_where_memory_is_the_limit(
    counts, lengths, group, multiply, monkeypatch
):
    """Splits that take 0.8 to 0.96 of the time of those with fewer programs that multiply."""
    config, _ = load_config("NVIDIA H100 80GB HBM3", torch.bfloat16, 128, group, True)
    plan = decode_step(counts, lengths, page_size=16).plan
    drafts = drafts_of(monkeypatch)
    make_work(plan, config.cost(132), num_kv_heads=8, group=group)
    assert drafts[0][0].split == (multiply, 132 - multiply)


@pytest.mark.parametrize(
    ("counts", "lengths", "heads", "multiply"),
    [
        ((1, 8, 512), (32, 512, 256), (16, 1), False),  # 28 us instead of 35 on an H200
        ((1, 8, 16, 32, 64, 128, 1024), (256, 128, 64, 32, 32, 32, 32), (64, 8), False),
        ((1, 2, 64), (1024, 256, 256), (32, 8), False),
        ((1, 1024), (8192, 128), (32, 8), True),  # 334 us instead of 435
        ((1, 256), (16384, 32), (64, 8), True),
    ],
)
def test_programs_multiply_where_that_takes_less_time(counts, lengths, heads, multiply):
    """Else all items have at most 64 queries, and all programs read."""
    group = heads[0] // heads[1]
    config, _ = load_config("NVIDIA H100 80GB HBM3", torch.bfloat16, 128, group, True)
    plan = decode_step(counts, lengths, page_size=16).plan
    work = make_work(plan, config.cost(132), num_kv_heads=heads[1], group=group)
    assert (work.num_wide > 0) == multiply
    assert (work.split == (0, 132)) == (not multiply)
    assert (work.records[:, 1].max() * group > 64) == multiply
    assert (work.records[:, 0].max() == 2) == multiply
    if plan.num_rows < 1024:
        assert_shows(packed(work), plan, config.cost(132), group, work.num_states)


@pytest.mark.parametrize(
    ("counts", "lengths", "heads"),
    [((1, 256), (8192, 128), (32, 8)), ((1, 256), (4096, 134), (32, 8)),
     ((1, 128), (4096, 128), (64, 8)), ((1, 256), (16384, 128), (16, 1))],
)  # fmt: skip
def test_programs_that_read_the_same_keys_slow_each_other_down(counts, lengths, heads):
    """On an H200 all of them reading would take longer than it seems without that."""
    group = heads[0] // heads[1]
    config, _ = load_config("NVIDIA H200", torch.bfloat16, 128, group, True)
    plan, cost = decode_step(counts, lengths, page_size=16).plan, config.cost(132)
    multiply = [
        make_work(plan, each, num_kv_heads=heads[1], group=group).num_wide > 0
        for each in (cost, dataclasses.replace(cost, row_crowd=0.0))
    ]
    assert multiply == [True, False]


@pytest.mark.parametrize(
    ("counts", "lengths", "multiply"),  # of the lists that are compared
    [
        ((64,), (256,), [False]),
        ((1, 16), (2048, 64), [False]),
        ((1, 64), (2048, 64), [True, False]),
        ((1, 1024), (8192, 128), [True]),
    ],
)
def test_no_program_is_late_where_none_multiplies(counts, lengths, multiply, monkeypatch):
    config, _ = load_config("NVIDIA H100 80GB HBM3", torch.bfloat16, 128, 4, True)
    made = drafts_of(monkeypatch)
    plan = decode_step(counts, lengths, page_size=16).plan
    make_work(plan, config.cost(132), num_kv_heads=8, group=4)
    for draft, cost in made:
        assert cost.late_ns == (config.cost(132).late_ns if draft.num_wide else (0.0, 0.0))
    assert [draft.num_wide > 0 for draft, _ in made] == multiply


@pytest.mark.parametrize("inner", [8, 32])
def test_states_are_dear_where_memory_is_the_limit(inner):
    """Walks of 256 tokens each take the memory's whole time: rows walk what four of them share, of
    which tokens are in the cache. It takes 0.96 of the time of three states for each row."""
    config, _ = load_config("NVIDIA H100 80GB HBM3", torch.bfloat16, 128, 4, True)
    counts, lengths = (1, 4, 16, 64, 256, 1024), (256, inner, 256, 64, 32, 256)
    work = [
        make_work(decode_step(counts, lengths, page_size=16).plan, cost, num_kv_heads=8, group=4)
        for cost in (config.cost(132), dataclasses.replace(config.cost(132), memory_ns=0.01))
    ]
    assert [each.num_states for each in work] == [2 * 1024, 3 * 1024]


@pytest.mark.parametrize("counts", [(1, 64), (1, 1024)])  # items with at most 64 queries, and more
def test_similar_steps_keep_the_choice(counts, monkeypatch):
    config, _ = load_config("NVIDIA H100 80GB HBM3", torch.bfloat16, 128, 4, True)
    drafts = drafts_of(monkeypatch)

    def made(num_rows, own, choice):
        drafts.clear()
        plan = decode_step((1, num_rows), (2048, own), page_size=16).plan
        work = make_work(plan, config.cost(132), num_kv_heads=8, group=4, choice=choice)
        return work, len(drafts)

    first, count = made(counts[1], 64, None)
    assert count == 2
    assert first.choice is not None
    assert first.choice.multiply == (first.num_wide > 0) == (counts[1] == 1024)
    again, count = made(counts[1], 64, first.choice)
    assert count == 1
    assert again.choice is None
    for name in ("queues", "records", "walk", "rows", "dest", "merges"):
        assert np.array_equal(getattr(again, name), getattr(first, name))
    for num_rows, own in ((counts[1] * 7 // 8 + 1, 64), (counts[1], 128)):
        other, count = made(num_rows, own, first.choice)
        assert count == 1
        assert (other.num_wide > 0) == first.choice.multiply
    for num_rows, own in ((counts[1] * 3 // 4, 800), (counts[1] * 3 // 4, 64), (counts[1], 512)):
        other, count = made(num_rows, own, first.choice)
        assert other.choice is not None
        assert count >= 2


def test_a_workspace_compares_now_and_then(monkeypatch):
    config, _ = load_config("NVIDIA H100 80GB HBM3", torch.bfloat16, 128, 4, True)
    kernels = Kernels(32, 8, 128, 16, config, 132, windowed=False, hopper=True, dependent=True)
    space = Workspace(kernels, States.empty(4096, 32, 128, torch.device("cpu")), max_rows=64)
    plan = decode_step((1, 64), (2048, 64), page_size=16).plan
    drafts, compared = drafts_of(monkeypatch), []
    for _ in range(40):
        drafts.clear()
        space.write(plan)
        compared.append(len(drafts) > 1)
    assert np.flatnonzero(compared).tolist() == [0, 17, 34]


def test_prepared_plans_of_one_implementation_keep_the_choice(monkeypatch):
    plan = decode_step((1, 6), (64, 8), page_size=4).plan
    q, k, v = (torch.rand(shape) for shape in ((6, 4, 16), (40, 4, 2, 16), (40, 4, 2, 16)))
    given = []

    def listed(*args, choice, **more):
        given.append(choice)
        return dataclasses.replace(make_work(*args, **more), choice=Choice(6, 6 * 72, True))

    monkeypatch.setattr("onestem.ops.triton.launch.make_work", listed)
    monkeypatch.setattr(Kernels, "launch", lambda *_, **__: None)
    impl = TritonAttention()
    for _ in range(20):
        impl.prepare(plan).attend(q, k, v)
    impl.prepare(windowed(plan, 8)).attend(q, k, v)
    TritonAttention().prepare(plan).attend(q, k, v)
    assert given == [None, *[Choice(6, 6 * 72, True)] * 19, None, None]


def test_a_step_of_prompts_alone_has_no_item_that_reads():
    config, _ = load_config("NVIDIA H100 80GB HBM3", torch.bfloat16, 128, 4, True)
    builder = PlanBuilder(16)
    prompt = builder.add_run(np.arange(32, dtype=np.int32), 0, 512, 0)
    builder.add_span(0, 512, prompt, 1, step=1)
    plan = builder.build(np.arange(512))
    work = make_work(plan, config.cost(132), num_kv_heads=8, group=4)
    assert work.num_wide == work.num_items > 0
    assert_shows(packed(work), plan, config.cost(132), 4, work.num_states)


@pytest.mark.parametrize(
    ("num_rows", "tokens", "holds"),
    [(64, 1000, True), (72, 1125, True), (56, 875, True), (73, 1000, False), (55, 1000, False),
     (64, 1126, False), (64, 874, False)],
)  # fmt: skip
def test_a_choice_holds_within_an_eighth(num_rows, tokens, holds):
    assert Choice(64, 1000, True).holds(num_rows, tokens) == holds


def test_a_prompt_that_grows_is_another_step():
    """A choice counts the tokens of each of its rows."""
    config, _ = load_config("NVIDIA H100 80GB HBM3", torch.bfloat16, 128, 4, True)

    def made(context, choice):
        builder = PlanBuilder(16)
        pages = np.arange(10_000, dtype=np.int32)
        builder.add_span(0, 64, builder.add_run(pages[:128], 0, 2048, 0), 2048)
        for row in range(64):
            own = builder.add_run(pages[200 + 4 * row :][:4], 0, 64, 2048)
            builder.add_span(row, 1, own, 64)
        chunk = pages[1000 : 1000 + (context + 512) // 16]
        prompt = builder.add_run(chunk, 0, context + 512, 0)
        builder.add_span(64, 512, prompt, context + 1, step=1)
        plan = builder.build(np.append(np.full(64, 2111), context + np.arange(512)))
        return make_work(plan, config.cost(132), num_kv_heads=8, group=4, choice=choice)

    first = made(0, None).choice
    assert first is not None
    tokens = 64 * (2048 + 64) + 512 * 513 // 2
    assert (first.num_rows, first.tokens) == (576, tokens)
    later = made(2048, first).choice
    assert later is not None
    assert later.tokens == tokens + 512 * 2048
    assert made(2048, later).choice is None


@pytest.mark.parametrize(
    ("rows", "few", "hands", "some"),  # times
    [
        ([10.0] * 256, [4.0] * 1024, 264, 128),  # mean 25 each: two items
        ([10.0] * 180, [4.0] * 1024, 264, 264),  # 84 hands begin with others anyway
        ([10.0] * 256, [4.0] * 2048, 264, 264),  # ... they are a third of the others
        ([10.0] * 256, [4.0] * 310, 264, 264),  # they are twice the others
        ([10.0] * 256, [4.0] * 640, 264, 264),  # mean 19 each: one item
        ([], [4.0] * 64, 33, 33),
        ([], [], 0, 0),  # all programs multiply
    ],
)
def test_hands_that_take_items_in_rows(rows, few, hands, some):
    assert hands_in_rows(np.array(rows), np.array(few), hands) == some


@pytest.mark.parametrize(
    ("heads", "counts", "lengths", "begin_in_rows"),
    [
        # 256 items in rows and 1,024 others for 264 halves: half of them read from the start
        ((16, 1), (1, 4, 16, 64, 256, 1024), (256, 32, 256, 64, 32, 256), 128),
        # 16 for each of 8 KV heads and 33 halves: no half has two
        ((32, 8), (1, 4, 256), (32, 256, 32), 128),
        # Own runs take much longer than what is shared
        ((16, 8), (1, 4, 16, 64, 256, 1024), (256, 32, 256, 64, 32, 256), 256),
    ],
)
def test_some_halves_read_from_memory_from_the_start(heads, counts, lengths, begin_in_rows):
    """What items in rows walk comes from the cache. Dealt out to all halves, they would begin with
    it and leave the memory idle: 62 us instead of 55 on an H200 (16/1)."""
    group = heads[0] // heads[1]
    config, _ = load_config("NVIDIA H200", torch.bfloat16, 128, group, True)
    plan = decode_step(counts, lengths, page_size=16).plan
    work = make_work(plan, config.cost(132), num_kv_heads=heads[1], group=group)
    start, few = work.queues[:, 6], work.queues[:, 15]
    assert work.num_wide == 0
    assert np.count_nonzero(few > start) == begin_in_rows
    assert (few - start).sum() == np.count_nonzero(work.records[:, 0] == 1) * heads[1]
    assert_shows(packed(work), plan, config.cost(132), group, work.num_states)


def test_items_take_whole_tiles():
    times = item_times(np.array([1, 64, 65, 128]), 64, 1000.0, 10.0)
    assert times.tolist() == [1640, 1640, 2280, 2280]


@pytest.mark.parametrize(
    ("lengths", "offsets", "want"),
    [
        ((16, 16, 16, 32), (0, 0, 0, 0), [(0, 80)]),  # whole pages: one entry for all
        ((16, 30, 34, 16), (0, 0, 14, 0), [(0, 96)]),  # cut inside a page, which both parts have
        ((16, 30, 34, 16), (0, 0, 0, 0), [(0, 46), (0, 34), (0, 16)]),  # pages with a gap
        ((16, 64, 16, 16), (0, 0, 0, 0), [(0, 16), (0, 64), (0, 32)]),  # a tile is no short run
        ((8, 8, 16, 16), (8, 8, 0, 0), [(8, 8), (8, 40)]),  # equal places, other pages
    ],
)
def test_short_runs_are_walked_as_one(lengths, offsets, want):
    """Entries of the longest item: where they begin in a page, and their tokens. Spans stand in any
    order."""
    builder = PlanBuilder(16)
    page, rows = 100, 6
    for position, length, offset in zip(np.cumsum((0, *lengths)), lengths, offsets, strict=False):
        page -= offset == 14  # in the page where the run before it ends
        pages = np.arange(page, page + -(-(offset + length) // 16))
        page = int(pages[-1]) + 1
        run = builder.add_run(pages.astype(np.int32), offset, length, int(position))
        builder.add_span(0, rows, run, length)
    for row in range(rows):
        own = builder.add_run(np.array([500 + row], np.int32), 0, 3, sum(lengths))
        builder.add_span(row, 1, own, 3)
    plan = builder.build(np.full(rows, sum(lengths) + 2))
    order = np.random.default_rng(3).permutation(plan.num_spans)
    plan = dataclasses.replace(plan, spans=np.ascontiguousarray(plan.spans[order]))
    cost = CostModel((Tile(16, 64), Tile(64, 64), Tile(128, 64)), programs=(8, 8))
    for share, more in ((True, []), (False, [(0, 3)])):
        work = make_work(plan, cost, num_kv_heads=1, group=4, share=share)
        assert_shows(packed(work), plan, cost, 4, work.num_states)
        item = int(np.argmax(work.records[:, 3]))
        first, count = int(work.records[item, 4]), int(work.records[item, 3]) - 1
        entries = np.concatenate((work.records[item, None, 8:], work.walk[first : first + count]))
        found = [(int(entry[0]) % 16, int(entry[3] - entry[0])) for entry in entries]
        assert found == want + more
        assert len(work.pages) - len(plan.run_pages) <= 8 * (len(lengths) - len(want)) * rows


def test_padding_rows_become_empty():
    plan = tree(3)
    work = make_work(plan, COSTS["default"], num_kv_heads=1, group=1, num_rows=8)
    merges = {row: count for row, _, count, _ in work.merges.tolist()}
    assert [merges.get(row, 1) for row in range(3, 8)] == [0] * 5


@pytest.mark.parametrize("window", [None, 40, 1000])
@pytest.mark.parametrize("cost", sorted(COSTS))
@pytest.mark.parametrize("cuts", [0, 11])
def test_growing_words_make_the_next_steps_list(cuts, cost, window):
    plan = windowed(tree(9, shared=150, cuts=cuts), window)
    model = COSTS[cost]
    work = make_work(plan, model, num_kv_heads=2, group=4)
    # Runs of 12 tokens are walked as one, where rows see them whole.
    assert (len(work.pages) > len(plan.run_pages)) == (cuts > 0 and window != 40)
    words = packed(work)
    own = cuts + np.arange(1, 10)
    grow = work.growing_words(own)
    assert len(np.unique(grow)) == len(grow)
    new_page = work.page_word(own[3:4], np.array([5]))
    words[new_page] = 77
    for _ in range(20):
        words[grow] += 1
        spans, runs, pages = plan.spans.copy(), plan.runs.copy(), plan.run_pages.copy()
        spans[own, 4] += 1
        runs[own, 2] += 1
        pages[runs[own[3], 0] + 5] = 77
        plan = dataclasses.replace(
            plan, spans=spans, runs=runs, run_pages=pages, row_position=plan.row_position + 1
        )
        check_plan(plan)
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
