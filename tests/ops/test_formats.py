"""Triton's products with quantised weights against float64, and rows rounded to 8 bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from onestem.ops.dispatch import resolve_rounding
from onestem.ops.rounding import LARGEST, rounded_rows
from onestem.ops.triton.formats import PackedGroups, Tiles
from onestem.ops.triton.formats import rounded_rows as by_kernel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WAYS = ((None, True), (Tiles(16, 32, 1), False), (Tiles(32, 16, 2), True))


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _weight(bits: int, group: int, size: int, out: int, zeros: bool) -> tuple[PackedGroups, Tensor]:
    """Random codes, and what they stand for in float64."""
    generator = torch.Generator().manual_seed(group)
    shape = (out, -(-size // group))
    codes = torch.randint(0, 1 << bits, (out, size), generator=generator).to(torch.uint8)
    scales = torch.rand(shape, generator=generator) + 0.5
    zero = torch.full(shape, 1 << (bits - 1), dtype=torch.int16)
    if zeros:
        zero = torch.randint(0, (1 << bits) + 1, shape, generator=generator).to(torch.int16)
    wide = [one.double().repeat_interleave(group, 1)[:, :size] for one in (zero, scales)]
    assert PackedGroups.takes(size, group, bits)
    packed = PackedGroups.of(*(one.to(DEVICE) for one in (codes, scales, zero)), group, bits)
    assert (packed.zero < 0) == zeros
    return packed, (codes.double() - wide[0]) * wide[1]


def _check(packed: PackedGroups, weight: Tensor, dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    dense = packed.dense(dtype).double().cpu()
    assert ((dense - weight).abs() <= eps * weight.abs() + 1e-6).all()
    bias = _random(len(weight), seed=1).to(DEVICE, dtype)
    for rows in (0, 1, 17):
        x = _random(rows, weight.shape[1], seed=2).to(DEVICE, dtype)
        exact = x.double().cpu() @ weight.t()
        sums = (x.double().cpu().abs() @ weight.abs().t()) * 2**-20  # of float32
        for tiles, with_bias in WAYS:
            truth = exact + with_bias * bias.double().cpu()
            y = packed.product(x, bias if with_bias else None, tiles)
            assert y.dtype == dtype
            assert ((y.double().cpu() - truth).abs() <= eps * truth.abs() + sums).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("zeros", [False, True])
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


def test_float8_in_groups() -> None:
    codes = (8 * _random(40, 320)).to(torch.float8_e4m3fn)
    scales = torch.rand(40, 3, generator=torch.Generator().manual_seed(1))
    packed = PackedGroups.of(codes.to(DEVICE), scales.to(DEVICE), None, 128, 8)
    wide = scales.double().repeat_interleave(128, 1)[:, :320]
    _check(packed, codes.double() * wide, torch.float16)


def test_widths_that_are_not_packed() -> None:
    assert not PackedGroups.takes(192, 64, 4)  # one and a half chunks
    assert not PackedGroups.takes(80, 40, 4)
    assert not PackedGroups.takes(80, 40, 8)
    assert PackedGroups.takes(192, 64, 8)


def test_tiles_cover_few_rows_with_many_programs() -> None:
    packed, _ = _weight(4, 128, 4096, 16, False)
    few, many = packed.tiles(1, 132), packed.tiles(4096, 132)
    assert (few.rows, many.rows) == (16, 128)
    assert few.split > packed.tiles(1, 1).split
    assert few.split * 4 <= 4096 // 128  # four chunks each at least


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
