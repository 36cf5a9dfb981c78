"""Fused layer operations in C++, in every instruction set, against float64."""

from __future__ import annotations

import math

import pytest
import torch

from onestem.errors import ConfigError, UnsupportedError
from onestem.ops import Angles, Heads, LayerOps, allocate_pages
from onestem.ops.cpu import CpuLayers, is_built
from tests.ops.cpu_isas import EVERY_ISA

pytestmark = pytest.mark.skipif(not is_built(), reason="the C++ extension is not built")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]

every_ops = pytest.mark.parametrize(
    "ops", [isa.layers() for isa in EVERY_ISA], ids=map(str, EVERY_ISA)
)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(params=[1, 2], autouse=True)
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rounded_once(got: torch.Tensor, exact: torch.Tensor) -> None:
    """Off by half a unit in the last place, and float32's own error on the way."""
    assert got.shape == exact.shape
    half = torch.finfo(got.dtype).eps / 2
    allowed = exact.abs() * (half + 1e-6) + torch.finfo(got.dtype).smallest_normal
    if got.dtype != torch.float32:
        allowed += 4e-7 * float(exact.abs().max())
    else:
        allowed += 1e-6 * float(exact.abs().max())
    assert bool(((got.double() - exact).abs() <= allowed).all())


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@every_ops
@every_dtype
@pytest.mark.parametrize(("rows", "size"), [(1, 8), (1, 4096), (3, 50), (130, 896), (0, 16)])
def test_add_rms_norm(ops, dtype, rows, size):
    hidden, delta = (drawn(rows, size, dtype=dtype, seed=i) for i in range(2))
    weight, before = drawn(size, dtype=dtype, seed=2), hidden.clone()
    out = ops.add_rms_norm(hidden, None, weight, 1e-5)
    assert torch.equal(hidden, before)
    out_after = ops.add_rms_norm(hidden, delta, weight, 1e-5)
    assert torch.equal(hidden, before + delta)
    if rows:
        assert_rounded_once(out, normed(before, weight, 1e-5))
        assert_rounded_once(out_after, normed(hidden, weight, 1e-5))


@every_ops
@every_dtype
@pytest.mark.parametrize(("rows", "size"), [(1, 8), (1, 4864), (3, 50), (70, 2048), (0, 16)])
def test_silu_mul(ops, dtype, rows, size):
    fused = drawn(rows, 2 * size, dtype=dtype) * 4
    if rows == 1:
        # Where e^-x overflows float32, and zeros.
        fused[0, :8] = torch.tensor([-300.0, -90.0, -88.0, 300.0, 0.0, -0.0, 20.0, -20.0])
    gate, up = fused.double().chunk(2, -1)
    got = ops.silu_mul(fused)
    if rows:
        assert_rounded_once(got, gate / (1 + (-gate).exp()) * up)
    else:
        assert got.shape == (0, size)


@every_ops
@every_dtype
@pytest.mark.parametrize(("norm", "head_major"), [(False, False), (True, True)])
@pytest.mark.parametrize(
    ("rows", "q_heads", "kv_heads", "head_dim"),
    [(1, 32, 8, 128), (40, 14, 2, 64), (3, 3, 3, 24), (2, 5, 1, 80), (4, 2, 1, 10), (0, 2, 1, 16)],
)
def test_rope_write(ops, dtype, rows, q_heads, kv_heads, head_dim, norm, head_major):
    qkv = drawn(rows, (q_heads + 2 * kv_heads) * head_dim, dtype=dtype)
    norms = [drawn(head_dim, dtype=dtype, seed=i) if norm else None for i in (1, 2)]
    heads = Heads(q_heads, kv_heads, head_dim, *norms, 1e-6)
    turn = drawn(rows, head_dim // 2, dtype=torch.float32, seed=3) * 50
    angles = Angles(turn.cos(), turn.sin())
    layout = {"dtype": dtype, "device": torch.device("cpu"), "head_major": head_major}
    k_pages, v_pages = (
        allocate_pages(12, 4, kv_heads, head_dim, **layout).fill_(math.nan) for _ in "kv"
    )
    slots = torch.randperm(48, generator=torch.Generator().manual_seed(4))[:rows]
    q = ops.rope_write(qkv, heads, angles, slots, k_pages, v_pages)
    exact = qkv.double().view(rows, q_heads + 2 * kv_heads, head_dim)
    want_q, want_k, want_v = exact.split((q_heads, kv_heads, kv_heads), 1)
    k, v = (pages.reshape(48, kv_heads, head_dim) for pages in (k_pages, v_pages))
    if rows:
        assert_rounded_once(q, rotated(want_q, norms[0], angles))
        assert_rounded_once(k[slots], rotated(want_k, norms[1], angles))
    assert q.shape == (rows, q_heads, head_dim)
    assert torch.equal(v[slots].double(), want_v)
    others = torch.ones(48, dtype=torch.bool).index_fill(0, slots, False)
    assert bool(k[others].isnan().all())
    assert bool(v[others].isnan().all())


@every_ops
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [50, 256])
def test_norms_of_gemma(ops, dtype, size):
    """Weights in float32 beside 16-bit rows; values normed without one, and taken from keys."""
    weights = [drawn(size, dtype=torch.float32, seed=i) + 1 for i in range(3)]
    hidden, delta = (drawn(5, size, dtype=dtype, seed=i) for i in (3, 4))
    total = hidden + delta
    out = ops.add_rms_norm(hidden, delta, weights[0], 1e-5)
    assert torch.equal(hidden, total)
    assert_rounded_once(out, normed(total, weights[0], 1e-5))
    heads = Heads(2, 1, size, *weights[1:], 1e-6, v_norm=True, value_is_key=True)
    qkv, slots = drawn(5, 3 * size, dtype=dtype, seed=5), torch.tensor([4, 0, 7, 2, 1])
    turn = drawn(5, size // 2, dtype=torch.float32, seed=6) * 50
    angles = Angles(turn.cos(), turn.sin())
    k_pages, v_pages = torch.zeros(2, 2, 4, 1, size, dtype=dtype)
    q = ops.rope_write(qkv, heads, angles, slots, k_pages, v_pages)
    split = qkv.view(5, 3, size).double()
    assert_rounded_once(q, rotated(split[:, :2], weights[1], angles))
    assert_rounded_once(k_pages.flatten(0, 1)[slots], rotated(split[:, 2:], weights[2], angles))
    assert_rounded_once(v_pages.flatten(0, 1)[slots], normed(split[:, 2:], torch.ones(1), 1e-6))


def rotated(x: torch.Tensor, weight: torch.Tensor | None, angles: Angles) -> torch.Tensor:
    x = x if weight is None else normed(x, weight, 1e-6)
    cos, sin = (a.double()[:, None] for a in angles)
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


@every_dtype
def test_error_is_at_most_twice_that_of_torch(dtype):
    """Mean error against float64 of a whole step's operations."""
    x, weight = drawn(64, 512, dtype=dtype), drawn(512, dtype=dtype, seed=1)
    exact = normed(x, weight, 1e-5)
    mine, other = (
        (ops.add_rms_norm(x, None, weight, 1e-5).double() - exact).abs().mean()
        for ops in (CpuLayers(), LayerOps())
    )
    assert mine <= 2 * other


def rope_arguments(**change):
    """Valid arguments of `rope_write`, some of them replaced."""
    heads = Heads(2, 1, 8)
    arguments = {
        "qkv": torch.zeros(3, 32),
        "heads": heads,
        "angles": Angles(torch.zeros(3, 4), torch.zeros(3, 4)),
        "slots": torch.tensor([0, 5, 7]),
        "k_pages": torch.zeros(2, 4, 1, 8),
        "v_pages": torch.zeros(2, 4, 1, 8),
    }
    return {**arguments, **change}


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"slots": torch.tensor([0, 5, 8])}, ConfigError),
        ({"slots": torch.tensor([0, -1, 7])}, ConfigError),
        ({"slots": torch.tensor([0, 5])}, ConfigError),
        ({"slots": torch.tensor([0, 5, 7], dtype=torch.int32)}, ConfigError),
        ({"qkv": torch.zeros(3, 40)}, ConfigError),
        ({"qkv": torch.zeros(3, 64)[:, :32]}, ConfigError),
        ({"qkv": torch.zeros(3, 32, dtype=torch.float64)}, UnsupportedError),
        ({"k_pages": torch.zeros(2, 4, 1, 8, dtype=torch.bfloat16)}, UnsupportedError),
        ({"v_pages": torch.zeros(2, 4, 1, 16)}, ConfigError),
        ({"angles": Angles(torch.zeros(3, 4), torch.zeros(3, 8))}, ConfigError),
        ({"heads": Heads(2, 1, 8, torch.zeros(4), torch.zeros(8))}, ConfigError),
        (
            {
                "qkv": torch.zeros(3, 32, dtype=torch.bfloat16),
                "k_pages": torch.zeros(2, 4, 1, 8, dtype=torch.bfloat16),
                "v_pages": torch.zeros(2, 4, 1, 8, dtype=torch.bfloat16),
                "heads": Heads(2, 1, 8, torch.zeros(8), torch.zeros(8, dtype=torch.bfloat16)),
            },
            ConfigError,
        ),
        ({"heads": Heads(2, 1, 8, value_is_key=True)}, ConfigError),
        ({"slots": torch.zeros(3, dtype=torch.int64, device="meta")}, ConfigError),
        ({"angles": Angles(torch.zeros(3, 4), torch.zeros(3, 4, device="meta"))}, ConfigError),
        ({"qkv": torch.zeros(3, 32, device="meta")}, UnsupportedError),
        ({"v_pages": torch.zeros(2, 4, 1, 8, device="meta")}, UnsupportedError),
        (
            {"heads": Heads(2, 1, 8, torch.zeros(8), torch.zeros(8, device="meta"))},
            UnsupportedError,
        ),
    ],
)
def test_what_would_read_or_write_elsewhere_is_refused(change, error):
    CpuLayers().rope_write(**rope_arguments())
    with pytest.raises(error):
        CpuLayers().rope_write(**rope_arguments(**change))


def test_misshapen_rows_are_refused():
    ops, x = CpuLayers(), torch.zeros(2, 8)
    with pytest.raises(ConfigError, match="expected"):
        ops.add_rms_norm(x, torch.zeros(1, 8), torch.zeros(8), 1e-5)
    with pytest.raises(ConfigError, match="expected"):
        ops.add_rms_norm(x, None, torch.zeros(7), 1e-5)
    with pytest.raises(ConfigError, match="contiguous"):
        ops.silu_mul(torch.zeros(2, 16)[:, :8])


def test_a_tensor_elsewhere_is_refused():
    """Its address is none: what it adds would be left out without a word."""
    ops, x, weight = CpuLayers(), torch.ones(2, 8), torch.ones(8)
    for delta, scale in ((x.to("meta"), weight), (x.clone(), weight.to("meta"))):
        with pytest.raises(UnsupportedError, match="on meta, expected"):
            ops.add_rms_norm(x, delta, scale, 1e-5)
    assert torch.equal(x, torch.ones(2, 8))


def test_results_stand_where_rows_do_whatever_the_default_device():
    ops, arguments, x = CpuLayers(), rope_arguments(), torch.ones(2, 8)
    with torch.device("meta"):
        made = [
            ops.rope_write(**arguments),
            ops.silu_mul(x),
            ops.add_rms_norm(x, None, x[0].contiguous(), 1e-5),
        ]
    assert {tensor.device.type for tensor in made} == {"cpu"}
