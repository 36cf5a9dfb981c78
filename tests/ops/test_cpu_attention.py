"""C++ attention over random plans, in every instruction set, against float64."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onestem.errors import ConfigError, UnsupportedError
from onestem.ops import (
    AttentionPlan,
    PlanBuilder,
    Scores,
    allocate_pages,
    windowed,
    write_kv,
)
from onestem.ops.cpu import CpuAttention, CpuCost, is_built
from onestem.ops.reference import visible
from tests.ops.attend import attention
from tests.ops.cpu_isas import EVERY_ISA, Isa
from tests.ops.test_attention import assert_matches, plain, random_plan
from tests.soak import one_in

pytestmark = pytest.mark.skipif(not is_built(), reason="the C++ extension is not built")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]

# Nothing costs anything but what is named: groups always or never get items of their own, every
# item is cut as short as it can be, few rows are packed like many.
NO_COST = CpuCost(0, 0, 0, 0, 0, 0, item=0, shortest=1, cuts=64)
COSTS = {
    "default": None,
    "share all, cut": dataclasses.replace(NO_COST, thin=1, read=1),
    "share none, cut": dataclasses.replace(NO_COST, thin=1, read=1, state=1e6),
    "pack all": dataclasses.replace(NO_COST, thin=1, state=1e-3, cuts=1),
    "pack none": dataclasses.replace(NO_COST, pack=1e6, pack_few=1e6, thin=1e-3, cuts=3),
}


every_isa = pytest.mark.parametrize("isa", EVERY_ISA, ids=str)


def isas_with(dtype: torch.dtype) -> list[Isa]:
    return [isa for isa in EVERY_ISA if isa.has(dtype)]


def compact(plan: AttentionPlan) -> AttentionPlan:
    """The same with as few pages as it uses, in their order; what is slack stays garbage."""
    pages = np.full_like(plan.run_pages, 2**30)
    used = np.zeros(len(pages), bool)
    for start, offset, length, _ in plan.runs.tolist():
        used[start : start - (-(offset + length) // plan.page_size)] = True
    pages[used] = np.unique(plan.run_pages[used], return_inverse=True)[1]
    return dataclasses.replace(plan, run_pages=pages)


def drawn(rng, plan, *, kv_heads, group, head_dim, dtype):
    """q, k_pages, v_pages in either layout; slots that no run owns hold NaN."""
    used = plan.run_pages[plan.run_pages < 2**30]
    shape = (int(used.max(initial=0)) + 1, plan.page_size, kv_heads, head_dim)
    generator = torch.Generator().manual_seed(int(rng.integers(2**31)))
    q = torch.randn(plan.num_queries, kv_heads * group, head_dim, generator=generator).to(dtype)
    layout = {"dtype": dtype, "device": torch.device("cpu"), "head_major": bool(rng.integers(2))}
    pages = [allocate_pages(*shape, **layout).fill_(math.nan) for _ in range(2)]
    slots = [plan.slots(run, 0, int(n)) for run, n in enumerate(plan.run_len)]
    owned = torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *slots]))
    for page in pages:
        values = torch.randn(len(owned), kv_heads, head_dim, generator=generator)
        write_kv(page, owned, values.to(dtype))
    return q, *pages


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    page_size=st.sampled_from([1, 3, 16, 64]),
    num_runs=st.integers(0, 6),
    num_seqs=st.integers(1, 12),
    head_dim=st.sampled_from([8, 16, 64, 72, 80, 96, 128, 256, 512]),
    group=st.integers(1, 9),
    kv_heads=st.integers(1, 3),
    window=st.sampled_from([None, None, 1, 7, 33]),
    share=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    cost=st.sampled_from(sorted(COSTS)),
    alibi=st.sampled_from([False, False, True]),
    softcap=st.sampled_from([None, None, 5.0]),
)
def test_equals_reference(
    seed, page_size, num_runs, num_seqs, head_dim, group, kv_heads, window, share, dtype, cost,
    alibi, softcap,
):  # fmt: skip
    rng = np.random.default_rng(seed)
    plan = compact(
        random_plan(rng, page_size=page_size, num_runs=num_runs, num_seqs=num_seqs, window=window)[
            0
        ]
    )
    q, k, v = drawn(rng, plan, kv_heads=kv_heads, group=group, head_dim=head_dim, dtype=dtype)
    slopes = torch.rand(kv_heads * group) if alibi else None
    options = {"alibi_slopes": slopes, "softcap": softcap}
    want = attention(q, k, v, plan, impl="reference", **options)
    for isa in isas_with(dtype):
        prepared = isa.attention(COSTS[cost]).prepare(plan, share=share)
        got = prepared.attend(q, k, v, Scores(**options))
        assert got.out.dtype == dtype
        assert got.lse.dtype == torch.float32
        assert_matches(got, want, dtype)


def long_plan(window: int | None = None) -> AttentionPlan:
    """Tiles and parts of every kind: a long prefix that 30 decodes see, a branch that 9 of them
    see, a module that every third sees, a chunk of 90 rows behind 333 tokens, a padded row."""
    rng = np.random.default_rng(0)
    builder, ids = PlanBuilder(16), iter(rng.permutation(400).astype(np.int32))

    def run(length: int, position: int, offset: int = 0) -> int:
        pages = np.array([next(ids) for _ in range(-(-(offset + length) // 16))], np.int32)
        return builder.add_run(pages, offset, length, position)

    prefix, branch, module = run(1100, 0, 5), run(257, 1100), run(130, 2000, 15)
    builder.add_span(0, 30, prefix, 1100)
    builder.add_span(3, 9, branch, 257)
    positions = []
    for row in range(30):
        if row % 3 == 0:
            builder.add_span(row, 1, module, 130)
        own = 1 + 7 * row
        builder.add_span(row, 1, run(own, 1357), own)
        positions.append(1357 + own - 1)
    chunk = run(423, 1100, 3)
    builder.add_span(30, 90, prefix, 1100)
    builder.add_span(30, 90, chunk, 334, step=1)
    positions += [*range(1433, 1523), 0]
    return windowed(builder.build(np.array(positions)), window)


@functools.cache
def long_case(dtype, window):
    """A plan, q, k and v for it, and what float64 makes of them."""
    plan = long_plan(window)
    rng = np.random.default_rng(1)
    tensors = drawn(rng, plan, kv_heads=2, group=3, head_dim=64, dtype=dtype)
    return plan, tensors, attention(*tensors, plan, impl="reference")


def small_plan(window: int | None) -> AttentionPlan:
    """Ten decodes behind 70 tokens, whose own runs begin in the middle of a page, and a chunk of 35
    rows behind 12 others."""
    builder, ids = PlanBuilder(16), iter(np.random.default_rng(0).permutation(40).astype(np.int32))

    def run(length: int, position: int, offset: int = 0) -> int:
        pages = np.array([next(ids) for _ in range(-(-(offset + length) // 16))], np.int32)
        return builder.add_run(pages, offset, length, position)

    builder.add_span(0, 10, run(70, 0), 70)
    for row in range(10):
        builder.add_span(row, 1, run(1 + 3 * row, 70, row), 1 + 3 * row)
    builder.add_span(10, 35, run(47, 0), 13, step=1)
    positions = [*(70 + 3 * row for row in range(10)), *range(12, 47)]
    return compact(windowed(builder.build(np.array(positions)), window))


@pytest.mark.parametrize(
    ("window", "alibi", "softcap"),
    [(None, False, None), (25, False, None), (None, True, 20.0)],
    ids=["plain", "window", "alibi and softcap"],
)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_isa_with_every_head_size(dtype, head_dim, window, alibi, softcap):
    plan = small_plan(window)
    rng = np.random.default_rng(6)
    q, k, v = drawn(rng, plan, kv_heads=2, group=2, head_dim=head_dim, dtype=dtype)
    slopes = torch.tensor([0.1, 0.03, 0.01, 0.0]) if alibi else None
    options = {"alibi_slopes": slopes, "softcap": softcap}
    want = attention(q, k, v, plan, impl="reference", **options)
    for isa in isas_with(dtype):
        for cost in ("default", "pack none"):
            got = isa.attention(COSTS[cost]).prepare(plan).attend(q, k, v, Scores(**options))
            assert_matches(got, want, dtype)


@pytest.mark.parametrize(
    ("dtype", "window", "cost"), one_in(3, DTYPES, (None, 400), sorted(COSTS)), ids=str
)
def test_long_runs_are_cut_and_merged(dtype, window, cost):
    plan, (q, k, v), want = long_case(dtype, window)
    for isa in isas_with(dtype):
        # An emulated one is slow: once.
        for share in (True, False) if isa.module is None else (True,):
            prepared = isa.attention(COSTS[cost]).prepare(plan, share=share)
            with on_threads(2):
                got = prepared.attend(q, k, v)
            assert_matches(got, want, dtype)
            if isa.module is None and share:
                with on_threads(1):
                    assert_matches(prepared.attend(q, k, v), want, dtype)
                with on_threads(2):
                    again = prepared.attend(q, k, v)  # whichever thread takes which item
                assert torch.equal(got.out, again.out)
                assert torch.equal(got.lse, again.lse)


@pytest.mark.parametrize("window", [None, 1, 5, 64, 400])
@pytest.mark.parametrize("cost", sorted(COSTS))
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("threads", [1, 3])
def test_items_show_exactly_what_the_plan_shows(window, cost, share, threads):
    """Each KV head of each row gets each of its keys once."""
    plan, kv_heads = long_plan(window), 3
    prepared = CpuAttention(cost=COSTS[cost]).prepare(plan, share=share)
    got = {(row, h): [] for row in range(plan.num_rows) for h in range(kv_heads)}
    with on_threads(threads):
        items = prepared.describe(torch.float32, 6, kv_heads, 64)
    for item in items:
        assert item["pieces"]
        for j, row in enumerate(item["rows"]):
            slots = [_seen(plan, row, j, piece) for piece in item["pieces"]]
            for h in range(item["kv_head"], item["kv_head"] + item["num_kv_heads"]):
                got[row, h].extend(np.concatenate(slots).tolist())
    for (row, _), slots in got.items():
        assert sorted(slots) == visible_slots(window)[row]


@functools.cache
def visible_slots(window: int | None) -> list[list[int]]:
    """What each row of the long plan sees."""
    plan = long_plan(window)
    return [sorted(visible(plan, row)[0].tolist()) for row in range(plan.num_rows)]


def _seen(plan, row, j, piece):
    run, low, high, first, end, step = piece
    if plan.window is not None:
        low = max(low, plan.row_position[row] - plan.window + 1 - plan.run_position[run])
    low, high = max(low, first), min(high, end + j * step)
    return plan.slots(run, low, max(low, high))


def test_shared_runs_are_read_once_and_unshared_ones_by_each_row():
    plan = long_plan()
    shared, unshared = (
        CpuAttention().prepare(plan, share=share).describe(torch.float32, 32, 8, 128)
        for share in (True, False)
    )
    assert max(len(item["rows"]) for item in unshared if 0 in item["rows"]) == 1
    assert max(len(item["rows"]) for item in shared if 0 in item["rows"]) >= 30
    assert sum(i["nanoseconds"] for i in shared) < sum(i["nanoseconds"] for i in unshared)


@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("scale", [None, 1.0, 0.0, -0.3])
def test_score_options(scale, softcap, alibi):
    plan = long_plan(window=300)
    rng = np.random.default_rng(2)
    q, k, v = drawn(rng, plan, kv_heads=2, group=2, head_dim=64, dtype=torch.float32)
    options = {
        "scale": scale,
        "softcap": softcap,
        "alibi_slopes": torch.tensor([0.05, 0.01, 0.002, 0.0]) if alibi else None,
    }
    want = attention(q, k, v, plan, impl="reference", **options)
    for isa in isas_with(torch.float32):
        for share in (True, False):
            got = isa.attention().prepare(plan, share=share).attend(q, k, v, Scores(**options))
            assert_matches(got, want, torch.float32)


@functools.cache
def error_cases(head_dim, dtype):
    """Several plans, tensors for them, float64's answers, and the errors of plain attention."""
    cases = []
    for seed in range(6):
        rng = np.random.default_rng(seed)
        plan = compact(random_plan(rng, page_size=16, num_runs=5, num_seqs=10, moves=False)[0])
        tensors = drawn(rng, plan, kv_heads=2, group=3, head_dim=head_dim, dtype=dtype)
        want = attention(*tensors, plan, impl="reference").out
        cases.append((plan, tensors, want, (plain(*tensors, plan).double() - want).abs()))
    return cases


@pytest.mark.parametrize(
    ("isa", "dtype"),
    [(isa, dtype) for isa in EVERY_ISA for dtype in DTYPES if isa.has(dtype)],
    ids=str,
)
@pytest.mark.parametrize(("head_dim", "share"), one_in(2, (64, 128), (True, False)))
def test_error_is_at_most_twice_that_of_plain_attention(head_dim, dtype, share, isa):
    """Against float64, in the largest and the mean error over all rows of several plans."""
    ours, theirs = [], []
    for plan, tensors, want, plain_error in error_cases(head_dim, dtype):
        got = isa.attention().prepare(plan, share=share).attend(*tensors).out
        ours.append((got.double() - want).abs().flatten())
        theirs.append(plain_error.flatten())
    mine, other = torch.cat(ours), torch.cat(theirs)
    assert float(mine.max()) <= 2 * float(other.max())
    assert float(mine.mean()) <= 2 * float(other.mean())


@functools.cache
def very_long_case():
    """16 rows over 4,096 keys in float32, float64's answer, and the error of plain attention."""
    builder = PlanBuilder(64)
    builder.add_span(0, 16, builder.add_run(np.arange(64, dtype=np.int32), 0, 4096, 0), 4096)
    plan = builder.build(np.arange(4096, 4112))
    tensors = drawn(
        np.random.default_rng(7), plan, kv_heads=1, group=2, head_dim=64, dtype=torch.float32
    )
    want = attention(*tensors, plan, impl="reference")
    return plan, tensors, want, (plain(*tensors, plan).double() - want.out).norm()


@every_isa
@pytest.mark.parametrize("share", [True, False])
def test_error_over_long_runs_is_at_most_twice_that_of_plain_attention(isa, share):
    """In float32 chains of sums would lose digits."""
    plan, tensors, want, theirs = very_long_case()
    got = isa.attention().prepare(plan, share=share).attend(*tensors)
    assert float((got.out.double() - want.out).norm()) <= 2 * float(theirs)
    assert float((got.lse.double() - want.lse).abs().max()) <= 2e-6


@functools.cache
def far_apart(factor):
    """The long plan, tensors whose scores are `factor` times the usual ones, float64's answer."""
    plan = long_plan()
    rng = np.random.default_rng(3)
    q, k, v = drawn(rng, plan, kv_heads=1, group=2, head_dim=64, dtype=torch.float32)
    return plan, (q * factor, k, v), attention(q * factor, k, v, plan, impl="reference")


@every_isa
@pytest.mark.parametrize("factor", [0.0, 60.0])
def test_scores_far_apart(isa, factor):
    """Weights that underflow, running maxima that rise late, and scores of one value."""
    plan, tensors, want = far_apart(factor)
    got = isa.attention().prepare(plan).attend(*tensors)
    assert not got.out.isnan().any()
    # A score of several thousand has float32's error of it: about 1e-3.
    assert float((got.out.double() - want.out).abs().max()) <= (2e-2 if factor else 1e-5)


@every_isa
def test_empty_plans_and_rows_that_see_nothing(isa):
    builder = PlanBuilder(4)
    run = builder.add_run(np.array([3], np.int32), 1, 3, 0)
    builder.add_span(1, 4, run, -1, step=1)  # rows 1 and 2 see nothing yet
    pages = torch.full((4, 4, 1, 16), math.nan)
    pages[3, 1:] = 1.0
    for plan, seen in (
        (builder.build(np.arange(6)), [0, 0, 0, 1, 2, 0]),
        (PlanBuilder(4).build(np.arange(2)), [0, 0]),
        (PlanBuilder(4).build(np.arange(0)), []),
    ):
        q = torch.zeros(plan.num_rows, 2, 16)
        got = isa.attention().prepare(plan).attend(q, pages, pages)
        count = torch.tensor(seen, dtype=torch.float32)
        assert torch.equal(got.out, (count > 0).float()[:, None, None].expand(-1, 2, 16))
        torch.testing.assert_close(got.lse, count.log()[:, None].expand(-1, 2))


@every_isa
def test_unseen_tokens_between_windows_may_hold_nan(isa):
    """Rows of one item at positions far apart: what stands between their windows is not read."""
    builder = PlanBuilder(16)
    builder.add_span(0, 10, builder.add_run(np.arange(3, dtype=np.int32), 0, 40, 0), 11, step=1)
    plan = windowed(builder.build(np.array([10, *[500] * 8, 19])), 2)
    seen = [[9, 10], *[[]] * 8, [18, 19]]
    assert [visible(plan, row)[0].tolist() for row in range(10)] == seen
    for group in (1, 3):
        pages = torch.full((3, 16, 1, 64), math.nan)
        pages.view(48, 64)[[9, 10, 18, 19]] = torch.randn(4, 64)
        q = torch.randn(10, group, 64)
        want = attention(q, pages, pages, plan, impl="reference")
        for cost in COSTS.values():
            got = isa.attention(cost).prepare(plan).attend(q, pages, pages)
            assert_matches(got, want, torch.float32)


def test_a_plan_edited_after_prepare_does_not_matter():
    plan = long_plan()
    rng = np.random.default_rng(4)
    q, k, v = drawn(rng, plan, kv_heads=1, group=1, head_dim=16, dtype=torch.float32)
    prepared = CpuAttention().prepare(plan)
    want = prepared.attend(q, k, v)
    plan.run_pages[:] = 0
    plan.spans[:] = 0
    assert torch.equal(prepared.attend(q, k, v).out, want.out)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"head_dim": 20}, UnsupportedError, "head_dim is 20"),
        ({"head_dim": 520}, UnsupportedError, "head_dim is 520"),
        ({"dtype": torch.float64}, UnsupportedError, "expected one of float32"),
        ({"num_pages": 3}, ConfigError, "pages up to 3, got 5 rows and 3 pages"),
        ({"rows": 4}, ConfigError, "5 rows and pages up to 3, got 4 rows"),
        ({"page_size": 8}, ConfigError, "of 4 slots"),
        ({"q_heads": 3}, ConfigError, "does not fit pages"),
        ({"strided": True}, ConfigError, "not contiguous"),
    ],
)
def test_what_it_cannot_do_is_refused(change, error, message):
    given = {
        "head_dim": 16, "dtype": torch.float32, "num_pages": 4, "rows": 5, "page_size": 4,
        "q_heads": 4, "strided": False,
    } | change  # fmt: skip
    builder = PlanBuilder(4)
    builder.add_span(0, 5, builder.add_run(np.array([3], np.int32), 0, 3, 0), 3)
    prepared = CpuAttention().prepare(builder.build(np.arange(5)))
    shape = (given["num_pages"], given["page_size"], 2, given["head_dim"])
    pages = torch.zeros(shape, dtype=given["dtype"])
    if given["strided"]:
        pages = torch.zeros(*shape[:3], 2 * shape[3])[..., : shape[3]]
    q = torch.zeros(given["rows"], given["q_heads"], shape[3], dtype=given["dtype"])
    with pytest.raises(error, match=message):
        prepared.attend(q, pages, pages)


@every_isa
@pytest.mark.parametrize("head_dim", [64, 80])
def test_the_layout_of_pages_changes_no_bit(head_dim, isa):
    plan = long_plan()
    for dtype in (dtype for dtype in DTYPES if isa.has(dtype)):
        q, *pages = drawn(
            np.random.default_rng(7), plan, kv_heads=2, group=3, head_dim=head_dim, dtype=dtype
        )
        prepared = isa.attention().prepare(plan)
        by_token = prepared.attend(q, *(page.contiguous() for page in pages))
        by_head = prepared.attend(
            q, *(page.transpose(1, 2).contiguous().transpose(1, 2) for page in pages)
        )
        assert torch.equal(by_token.out, by_head.out)
        assert torch.equal(by_token.lse, by_head.lse)


def test_a_query_with_gaps_is_taken():
    plan = long_plan()
    rng = np.random.default_rng(5)
    q, k, v = drawn(rng, plan, kv_heads=1, group=2, head_dim=16, dtype=torch.float32)
    wide = torch.cat((q, q), -1)[..., :16]
    assert not wide.is_contiguous()
    prepared = CpuAttention().prepare(plan)
    got = prepared.attend(wide, k, v).out
    assert got.is_contiguous()
    assert torch.equal(got, prepared.attend(q, k, v).out)
