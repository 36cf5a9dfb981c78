"""Experts' products with weights in fewer bits, weights on the left.

Codes become 16 bits in the registers that tensor cores read, exactly: codes in groups less their
zero points, whose sums are scaled in float32, or mxfp4 times its scales. Rows of gate and up
alternate by eights, so that one tile has both for the same outputs, and one loop (`_sums`) serves
both products. The rest is as in `onestem.ops.triton.experts`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from onestem.ops.experts import E2M1, MX_BLOCK, Beside
from onestem.ops.triton.experts import (
    bias_of,
    choose_tiles,
    constants,
    expert_tile,
    gated,
    sort_rows,
    summed,
    tile_grid,
)
from onestem.ops.triton.tiled import Packing, Tiles, fitting, in_blocks, in_words
from onestem.ops.triton.tiled_groups import Numbers, TiledGroups, sums_of

_ROWS = tl.constexpr(64)  # adjacent rows of a weight
_PLANE = tl.constexpr(MX_BLOCK)  # columns of mxfp4 that share a scale and a place in words
_EIGHT = 8  # rows of gate, and after them of up


# As those of `experts`; `up` has outputs of both its weights. Not timed yet.
_MX_TILES = (
    (10, Tiles(128, 16), Tiles(64, 16, stages=5)),
    (24, Tiles(128, 32, stages=3), Tiles(64, 32)),
    (56, Tiles(128, 64, stages=3), Tiles(128, 64, warps=8, stages=3)),
    (math.inf, Tiles(256, 64, warps=8, stages=3), Tiles(128, 128, warps=8, stages=3)),
)
_FEW = (10, Tiles(64, 16), Tiles(64, 16)), (24, Tiles(64, 32), Tiles(64, 32))
_SQUARE, _LARGE = Tiles(64, 64, stages=3), Tiles(128, 128, warps=8, stages=3)
# By the bits of a number: an unpacked tile of four bits serves more rows.
_TILES = {
    4: (*_FEW, (128, _SQUARE, _SQUARE), (math.inf, _LARGE, _LARGE)),
    8: (*_FEW, (56, _SQUARE, _SQUARE), (math.inf, Tiles(128, 64), Tiles(128, 64))),
}


def _widening() -> tuple[str, ...]:
    """PTX for each of four places in two words (`$1`): moves a sign and three bits to bfloat16's
    sign and end of exponent (2 ** -126 of the value), and multiplies by a scale (`$2`)."""
    return tuple(
        f"{{ .reg .b32 t, s, z; {shift} t, $1, {abs(6 - 4 * place)}; shl.b32 s, t, 6; "
        "and.b32 t, t, 0x01c001c0; lop3.b32 t, s, 0x80008000, t, 0xea; "
        "mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, t, $2, z; }"
        for place, shift in enumerate(("shl.b32", "shl.b32", "shr.u32", "shr.u32"))
    )


_WIDEN = tl.constexpr(_widening())


@triton.jit
def _e2m1(word):
    """The e2m1 value (sign, two bits of exponent, one of mantissa) in the lowest bits of int32,
    times 2 ** -126. The bits become the lowest exponents of float32, with 0 and 0.5 among its
    subnormal numbers."""
    bits = (word << 22) & 0x01C00000 | (word << 28) & -2147483648
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _widened(word, powers, dtype: tl.constexpr, ASM: tl.constexpr, PLACE: tl.constexpr):
    """Values at a place in words `[BLOCK_N, _PLANE]`, times the scale of this place."""
    power = (powers >> (8 * PLACE)) & 255
    if ASM and dtype == tl.bfloat16:
        scale = ((power + 126) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)[:, None]
        value = tl.inline_asm_elementwise(
            _WIDEN[PLACE], "=r,r,r", [word, scale], tl.bfloat16, is_pure=True, pack=2
        )
    else:
        scale = ((power + 126) << 23).to(tl.float32, bitcast=True)[:, None]
        value = (_e2m1(word.to(tl.int32) >> (4 * PLACE)) * scale).to(dtype)
    return value


@triton.jit
def _sums(
    x_at, inside, codes, scales, others, inputs, expert, n, blocks, chunks, size,
    dtype: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, PACKING: tl.constexpr,
    MX: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    """Sums [BLOCK_N, BLOCK_M] of an expert's outputs n over all columns of rows that begin at
    x_at."""
    block = expert.to(tl.int64) * blocks + tl.minimum(n // _ROWS, blocks - 1)
    if MX:
        total = _mx_sums(
            x_at, inside, codes, scales, block, n, chunks, size, dtype, BLOCK_N, BLOCK_M, PACKING
        )
    else:
        total = sums_of(
            x_at, inside, codes, scales, others, inputs + expert * (chunks * PACKING.columns),
            block, n, 0, chunks, chunks, size, dtype, BLOCK_N, BLOCK_M, PACKING, ORDERED,
        )  # fmt: skip
    return total


@triton.jit
def _mx_sums(
    x_at, inside, codes, powers, block, n, chunks, size, dtype: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, PACKING: tl.constexpr,
):  # fmt: skip
    """`sums_of` of mxfp4, whose scales are exact in 16 bits."""
    j = tl.arange(0, _PLANE)
    line = block * chunks
    code_at = codes + (line * (_ROWS * _PLANE) + n % _ROWS * _PLANE)[:, None] + j[None, :]
    power_at = powers + line * _ROWS + n % _ROWS
    row_at = x_at[None, :] + j[:, None]
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for chunk in range(chunks):
        word = tl.load(code_at + chunk * (_ROWS * _PLANE))
        power = tl.load(power_at + chunk * _ROWS)
        for place in tl.static_range(4):
            column = (4 * chunk + place) * _PLANE
            mask = inside[None, :]
            if not PACKING.even:
                mask = mask & (column + j < size)[:, None]
            right = tl.load(row_at + column, mask=mask, other=0.0)
            left = _widened(word, power, dtype, PACKING.asm, place)
            total = tl.dot(left, right, total, input_precision="ieee")
    return total


@triton.jit
def _up_kernel(
    x, order, ends, codes, scales, others, inputs, bias, out, num, top_k, hidden, inner, blocks,
    chunks, size, alpha, limit, CLAMPED: tl.constexpr, GELU: tl.constexpr,
    PACKING: tl.constexpr, MX: tl.constexpr, ORDERED: tl.constexpr,
    BIAS: tl.constexpr, BLOCK_E: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    BLOCK_M: tl.constexpr = TILES.rows
    BLOCK_N: tl.constexpr = TILES.out
    expert, first, end = expert_tile(ends, tl.program_id(1), num, BLOCK_E, BLOCK_M)
    if expert < num:
        place = first + tl.arange(0, BLOCK_M)
        inside = place < end
        row = tl.load(order + place, mask=inside, other=0) // top_k
        total = _sums(
            x + row.to(tl.int64) * hidden, inside, codes, scales, others, inputs,
            expert, tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), blocks, chunks,
            size, x.dtype.element_ty, BLOCK_N, BLOCK_M, PACKING, MX, ORDERED,
        )  # fmt: skip
        total = tl.permute(tl.reshape(total, [BLOCK_N // 16, 2, 8, BLOCK_M]), [0, 2, 3, 1])
        gate, up = tl.split(total)
        gate = tl.reshape(gate, [BLOCK_N // 2, BLOCK_M])
        up = tl.reshape(up, [BLOCK_N // 2, BLOCK_M])
        n = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        in_n = n < inner
        if BIAS:
            line = bias + 2 * expert.to(tl.int64) * inner + n
            gate += tl.load(line, mask=in_n, other=0.0).to(tl.float32)[:, None]
            up += tl.load(line + inner, mask=in_n, other=0.0).to(tl.float32)[:, None]
        value = gated(gate, up, alpha, limit, CLAMPED, GELU)
        to = out + place.to(tl.int64)[None, :] * inner + n[:, None]
        tl.store(to, value.to(out.dtype.element_ty), mask=inside[None, :] & in_n[:, None])


@triton.jit
def _down_kernel(
    x, order, ends, codes, scales, others, inputs, bias, factors, out, num, inner, hidden, blocks,
    chunks, size, PACKING: tl.constexpr, MX: tl.constexpr,
    ORDERED: tl.constexpr, BIAS: tl.constexpr, BLOCK_E: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    BLOCK_M: tl.constexpr = TILES.rows
    BLOCK_N: tl.constexpr = TILES.out
    expert, first, end = expert_tile(ends, tl.program_id(1), num, BLOCK_E, BLOCK_M)
    if expert < num:
        place = first + tl.arange(0, BLOCK_M)
        inside = place < end
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        in_n = n < hidden
        total = _sums(
            x + place.to(tl.int64) * inner, inside, codes, scales, others, inputs,
            expert, n, blocks, chunks, size, x.dtype.element_ty, BLOCK_N, BLOCK_M,
            PACKING, MX, ORDERED,
        )  # fmt: skip
        if BIAS:
            line = bias + expert.to(tl.int64) * hidden + n
            total += tl.load(line, mask=in_n, other=0.0).to(tl.float32)[:, None]
        row = tl.load(order + place, mask=inside, other=0)
        total *= tl.load(factors + row, mask=inside, other=0.0)[None, :]
        to = out + row.to(tl.int64)[None, :] * hidden + n[:, None]
        tl.store(to, total.to(out.dtype.element_ty), mask=inside[None, :] & in_n[:, None])


class Coded(Protocol):
    """An expert's weight in codes, as `Groups` of `onestem.models.formats.held`; of gate and up,
    gate first."""

    @property
    def codes(self) -> Tensor:
        """`[rows, columns]`; this and the others: see `TiledGroups.of`."""

    @property
    def scales(self) -> Numbers:
        """`[rows, groups]`."""

    @property
    def zeros(self) -> Tensor | None:
        """`[rows, groups]`."""

    @property
    def minimums(self) -> Numbers | None:
        """`[rows, groups]`."""

    @property
    def group(self) -> int:
        """Columns of a group."""

    @property
    def bits(self) -> int:
        """Of a code."""

    @property
    def table(self) -> tuple[int, ...] | None:
        """What codes stand for."""

    @property
    def order(self) -> Tensor | None:
        """int64 `[columns]`: the input of each column; None: they are in order."""

    def rows(self, at: Tensor) -> Coded:
        """The rows `at` (int64)."""


class _Matrix(NamedTuple):
    """An expert's weight in blocks; see `_Packed`."""

    codes: Tensor
    scales: Tensor
    others: Tensor
    packing: Packing

    @staticmethod
    def of(weight: Coded) -> _Matrix:
        if weight.table == E2M1 and weight.group == MX_BLOCK:
            return _Matrix.of_mx(weight)
        numbers = weight.scales, weight.zeros, weight.minimums
        tiled = TiledGroups.of(weight.codes, *numbers, weight.group, weight.bits, weight.table)
        return _Matrix(tiled.codes, tiled.scales, tiled.others, tiled.packing)

    @staticmethod
    def of_mx(weight: Coded) -> _Matrix:
        # The table is doubled, so scales are half of files'.
        powers = (weight.scales.float().frexp().exponent + 127).to(torch.uint8)
        words = in_words(in_blocks(weight.codes, 4 * MX_BLOCK))
        lines = in_blocks(powers, 4).view(torch.int32).transpose(2, 3).contiguous()
        even = weight.codes.shape[1] % (4 * MX_BLOCK) == 0
        asm = words.is_cuda
        packing = Packing(4, False, MX_BLOCK, 4, zero=0, even=even, asm=asm, is_e2m1=True)
        return _Matrix(words, lines, lines, packing)

    def with_zeros(self) -> _Matrix:
        """With zero points of each group."""
        if self.packing.zero < 0:
            return self
        zeros = torch.full_like(self.scales, self.packing.zero, dtype=torch.int32)
        return self._replace(others=zeros, packing=replace(self.packing, zero=-1))


@dataclass(frozen=True, eq=False)
class _Packed:
    """A weight of all experts as the kernels read it.

    Attributes:
        codes, scales, others: as in `TiledGroups`, of one expert after the other: `[num, blocks,
            chunks, ...]`. Scales of mxfp4 are int32, the powers of a chunk's four groups.
        inputs: int32 `[num, columns]`; None: they are in order.
        bias: `[num, rows]`.
        size: columns of the weight.
    """

    codes: Tensor
    scales: Tensor
    others: Tensor
    inputs: Tensor | None
    bias: Tensor | None
    packing: Packing
    size: int

    @staticmethod
    def of(weights: Sequence[Coded], bias: Tensor | None, *, halves: int) -> _Packed:
        num_rows, size = weights[0].codes.shape
        rows = _in_turns(num_rows // halves, halves).to(weights[0].codes.device)
        held = [_Matrix.of(one.rows(rows) if halves > 1 else one) for one in weights]
        if len({one.packing.zero for one in held}) > 1:
            held = [one.with_zeros() for one in held]
        asm = all(one.packing.asm for one in held)
        (packing,) = {replace(one.packing, asm=asm) for one in held}
        scales = _stacked([one.scales for one in held])
        others = scales
        if any(one.others is not one.scales for one in held):
            others = _stacked([one.others for one in held])
        inputs = None
        if weights[0].order is not None:
            orders = [one.order for one in weights if one.order is not None]
            lacking = packing.columns * held[0].codes.shape[1] - size
            inputs = torch.nn.functional.pad(torch.stack(orders).int(), (0, lacking))
        codes = torch.stack([one.codes for one in held])
        return _Packed(codes, scales, others, inputs, bias, packing, size)

    @property
    def rows(self) -> int:
        """Rows of an expert's blocks."""
        return 64 * self.codes.shape[1]

    def pointers(self) -> tuple[Tensor, ...]:
        """What kernels read of it; a placeholder for what is not there."""
        inputs = self.scales if self.inputs is None else self.inputs
        return self.codes, self.scales, self.others, inputs

    def constants(self) -> dict[str, object]:
        """What kernels are compiled for."""
        return {"PACKING": self.packing, "MX": self.is_mx, "ORDERED": self.inputs is not None}

    @property
    def is_mx(self) -> bool:
        """Whether it is in mxfp4."""
        return self.packing.is_e2m1 and self.scales.dtype == torch.int32

    @property
    def table(self) -> tuple[tuple[float, Tiles, Tiles], ...]:
        """What `choose_tiles` chooses from."""
        return _MX_TILES if self.is_mx else _TILES[self.packing.bits]

    def tiles(self, chosen: Tiles, x: Tensor) -> Tiles:
        """Tiles whose stages fit in shared memory."""
        words = self.codes[0, 0, 0].nbytes // _ROWS.value
        columns = self.packing.columns
        return fitting(chosen, chosen.out * words + chosen.rows * columns * x.itemsize, x.device)

    def tensors(self) -> list[Tensor]:
        """All tensors held, for counting bytes."""
        others = None if self.others is self.scales else self.others
        named = self.codes, self.scales, others, self.inputs, self.bias
        return [one for one in named if one is not None]


def _in_turns(size: int, halves: int) -> Tensor:
    """Rows of a weight in the order of its blocks: of gate and up eight each in turns, any row
    where there are no more."""
    if halves == 1:
        return torch.arange(size)
    line = torch.arange(-(-size // _EIGHT) * _EIGHT).clamp_(max=size - 1).view(-1, _EIGHT)
    return torch.stack((line, line + size), dim=1).flatten()


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    """In one dtype: some may be narrower than others."""
    kinds = {one.dtype for one in parts}
    return torch.stack([*parts] if len(kinds) == 1 else [one.float() for one in parts])


@dataclass(frozen=True, eq=False)
class TiledExperts:
    """All experts of a layer; see `GroupedExperts`."""

    up: _Packed
    down: _Packed
    inner: int
    hidden: int
    clamp: tuple[float, float] | None = None
    gelu: bool = False

    @staticmethod
    def of(
        up: Sequence[Coded],
        down: Sequence[Coded],
        biases: tuple[Tensor | None, Tensor | None] = (None, None),
        clamp: tuple[float, float] | None = None,
        *,
        gelu: bool = False,
    ) -> TiledExperts:
        """The experts of two weights, each of one format, group and width (`TiledGroups.takes`);
        powers of mxfp4 are at most `MAX_POWER`. biases: `[num, out_features]` of both."""
        inner, hidden = len(up[0].codes) // 2, len(down[0].codes)
        packed = _Packed.of(up, biases[0], halves=2), _Packed.of(down, biases[1], halves=1)
        return TiledExperts(*packed, inner, hidden, clamp, gelu)

    def __call__(
        self, x: Tensor, scores: Tensor, chosen: Tensor, beside: Beside | None = None
    ) -> Tensor:
        """See `ExpertProducts`."""
        up, down, num = self.up, self.down, len(self.up.codes)
        order, ends = sort_rows(chosen, num)
        total, (rows, top_k) = len(order), chosen.shape
        inner = torch.empty(total, self.inner, dtype=x.dtype, device=x.device)
        out = torch.empty(rows, top_k, self.hidden, dtype=x.dtype, device=x.device)
        alpha, limit = self.clamp or (1.0, 0.0)
        if total:
            of_up, _ = choose_tiles(up.table, total, num)
            _, of_down = choose_tiles(down.table, total, num)
            of_up, of_down = up.tiles(of_up, x), down.tiles(of_down, x)
            _up_kernel[tile_grid(total, num, up.rows, of_up)](
                x.contiguous(), order, ends, *up.pointers(), bias_of(up.bias, x), inner, num,
                top_k, x.shape[1], self.inner, *up.codes.shape[1:3], up.size, alpha, limit,
                CLAMPED=self.clamp is not None, GELU=self.gelu, **up.constants(),
                **constants(up.bias, num, of_up),
            )  # fmt: skip
            _down_kernel[tile_grid(total, num, self.hidden, of_down)](
                inner, order, ends, *down.pointers(), bias_of(down.bias, x), scores, out, num,
                self.inner, self.hidden, *down.codes.shape[1:3], down.size, **down.constants(),
                **constants(down.bias, num, of_down),
            )  # fmt: skip
        return summed(out, beside)

    def tensors(self) -> list[Tensor]:
        """All tensors held, for counting bytes."""
        return self.up.tensors() + self.down.tensors()
