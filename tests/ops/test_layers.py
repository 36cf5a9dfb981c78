"""What stands between a layer's products, against the same in float64."""

from __future__ import annotations

import math

import pytest
import torch

from onestem.errors import ConfigError
from onestem.ops import Angles, Heads, LayerOps, Queries, allocate_pages, read_kv
from onestem.ops.cpu import CpuLayers, is_built
from onestem.ops.rounding import LARGEST
from onestem.ops.triton.layers import TritonLayers
from onestem.ops.triton.rounding import rounded_rows as rounded_by_kernel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
OPS = [LayerOps(), TritonLayers()]
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE.type == "cuda" else [])


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def assert_rounded_once(got: torch.Tensor, exact: torch.Tensor) -> None:
    """Off by one rounding of the result, and float32's own error on the way."""
    assert got.shape == exact.shape
    allowed = exact.abs() * torch.finfo(got.dtype).eps + 4e-6 * float(exact.abs().max())
    assert bool(((got.double() - exact).abs() <= allowed).all())


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ops", OPS, ids=lambda ops: ops.name)
@pytest.mark.parametrize(("rows", "size"), [(0, 64), (1, 48), (5, 100)])
def test_add_rms_norm(ops: LayerOps, dtype: torch.dtype, rows: int, size: int) -> None:
    hidden, delta = (drawn(rows, size, dtype=dtype, seed=i) for i in range(2))
    weight, before = drawn(size, dtype=dtype, seed=2), hidden.clone()
    first = ops.add_rms_norm(hidden, None, weight, 1e-5)
    assert torch.equal(hidden, before)
    if rows:
        assert_rounded_once(first, normed(before, weight, 1e-5))
    second = ops.add_rms_norm(hidden, delta, weight, 1e-5)
    assert torch.equal(hidden, before + delta)
    if rows:
        assert_rounded_once(second, normed(hidden, weight, 1e-5))


@pytest.mark.parametrize("codes", LARGEST, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "size"), [(0, 64), (3, 100)])
def test_rounding_at_once_is_rounding_behind(
    codes: torch.dtype, dtype: torch.dtype, rows: int, size: int
) -> None:
    """The same bits as one kernel and as two, with the residual written."""
    ops, weight = TritonLayers(), drawn(size, dtype=torch.float32, seed=2)
    hidden, delta, fused = (drawn(rows, n, dtype=dtype, seed=n) for n in (size, size, 2 * size))
    if rows:
        hidden[1], delta[1], fused[1] = 0, 0, 0
    apart, before = hidden.clone(), hidden.clone()
    one = ops.rounded_rms_norm(hidden, delta, weight, 1e-5, codes)
    plain = ops.add_rms_norm(apart, delta, weight, 1e-5)
    other = rounded_by_kernel(plain, codes)
    assert torch.equal(hidden, apart)
    both = ops.both_rms_norm(before, delta, weight, 1e-5, codes)
    assert torch.equal(before, apart)
    assert torch.equal(both.plain, plain)
    of_gates = ops.rounded_silu_mul(fused, codes), rounded_by_kernel(ops.silu_mul(fused), codes)
    for got, want in ((one, other), (both.rounded, other), of_gates):
        assert got.codes.dtype == codes
        assert got.scales.shape == (rows, 1)
        assert torch.equal(got.codes.view(torch.uint8), want.codes.view(torch.uint8))
        assert torch.equal(got.scales, want.scales)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ops", OPS, ids=lambda ops: ops.name)
@pytest.mark.parametrize(("rows", "size"), [(0, 8), (1, 7), (4, 1100)])
def test_gelu_mul(ops: LayerOps, dtype: torch.dtype, rows: int, size: int) -> None:
    fused = drawn(rows, 2 * size, dtype=dtype) * 4
    if rows == 1:
        fused[0, :4] = torch.tensor([-60.0, 60.0, 0.0, -0.0])
    gate, up = fused.double().chunk(2, -1)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    exact = 0.5 * gate * (1 + inner.tanh()) * up
    got = ops.gelu_mul(fused.clone())
    assert got.shape == (rows, size)
    # PyTorch rounds the gate before it multiplies: two roundings. Where the gate is far below zero,
    # 1 + tanh has an error of float32's unit.
    allowed = exact.abs() * 2 * torch.finfo(dtype).eps + (gate * up).abs() * 1e-6 + 1e-6
    assert bool(((got.double() - exact).abs() <= allowed).all())


@pytest.mark.parametrize("ops", [*OPS, CpuLayers()] if is_built() else OPS, ids=lambda o: o.name)
def test_weights_of_norms_may_be_wider_than_rows(ops: LayerOps) -> None:
    """Of float32 beside 16 bits: one rounding, as if the rows were float32 too."""
    dtype, weight = torch.float16, drawn(48, dtype=torch.float32, seed=2) + 1
    hidden, delta = (drawn(5, 48, dtype=dtype, seed=i) for i in range(2))
    total = hidden + delta
    normal = ops.add_rms_norm(hidden, delta, weight, 1e-5)
    assert normal.dtype == dtype
    assert torch.equal(hidden, total)
    assert_rounded_once(normal, normed(total, weight, 1e-5))
    qkv, slots = drawn(5, 4 * 48, dtype=dtype, seed=3), torch.arange(5, device=DEVICE)
    still = Angles(torch.ones(5, 24, device=DEVICE), torch.zeros(5, 24, device=DEVICE))
    pages = [torch.zeros(3, 2, 1, 48, dtype=dtype, device=DEVICE) for _ in range(2)]
    q = ops.rope_write(qkv, Heads(2, 1, 48, weight, weight, 1e-6), still, slots, *pages)
    split = qkv.view(5, 4, 48)
    assert_rounded_once(q, normed(split[:, :2], weight, 1e-6))
    assert_rounded_once(read_kv(pages[0], slots), normed(split[:, 2:3], weight, 1e-6))
    assert torch.equal(read_kv(pages[1], slots), split[:, 3:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ops", OPS, ids=lambda ops: ops.name)
@pytest.mark.parametrize(("rows", "size"), [(0, 8), (1, 7), (4, 1100)])
def test_silu_mul(ops: LayerOps, dtype: torch.dtype, rows: int, size: int) -> None:
    fused = drawn(rows, 2 * size, dtype=dtype)
    gate, up = fused.double().chunk(2, -1)
    exact = gate / (1 + (-gate).exp()) * up
    got = ops.silu_mul(fused.clone())
    assert got.shape == (rows, size)
    # PyTorch rounds the gate before it multiplies: two roundings.
    allowed = exact.abs() * 2 * torch.finfo(dtype).eps + 1e-6
    assert bool(((got.double() - exact).abs() <= allowed).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("ops", "head_major"),
    [(ops, head_major) for ops in (LayerOps(), TritonLayers()) for head_major in (False, True)],
    ids=["torch", "torch head-major", "triton", "triton head-major"],
)
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim", "norm"),
    [(8, 2, 16, False), (3, 3, 24, True), (10, 1, 32, True), (12, 12, 8, False)],
)
def test_rope_write(
    ops: LayerOps,
    head_major: bool,
    dtype: torch.dtype,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    norm: bool,
) -> None:
    rows, half = 5, head_dim // 2
    qkv = drawn(rows, (q_heads + 2 * kv_heads) * head_dim, dtype=dtype)
    norms = [drawn(head_dim, dtype=dtype, seed=i) for i in (1, 2)] if norm else [None, None]
    heads = Heads(q_heads, kv_heads, head_dim, *norms, 1e-6)
    turn = drawn(rows, half, dtype=torch.float32, seed=3) * 50
    angles = Angles(turn.cos(), turn.sin())
    pages = [
        allocate_pages(
            4, 3, kv_heads, head_dim, dtype=dtype, device=DEVICE, head_major=head_major
        ).fill_(math.nan)
        for _ in range(2)
    ]
    slots = torch.tensor([7, 0, 11, 3, 4], device=DEVICE)
    q = ops.rope_write(qkv.clone(), heads, angles, slots, *pages)
    split = qkv.view(rows, -1, head_dim)
    want_q, want_k, want_v = split.split((q_heads, kv_heads, kv_heads), dim=1)
    assert torch.equal(read_kv(pages[1], slots), want_v)
    for got, want, weight in ((q, want_q, norms[0]), (read_kv(pages[0], slots), want_k, norms[1])):
        exact = want.double() if weight is None else normed(want, weight, 1e-6).to(dtype).double()
        x, y = exact.split(half, dim=-1)
        cos, sin = angles.cos.double()[:, None], angles.sin.double()[:, None]
        exact = torch.cat((x * cos - y * sin, y * cos + x * sin), -1)
        # The norm's own rounding may fall to either side: one more unit of the largest value.
        unit = torch.finfo(dtype).eps * float(exact.abs().max()) * (2 if norm else 1)
        assert float((got.double() - exact).abs().max()) <= unit + 1e-5
    for page in pages:
        assert int(page.isnan().all(-1).all(-1).sum()) == 12 - rows


@pytest.mark.parametrize("ops", [*OPS, CpuLayers()] if is_built() else OPS, ids=lambda o: o.name)
@pytest.mark.parametrize("rows", [[2, 0, 0, 1, 2, 1, 0], [1, 2]], ids=["more", "fewer"])
def test_queries_of_rows_at_other_places(ops: LayerOps, rows: list[int]) -> None:
    """Each as of a row of its own, beside the rows' keys and values."""
    sources, slots = torch.tensor(rows, device=DEVICE), torch.tensor([7, 0, 11], device=DEVICE)
    qkv, norms = drawn(3, 13 * 48, dtype=torch.float16), [drawn(48, dtype=torch.float16)] * 2
    heads, turn = Heads(9, 2, 48, *norms, 1e-6), drawn(10, 24, dtype=torch.float32) * 50
    here, there = Angles(turn.cos()[:3], turn.sin()[:3]), Angles(turn.cos()[3:], turn.sin()[3:])
    there = Angles(*(one[: len(rows)].contiguous() for one in there))
    pages = [torch.zeros(4, 3, 2, 48, dtype=torch.float16, device=DEVICE) for _ in range(4)]
    ops.rope_write(qkv.clone(), heads, here, slots, *pages[:2])
    own = torch.arange(len(rows), device=DEVICE)
    aside = [torch.zeros_like(pages[0]) for _ in range(2)]
    want = ops.rope_write(qkv[sources], heads, there, own, *aside)
    asked = Queries(sources, there)
    q = ops.rope_write(qkv.clone(), heads, here, slots, *pages[2:], queries=asked)
    assert torch.equal(q, want)
    assert all(map(torch.equal, pages[:2], pages[2:]))


@pytest.mark.parametrize("same", [False, True], ids=["values", "values are keys"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ops", [*OPS, CpuLayers()] if is_built() else OPS, ids=lambda o: o.name)
def test_values_are_normed_and_may_be_keys(ops: LayerOps, dtype: torch.dtype, same: bool) -> None:
    """As in Gemma 4, whose heads have 512 dimensions there; and queries alone."""
    rows, size, slots = 3, 512, torch.tensor([5, 0, 3], device=DEVICE)
    norms = [drawn(size, dtype=dtype, seed=i) for i in (1, 2)]
    heads = Heads(9, 2, size, *norms, 1e-6, v_norm=True, value_is_key=same)
    assert heads.num_projected == 13 - 2 * same
    qkv = drawn(rows, heads.num_projected * size, dtype=dtype)
    still = Angles(torch.ones(rows, 256, device=DEVICE), torch.zeros(rows, 256, device=DEVICE))
    pages = [torch.full((3, 2, 2, size), math.nan, dtype=dtype, device=DEVICE) for _ in "kv"]
    q = ops.rope_write(qkv.clone(), heads, still, slots, *pages)
    split = qkv.view(rows, -1, size)
    keys, values = split[:, 9:11], split[:, 9:11] if same else split[:, 11:]
    ones = torch.ones(size, device=DEVICE)
    assert_rounded_once(read_kv(pages[0], slots), normed(keys, norms[1], 1e-6))
    assert_rounded_once(read_kv(pages[1], slots), normed(values, ones, 1e-6))
    alone = Heads(9, 0, size, norms[0], None, 1e-6, v_norm=True)
    again = [page.clone() for page in pages]
    queries = split[:, :9].flatten(1).contiguous()
    assert torch.equal(ops.rope_write(queries, alone, still, slots, *again), q)
    for page, other in zip(pages, again, strict=True):
        assert torch.equal(page.nan_to_num(), other.nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ops", OPS, ids=lambda ops: ops.name)
@pytest.mark.parametrize(("rows", "heads", "head_dim"), [(0, 4, 8), (3, 5, 24), (2, 40, 64)])
def test_share_sinks(
    ops: LayerOps, dtype: torch.dtype, rows: int, heads: int, head_dim: int
) -> None:
    """Softmax over some keys and one without a value; a row that sees nothing stays 0."""
    scores = drawn(rows, heads, 7, dtype=torch.float32) * 3
    values = drawn(rows, heads, 7, head_dim, dtype=torch.float32, seed=1)
    sinks = drawn(heads, dtype=torch.float32, seed=2) * 3
    if rows:
        scores[-1, -1] = -math.inf
    out = (scores.softmax(-1).nan_to_num()[..., None] * values).sum(2).to(dtype)
    before, lse = out.double(), scores.logsumexp(-1)
    ops.share_sinks(out, lse, sinks)
    beside = torch.cat((scores, sinks.expand(rows, heads)[..., None]), -1).double()
    share = beside.softmax(-1)[..., :-1].sum(-1, keepdim=True)
    if rows:
        assert_rounded_once(out, before * share)


@pytest.mark.parametrize("ops", [*OPS, CpuLayers()] if is_built() else OPS, ids=lambda o: o.name)
def test_what_has_no_halves_is_refused(ops: LayerOps) -> None:
    with pytest.raises(ConfigError, match="width of gate and up is 7, expected an even number"):
        ops.silu_mul(torch.zeros(4, 7, device=DEVICE))
    angles = Angles(*torch.zeros(2, 3, 3, device=DEVICE))
    pages = [torch.zeros(2, 4, 1, 7, device=DEVICE) for _ in range(2)]
    slots = torch.arange(3, device=DEVICE)
    with pytest.raises(ConfigError, match="head_dim is 7, expected an even number"):
        ops.rope_write(torch.zeros(3, 28, device=DEVICE), Heads(2, 1, 7), angles, slots, *pages)
