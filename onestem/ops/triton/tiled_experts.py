"""Experts' products with weights in mxfp4, weights on the left.

Four bits become 16 in the registers that tensor cores read, times their scale, which is exact. The
rest is as in `onestem.ops.triton.experts`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from onestem.ops.experts import MX_BLOCK
from onestem.ops.triton.experts import (
    bias_of,
    choose_tiles,
    constants,
    expert_tile,
    gated,
    sort_rows,
    tile_grid,
)
from onestem.ops.triton.tiled import Tiles, in_blocks, in_words

__all__ = ["ExpertCodes", "TiledExperts"]

_ROWS = tl.constexpr(64)  # adjacent rows of a weight
_PLANE = tl.constexpr(MX_BLOCK)  # columns that share a scale and a place in words
_CHUNK = tl.constexpr(4 * MX_BLOCK)


# As those of `experts`. Not timed yet.
_TILES = (
    (10, Tiles(64, 16), Tiles(64, 16, stages=5)),
    (24, Tiles(64, 32, stages=3), Tiles(64, 32)),
    (56, Tiles(64, 64, stages=3), Tiles(128, 64, warps=8, stages=3)),
    (math.inf, Tiles(128, 64, warps=8, stages=3), Tiles(128, 128, warps=8, stages=3)),
)


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
def _weight_at(values, powers, block, num_blocks, n, out, chunks):
    """Pointers to the first chunk of outputs n of a weight that begins at `block`."""
    line = (block * num_blocks + tl.minimum(n, out - 1) // _ROWS) * chunks
    word = values + (line * (_ROWS * _PLANE) + n % _ROWS * _PLANE)[:, None]
    return word + tl.arange(0, _PLANE)[None, :], powers + line * _ROWS + n % _ROWS


@triton.jit
def _up_kernel(
    x, order, ends, values, powers, bias, out, num, top_k, hidden, inner, chunks, alpha, limit,
    ASM: tl.constexpr, CLAMPED: tl.constexpr, BIAS: tl.constexpr, BLOCK_E: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    BLOCK_M: tl.constexpr = TILES.rows
    BLOCK_N: tl.constexpr = TILES.out
    expert, first, end = expert_tile(ends, tl.program_id(1), num, BLOCK_E, BLOCK_M)
    if expert < num:
        dtype: tl.constexpr = x.dtype.element_ty
        place = first + tl.arange(0, BLOCK_M)
        inside = place < end
        row = tl.load(order + place, mask=inside, other=0) // top_k
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        in_n = n < inner
        blocks = tl.cdiv(inner, _ROWS)
        half = 2 * expert.to(tl.int64)
        gate_at, gate_powers = _weight_at(values, powers, half, blocks, n, inner, chunks)
        up_at, up_powers = _weight_at(values, powers, half + 1, blocks, n, inner, chunks)
        j = tl.arange(0, _PLANE)
        x_at = x + row.to(tl.int64)[None, :] * hidden + j[:, None]
        gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for chunk in range(chunks):
            gate_word = tl.load(gate_at + chunk * (_ROWS * _PLANE))
            up_word = tl.load(up_at + chunk * (_ROWS * _PLANE))
            gate_power = tl.load(gate_powers + chunk * _ROWS)
            up_power = tl.load(up_powers + chunk * _ROWS)
            for i in tl.static_range(4):
                k = chunk * _CHUNK + i * _PLANE
                mask = (k + j < hidden)[:, None] & inside[None, :]
                b = tl.load(x_at + k, mask=mask, other=0.0)
                a = _widened(gate_word, gate_power, dtype, ASM, i)
                gate = tl.dot(a, b, gate, input_precision="ieee")
                a = _widened(up_word, up_power, dtype, ASM, i)
                up = tl.dot(a, b, up, input_precision="ieee")
        if BIAS:
            line = bias + half * inner + n
            gate += tl.load(line, mask=in_n, other=0.0).to(tl.float32)[:, None]
            up += tl.load(line + inner, mask=in_n, other=0.0).to(tl.float32)[:, None]
        value = gated(gate, up, alpha, limit, CLAMPED, False)
        to = out + place.to(tl.int64)[None, :] * inner + n[:, None]
        tl.store(to, value.to(out.dtype.element_ty), mask=inside[None, :] & in_n[:, None])


@triton.jit
def _down_kernel(
    x, order, ends, values, powers, bias, factors, out, num, inner, hidden, chunks,
    ASM: tl.constexpr, BIAS: tl.constexpr, BLOCK_E: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    BLOCK_M: tl.constexpr = TILES.rows
    BLOCK_N: tl.constexpr = TILES.out
    expert, first, end = expert_tile(ends, tl.program_id(1), num, BLOCK_E, BLOCK_M)
    if expert < num:
        dtype: tl.constexpr = x.dtype.element_ty
        place = first + tl.arange(0, BLOCK_M)
        inside = place < end
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        in_n = n < hidden
        begin = expert.to(tl.int64)
        blocks = tl.cdiv(hidden, _ROWS)
        weight_at, powers_at = _weight_at(values, powers, begin, blocks, n, hidden, chunks)
        j = tl.arange(0, _PLANE)
        x_at = x + place.to(tl.int64)[None, :] * inner + j[:, None]
        total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for chunk in range(chunks):
            word = tl.load(weight_at + chunk * (_ROWS * _PLANE))
            power = tl.load(powers_at + chunk * _ROWS)
            for i in tl.static_range(4):
                k = chunk * _CHUNK + i * _PLANE
                mask = (k + j < inner)[:, None] & inside[None, :]
                b = tl.load(x_at + k, mask=mask, other=0.0)
                a = _widened(word, power, dtype, ASM, i)
                total = tl.dot(a, b, total, input_precision="ieee")
        if BIAS:
            line = bias + begin * hidden + n
            total += tl.load(line, mask=in_n, other=0.0).to(tl.float32)[:, None]
        row = tl.load(order + place, mask=inside, other=0)
        total *= tl.load(factors + row, mask=inside, other=0.0)[None, :]
        to = out + row.to(tl.int64)[None, :] * hidden + n[:, None]
        tl.store(to, total.to(out.dtype.element_ty), mask=inside[None, :] & in_n[:, None])


class ExpertCodes(NamedTuple):
    """An expert's weight in mxfp4; of gate and up, gate first.

    Attributes:
        codes: uint8 `[rows, columns]`: e2m1.
        powers: uint8 `[rows, columns / 32]`: of two; 127 is 1.
    """

    codes: Tensor
    powers: Tensor


class _Packed(NamedTuple):
    """A weight of all experts as the kernels read it.

    values: int16 `[matrices, blocks, chunks, 64, 32]`, see `in_words`.
    powers: int32 `[matrices, blocks, chunks, 64]`, those of a chunk's four blocks of columns.
    """

    values: Tensor
    powers: Tensor
    bias: Tensor | None

    @staticmethod
    def of(weights: Sequence[ExpertCodes], bias: Tensor | None, halves: int) -> _Packed:
        values, powers = [], []
        for weight in weights:
            values += [in_words(in_blocks(one, 4 * MX_BLOCK)) for one in weight.codes.chunk(halves)]
            parts = [in_blocks(one, 4) for one in weight.powers.chunk(halves)]
            powers += [one.view(torch.int32).squeeze(-1) for one in parts]
        return _Packed(torch.stack(values), torch.stack(powers), bias)

    @property
    def chunks(self) -> int:
        return self.values.shape[2]

    def tensors(self) -> list[Tensor]:
        """All tensors held, for counting bytes."""
        return [one for one in self if one is not None]


@dataclass(frozen=True, eq=False)
class TiledExperts:
    """All experts of a layer; see `GroupedExperts`."""

    up: _Packed
    down: _Packed
    num: int
    inner: int
    hidden: int
    clamp: tuple[float, float] | None = None

    @staticmethod
    def of(
        up: Sequence[ExpertCodes],
        down: Sequence[ExpertCodes],
        biases: tuple[Tensor | None, Tensor | None] = (None, None),
        clamp: tuple[float, float] | None = None,
    ) -> TiledExperts:
        """The experts of two weights, with powers of at most `MAX_POWER`. biases: `[num,
        out_features]` of both."""
        inner, hidden = len(up[0].codes) // 2, len(down[0].codes)
        packed = _Packed.of(up, biases[0], 2), _Packed.of(down, biases[1], 1)
        return TiledExperts(*packed, len(up), inner, hidden, clamp)

    def __call__(self, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        """See `ExpertProducts`."""
        order, ends = sort_rows(chosen, self.num)
        total, (rows, top_k), size = len(order), chosen.shape, x.shape[1]
        inner = torch.empty(total, self.inner, dtype=x.dtype, device=x.device)
        out = torch.empty(rows, top_k, self.hidden, dtype=x.dtype, device=x.device)
        alpha, limit = self.clamp or (1.0, 0.0)
        if total:
            of_up, of_down = choose_tiles(_TILES, total, self.num)
            _up_kernel[tile_grid(total, self.num, self.inner, of_up)](
                x.contiguous(), order, ends, self.up.values, self.up.powers,
                bias_of(self.up.bias, x), inner, self.num, top_k, size, self.inner, self.up.chunks,
                alpha, limit, ASM=x.is_cuda, CLAMPED=self.clamp is not None,
                **constants(self.up.bias, self.num, of_up),
            )  # fmt: skip
            _down_kernel[tile_grid(total, self.num, self.hidden, of_down)](
                inner, order, ends, self.down.values, self.down.powers, bias_of(self.down.bias, x),
                scores, out, self.num, self.inner, self.hidden, self.down.chunks, ASM=x.is_cuda,
                **constants(self.down.bias, self.num, of_down),
            )  # fmt: skip
        return out.sum(1)

    def tensors(self) -> list[Tensor]:
        """All tensors held, for counting bytes."""
        return self.up.tensors() + self.down.tensors()
