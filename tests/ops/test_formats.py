"""Triton's products with quantised weights against float64, and rows rounded to 8 bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from onestem.ops.dispatch import resolve_rounding
from onestem.ops.rounding import LARGEST, RoundedRows, rounded_rows, row_tops
from onestem.ops.triton import tiled
from onestem.ops.triton.layers import TritonLayers
from onestem.ops.triton.rounding import rounded_rows as by_kernel
from onestem.ops.triton.tiled import TiledChannels, divided
from onestem.ops.triton.tiled_groups import TiledGroups
from tests.soak import one_in

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Tiles, and whether there is a bias.
WAYS = ((None, True), (tiled.Tiles(64, 16, 1), False), (tiled.Tiles(128, 32, 3), True))


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _weight(bits: int, group: int, size: int, out: int, zeros: bool) -> tuple[TiledGroups, Tensor]:
    """Random codes, and what they stand for in float64."""
    generator = torch.Generator().manual_seed(group)
    shape = (out, -(-size // group))
    codes = torch.randint(0, 1 << bits, (out, size), generator=generator).to(torch.uint8)
    scales = torch.rand(shape, generator=generator) + 0.5
    zero = torch.full(shape, 1 << (bits - 1), dtype=torch.int16)
    if zeros:
        zero = torch.randint(0, (1 << bits) + 1, shape, generator=generator).to(torch.int16)
    wide = [one.double().repeat_interleave(group, 1)[:, :size] for one in (zero, scales)]
    assert TiledGroups.takes(size, group, bits)
    packed = TiledGroups.of(*(one.to(DEVICE) for one in (codes, scales, zero)), None, group, bits)
    assert (packed.packing.zero < 0) == zeros
    return packed, (codes.double() - wide[0]) * wide[1]


def _check(packed: TiledGroups, weight: Tensor, dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    dense = packed.dense(dtype).double().cpu()
    assert ((dense - weight).abs() <= eps * weight.abs() + 1e-6).all()
    bias = _random(len(weight), seed=1).to(DEVICE, dtype)
    for rows in (0, 1, 5, 17):
        x = _random(rows, weight.shape[1], seed=2).to(DEVICE, dtype)
        exact = x.double().cpu() @ weight.t()
        sums = (x.double().cpu().abs() @ weight.abs().t()) * 2**-20  # of float32
        for tiles, with_bias in WAYS:
            truth = exact + with_bias * bias.double().cpu()
            y = packed.product(x, bias if with_bias else None, tiles)
            assert y.dtype == dtype
            assert ((y.double().cpu() - truth).abs() <= eps * truth.abs() + sums).all()


@pytest.mark.parametrize(
    ("dtype", "zeros"), one_in(2, (torch.float16, torch.float32), (False, True)), ids=str
)
@pytest.mark.parametrize(
    ("bits", "group", "size", "out"),
    [
        (4, 128, 256, 40),
        (4, 64, 384, 33),
        (4, 32, 192, 48),
        (4, 256, 256, 16),
        (8, 128, 320, 40),  # a last group of 64
        (8, 32, 96, 17),
        (8, 100, 100, 20),
    ],
)
def test_groups_are_multiplied(
    bits: int, group: int, size: int, out: int, zeros: bool, dtype: torch.dtype
) -> None:
    _check(*_weight(bits, group, size, out, zeros), dtype)


@pytest.mark.parametrize(("bits", "group", "size"), [(4, 96, 192), (4, 200, 200), (4, 128, 384)])
def test_tiled_groups_take_odd_widths(bits: int, group: int, size: int) -> None:
    """Those that are no multiple of a chunk, and groups that end within one."""
    _check(*_weight(bits, group, size, 70, True), torch.float16)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="Gluon needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(
    ("group", "size", "out"),
    [
        (128, 4096, 4300),  # a tile or two of each program
        (128, 14336, 96),  # an odd number of turns
        (32, 1032, 13000),  # a chunk that is not full; more tiles than programs
        (4096, 4096, 1024),  # a scale per output
        (64, 264, 40),
        (64, 128, 34_000),  # more than 8 tiles for a program
    ],
)
def test_one_row(group: int, size: int, out: int, zeros: bool, dtype: torch.dtype) -> None:
    packed, weight = _weight(4, group, size, out, zeros)
    x = _random(1, size, seed=2).to(DEVICE, dtype)
    assert packed.takes_one_row(x)
    bias = _random(out, seed=1).to(DEVICE, dtype)
    truth = x.double() @ weight.t().to(DEVICE)
    sums = (x.double().abs() @ weight.abs().t().to(DEVICE)) * 2**-20  # of float32
    for added in (bias, None):
        exact = truth if added is None else truth + added.double()
        y = packed.product(x, added)
        assert ((y.double() - exact).abs() <= torch.finfo(dtype).eps * exact.abs() + sums).all()
        assert torch.equal(y, packed.product(x, added))


@pytest.mark.skipif(DEVICE.type == "cpu", reason="Gluon needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("size", "out"), [(14336, 128), (520, 384), (128, 34_048)])
def test_gated_row(size: int, out: int, zeros: bool, dtype: torch.dtype) -> None:
    packed, _ = _weight(4, 128, size, out, zeros)
    x, bias = _random(1, size, seed=2).to(DEVICE, dtype), _random(out, seed=1).to(DEVICE, dtype)
    assert packed.takes_gated_row(x)
    for added in (bias, None):
        both = packed.product(x, added)
        assert torch.equal(packed.gated_row(x, added, "silu"), TritonLayers().silu_mul(both))
        assert torch.equal(packed.gated_row(x, added, "gelu"), TritonLayers().gelu_mul(both))


def test_float8_in_groups() -> None:
    codes = (8 * _random(40, 320)).to(torch.float8_e4m3fn)
    scales = torch.rand(40, 3, generator=torch.Generator().manual_seed(1))
    packed = TiledGroups.of(codes.to(DEVICE), scales.to(DEVICE), None, None, 128, 8)
    wide = scales.double().repeat_interleave(128, 1)[:, :320]
    _check(packed, codes.double() * wide, torch.float16)


@pytest.mark.parametrize("has_nan", [False, True])
def test_every_float8_of_one_group(has_nan: bool) -> None:
    """All values, and NaN, which the instructions of their own do not know."""
    values = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float()
    codes = (values if has_nan else values.nan_to_num(0)).to(torch.float8_e4m3fn).repeat(70, 1)
    scales = torch.rand(70, 1, generator=torch.Generator().manual_seed(1))
    packed = TiledGroups.of(codes.to(DEVICE), scales.to(DEVICE), None, None, 256, 8)
    assert packed.packing.asm == (DEVICE.type == "cuda" and not has_nan)
    assert packed.scales.numel() == 128  # once for each row of two blocks
    dense, known = packed.dense(torch.float32).cpu(), ~codes.float().isnan()
    assert torch.equal(dense[known], (codes.float() * scales)[known])
    if DEVICE.type == "cuda":  # the interpreter has no NaN of float8
        assert bool(dense[~known].isnan().all())


def test_widths_that_are_not_packed() -> None:
    assert not TiledGroups.takes(80, 40, 4)
    assert not TiledGroups.takes(80, 40, 8)
    assert TiledGroups.takes(192, 64, 4)


def test_parts_of_tiled_products() -> None:
    """Enough programs for a device, none without columns, and those of one tile count up alike."""
    packed, _ = _weight(4, 128, 4096, 64, False)
    assert packed.tiles(9, 132).split == 8  # 512 columns each
    assert packed.tiles(9, 1).split == 4
    many = packed.tiles(4096, 132)
    assert (many.out, many.rows, many.split) == (64, 64, 4)
    assert divided(packed, tiled.Tiles(64, 16, 6), 1, 1).split == 6  # of 16 chunks: 3 each, 1 last
    assert divided(packed, tiled.Tiles(64, 16, 5), 1, 1).split == 4
    x = _random(2, 4096).to(DEVICE, torch.float16)
    first = packed.product(x, None)
    assert torch.equal(first, packed.product(x, None))
    assert torch.equal(first[:1], packed.product(x[:1], None))
    assert not packed.counters.any()


def test_scales_are_kept_in_16_bits_where_nothing_is_lost() -> None:
    codes, zeros = torch.zeros(2, 32, dtype=torch.uint8), None
    for value, dtype in ((0.5, torch.bfloat16), (1 + 2**-10, torch.float16), (0.1, torch.float32)):
        packed = TiledGroups.of(codes, torch.full((2, 1), value), zeros, None, 32, 4)
        assert packed.scales.dtype == dtype
        assert packed.scales[0, 0, 0, :2].tolist() == [torch.tensor(value).item()] * 2


@pytest.mark.parametrize(("size", "out"), [(256, 40), (144, 130)])
@pytest.mark.parametrize("dtype", LARGEST)
def test_tiled_channels(dtype: torch.dtype, size: int, out: int) -> None:
    weight, x = (rounded_rows(_random(rows, size, seed=rows), dtype) for rows in (out, 33))
    layer = TiledChannels(weight.codes.to(DEVICE), weight.scales[:, 0].to(DEVICE))
    bias = _random(out, seed=1).to(DEVICE, torch.float16)
    wide, rows = (one.codes.double() * one.scales.double() for one in (weight, x))
    exact = rows @ wide.t()
    # float8 is added up with 13 bits, or in the interpreter in float32.
    sums = (rows.abs() @ wide.abs().t()) * (2**-11 if dtype != torch.int8 else 2**-22)
    whole = RoundedRows(*(one.to(DEVICE) for one in x))
    for num in (0, 1, 33):
        some = RoundedRows(*(one[:num] for one in whole))
        for tiles in (None, tiled.Tiles(64, 16, 1), tiled.Tiles(128, 32, 2)):
            truth = exact[:num] + bias.double().cpu() * (tiles is None)
            y = layer.product(some, bias if tiles is None else None, torch.float16, tiles)
            off = (y.double().cpu() - truth).abs()
            assert (off <= 2**-11 * truth.abs() + sums[:num] + 1e-6).all()
    assert not layer.counters.any()
    many = layer.tiles(8192, 132)
    assert many.split == 1


@pytest.mark.parametrize("dtype", LARGEST)
def test_rows_are_rounded_by_their_own_maximum(dtype: torch.dtype) -> None:
    x = 3 * _random(12, 100)
    x[3], x[4] = 0, 1e-3 * x[4]
    codes, scales = rounded_rows(x, dtype)
    assert codes.dtype == dtype
    assert scales[3] == 1
    assert codes.float().abs().amax(1)[[0, 4]].tolist() == [LARGEST[dtype]] * 2
    value = codes.double() * scales.double()
    step = scales.double() / 2 if dtype == torch.int8 else x.double().abs() / 16 + scales / 512
    assert ((value - x.double()).abs() <= 1.0001 * step).all()
    for row in range(12):
        alone = rounded_rows(x[row : row + 1], dtype)
        assert torch.equal(alone.codes.float()[0], codes.float()[row])
    assert rounded_rows(x[:0], dtype).codes.shape == (0, 100)
    tops = torch.cat([row_tops(x[:, :30]), row_tops(x[:, 30:])], dim=1)
    part = rounded_rows(x[:, 30:], dtype, tops)
    assert torch.equal(part.codes.float(), codes[:, 30:].float())
    assert torch.equal(part.scales, scales)
    assert resolve_rounding(torch.device("cpu")) is rounded_rows


@pytest.mark.parametrize("dtype", LARGEST)
def test_the_kernel_rounds_likewise(dtype: torch.dtype) -> None:
    x = 3 * _random(12, 100)
    if dtype == torch.float8_e4m3fn:
        # The interpreter rounds 1.97 * 2 ** k to 1.0 * 2 ** k: values that need no rounding.
        x = (20 * x).to(dtype).float()
        x[:, 0] = LARGEST[dtype]
    x[3] = 0
    one, other = rounded_rows(x, dtype), by_kernel(x.to(DEVICE), dtype)
    assert torch.equal(one.codes.float(), other.codes.float().cpu())
    assert torch.equal(one.scales, other.scales.cpu())
    assert by_kernel(x[:0].to(DEVICE), dtype).codes.shape == (0, 100)
