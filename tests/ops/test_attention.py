"""Attention over random plans against the float64 reference."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onestem.errors import ConfigError
from onestem.ops import (
    AttentionPlan,
    PlanBuilder,
    Scores,
    State,
    read_kv,
    resolve,
    windowed,
)
from onestem.ops.items import CostModel, SharedItem, make_items
from onestem.ops.reference import visible
from onestem.ops.state import merge_into
from onestem.ops.torch_impl import TorchAttention
from tests.ops.attend import attention, check_plan


def random_plan(
    rng: np.random.Generator,
    *,
    page_size: int,
    num_runs: int,
    num_seqs: int,
    window: int | None = None,
    moves: bool = True,
) -> tuple[AttentionPlan, int]:
    """A forest plus modules: each sequence sees some runs whole and a run of its own causally. In
    half of the plans, if it `moves`, some are seen elsewhere."""
    builder = PlanBuilder(page_size)
    page_ids = rng.permutation(4096)
    used = 0

    def run(length: int, position: int) -> int:
        nonlocal used
        offset = int(rng.integers(0, page_size))
        count = -(-(offset + length) // page_size) + int(rng.integers(0, 2))
        pages = page_ids[used : used + count]
        used += count
        return builder.add_run(pages.astype(np.int32), offset, length, position)

    lengths = [
        int(rng.choice([0, 1, page_size - 1, page_size, page_size + 1, int(rng.integers(1, 90))]))
        for _ in range(num_runs)
    ]
    gaps = rng.integers(0, 5, num_runs)
    starts = np.cumsum([0, *[n + g for n, g in zip(lengths, gaps, strict=True)]])
    shared = [run(n, int(p)) for n, p in zip(lengths, starts[:-1], strict=True)]
    positions: list[int] = []
    spans = []
    shifts = [0, *(rng.integers(-90, 90, 2).tolist() if moves and rng.random() < 0.5 else ())]
    for _ in range(num_seqs):
        rows = int(rng.choice([1, 1, 1, 2, int(rng.integers(1, 40))]))
        before = int(rng.choice([0, 0, int(rng.integers(0, 70))]))
        base = int(starts[-1]) + int(rng.integers(0, 3))
        own = run(before + rows, base)
        row = len(positions)
        for r, n in zip(shared, lengths, strict=True):
            if rng.random() < 0.6 and n:
                spans.append((row, rows, r, n, 0, int(rng.choice(shifts))))
        if rng.random() < 0.9:
            spans.append((row, rows, own, before + 1, 1, 0))
        positions.extend(range(base + before, base + before + rows))
    # Spans of neighbouring rows over the same run are one span, as the engine writes them.
    for row, rows, r, end, step, shift in _joined(spans):
        builder.add_span(row, rows, r, end, step=step, shift=shift)
    plan = builder.build(np.array(positions))
    return (windowed(plan, window) if window else plan), used


def _joined(spans: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    out: list[tuple[int, ...]] = []
    for span in sorted(spans, key=lambda s: (s[2], s[5], s[0])):
        row, rows, run, end, step, shift = span
        alike = out and step == 0 and out[-1][2:] == (run, end, 0, shift)
        if alike and out[-1][0] + out[-1][1] == row:
            out[-1] = (out[-1][0], out[-1][1] + rows, run, end, 0, shift)
        else:
            out.append(span)
    return out


def random_tensors(
    rng: np.random.Generator,
    plan: AttentionPlan,
    used_pages: int,
    *,
    kv_heads: int,
    group: int,
    head_dim: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, ...]:
    """q, k_pages, v_pages; slots that no run owns hold NaN."""
    generator = torch.Generator().manual_seed(int(rng.integers(2**31)))
    shape = (4096, plan.page_size, kv_heads, head_dim)
    q = torch.randn(plan.num_queries, kv_heads * group, head_dim, generator=generator).to(dtype)
    pages = [torch.full(shape, float("nan"), dtype=dtype) for _ in range(2)]
    for run in range(plan.num_runs):
        slots = torch.from_numpy(plan.slots(run, 0, int(plan.run_len[run])))
        for page in pages:
            values = torch.randn(len(slots), kv_heads, head_dim, generator=generator)
            page.view(-1, kv_heads, head_dim)[slots] = values.to(dtype)
    return q, *pages


def assert_matches(got: State, want: State, dtype: torch.dtype) -> None:
    """float32: 2e-5 of the largest value. bf16: each weight and the result are rounded once, so an
    element may be off by 2 x (unit roundoff 2**-8) of the largest value seen."""
    unit = {torch.float32: 2e-5, torch.bfloat16: 2 * 2**-8, torch.float16: 2 * 2**-11}[dtype]
    assert not got.out.isnan().any()
    assert not got.lse.isnan().any()
    scale = float(want.out.abs().max())
    assert float((got.out.double() - want.out).abs().max()) <= unit * max(scale, 1e-9)
    blind = want.lse == -math.inf
    assert torch.equal(got.lse == -math.inf, blind)
    if not blind.all():
        assert float((got.lse.double() - want.lse)[~blind].abs().max()) <= max(unit, 2e-5)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    page_size=st.sampled_from([1, 3, 16, 64]),
    num_runs=st.integers(0, 6),
    num_seqs=st.integers(1, 12),
    head_dim=st.sampled_from([16, 64, 80, 96, 128, 256]),
    group=st.integers(1, 8),
    kv_heads=st.integers(1, 3),
    window=st.sampled_from([None, None, 1, 7, 33]),
    share=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float32, torch.bfloat16]),
)
def test_torch_equals_reference(
    seed, page_size, num_runs, num_seqs, head_dim, group, kv_heads, window, share, dtype
):
    rng = np.random.default_rng(seed)
    plan, used = random_plan(
        rng, page_size=page_size, num_runs=num_runs, num_seqs=num_seqs, window=window
    )
    q, k, v = random_tensors(
        rng, plan, used, kv_heads=kv_heads, group=group, head_dim=head_dim, dtype=dtype
    )
    want = attention(q, k, v, plan, impl="reference")
    for item_tokens, view_tokens in ((512, 512), (1, 1), (10**9, 10**9)):
        impl = TorchAttention(cost=CostModel(item_tokens, view_tokens))
        got = impl.prepare(plan, share=share).attend(q, k, v)
        assert got.out.dtype == dtype
        assert got.lse.dtype == torch.float32
        assert_matches(got, want, dtype)


@settings(max_examples=15)
@given(
    seed=st.integers(0, 2**31),
    group=st.integers(1, 4),
    kv_heads=st.integers(1, 2),
    alibi=st.booleans(),
    softcap=st.sampled_from([None, 5.0]),
    window=st.sampled_from([None, 9]),
    share=st.booleans(),
)
def test_alibi_and_softcap(seed, group, kv_heads, alibi, softcap, window, share):
    rng = np.random.default_rng(seed)
    plan, used = random_plan(rng, page_size=16, num_runs=4, num_seqs=6, window=window)
    q, k, v = random_tensors(
        rng, plan, used, kv_heads=kv_heads, group=group, head_dim=64, dtype=torch.float32
    )
    slopes = torch.rand(kv_heads * group) if alibi else None
    want = attention(q, k, v, plan, impl="reference", alibi_slopes=slopes, softcap=softcap)
    prepared = resolve("torch").prepare(plan, share=share)
    got = prepared.attend(q, k, v, Scores(alibi_slopes=slopes, softcap=softcap))
    assert_matches(got, want, torch.float32)


@pytest.mark.parametrize("window", [1, 2, 5, 17, 64, 1000])
def test_items_show_exactly_what_the_plan_shows(window):
    """Every row gets each of its keys once, under any window and cost model."""
    rng = np.random.default_rng(window)
    plan, _ = random_plan(rng, page_size=16, num_runs=5, num_seqs=9, window=window)
    check_plan(plan)
    for cost in (CostModel(), CostModel(1, 1), CostModel(10**9, 10**9)):
        for share in (True, False):
            got: list[list[int]] = [[] for _ in range(plan.num_queries)]
            for item in make_items(plan, cost, share):
                for i, row in enumerate(item.rows.tolist()):
                    got[row].extend(_keys_of(item, i))
            for row in range(plan.num_queries):
                assert sorted(got[row]) == sorted(visible(plan, row)[0].tolist())


def _keys_of(item, i: int) -> list[int]:
    slots = item.slots if item.slots.ndim == 1 else item.slots[i]
    if item.seen is not None:
        slots = slots[item.seen[i]]
    elif isinstance(item, SharedItem) and item.causal:
        slots = slots[: i + 1]
    return slots.tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"spans": [[0, 2, 0, 0, 9, 0]]}, "ends behind its run"),
        ({"spans": [[0, 3, 0, 0, 1, 0]]}, "rows leave 0..1"),
        ({"spans": [[0, 1, 3, 0, 1, 0]]}, "run is not in 0..0"),
        ({"spans": [[0, 1, 0, -1, 1, 0]]}, "starts before"),
        ({"spans": [[0, 2, 0, 0, 1, 2]]}, "step is neither"),
        ({"spans": [[0, 2, 0, 0, 4, 0], [1, 1, 0, 3, 5, 0]]}, "token of run 0 twice"),
        ({"spans": [[0, 2, 0, 0, 2, 1], [1, 1, 0, 2, 5, 0]]}, "token of run 0 twice"),
        ({"runs": [[0, 4, 5, 0]]}, "offset is not in 0..3"),
        ({"runs": [[2, 0, 5, 0]]}, "page list leaves"),
        ({"run_pages": [0, -1, 7]}, "negative page id"),
    ],
)
def test_malformed_plans_are_refused(change, message):
    builder = PlanBuilder(4)
    run = builder.add_run(np.array([0, 1, 2], np.int32), 1, 5, 0)
    builder.add_span(0, 2, run, 4, step=1)
    plan = builder.build(np.array([3, 4]))
    check_plan(plan)
    arrays = {name: np.array(value, np.int32) for name, value in change.items()}
    with pytest.raises(ConfigError, match=message):
        check_plan(dataclasses.replace(plan, **arrays))


def merged(*parts: State) -> State:
    out, lse = parts[0].out.clone(), parts[0].lse.clone()
    for part in parts[1:]:
        merge_into(out, lse, part.out, part.lse)
    return State(out, lse)


def test_merge_is_exact_associative_and_never_nan():
    generator = torch.Generator().manual_seed(0)
    parts = [
        State(torch.randn(5, 2, 8, generator=generator), torch.randn(5, 2, generator=generator))
        for _ in range(4)
    ]
    for part in parts[:3]:
        part.out[0] = 0
        part.lse[0] = -math.inf
    parts[3].out[0] = 0
    parts[3].lse[0] = -math.inf
    whole = merged(*parts)
    nested = merged(merged(*parts[:2]), merged(*parts[2:]))
    torch.testing.assert_close(whole.out, nested.out)
    torch.testing.assert_close(whole.lse, nested.lse)
    assert (whole.out[0] == 0).all()
    assert (whole.lse[0] == -math.inf).all()


def test_merge_of_two_is_relay_attention_alpha():
    a, b = (
        State(torch.ones(1, 1, 4), torch.tensor([[0.3]])),
        State(torch.zeros(1, 1, 4), torch.tensor([[1.1]])),
    )
    alpha = 1 / (1 + math.exp(1.1 - 0.3))
    torch.testing.assert_close(merged(a, b).out, torch.full((1, 1, 4), alpha))


def plain(q, k_pages, v_pages, plan):
    """The same attention row by row, each operation in q's own dtype."""
    out = torch.zeros_like(q)
    group = q.shape[1] // k_pages.shape[2]
    for row in range(plan.num_rows):
        slots = torch.from_numpy(visible(plan, row)[0])
        if len(slots) == 0:
            continue
        k, v = (read_kv(pages, slots).transpose(0, 1) for pages in (k_pages, v_pages))
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        scores = (k @ q[row].unsqueeze(-1)).squeeze(-1) * q.shape[-1] ** -0.5
        out[row] = (torch.softmax(scores, -1).unsqueeze(1) @ v).squeeze(1)
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_error_is_at_most_twice_that_of_plain_attention(head_dim, dtype):
    """Against float64, in the largest and the mean error over all rows of several plans."""
    ours: dict[bool, list] = {True: [], False: []}
    theirs = []
    for seed in range(6):
        rng = np.random.default_rng(seed)
        plan, used = random_plan(rng, page_size=16, num_runs=5, num_seqs=10, moves=False)
        q, k, v = random_tensors(
            rng, plan, used, kv_heads=2, group=3, head_dim=head_dim, dtype=dtype
        )
        want = attention(q, k, v, plan, impl="reference").out
        for share, errors in ours.items():
            got = resolve("torch").prepare(plan, share=share).attend(q, k, v).out
            errors.append((got.double() - want).abs().flatten())
        theirs.append((plain(q, k, v, plan).double() - want).abs().flatten())
    other = torch.cat(theirs)
    for mine in map(torch.cat, ours.values()):
        assert float(mine.max()) <= 2 * float(other.max())
        assert float(mine.mean()) <= 2 * float(other.mean())
