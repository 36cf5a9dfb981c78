"""Products with quantised weights in Triton, weights on the left.

A tile of tensor cores has at least 64 rows. Weights fill them, and a few rows of a step do not. So
weights are the left factor here, from registers if they are unpacked there, and rows the right one.
A product of some rows has few tiles, whose columns are divided among programs. The last program of
a tile adds up all parts in order, so a row's bits do not depend on which program that is.

`TiledGroups`: 4 bits, 8 bits and float8 with a scale per row and group of columns. Codes are exact
in the dtype of x, so the tensor cores multiply codes, and each group's sum is scaled in float32: no
weight is rounded. For many rows it is faster to write the weight out once (`TiledGroups.dense`) and
multiply that. For one see `onestem.ops.triton.one_row`.

`TiledChannels`: float8 or int8 with a scale per row, times rows that are rounded the same way.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from onestem.ops.rounding import RoundedRows

__all__ = [
    "TiledChannels",
    "TiledGroups",
    "Tiles",
    "divided",
    "in_blocks",
    "in_words",
    "num_sms",
]


class Tiles(NamedTuple):
    """Cut of a product: tiles of `out` outputs by `rows` rows, their columns in `split` parts; with
    8 bits, `columns` at a time."""

    out: int
    rows: int
    split: int
    warps: int = 4
    stages: int = 4
    columns: int = 128


# ------------------------------------------------------------------------------ tiles and sums


@triton.jit
def _tile(num_rows, num_out, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BAND: tl.constexpr):
    """(tile of rows, tile of outputs): in bands of `BAND` tiles of rows, so that reads stay in the
    caches."""
    tile = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(num_out, BLOCK_N)
    band = tile // (BAND * tiles_n)
    high = tl.minimum(tiles_m - band * BAND, BAND)
    place = tile - band * BAND * tiles_n
    return band * BAND + place % high, place // high


@triton.jit
def _sum_parts(
    total,
    parts,
    counters,
    inside,
    SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Store a part's sum; the last program of a tile gets all parts, added in order."""
    tile = tl.program_id(0)
    within = tl.arange(0, BLOCK_M)[None, :] * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    first = parts + tile.to(tl.int64) * (SPLIT * BLOCK_M * BLOCK_N)
    own = first + tl.program_id(1) * (BLOCK_M * BLOCK_N)
    tl.store(own + within, total, mask=inside)
    tl.debug_barrier()
    is_last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLIT - 1
    if is_last:
        total = tl.zeros((BLOCK_N, BLOCK_M), total.dtype)
        for part in range(SPLIT):
            at = first + part * (BLOCK_M * BLOCK_N) + within
            total += tl.load(at, mask=inside, other=0, cache_modifier=".cg")
        tl.store(counters + tile, 0)
    return total, is_last


@triton.jit
def _store_tile(total, bias, out, n, m, num_out, inside, HAS_BIAS: tl.constexpr):
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < num_out, other=0.0).to(tl.float32)[:, None]
    at = out + m.to(tl.int64)[None, :] * num_out + n[:, None]
    tl.store(at, total.to(out.dtype.element_ty), mask=inside)


@functools.cache
def _shared_bytes(device: torch.device) -> int:
    """Shared memory that a program may have for its stages."""
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index)
    return int(properties["max_shared_mem"]) - 4096


def _fitting(tiles: Tiles, stage_bytes: int, device: torch.device) -> Tiles:
    """Tiles with the number of stages that fits a device's shared memory."""
    if device.type != "cuda":
        return tiles
    return tiles._replace(stages=max(1, min(tiles.stages, _shared_bytes(device) // stage_bytes)))


# Maximum tiles with divided columns.
_COUNTERS = 2048


def _counters(device: torch.device) -> Tensor:
    return torch.zeros(_COUNTERS, dtype=torch.int32, device=device)


def _parts(
    out: Tensor, tiles: Tiles, num_tiles: int, counters: Tensor, dtype: torch.dtype
) -> Tensor:
    """Memory for the sums of `tiles.split` programs per tile; unused with one."""
    if tiles.split == 1:
        return counters
    assert num_tiles <= _COUNTERS
    return out.new_empty(num_tiles * tiles.split * tiles.rows * tiles.out, dtype=dtype)


def _num_tiles(rows: int, num_out: int, tiles: Tiles) -> int:
    return triton.cdiv(rows, tiles.rows) * triton.cdiv(num_out, tiles.out)


@functools.cache
def num_sms(device: torch.device) -> int:
    """Number of multiprocessors."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


# -------------------------------------------------------------------------------- 8 bits by 8 bits


@triton.jit(do_not_specialize=("num_rows", "chunks"))
def _channels_product(
    codes,
    row_scales,
    weight,
    scales,
    bias,
    out,
    parts,
    counters,
    num_rows,
    num_out,
    size,
    chunks,
    IS_INT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program (tile, part): the sum of a tile over `chunks` chunks of columns."""
    tile_m, tile_n = _tile(num_rows, num_out, BLOCK_N, BLOCK_M, 8)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    i = tl.arange(0, BLOCK_K)
    in_n, in_m = n < num_out, m < num_rows
    weight_at = weight + n.to(tl.int64)[:, None] * size + i[None, :]
    code_at = codes + m.to(tl.int64)[None, :] * size + i[:, None]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.int32 if IS_INT else tl.float32)
    first = tl.program_id(1) * chunks
    last = tl.minimum(first + chunks, tl.cdiv(size, BLOCK_K))
    for chunk in range(first, last):
        column = chunk * BLOCK_K
        if EVEN:
            left = tl.load(weight_at + column, mask=in_n[:, None], other=0.0)
            right = tl.load(code_at + column, mask=in_m[None, :], other=0.0)
        else:
            in_k = column + i < size
            left = tl.load(weight_at + column, mask=in_n[:, None] & in_k[None, :], other=0.0)
            right = tl.load(code_at + column, mask=in_m[None, :] & in_k[:, None], other=0.0)
        total = tl.dot(left, right, total, out_dtype=total.dtype)
    inside = in_n[:, None] & in_m[None, :]
    is_last = True
    if SPLIT > 1:
        total, is_last = _sum_parts(total, parts, counters, inside, SPLIT, BLOCK_N, BLOCK_M)
    if is_last:
        row_scale = tl.load(row_scales + m, mask=in_m, other=0.0)
        scale = tl.load(scales + n, mask=in_n, other=0.0)
        result = total.to(tl.float32) * row_scale[None, :] * scale[:, None]
        _store_tile(result, bias, out, n, m, num_out, inside, HAS_BIAS)


@dataclass(frozen=True, eq=False)
class TiledChannels:
    """`weight[o, i] = codes[o, i] * scales[o]`.

    Attributes:
        codes: float8_e4m3fn or int8 `[num_out, size]`, contiguous; size is a multiple of 16.
        scales: float32 `[num_out]`.
    """

    codes: Tensor
    scales: Tensor
    counters: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "counters", _counters(self.codes.device))

    def product(
        self, x: RoundedRows, bias: Tensor | None, dtype: torch.dtype, tiles: Tiles | None = None
    ) -> Tensor:
        """The product `[num_rows, num_out]` in a dtype, rounded once. Sums of int8 are exact; sums
        of float8 are the tensor cores' own."""
        rows, size, num_out = len(x.codes), self.size, self.num_out
        out = torch.empty(rows, num_out, dtype=dtype, device=x.codes.device)
        if rows == 0:
            return out
        is_int = self.codes.dtype == torch.int8
        if tiles is None:
            tiles = self.tiles(rows, num_sms(out.device))
            tiles = _fitting(tiles, (tiles.out + tiles.rows) * tiles.columns, out.device)
        num_tiles, chunks = _num_tiles(rows, num_out, tiles), triton.cdiv(size, tiles.columns)
        sums = torch.int32 if is_int else torch.float32
        _channels_product[(num_tiles, tiles.split)](
            x.codes,
            x.scales,
            self.codes,
            self.scales,
            out if bias is None else bias,
            out,
            _parts(out, tiles, num_tiles, self.counters, sums),
            self.counters,
            rows,
            num_out,
            size,
            triton.cdiv(chunks, tiles.split),
            IS_INT=is_int,
            HAS_BIAS=bias is not None,
            EVEN=size % tiles.columns == 0,
            SPLIT=tiles.split,
            BLOCK_N=tiles.out,
            BLOCK_M=tiles.rows,
            BLOCK_K=tiles.columns,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
        return out

    def tiles(self, rows: int, sms: int) -> Tiles:
        """Tiles for `rows` rows on `sms` multiprocessors."""
        chosen = next(tiles for most, tiles in _CHANNEL_TILES if rows <= most)
        return divided(self, chosen, rows, sms)

    def columns(self, tiles: Tiles) -> int:
        """Columns of a chunk."""
        return tiles.columns

    @property
    def num_out(self) -> int:
        return len(self.codes)

    @property
    def size(self) -> int:
        return self.codes.shape[1]


def divided(weight: TiledChannels | TiledGroups, tiles: Tiles, rows: int, sms: int) -> Tiles:
    """Tiles whose `split` is programs per multiprocessor -> tiles whose `split` is parts."""
    num_tiles = _num_tiles(rows, weight.num_out, tiles)
    chunk = weight.columns(tiles)
    chunks = triton.cdiv(weight.size, chunk)
    # Adding up shorter parts would take longer than computing them.
    split = min(tiles.split * sms // num_tiles, chunks * chunk // _LEAST_COLUMNS, _MOST_PARTS)
    if split <= 1 or num_tiles > _COUNTERS:
        return tiles._replace(split=1)
    # No part is empty.
    return tiles._replace(split=triton.cdiv(chunks, triton.cdiv(chunks, split)))


_LEAST_COLUMNS, _MOST_PARTS = 512, 16

# Maximum rows, and the tiles for them; `split` is programs per multiprocessor.
_CHANNEL_TILES = (
    (16, Tiles(64, 16, 4, 4, 5, 128)),
    (32, Tiles(64, 32, 4, 4, 5, 128)),
    (64, Tiles(128, 64, 2, 4, 4, 128)),
    (256, Tiles(128, 128, 1, 8, 4, 128)),
    (math.inf, Tiles(128, 256, 1, 8, 3, 128)),
)


# ------------------------------------------------------------------------------ groups of columns

# Rows of a weight whose codes of a chunk are adjacent.
_ROWS = tl.constexpr(64)


def _unpacking(kind: str, base: str, one: str) -> tuple[str, ...]:
    """PTX for each of four places in two words (`$1`): puts four bits below those of a power of two
    (`base`), and adds a number (`$2`). Much cheaper than a conversion; no compiler finds it."""
    return tuple(
        f"{{ .reg .b32 t, one; shr.u32 t, $1, {4 * place}; mov.b32 one, {one}; "
        f"lop3.b32 t, t, 0x000f000f, {base}, 0xea; fma.rn.{kind}x2 $0, t, one, $2; }}"
        for place in range(4)
    )


_UNPACK_BF16 = tl.constexpr(_unpacking("bf16", "0x43004300", "0x3f803f80"))  # 128, 1
_UNPACK_FP16 = tl.constexpr(_unpacking("f16", "0x64006400", "0x3c003c00"))  # 1024, 1


@triton.jit
def _values(
    codes,
    zero,
    dtype: tl.constexpr,
    BITS: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    ASM: tl.constexpr,
    PLACE: tl.constexpr,
):
    """Codes less their zero points, exact in `dtype`; with 4 bits, those at PLACE in words."""
    if IS_FLOAT:
        value = codes.to(dtype)
    elif BITS == 8:
        value = (codes.to(tl.int16) - zero[:, None]).to(dtype)
    elif ASM and dtype == tl.bfloat16:
        less = (-128 - zero).to(dtype)[:, None]
        value = tl.inline_asm_elementwise(
            _UNPACK_BF16[PLACE], "=r,r,r", [codes, less], tl.bfloat16, is_pure=True, pack=2
        )
    elif ASM and dtype == tl.float16:
        less = (-1024 - zero).to(dtype)[:, None]
        value = tl.inline_asm_elementwise(
            _UNPACK_FP16[PLACE], "=r,r,r", [codes, less], tl.float16, is_pure=True, pack=2
        )
    else:
        value = ((codes >> (4 * PLACE) & 15) - zero[:, None]).to(dtype)
    return value


@triton.jit
def _zero_of(zeros, at, ZERO: tl.constexpr):
    """Zero points `[BLOCK_N]` of a group."""
    if ZERO >= 0:
        zero = tl.full(at.shape, ZERO, tl.int16)
    else:
        zero = tl.load(zeros + at).to(tl.int16)
    return zero


@triton.jit
def _scales_of(scales, at, GROUPS: tl.constexpr):
    """Scales of a chunk's groups, `[BLOCK_N]` each."""
    if GROUPS == 1:
        return (tl.load(scales + at),)
    elif GROUPS == 2:  # noqa: RET505 - one of these is compiled
        return tl.load(scales + at), tl.load(scales + at + _ROWS)
    else:
        return (
            tl.load(scales + at),
            tl.load(scales + at + _ROWS),
            tl.load(scales + at + 2 * _ROWS),
            tl.load(scales + at + 3 * _ROWS),
        )


@triton.jit(do_not_specialize=("num_rows", "num_chunks", "chunks"))
def _groups_product(
    x,
    codes,
    scales,
    zeros,
    bias,
    out,
    parts,
    counters,
    num_rows,
    num_out,
    size,
    num_chunks,
    chunks,
    BITS: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    ZERO: tl.constexpr,
    ASM: tl.constexpr,
    PLANE: tl.constexpr,
    GROUPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Program (tile, part): the sum of a tile over `chunks` chunks of columns."""
    dtype: tl.constexpr = x.dtype.element_ty
    PLACES: tl.constexpr = 4 if BITS == 4 else 1
    tile_m, tile_n = _tile(num_rows, num_out, BLOCK_N, BLOCK_M, 8)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    j = tl.arange(0, PLANE)
    in_n, in_m = n < num_out, m < num_rows
    line = tl.minimum(n // _ROWS, (num_out - 1) // _ROWS).to(tl.int64) * num_chunks
    code_at = codes + (line * (_ROWS * PLANE) + n % _ROWS * PLANE)[:, None] + j[None, :]
    group_at = line * (_ROWS * GROUPS) + n % _ROWS
    x_at = x + m.to(tl.int64)[None, :] * size + j[:, None]
    first = tl.program_id(1) * chunks
    last = tl.minimum(first + chunks, num_chunks)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    # Scales are loaded a chunk before their use, so nothing waits for them.
    following = _scales_of(scales, group_at + first * (_ROWS * GROUPS), GROUPS)
    for chunk in range(first, last):
        scale = following
        at = group_at + tl.minimum(chunk + 1, last - 1) * (_ROWS * GROUPS)
        following = _scales_of(scales, at, GROUPS)
        word = tl.load(code_at + chunk * (_ROWS * PLANE))
        for group in tl.static_range(GROUPS):
            zero = _zero_of(zeros, group_at + (chunk * GROUPS + group) * _ROWS, ZERO)
            part = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for place in tl.static_range(group * PLACES // GROUPS, (group + 1) * PLACES // GROUPS):
                column = (chunk * PLACES + place) * PLANE
                if EVEN:
                    right = tl.load(x_at + column, mask=in_m[None, :], other=0.0)
                else:
                    in_k = column + j < size
                    right = tl.load(x_at + column, mask=in_m[None, :] & in_k[:, None], other=0.0)
                left = _values(word, zero, dtype, BITS, IS_FLOAT, ASM, place)
                part = tl.dot(left, right, part, input_precision="ieee")
            total += part * scale[group].to(tl.float32)[:, None]
    inside = in_n[:, None] & in_m[None, :]
    is_last = True
    if SPLIT > 1:
        total, is_last = _sum_parts(total, parts, counters, inside, SPLIT, BLOCK_N, BLOCK_M)
    if is_last:
        _store_tile(total, bias, out, n, m, num_out, inside, HAS_BIAS)


@triton.jit
def _groups_dense(
    codes,
    scales,
    zeros,
    out,
    num_out,
    size,
    num_chunks,
    BITS: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    ZERO: tl.constexpr,
    ASM: tl.constexpr,
    PLANE: tl.constexpr,
    GROUPS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Program (chunk, rows): writes a block of the weight out."""
    PLACES: tl.constexpr = 4 if BITS == 4 else 1
    # Codes are exact in 16 bits.
    dtype: tl.constexpr = out.dtype.element_ty
    row, j = tl.arange(0, _ROWS), tl.arange(0, PLANE)
    block = tl.program_id(1).to(tl.int64) * num_chunks + tl.program_id(0)
    at = block * (_ROWS * GROUPS) + row
    word = tl.load(codes + (block * _ROWS + row)[:, None] * PLANE + j[None, :])
    n = tl.program_id(1) * _ROWS + row
    to = out + n.to(tl.int64)[:, None] * size + j[None, :]
    for place in tl.static_range(PLACES):
        group_at = at + place * GROUPS // PLACES * _ROWS
        zero = _zero_of(zeros, group_at, ZERO)
        scale = tl.load(scales + group_at).to(tl.float32)
        value = _values(word, zero, dtype, BITS, IS_FLOAT, ASM, place).to(tl.float32)
        value *= scale[:, None]
        column = (tl.program_id(0) * PLACES + place) * PLANE
        inside = (n < num_out)[:, None]
        if not EVEN:
            inside = inside & (column + j < size)[None, :]
        tl.store(to + column, value.to(dtype), mask=inside)


@dataclass(frozen=True, eq=False)
class TiledGroups:
    """A weight `[num_out, size]` as the kernels read it: consecutive blocks of 64 rows and a chunk
    of columns.

    Attributes:
        codes: float8_e4m3fn or uint8 `[blocks, chunks, 64, plane]`, with `plane` columns in a
            chunk; 4 bits: int16, with `4 * plane` columns in a chunk (`in_words`).
        scales: `[blocks, chunks, groups of a chunk, 64]`, of 16 bits if these hold them exactly.
        zeros: int32, in the same shape, if `zero` is -1: wide enough for asynchronous copies.
        zero: the zero point of all groups.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    zero: int
    bits: int
    num_out: int
    size: int
    counters: Tensor

    @staticmethod
    def takes(size: int, group: int, bits: int) -> bool:
        """Whether a width can be packed with a size of groups."""
        return bits in (4, 8) and (group % 32 == 0 or group >= size)

    @staticmethod
    def of(
        codes: Tensor, scales: Tensor, zeros: Tensor | None, group: int, bits: int
    ) -> TiledGroups:
        """Pack a weight. codes `[num_out, size]`, not packed; scales and zeros
        `[num_out, num_groups]`; zeros None: 0."""
        num_out, size = codes.shape
        plane, places = _plane(group if group < size else 0, bits), 4 if bits == 4 else 1
        chunk = plane * places
        # As bytes: torch does not pad float8.
        raw = in_blocks(codes.view(torch.uint8), chunk)
        raw = in_words(raw) if bits == 4 else raw.view(codes.dtype)
        # The group of each stretch of columns with one group, by its first column.
        width = math.gcd(group, chunk) if group < size else chunk
        begins = torch.arange(0, raw.shape[1] * chunk, width, device=codes.device)
        groups = (begins // group).clamp_(max=scales.shape[1] - 1)
        first = 0 if zeros is None else int(zeros.flatten()[0])
        alike = zeros is None or bool((zeros == first).all())
        packed = (
            in_blocks(_narrowed(scales)[:, groups], chunk // width).transpose(2, 3).contiguous()
        )
        many = packed
        if zeros is not None and not alike:
            many = in_blocks(zeros[:, groups].int(), chunk // width).transpose(2, 3).contiguous()
        return TiledGroups(
            raw,
            packed,
            many,
            first if alike else -1,
            bits,
            num_out,
            size,
            _counters(codes.device),
        )

    def tensors(self) -> list[Tensor]:
        return [self.codes, self.scales] + ([] if self.zero >= 0 else [self.zeros])

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight `[num_out, size]` in `dtype`, each value rounded once."""
        out = torch.empty(self.num_out, self.size, dtype=dtype, device=self.codes.device)
        blocks, chunks = self.codes.shape[:2]
        _groups_dense[(chunks, blocks)](
            self.codes,
            self.scales,
            self.zeros,
            out,
            self.num_out,
            self.size,
            chunks,
            **self._constants,
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
        if tiles is None and self.takes_one_row(x):
            from onestem.ops.triton.one_row import one_row_product

            one_row_product(x, self, bias, out, num_sms(x.device))
            return out
        if tiles is None:
            tiles = self.tiles(rows, num_sms(x.device))
            words = self.codes.shape[3] * self.codes.itemsize
            stage = tiles.out * words + tiles.rows * self.columns() * x.itemsize
            tiles = _fitting(tiles, stage, x.device)
        num_tiles, chunks = _num_tiles(rows, self.num_out, tiles), self.codes.shape[1]
        _groups_product[(num_tiles, tiles.split)](
            x,
            self.codes,
            self.scales,
            self.zeros,
            out if bias is None else bias,
            out,
            _parts(out, tiles, num_tiles, self.counters, torch.float32),
            self.counters,
            rows,
            self.num_out,
            self.size,
            chunks,
            triton.cdiv(chunks, tiles.split),
            **self._constants,
            HAS_BIAS=bias is not None,
            SPLIT=tiles.split,
            BLOCK_N=tiles.out,
            BLOCK_M=tiles.rows,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
        return out

    def tiles(self, rows: int, sms: int) -> Tiles:
        """Tiles for `rows` rows on `sms` multiprocessors."""
        chosen = next(tiles for most, tiles in _GROUP_TILES if rows <= most)
        return divided(self, chosen, rows, sms)

    def takes_one_row(self, x: Tensor) -> bool:
        """Whether `one_row_product` multiplies `x`: it copies it to shared memory, 16 bytes at a
        time."""
        if not (x.is_cuda and len(x) == 1 and self.bits == 4 and x.itemsize == 2):
            return False
        fits = self.size % 8 == 0 and self.size <= _LARGEST_ROW
        return fits and torch.cuda.get_device_capability(x.device) >= (8, 0)

    def takes_gated_row(self, x: Tensor) -> bool:
        """Whether `gated_row` takes `x`: a tile has as many outputs of the gate as of `up`."""
        return self.num_out % 128 == 0 and self.takes_one_row(x)

    def gated_row(self, x: Tensor, bias: Tensor | None, gate: Literal["silu", "gelu"]) -> Tensor:
        """gate(first half) * second half of what `product` gives for one row, rounded as it is:
        x `[1, size]`, contiguous -> `[1, num_out / 2]`. `gelu` is the approximation by tanh."""
        from onestem.ops.triton.one_row import one_row_product

        out = torch.empty(1, self.num_out // 2, dtype=x.dtype, device=x.device)
        one_row_product(x, self, bias, out, num_sms(x.device), gate)
        return out

    def columns(self, tiles: Tiles | None = None) -> int:
        """Columns of a chunk."""
        return self.codes.shape[3] * (4 if self.bits == 4 else 1)

    @property
    def _constants(self) -> dict[str, object]:
        return {
            "BITS": self.bits,
            "IS_FLOAT": self.codes.is_floating_point(),
            "ZERO": self.zero,
            "ASM": self.codes.is_cuda,
            "PLANE": self.codes.shape[3],
            "GROUPS": self.scales.shape[2],
            "EVEN": self.size % self.columns() == 0,
        }


# Columns of a row that leaves shared memory for another program.
_LARGEST_ROW = 32768
# As `_CHANNEL_TILES`. Larger tiles have more sums than registers.
_GROUP_TILES = (
    (16, Tiles(64, 16, 4, 4, 4)),
    (32, Tiles(64, 32, 2, 4, 4)),
    (math.inf, Tiles(64, 64, 2, 4, 3)),
)


def _plane(group: int, bits: int) -> int:
    """Columns that are multiplied at once and share a scale. 0: there is one group."""
    largest = 64 if bits == 4 else 128
    return next(plane for plane in (largest, 64, 32) if group % plane == 0)


def in_blocks(values: Tensor, columns: int) -> Tensor:
    """`[num_out, size]` -> `[blocks, chunks, 64, columns]`, with zeros at the ends."""
    lacking = -values.shape[1] % columns, -values.shape[0] % 64
    padded = torch.nn.functional.pad(values, (0, lacking[0], 0, lacking[1]))
    return padded.unflatten(0, (-1, 64)).unflatten(2, (-1, columns)).transpose(1, 2).contiguous()


def in_words(codes: Tensor) -> Tensor:
    """Codes of 4 bits, uint8 `[..., 4 * plane]` -> int16 `[..., plane]`: word j holds column j in
    its lowest four bits, above them columns `plane + j`, `2 * plane + j` and `3 * plane + j`."""
    one, two, three, four = codes.chunk(4, dim=-1)
    both = torch.stack((one | two << 4, three | four << 4), -1)
    return both.view(torch.int16).squeeze(-1)


def _narrowed(scales: Tensor) -> Tensor:
    """Scales in 16 bits if nothing is lost: each product reads them."""
    for dtype in (torch.bfloat16, torch.float16):
        narrow = scales.to(dtype)
        if torch.equal(narrow.float(), scales.float()):
            return narrow
    return scales.float()
