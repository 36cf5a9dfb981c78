"""Triton's products with what GGUF's blocks have: minimums, two levels, tables, groups of 16."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from onestem.models.formats.held import Groups, Levels, of_columns
from onestem.models.formats.products import GpuGroups, Target
from onestem.models.gguf.blocks import groups_of_blocks
from onestem.models.gguf.file import BLOCKS
from onestem.models.linear import Layout, held_tensors
from onestem.ops.triton.layers import TritonLayers
from onestem.ops.triton.tiled import Tiles
from onestem.ops.triton.tiled_groups import TiledGroups

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
UNEVEN = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# Rows, tiles, and whether there is a bias.
WAYS = ((1, None, True), (17, Tiles(64, 32, 2), False))


class Random:
    """Random weights in groups, as blocks of a type have them."""

    def __init__(self, out: int, size: int, group: int) -> None:
        self.generator = torch.Generator().manual_seed(out + group)
        self.out, self.size, self.group = out, size, group

    def whole(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator)

    def codes(self, bits: int) -> Tensor:
        return self.whole(0, 1 << bits, self.out, self.size).to(torch.uint8)

    def halves(self, each: int = 1) -> Tensor:
        shape = (self.out, self.size // self.group // each)
        return ((torch.rand(shape, generator=self.generator) + 0.5) / 16).half()

    def levels(self, low: int, high: int, each: int, dtype: torch.dtype) -> Levels:
        parts = self.whole(low, high, self.out, self.size // self.group).to(dtype)
        return Levels(parts, self.halves(each), each)

    def zeros(self, zero: int) -> Tensor:
        return torch.full((self.out, self.size // self.group), zero, dtype=torch.int16)


def q4_0(out: int, size: int) -> Groups:
    r = Random(out, size, 32)
    return Groups(r.codes(4), r.halves(), r.zeros(8), 32, 4)


def q4_1(out: int, size: int) -> Groups:
    r = Random(out, size, 32)
    return Groups(r.codes(4), r.halves(), None, 32, 4, minimums=-8 * r.halves())


def q8_0(out: int, size: int) -> Groups:
    r = Random(out, size, 32)
    return Groups(r.codes(8), r.halves(), r.zeros(128), 32)


def q5_0(out: int, size: int) -> Groups:
    r = Random(out, size, 32)
    return Groups(r.codes(5), r.halves(), r.zeros(16), 32)


def q5_1(out: int, size: int) -> Groups:
    r = Random(out, size, 32)
    return Groups(r.codes(5), r.halves(), None, 32, minimums=-16 * r.halves())


def of_levels(bits: int) -> Callable[[int, int], Groups]:
    def made(out: int, size: int) -> Groups:
        r = Random(out, size, 32)
        scales, least = (r.levels(0, 64, 8, torch.uint8) for _ in range(2))
        least = Levels(least.parts, -8 * least.supers, 8)
        return Groups(r.codes(bits), scales, None, 32, 4 if bits == 4 else 8, minimums=least)

    return made


def q6_k(out: int, size: int) -> Groups:
    r = Random(out, size, 16)
    return Groups(r.codes(6), r.levels(-128, 128, 16, torch.int8), r.zeros(32), 16)


def mxfp4(out: int, size: int) -> Groups:
    r = Random(out, size, 32)
    powers = r.whole(-9, 0, out, size // 32)
    scales = torch.exp2(powers.float()).bfloat16()
    return Groups(r.codes(4), scales, None, 32, 4, table=E2M1)


def uneven(out: int, size: int) -> Groups:
    r = Random(out, size, 32)
    return Groups(r.codes(4), r.halves(), None, 32, 4, table=UNEVEN)


KINDS: dict[str, Callable[[int, int], Groups]] = {
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q5_0": q5_0,
    "Q5_1": q5_1,
    "Q8_0": q8_0,
    "Q4_K": of_levels(4),
    "Q5_K": of_levels(5),
    "Q6_K": q6_k,
    "MXFP4": mxfp4,
    "uneven": uneven,
}


def exact(weight: Groups) -> tuple[Tensor, Tensor]:
    """What a weight stands for, in float64, and the sum of its terms' magnitudes."""

    def wide(numbers: Tensor | Levels | None) -> Tensor:
        if numbers is None:
            return torch.zeros(())
        if isinstance(numbers, Levels):
            above = numbers.supers.double().repeat_interleave(numbers.each, 1)
            numbers = numbers.parts.double() * above
        return numbers.double().repeat_interleave(weight.group, 1)[:, : weight.codes.shape[1]]

    value = weight.codes.double()
    if weight.table is not None:
        value = torch.tensor(weight.table).double()[weight.codes.long()]
    scaled, least = (value - wide(weight.zeros)) * wide(weight.scales), wide(weight.minimums)
    return scaled + least, scaled.abs() + least.abs()


def moved(weight: Groups) -> Groups:
    """To the device."""

    def move(one: Any) -> Any:
        if isinstance(one, Levels):
            return replace(one, parts=move(one.parts), supers=move(one.supers))
        return one.to(DEVICE) if isinstance(one, Tensor) else one

    named = {field.name: move(getattr(weight, field.name)) for field in fields(weight)}
    return Groups(**named)


def check(weight: Groups, dtype: torch.dtype = torch.float16) -> GpuGroups:
    """Products and the weight written out, against float64."""
    truth, terms = exact(weight)
    assert TiledGroups.takes(weight.codes.shape[1], weight.group, weight.bits)
    generator = torch.Generator().manual_seed(1)
    bias = torch.randn(len(truth), generator=generator).to(DEVICE, dtype)
    product = GpuGroups(moved(weight), bias, Target(dtype, DEVICE, Layout.PLAIN))
    eps = torch.finfo(dtype).eps
    dense = product.packed.dense(dtype).double().cpu()
    assert ((dense - truth).abs() <= eps * truth.abs() + 2**-22 * terms).all()
    for rows, tiles, with_bias in WAYS:
        x = torch.randn(rows, truth.shape[1], generator=generator).to(DEVICE, dtype)
        wanted = x.double().cpu() @ truth.t() + with_bias * bias.double().cpu()
        sums = x.double().cpu().abs() @ terms.t() * 2**-20  # of float32
        y = product.packed.product(x, bias if with_bias else None, tiles)
        assert ((y.double().cpu() - wanted).abs() <= eps * wanted.abs() + sums).all()
    return product


@pytest.mark.parametrize("name", KINDS)
def test_blocks_are_multiplied(name: str) -> None:
    check(KINDS[name](40, 512))


@pytest.mark.parametrize("kind", sorted(BLOCKS))
def test_blocks_of_files_are_written_out(kind: str) -> None:
    columns, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    # Numbers of 16 bits are finite, and powers of two normal.
    rows = np.random.default_rng(0).integers(2, 64, (70, 512 // columns * size), np.uint8)
    weight = groups_of_blocks(kind, rows)
    product = GpuGroups(moved(weight), None, Target(torch.float16, DEVICE, Layout.PLAIN))
    truth, terms = exact(weight)
    off = product.packed.dense(torch.float32).double().cpu() - truth
    assert (off.abs() <= 2**-23 * terms).all()


@pytest.mark.parametrize(
    ("name", "span", "group", "chunks"),
    [
        ("Q4_K", (256, 512), 32, 2),
        ("Q4_K", (128, 512), 32, 1),  # half of a super-block
        ("Q4_K", (96, 256), 32, 0),  # a chunk has groups of two
        ("Q4_K", (16, 272), 16, 0),  # no planes of words: 8 bits
        ("Q6_K", (192, 512), 16, 1),
        ("Q4_1", (32, 224), 32, 0),
        ("MXFP4", (48, 240), 16, 0),
        ("MXFP4", (32, 288), 32, 0),
    ],
)
def test_a_rank_s_columns(name: str, span: tuple[int, int], group: int, chunks: int) -> None:
    whole = KINDS[name](40, 512)
    codes = whole.codes[:, slice(*span)].contiguous()
    part = of_columns(replace(whole, codes=codes), span, 512)
    assert part.group == group
    assert torch.equal(part.dense(), whole.dense()[:, slice(*span)])
    packing = check(part).packed.packing
    assert packing.span == chunks
    assert packing.bits == (8 if name == "Q6_K" or group < 32 else 4)


@pytest.mark.parametrize(
    ("name", "file"), [("Q4_0", 18), ("Q4_1", 20), ("Q8_0", 34), ("Q4_K", 18), ("MXFP4", 17)]
)
def test_bytes_of_blocks(name: str, file: int) -> None:
    """Those of 32 codes, in the file and here."""
    product = GpuGroups(KINDS[name](64, 2560), None, Target(torch.float16, DEVICE, Layout.PLAIN))
    held = sum(tensor.nbytes for tensor in held_tensors(product))
    assert 64 * 80 * file <= held <= 1.06 * 64 * 80 * file


@pytest.mark.skipif(DEVICE.type == "cpu", reason="Gluon needs a GPU")
@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q4_K"])
def test_gated_row_of_blocks(name: str) -> None:
    product = check(KINDS[name](384, 2560), torch.bfloat16)
    x = torch.randn(1, 2560, device=DEVICE, dtype=torch.bfloat16)
    assert product.packed.takes_gated_row(x)
    both = product.packed.product(x, product.bias)
    gated = product.packed.gated_row(x, product.bias, "silu")
    assert torch.equal(gated, TritonLayers().silu_mul(both))
