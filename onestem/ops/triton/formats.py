"""Products with quantised weights in Triton, and the rounding of their rows.

`PackedGroups.product` is one kernel for weights of 4 bits, 8 bits and float8 with a scale per row
and group of columns. Codes are exact in the dtype of x, so the tensor cores multiply codes, and
each group's sum is scaled in float32: no weight is rounded. For many rows it is faster to write the
weight out once (`PackedGroups.dense`) and multiply that.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from onestem.ops.rounding import LARGEST, RoundedRows

__all__ = ["PackedGroups", "Tiles", "empty_rows", "round_codes", "rounded_rows"]

# Adding and subtracting it rounds a float32 to the nearest integer, halves to even.
_ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2 ** 23


@triton.jit
def round_codes(value, largest, IS_INT: tl.constexpr):
    """A row of float32, padded with zeros -> its codes, float32, and its scale.

    Divides as PyTorch does: a GPU's own division is off by a bit here and there."""
    most = tl.max(tl.abs(value), 0)
    scale = tl.where(most == 0.0, 1.0, tl.div_rn(most, largest))
    code = tl.div_rn(value, scale)
    if IS_INT:
        code = (code + _ROUNDER) - _ROUNDER
    return code, scale


@triton.jit
def _round_rows(x, codes, scales, size, largest, IS_INT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < size
    value = tl.load(x + row * size + at, mask=inside, other=0.0).to(tl.float32)
    code, scale = round_codes(value, largest, IS_INT)
    tl.store(codes + row * size + at, code.to(codes.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


def empty_rows(rows: int, size: int, dtype: torch.dtype, device: torch.device) -> RoundedRows:
    """Rows to be written."""
    scales = torch.empty(rows, 1, dtype=torch.float32, device=device)
    return RoundedRows(torch.empty(rows, size, dtype=dtype, device=device), scales)


def rounded_rows(x: Tensor, dtype: torch.dtype) -> RoundedRows:
    """`onestem.ops.rounding.rounded_rows` in Triton. x is contiguous."""
    rows, size = x.shape
    rounded = empty_rows(rows, size, dtype, x.device)
    if rows:
        _round_rows[(rows,)](
            x,
            rounded.codes,
            rounded.scales,
            size,
            LARGEST[dtype],
            IS_INT=dtype == torch.int8,
            BLOCK=triton.next_power_of_2(size),
            num_warps=8 if size > 2048 else 4,
        )
    return rounded


@triton.jit
def _value(code, zero, dtype: tl.constexpr, BITS: tl.constexpr, IS_FLOAT: tl.constexpr):
    """Codes less their zero points, exact in `dtype`."""
    if IS_FLOAT:
        return code.to(dtype)
    if BITS == 4 and dtype == tl.bfloat16:
        # Put below the bits of 128.0: much cheaper than a conversion.
        return (code.to(tl.int16) | 0x4300).to(tl.int16).to(dtype, bitcast=True) - (zero + 128).to(
            dtype
        )
    if BITS == 4 and dtype == tl.float16:
        # Put below the bits of 1024.0.
        return (code.to(tl.int16) | 0x6400).to(tl.int16).to(dtype, bitcast=True) - (zero + 1024).to(
            dtype
        )
    return code.to(dtype) - zero.to(dtype)


@triton.jit
def _group_of(scales, zeros, n, inside, num_groups, at, ZERO: tl.constexpr):
    """Scales and zero points `[BLOCK_N]` of rows n in group `at`."""
    where = n * num_groups + at
    scale = tl.load(scales + where, mask=inside, other=0.0)
    if ZERO >= 0:
        zero = tl.full(n.shape, ZERO, tl.int16)
    else:
        zero = tl.load(zeros + where, mask=inside, other=0)
    return scale, zero


@triton.jit
def _groups_product(
    x,
    codes,
    scales,
    zeros,
    bias,
    out,
    num_rows,
    num_out,
    size,
    code_stride,
    num_groups,
    group,
    chunks,
    BITS: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ONE_SCALE: tl.constexpr,
    PLANE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Program (tile, part): the sum of a tile of the product over `chunks` chunks of columns."""
    dtype = x.dtype.element_ty
    tiles_m = tl.cdiv(num_rows, BLOCK_M)
    m = tl.program_id(0) % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) // tiles_m * BLOCK_N + tl.arange(0, BLOCK_N)
    in_m, in_n = m < num_rows, n < num_out
    i = tl.arange(0, PLANE)
    columns: tl.constexpr = PLANE * 8 // BITS  # of a chunk
    x_at = x + m.to(tl.int64)[:, None] * size
    code_at = codes + n.to(tl.int64)[None, :] * code_stride + i[:, None]
    n = n.to(tl.int64)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    first = tl.program_id(1) * chunks
    for chunk in range(first, tl.minimum(first + chunks, tl.cdiv(size, columns))):
        column = chunk * columns
        k = column + i
        in_k = k < size
        x1 = tl.load(x_at + k[None, :], mask=in_m[:, None] & in_k[None, :], other=0.0)
        inside = in_n[None, :] & in_k[:, None]
        scale, zero = _group_of(scales, zeros, n, in_n, num_groups, column // group, ZERO)
        if BITS == 8:
            code = tl.load(code_at + column, mask=inside, other=0.0)
            value = _value(code, zero[None, :], dtype, BITS, IS_FLOAT)
            total += tl.dot(x1, value, input_precision="ieee") * scale[None, :]
        else:
            pair = tl.load(code_at + chunk * PLANE, mask=inside, other=0)
            x2 = tl.load(x_at + (k + PLANE)[None, :], mask=in_m[:, None] & in_k[None, :], other=0.0)
            value = _value(pair & 15, zero[None, :], dtype, BITS, IS_FLOAT)
            part = tl.dot(x1, value, input_precision="ieee")
            if not ONE_SCALE:
                total += part * scale[None, :]
                at = (column + PLANE) // group
                scale, zero = _group_of(scales, zeros, n, in_n, num_groups, at, ZERO)
                part = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            value = _value(pair >> 4, zero[None, :], dtype, BITS, IS_FLOAT)
            total += tl.dot(x2, value, part, input_precision="ieee") * scale[None, :]
    if HAS_BIAS:
        total += tl.load(bias + n, mask=in_n, other=0.0).to(tl.float32)[None, :]
    row = tl.program_id(1).to(tl.int64) * num_rows + m
    at = out + row[:, None] * num_out + n[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])


@triton.jit
def _sum_parts(
    parts,
    bias,
    out,
    count,
    num_out,
    HAS_BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(SPLIT):
        total += tl.load(parts + part * count.to(tl.int64) + at, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + at % num_out, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _groups_dense(
    codes,
    scales,
    zeros,
    out,
    num_out,
    size,
    code_stride,
    num_groups,
    group,
    BITS: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    ZERO: tl.constexpr,
    PLANE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Program (rows, chunk): writes a block of the weight out."""
    chunk = tl.program_id(1)
    column = chunk * (PLANE * 8 // BITS)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = n < num_out
    n = n.to(tl.int64)
    k = column + tl.arange(0, PLANE)
    inside = in_n[:, None] & (k < size)[None, :]
    code_at = codes + n[:, None] * code_stride + chunk * PLANE + tl.arange(0, PLANE)[None, :]
    at = out + n[:, None] * size + k[None, :]
    scale, zero = _group_of(scales, zeros, n, in_n, num_groups, column // group, ZERO)
    code = tl.load(code_at, mask=inside, other=0.0)
    low = code if BITS == 8 else code & 15
    value = _value(low, zero[:, None], tl.float32, BITS, IS_FLOAT) * scale[:, None]
    tl.store(at, value.to(out.dtype.element_ty), mask=inside)
    if BITS == 4:
        next_group = (column + PLANE) // group
        scale, zero = _group_of(scales, zeros, n, in_n, num_groups, next_group, ZERO)
        value = _value(code >> 4, zero[:, None], tl.float32, BITS, IS_FLOAT) * scale[:, None]
        tl.store(at + PLANE, value.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, eq=False)
class PackedGroups:
    """A weight `[num_out, size]` as the kernels read it.

    Attributes:
        codes: float8_e4m3fn or uint8 `[num_out, size]`; 4 bits: uint8 `[num_out, size / 2]`, where
            byte j of a chunk of `plane` bytes holds column `2 * plane * chunk + j` (low bits) and
            the column `plane` after it.
        scales: float32 `[num_out, num_groups]`. zeros: int16, in the same shape, if `zero` is -1.
        zero: zero point of all groups. group: columns that share a scale.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    zero: int
    group: int
    bits: int
    size: int
    plane: int

    @staticmethod
    def takes(size: int, group: int, bits: int) -> bool:
        """Whether a width can be packed with a size of groups."""
        if bits == 8:
            return group % 32 == 0 or group >= size
        return group % 32 == 0 and size % (2 * _plane(group)) == 0

    @staticmethod
    def of(
        codes: Tensor, scales: Tensor, zeros: Tensor | None, group: int, bits: int
    ) -> PackedGroups:
        """Pack a weight. codes `[num_out, size]`, not packed; zeros None: 0."""
        size, plane = codes.shape[1], _plane(group)
        if bits == 4:
            planes = codes.unflatten(1, (-1, 2, plane))
            codes = (planes[:, :, 0] | planes[:, :, 1] << 4).flatten(1)
        first = 0 if zeros is None else int(zeros.flatten()[0])
        alike = zeros is None or bool((zeros == first).all())
        return PackedGroups(
            codes.contiguous(),
            scales.contiguous(),
            scales if zeros is None or alike else zeros.contiguous(),
            first if alike else -1,
            group,
            bits,
            size,
            plane,
        )

    def tensors(self) -> list[Tensor]:
        return [self.codes, self.scales] + ([] if self.zero >= 0 else [self.zeros])

    @property
    def num_out(self) -> int:
        return len(self.codes)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight `[num_out, size]` in `dtype`, each value rounded once."""
        out = torch.empty(self.num_out, self.size, dtype=dtype, device=self.codes.device)
        grid = (triton.cdiv(self.num_out, _DENSE_ROWS), self._chunks)
        _groups_dense[grid](
            self.codes,
            self.scales,
            self.zeros,
            out,
            self.num_out,
            self.size,
            self.codes.stride(0),
            self.scales.shape[1],
            self.group,
            **self._constants,
            BLOCK_N=_DENSE_ROWS,
            num_warps=4,
        )
        return out

    def product(self, x: Tensor, bias: Tensor | None, tiles: Tiles | None = None) -> Tensor:
        """x `[num_rows, size]`, contiguous -> `[num_rows, num_out]` in x's dtype. Sums are float32,
        and weights are not rounded."""
        rows = len(x)
        out = torch.empty(rows, self.num_out, dtype=x.dtype, device=x.device)
        if rows == 0:
            return out
        tiles = tiles or self.tiles(rows, _num_sms(x.device))
        split = tiles.split > 1
        parts = out.new_empty((tiles.split, *out.shape), dtype=torch.float32) if split else out
        grid = (triton.cdiv(rows, tiles.rows) * triton.cdiv(self.num_out, tiles.out), tiles.split)
        columns = self.plane * 8 // self.bits
        _groups_product[grid](
            x,
            self.codes,
            self.scales,
            self.zeros,
            out if bias is None else bias,
            parts,
            rows,
            self.num_out,
            self.size,
            self.codes.stride(0),
            self.scales.shape[1],
            self.group,
            triton.cdiv(self._chunks, tiles.split),
            **self._constants,
            HAS_BIAS=bias is not None and not split,
            ONE_SCALE=self.group % columns == 0,
            BLOCK_M=tiles.rows,
            BLOCK_N=tiles.out,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
        if split:
            count = out.numel()
            _sum_parts[(triton.cdiv(count, _SUM_BLOCK),)](
                parts,
                out if bias is None else bias,
                out,
                count,
                self.num_out,
                HAS_BIAS=bias is not None,
                SPLIT=tiles.split,
                BLOCK=_SUM_BLOCK,
            )
        return out

    def tiles(self, rows: int, num_sms: int) -> Tiles:
        """Tiles for `rows` rows: as high as the rows, with enough programs for the device."""
        high = min(128, max(16, triton.next_power_of_2(rows)))
        wide = 64 if rows <= 32 else 128
        programs = triton.cdiv(rows, high) * triton.cdiv(self.num_out, wide)
        split = triton.next_power_of_2(max(1, 2 * num_sms // programs))
        split = max(1, min(split, self._chunks // 4, 16))
        return Tiles(high, wide, split, 4 if high < 128 else 8, 4 if high < 128 else 3)

    @property
    def _chunks(self) -> int:
        return triton.cdiv(self.size, self.plane * 8 // self.bits)

    @property
    def _constants(self) -> dict[str, object]:
        return {
            "BITS": self.bits,
            "IS_FLOAT": self.codes.is_floating_point(),
            "ZERO": self.zero,
            "PLANE": self.plane,
        }


@dataclass(frozen=True)
class Tiles:
    """Cut of a product: tiles of `rows` by `out`, their columns in `split` parts."""

    rows: int
    out: int
    split: int
    warps: int = 4
    stages: int = 4


_DENSE_ROWS = 64
_SUM_BLOCK = 1024


def _plane(group: int) -> int:
    """Columns that are multiplied at once and share a scale."""
    return 64 if group % 64 == 0 else 32


@functools.cache
def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
