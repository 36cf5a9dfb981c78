"""The Triton kernels against the float64 reference: on a GPU, else under Triton's interpreter."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from onestem.errors import ConfigError, UnsupportedError
from onestem.ops import AttentionPlan, PlanBuilder, Scores, State, resolve, windowed
from onestem.ops.kv import laid_out, read_kv
from onestem.ops.triton import (
    KernelConfig,
    States,
    TritonAttention,
    Workspace,
    launch,
    load_config,
)
from onestem.ops.triton.launch import Kernels, takes_heads
from onestem.ops.work import Tile, make_work
from onestem.ops.work.lists import AT_RECORDS, RECORD
from onestem_lab.attention.cases import decode_step
from tests.ops.attend import attention
from tests.ops.plans import SMALL, random_plan, written_slots
from tests.soak import one_in

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Triton's interpreter does not multiply bfloat16.
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
CONFIG = KernelConfig(SMALL, (2, 2, 2), merge_tokens=2, min_tokens=32)
CUTS = dataclasses.replace(CONFIG, min_tokens=16, merge_tokens=0)
ALONE = dataclasses.replace(CONFIG, merge_tokens=10**6)


def tensors(plan: AttentionPlan, seed: int, *, kv_heads: int, group: int, head_dim: int, dtype):
    """q, k_pages, v_pages; NaN in every slot that no span shows."""
    generator = torch.Generator().manual_seed(seed)
    num_pages = max(
        512 // plan.page_size, *(_last_page(plan, run) + 1 for run in range(plan.num_runs)), 1
    )
    q = torch.randn(plan.num_queries, kv_heads * group, head_dim, generator=generator)
    slots = torch.from_numpy(written_slots(plan))
    pages = []
    for _ in range(2):
        page = torch.full((num_pages * plan.page_size, kv_heads, head_dim), math.nan)
        page[slots] = torch.randn(len(slots), kv_heads, head_dim, generator=generator)
        page = page.view(num_pages, plan.page_size, kv_heads, head_dim).to(DEVICE, dtype)
        pages.append(laid_out(page, head_major=TritonAttention().head_major(head_dim, dtype)))
    return q.to(DEVICE, dtype), *pages


def _last_page(plan: AttentionPlan, run: int) -> int:
    start, offset, length, _ = plan.runs[run].tolist()
    end = start - (-(offset + length) // plan.page_size)
    return int(plan.run_pages[start:end].max(initial=0))


def poison(monkeypatch) -> None:
    """torch.empty gives NaN."""
    empty, empty_like = torch.empty, torch.empty_like

    def fill(made):
        return made.fill_(math.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", lambda *a, **k: fill(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: fill(empty_like(*a, **k)))


def assert_matches(got: State, want: State, dtype: torch.dtype) -> None:
    """float32: 2e-5 of the largest value. 16 bits: each weight and the result are rounded once, so
    an element may be off by twice the unit roundoff of the largest value."""
    unit = {torch.float32: 2e-5, torch.bfloat16: 2 * 2**-8, torch.float16: 2 * 2**-11}[dtype]
    assert got.out.dtype == dtype
    assert got.lse.dtype == torch.float32
    assert not got.out.isnan().any()
    assert not got.lse.isnan().any()
    scale = float(want.out.abs().max())
    assert float((got.out.double() - want.out).abs().max()) <= unit * max(scale, 1e-9)
    blind = want.lse == -math.inf
    assert torch.equal(got.lse == -math.inf, blind)
    assert (got.out[blind] == 0).all()
    if not blind.all():
        assert float((got.lse.double() - want.lse)[~blind].abs().max()) <= max(unit, 2e-5)


# page_size, window, group, kv_heads, head_dim, dtype, share, configuration
SHAPES = [
    (16, None, 4, 2, 16, torch.float32, True, CONFIG),
    (16, None, 1, 1, 32, torch.float32, True, CUTS),
    (1, None, 3, 2, 16, torch.float32, True, CUTS),
    (3, 7, 4, 1, 16, torch.float32, True, CONFIG),
    (64, 33, 8, 1, 16, torch.float32, True, CUTS),
    (16, None, 16, 1, 16, torch.float32, True, CONFIG),
    (16, None, 71, 1, 16, torch.float32, True, None),
    (16, None, 5, 1, 24, torch.float32, False, CONFIG),
    (16, 20, 2, 2, 16, torch.float32, True, ALONE),
    (16, None, 4, 1, 80, torch.float32, True, CUTS),
    (16, None, 2, 1, 16, torch.float16, True, CUTS),
    (16, None, 4, 1, 64, HALF, True, CONFIG),
    (16, None, 8, 1, 512, HALF, True, None),
    (16, 20, 8, 1, 512, torch.float32, True, None),
]
if DEVICE.type == "cuda":  # the interpreter is slow
    SHAPES += [(16, None, 64, 1, 512, HALF, True, None), (16, 90, 4, 2, 512, HALF, True, CUTS)]


# The interpreter is slow. Over all shapes, plans of this seed have tiles of every kind (whole,
# ragged, masked, several in a row), merges, empty rows, and more works than programs.
SEEDS = [2] if DEVICE.type == "cpu" else range(10)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(map(str, s[:5])))
@pytest.mark.parametrize("seed", SEEDS)
def test_triton_equals_reference(shape, seed, monkeypatch):
    page_size, window, group, kv_heads, head_dim, dtype, share, config = shape
    rng = np.random.default_rng(seed)
    plan = random_plan(rng, page_size=page_size, window=window, num_seqs=5, max_rows=10)
    q, k, v = tensors(plan, seed, kv_heads=kv_heads, group=group, head_dim=head_dim, dtype=dtype)
    want = attention(q, k, v, plan, impl="reference")
    poison(monkeypatch)
    got = TritonAttention(config=config).prepare(plan, share=share).attend(q, k, v)
    assert_matches(got, want, dtype)


@pytest.mark.parametrize(("head_dim", "dtype"), [(32, torch.float32), (64, HALF)])
def test_a_plan_of_parts_of_pages(head_dim, dtype):
    """Its pages are halves of those that keys and values are in."""
    impl = TritonAttention()
    assert impl.takes_parts
    assert not impl.head_major(head_dim, dtype)
    plan = random_plan(np.random.default_rng(2), page_size=8, num_seqs=5, max_rows=10)
    q, k, v = tensors(plan, 2, kv_heads=2, group=2, head_dim=head_dim, dtype=dtype)
    got = impl.prepare(plan).attend(q, *(x.view(-1, 16, *x.shape[2:]) for x in (k, v)))
    assert_matches(got, attention(q, k, v, plan, impl="reference"), dtype)


def test_which_heads_the_kernels_take():
    assert takes_heads(256, 128)
    assert takes_heads(512, 64)
    assert not takes_heads(264, 65)
    assert not takes_heads(256, 129)
    assert not takes_heads(520, 1)


@pytest.mark.parametrize(
    ("alibi", "softcap", "scale", "window"),
    [(True, None, None, None), (False, 5.0, 0.3, None), (True, 2.0, 0.7, 9), (False, None, 2.0, 5)],
)
def test_alibi_softcap_and_scale(alibi, softcap, scale, window):
    plan = random_plan(
        np.random.default_rng(3), page_size=16, window=window, num_seqs=4, max_rows=12
    )
    q, k, v = tensors(plan, 3, kv_heads=2, group=2, head_dim=16, dtype=torch.float32)
    slopes = torch.rand(4, device=DEVICE) if alibi else None
    more = {"alibi_slopes": slopes, "softcap": softcap, "scale": scale}
    want = attention(q, k, v, plan, impl="reference", **more)
    got = TritonAttention(config=CUTS).prepare(plan).attend(q, k, v, Scores(**more))
    assert_matches(got, want, torch.float32)


def test_a_named_implementation_runs_with_its_own_configuration():
    plan = random_plan(np.random.default_rng(4), page_size=16, num_seqs=3, num_runs=2)
    q, k, v = tensors(plan, 4, kv_heads=1, group=2, head_dim=16, dtype=torch.float32)
    got = attention(q, k, v, plan, impl="triton")
    assert_matches(got, attention(q, k, v, plan, impl="reference"), torch.float32)
    assert resolve("triton").name == "triton"


def workspace(**more) -> Workspace:
    shape = {"num_q_heads": 2, "num_kv_heads": 1, "head_dim": 16, "page_size": 16}
    options = {"dtype": torch.float32, "device": DEVICE, "windowed": False, "config": CUTS}
    space = {"max_rows": 160, "max_words": 1 << 14} | {
        name: more.pop(name) for name in ("max_words", "states") if name in more
    }
    kernels = Kernels.make(**{**shape, **options, **more})
    states = States.empty(400, kernels.num_q_heads, kernels.head_dim, DEVICE)
    return Workspace(kernels, **{"states": states, **space})


def run_in(space: Workspace, plan: AttentionPlan, q, k, v, num_rows: int | None = None) -> State:
    """Write, upload and launch with q and out in buffers of `max_rows`."""
    space.write(plan, num_rows=num_rows)
    space.upload()
    fixed = torch.full((space.max_rows, *q.shape[1:]), math.nan, device=DEVICE, dtype=q.dtype)
    fixed[: plan.num_queries] = q
    out, lse = torch.full_like(fixed, math.nan), torch.full(fixed.shape[:2], math.nan)
    lse = lse.to(DEVICE)
    space.launch(fixed, k, v, out, lse=lse)
    return State(out, lse)


def test_before_the_first_list_there_are_no_items():
    space = workspace()
    q = torch.full((8, 2, 16), math.nan, device=DEVICE)
    out, pages = q.clone(), torch.zeros(1, 16, 1, 16, device=DEVICE)
    space.launch(q, pages, pages, out)
    assert out.isnan().all()
    # The kernel for Hopper looks at the record before the first one, which must be its own memory.
    assert RECORD <= int(space.control[AT_RECORDS]) < space.max_words


def test_one_workspace_serves_plan_after_plan():
    space = workspace()
    for seed in range(3):
        plan = random_plan(np.random.default_rng(seed), page_size=16, num_seqs=4, max_rows=12)
        q, k, v = tensors(plan, seed, kv_heads=1, group=2, head_dim=16, dtype=torch.float32)
        want = attention(q, k, v, plan, impl="reference")
        n = plan.num_rows
        got = run_in(space, plan, q, k, v, num_rows=n + 3)
        assert_matches(State(got.out[:n], got.lse[:n]), want, torch.float32)
        assert (got.out[n : n + 3] == 0).all()
        assert (got.lse[n : n + 3] == -math.inf).all()
        assert got.out[n + 3 :].isnan().all()


def test_few_states_share_less_and_are_right():
    plan = random_plan(np.random.default_rng(5), page_size=16, num_seqs=6, max_rows=12, moves=False)
    q, k, v = tensors(plan, 5, kv_heads=1, group=2, head_dim=16, dtype=torch.float32)
    want = attention(q, k, v, plan, impl="reference")
    n, used = plan.num_rows, []
    for room in (400, plan.num_rows + 10, 1):
        states = States.empty(room, 2, 16, DEVICE)
        space = workspace(states=states)
        got = run_in(space, plan, q, k, v)
        used.append(space.work.num_states)
        assert_matches(State(got.out[:n], got.lse[:n]), want, torch.float32)
    assert used[0] > used[2] == 0


@pytest.mark.parametrize("window", [None, 25])
def test_advance_is_the_next_step(window):
    """Decode steps, each from the list of the one before, the third of them into a new page."""
    rng = np.random.default_rng(6)
    plan = windowed(decodes(), window)
    space = workspace(windowed=window is not None, states=States.empty(300, 2, 16, DEVICE))
    space.write(plan)
    own = np.arange(1, plan.num_spans)
    for step in range(3):
        q, k, v = tensors(plan, step, kv_heads=1, group=2, head_dim=16, dtype=torch.float32)
        space.upload()
        out = torch.full((space.max_rows, 2, 16), math.nan, device=DEVICE)
        space.launch(q, k, v, out)
        want = attention(q, k, v, plan, impl="reference")
        n = plan.num_rows
        assert_matches(State(out[:n], space.lse[:n]), want, torch.float32)
        pages = rng.integers(400, 500, 1)
        word = space.work.page_word(np.array([2]), np.array([2]))
        space.advance(own, word, pages)
        plan = grown(plan, own, 2, int(pages[0]))


def decodes() -> AttentionPlan:
    """Six decodes behind 90 shared tokens; the second will soon enter its third page."""
    builder = PlanBuilder(16)
    system = builder.add_run(np.arange(10, 16, dtype=np.int32), 0, 90, 0)
    builder.add_span(0, 6, system, 90)
    for row in range(6):
        pages = np.array([20 + 4 * row, 21 + 4 * row, 0, 0], np.int32)
        run = builder.add_run(pages, 0, 31 if row == 1 else 12 + row, 90)
        builder.add_span(row, 1, run, 31 if row == 1 else 12 + row)
    return builder.build(np.array([101, 120, 103, 104, 105, 106]))


def grown(plan: AttentionPlan, own: np.ndarray, run: int, page: int) -> AttentionPlan:
    spans, runs, pages = plan.spans.copy(), plan.runs.copy(), plan.run_pages.copy()
    spans[own, 4] += 1
    runs[own, 2] += 1
    pages[runs[run, 0] + 2] = page
    return dataclasses.replace(
        plan, spans=spans, runs=runs, run_pages=pages, row_position=plan.row_position + 1
    )


def test_what_cannot_run_is_refused():
    plan = decodes()
    with pytest.raises(ConfigError, match="windowed=True"):
        workspace(windowed=True).write(plan)
    with pytest.raises(ConfigError, match="raise max_words"):
        workspace(max_words=64).write(plan)
    with pytest.raises(UnsupportedError, match=r"torch.float64 has no Triton kernel"):
        workspace(dtype=torch.float64)
    if DEVICE.type == "cpu":
        with pytest.raises(UnsupportedError, match="interpreter does not multiply bfloat16"):
            workspace(dtype=torch.bfloat16)
        with pytest.raises(ConfigError, match="kernel for Hopper, which does not run on cpu"):
            workspace(config=load_config("cpu", torch.float16, 16, 2, hopper=True)[0])
    with pytest.raises(UnsupportedError, match="129 query heads per KV head"):
        workspace(num_q_heads=129, num_kv_heads=1)
    with pytest.raises(ConfigError, match="advance before write"):
        workspace().advance(np.arange(1))
    q, k, v = tensors(plan, 0, kv_heads=2, group=2, head_dim=16, dtype=torch.float32)
    with pytest.raises(ConfigError, match="scale is -1"):
        TritonAttention().prepare(plan).attend(q, k, v, Scores(-1))
    with pytest.raises(ConfigError, match="not contiguous"):
        TritonAttention().prepare(plan).attend(q, k[::2], v[::2])


def plain(q, k_pages, v_pages, plan, softcap=None):
    """The same attention row by row, each operation in q's own dtype."""
    from onestem.ops.reference import visible

    out = torch.zeros_like(q)
    group = q.shape[1] // k_pages.shape[2]
    for row in range(plan.num_rows):
        slots = torch.from_numpy(visible(plan, row)[0]).to(q.device)
        if len(slots) == 0:
            continue
        k, v = (read_kv(pages, slots).transpose(0, 1) for pages in (k_pages, v_pages))
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        scores = (k @ q[row].unsqueeze(-1)).squeeze(-1) * q.shape[-1] ** -0.5
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        out[row] = (torch.softmax(scores, -1).unsqueeze(1) @ v).squeeze(1)
    return out


@pytest.mark.parametrize(
    ("dtype", "softcap"), one_in(5, (HALF, torch.float32), (None, 5.0, 30.0, 1000.0, 50.0)), ids=str
)
def test_error_is_at_most_twice_that_of_plain_attention(dtype, softcap):
    """Against float64, in the largest and the mean error over all rows."""
    plan = random_plan(np.random.default_rng(8), page_size=16, num_seqs=6, max_rows=12, moves=False)
    q, k, v = tensors(plan, 8, kv_heads=2, group=2, head_dim=64, dtype=dtype)
    want = attention(q, k, v, plan, impl="reference", softcap=softcap).out
    got = TritonAttention(config=CUTS).prepare(plan).attend(q, k, v, Scores(softcap=softcap)).out
    mine, other = ((x.double() - want).abs() for x in (got, plain(q, k, v, plan, softcap)))
    assert float(mine.max()) <= 2 * float(other.max())
    assert float(mine.mean()) <= 2 * float(other.mean())


@pytest.mark.parametrize("keys", [128, 2048])
def test_keys_and_values_in_fp8_break_the_rule_of_errors(keys):
    """Why they are not offered: rounding alone, with a scale per dimension and exact arithmetic
    behind it, errs more than twice as much as computing in bfloat16 does."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 128, generator=generator).bfloat16() for n in (64, keys, keys))
    plain, exact = (attend_alone(q, k, v, t) for t in (torch.bfloat16, torch.float64))
    rounded = attend_alone(q, in_fp8(k), in_fp8(v), torch.float64)
    for size in (torch.max, torch.mean):
        assert size((rounded - exact).abs()) > 2 * size((plain - exact).abs())


def attend_alone(q, k, v, dtype):
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    return (torch.softmax((q @ k.T) * q.shape[1] ** -0.5, -1) @ v).double()


def in_fp8(x):
    """x rounded to float8_e4m3fn, the largest value of each dimension being the format's."""
    scale = x.abs().amax(0, keepdim=True).float() / torch.finfo(torch.float8_e4m3fn).max
    return (x.float() / scale).to(torch.float8_e4m3fn).float() * scale


def test_wide_tiles_of_the_default_configuration():
    """A chunk that fills tiles of 128 rows, unmasked and masked tiles, three kinds of items."""
    config = KernelConfig((Tile(16, 16), Tile(64, 32), Tile(128, 32)), (3, 3, 3))
    plan = random_plan(np.random.default_rng(9), page_size=16, num_seqs=3, max_rows=40, max_len=100)
    q, k, v = tensors(plan, 9, kv_heads=1, group=4, head_dim=16, dtype=torch.float32)
    got = TritonAttention(config=config).prepare(plan).attend(q, k, v)
    assert_matches(got, attention(q, k, v, plan, impl="reference"), torch.float32)


def test_a_chunk_whose_window_begins_and_ends_inside_a_run():
    """A tile of many rows walks what some rows no longer see, what all see, and what some see not
    yet, one after the other."""
    builder = PlanBuilder(16)
    builder.add_span(0, 24, builder.add_run(np.arange(7, dtype=np.int32), 0, 100, 0), 100)
    own = builder.add_run(np.array([9, 8], np.int32), 0, 24, 100)
    builder.add_span(0, 24, own, 1, step=1)
    plan = windowed(builder.build(np.arange(100, 124)), 70)
    q, k, v = tensors(plan, 0, kv_heads=1, group=2, head_dim=16, dtype=torch.float32)
    got = TritonAttention(config=ALONE).prepare(plan).attend(q, k, v)
    assert_matches(got, attention(q, k, v, plan, impl="reference"), torch.float32)


def test_a_row_with_more_states_than_are_merged_at_a_time():
    """Row 0 shares each of twelve runs with another row; the best of its keys is in a late one."""
    builder = PlanBuilder(16)
    for i in range(12):
        run = builder.add_run(np.array([11 - i], np.int32), 0, 16, 16 * i)
        for row in (0, i + 1):
            builder.add_span(row, 1, run, 16)
    plan = builder.build(np.full(13, 200))
    q, k, v = tensors(plan, 4, kv_heads=1, group=1, head_dim=16, dtype=torch.float32)
    space = workspace(num_q_heads=1)
    got = run_in(space, plan, q, k, v)
    assert space.work.num_states >= 12
    want = attention(q, k, v, plan, impl="reference")
    assert_matches(State(got.out[:13], got.lse[:13]), want, torch.float32)


class Counted:
    """A kernel that counts its launches."""

    def __init__(self, kernel):
        self.kernel = kernel
        self.launches = 0

    def __getitem__(self, grid):
        self.launches += 1
        return self.kernel[grid]


@pytest.fixture
def merging(monkeypatch) -> Counted:
    counted = Counted(launch.merge_kernel)
    monkeypatch.setattr(launch, "merge_kernel", counted)
    return counted


def unshared(num_seqs: int, rows: int) -> AttentionPlan:
    """Sequences without anything in common: so many rows each, the last of 5 to 16 tokens."""
    builder = PlanBuilder(16)
    tokens = 5 + np.arange(num_seqs) % 12
    for seq in range(num_seqs):
        run = builder.add_run(np.array([seq], np.int32), 0, int(tokens[seq]), 0)
        builder.add_span(seq * rows, rows, run, int(tokens[seq]) - rows + 1, step=1)
    return builder.build((tokens[:, None] - rows + np.arange(rows)).reshape(-1))


@pytest.mark.parametrize("rows", [1, 5])
def test_without_merges_there_is_one_launch_and_it_can_be_repeated(rows, merging, monkeypatch):
    """Each list has more works than programs: what they count with must be as it was."""
    plan = unshared(7 if DEVICE.type == "cpu" else 700, rows)
    q, k, v = tensors(plan, 1, kv_heads=1, group=8, head_dim=16, dtype=torch.float32)
    want = attention(q, k, v, plan, impl="reference")
    poison(monkeypatch)
    prepared = TritonAttention(config=CONFIG).prepare(plan)
    for _ in range(3):
        assert_matches(prepared.attend(q, k, v), want, torch.float32)
    assert merging.launches == 0


@pytest.mark.parametrize(("num_seqs", "rows", "wide"), [(20, 1, [0]), (2, 10, [1, 0])])
def test_items_of_the_widest_tiles_have_a_launch_where_there_are_some(
    num_seqs, rows, wide, monkeypatch
):
    """Sequences of a row each, or of 10 rows, which fill such a tile."""
    plan = unshared(num_seqs, rows)
    q, k, v = tensors(plan, 1, kv_heads=1, group=8, head_dim=16, dtype=torch.float32)
    kernel, launches = launch.attend_kernel, []

    class Recorded:
        def __getitem__(self, grid):
            return lambda *args, WIDE, **options: (
                launches.append(WIDE),
                kernel[grid](*args, WIDE=WIDE, **options),
            )

    monkeypatch.setattr(launch, "attend_kernel", Recorded())
    got = TritonAttention(config=CONFIG).prepare(plan).attend(q, k, v)
    assert_matches(got, attention(q, k, v, plan, impl="reference"), torch.float32)
    assert launches == wide


def test_where_rows_merge_there_is_a_second_launch(merging):
    plan = decodes()
    q, k, v = tensors(plan, 1, kv_heads=1, group=2, head_dim=16, dtype=torch.float32)
    got = TritonAttention(config=CUTS).prepare(plan).attend(q, k, v)
    assert_matches(got, attention(q, k, v, plan, impl="reference"), torch.float32)
    assert merging.launches == 1


def test_a_workspace_merges_whatever_its_plan(merging):
    """A graph that was captured with one plan serves others."""
    plan = unshared(3, 1)
    q, k, v = tensors(plan, 1, kv_heads=1, group=2, head_dim=16, dtype=torch.float32)
    got = run_in(workspace(), plan, q, k, v)
    want = attention(q, k, v, plan, impl="reference")
    assert_matches(State(got.out[:3], got.lse[:3]), want, torch.float32)
    assert merging.launches == 1


NEEDS_HOPPER = pytest.mark.skipif(
    DEVICE.type == "cpu" or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)


@NEEDS_HOPPER
@pytest.mark.parametrize("num_seqs", [3, 700])
def test_few_and_many_turns_on_hopper(num_seqs):
    """Of many rows each reader has 40 items."""
    plan = random_plan(
        np.random.default_rng(0), page_size=16, num_runs=2, num_seqs=num_seqs, max_rows=2,
        max_len=90, num_pages=16384,
    )  # fmt: skip
    q, k, v = tensors(plan, 0, kv_heads=16, group=2, head_dim=64, dtype=torch.bfloat16)
    want = attention(q, k, v, plan, impl="reference")
    for _ in range(3):
        assert_matches(attention(q, k, v, plan, impl="triton"), want, torch.bfloat16)


@pytest.mark.parametrize(
    ("group", "largest"),  # tile of steps of so many rows
    [(4, {1: 8, 2: 8, 3: 64, 16: 64, 17: 128, 300: 128}), (3, {2: 8, 3: 64, 21: 64, 22: 128})],
)
def test_steps_of_few_rows_have_a_smaller_kernel_on_hopper(group, largest):
    config, _ = load_config("NVIDIA H100 80GB HBM3", torch.bfloat16, 128, group, hopper=True)
    kernels = Kernels(8 * group, 8, 128, 16, config, 132, False, True, True)
    for rows, queries in largest.items():
        assert kernels.most_queries(rows, wide=True) == queries
        assert kernels.may_be_wide(rows) == (queries == 128)
        # Without items of the widest tiles, steps of many rows have it too.
        assert kernels.most_queries(rows, wide=False) == min(queries, 64)


def test_one_size_of_tiles_has_one_kernel():
    """71 query heads on a KV head (Falcon 7B)."""
    config, _ = load_config("NVIDIA H100 80GB HBM3", torch.bfloat16, 64, 71, hopper=True)
    kernels = Kernels(71, 1, 64, 16, config, 132, False, True, True)
    assert [kernels.most_queries(1, wide) for wide in (False, True)] == [128, 128]
    assert kernels.may_be_wide(1)
    step = decode_step((1, 256), (2048, 256), page_size=16)
    work = make_work(step.plan, kernels.cost, num_kv_heads=1, group=71)
    assert work.num_wide == work.num_items > 0


@NEEDS_HOPPER
@pytest.mark.parametrize(
    ("head_dim", "group", "window", "special"),
    [(128, 4, None, False), (64, 1, 40, True), (256, 8, None, True), (80, 16, None, False)],
)
def test_each_size_of_the_kernel_on_hopper(head_dim, group, window, special):
    more = {"alibi_slopes": torch.rand(8 * group, device=DEVICE), "softcap": 3.0}
    more = more if special else {}
    for num_seqs in (1, 2, 4, 8, 16, 40):
        plan = random_plan(
            np.random.default_rng(num_seqs), page_size=16, window=window, num_seqs=num_seqs,
            max_rows=2, max_len=900, num_pages=16384,
        )  # fmt: skip
        q, k, v = tensors(
            plan, num_seqs, kv_heads=8, group=group, head_dim=head_dim, dtype=torch.bfloat16
        )
        want = attention(q, k, v, plan, impl="reference", **more)
        for share in (True, False):
            got = TritonAttention().prepare(plan, share=share).attend(q, k, v, Scores(**more))
            assert_matches(got, want, torch.bfloat16)


@NEEDS_HOPPER
def test_without_merges_there_is_one_launch_on_hopper(merging):
    plan = unshared(700, 1)
    q, k, v = tensors(plan, 0, kv_heads=8, group=4, head_dim=128, dtype=torch.bfloat16)
    want = attention(q, k, v, plan, impl="reference")
    prepared = TritonAttention().prepare(plan)
    for _ in range(2):
        assert_matches(prepared.attend(q, k, v), want, torch.bfloat16)
    assert merging.launches == 0


@NEEDS_HOPPER
@pytest.mark.parametrize(
    ("head_dim", "group", "page_size", "window", "special"),
    [
        (128, 4, 16, None, False),
        (128, 16, 16, None, False),
        (64, 8, 8, None, False),
        (64, 12, 32, 90, True),
        (128, 3, 64, 150, False),
        (128, 1, 32, 40, True),
        (256, 16, 16, None, True),
        (80, 1, 16, None, False),
        (96, 4, 16, 70, True),
        (160, 2, 16, None, False),
        (64, 71, 16, None, True),
        (64, 80, 8, 60, False),
        (80, 40, 8, 60, False),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_wide_items_on_hopper(head_dim, group, page_size, window, special, dtype):
    """The kernel for Hopper: tiles of 128, one and several, windows, empty rows, several turns."""
    for seed in range(3):
        plan = random_plan(
            np.random.default_rng(seed), page_size=page_size, window=window, max_rows=200,
            max_len=400, num_pages=8192,
        )  # fmt: skip
        q, k, v = tensors(plan, seed, kv_heads=2, group=group, head_dim=head_dim, dtype=dtype)
        more = {"alibi_slopes": torch.rand(2 * group, device=DEVICE), "softcap": 3.0}
        more = more if special else {}
        want = attention(q, k, v, plan, impl="reference", **more)
        for merge_tokens in (0, 16):
            config, _ = load_config("of a GPU not tuned", dtype, head_dim, group, hopper=True)
            config = dataclasses.replace(config, merge_tokens=merge_tokens, min_tokens=64)
            prepared = TritonAttention(config=config).prepare(plan)
            assert_matches(prepared.attend(q, k, v, Scores(**more)), want, dtype)
