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
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from onestem.ops.rounding import RoundedRows

__all__ = [
    "Packing",
    "TiledChannels",
    "TiledGroups",
    "Tiles",
    "divided",
    "in_blocks",
    "in_words",
    "num_sms",
]


@dataclass(frozen=True)
class Tiles:
    """Cut of a product: tiles of `out` outputs by `rows` rows, their columns in `split` parts; with
    8 bits, `columns` at a time."""

    out: int
    rows: int
    split: int = 1
    warps: int = 4
    stages: int = 4
    columns: int = 128


@triton.jit
def _tile(num_rows, num_out, TILES: tl.constexpr):
    """Rows and outputs of a tile: in bands of 8 tiles of rows, so that reads stay in the caches."""
    BAND: tl.constexpr = 8
    tile = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(num_rows, TILES.rows), tl.cdiv(num_out, TILES.out)
    band = tile // (BAND * tiles_n)
    high = tl.minimum(tiles_m - band * BAND, BAND)
    place = tile - band * BAND * tiles_n
    tile_m, tile_n = band * BAND + place % high, place // high
    n = tile_n * TILES.out + tl.arange(0, TILES.out)
    m = tile_m * TILES.rows + tl.arange(0, TILES.rows)
    return m, n


@triton.jit
def _sum_parts(total, parts, counters, inside, TILES: tl.constexpr):
    """Store a part's sum; the last program of a tile gets all parts, added in order."""
    SPLIT: tl.constexpr = TILES.split
    SIZE: tl.constexpr = TILES.rows * TILES.out
    tile = tl.program_id(0)
    within = tl.arange(0, TILES.rows)[None, :] * TILES.out + tl.arange(0, TILES.out)[:, None]
    first = parts + tile.to(tl.int64) * (SPLIT * SIZE)
    own = first + tl.program_id(1) * SIZE
    tl.store(own + within, total, mask=inside)
    tl.debug_barrier()
    is_last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLIT - 1
    if is_last:
        SHAPE: tl.constexpr = (TILES.out, TILES.rows)  # Triton 3.6 takes no fields in a shape
        total = tl.zeros(SHAPE, total.dtype)
        for part in range(SPLIT):
            at = first + part * SIZE + within
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
    return replace(tiles, stages=max(1, min(tiles.stages, _shared_bytes(device) // stage_bytes)))


# Maximum tiles with divided columns.
_COUNTERS = 2048


def _counters(device: torch.device) -> Tensor:
    return torch.zeros(_COUNTERS, dtype=torch.int32, device=device)


def _multiply(
    kernel: Any,
    factors: tuple[Tensor, ...],
    weight: TiledChannels | TiledGroups,
    bias: Tensor | None,
    out: Tensor,
    tiles: Tiles,
    sums: torch.dtype,
    chunks: tuple[int, ...],
    **form: object,
) -> Tensor:
    """Launch a product into `out`, with its sums in a dtype. chunks: the last is their number."""
    rows, num_tiles = len(out), _num_tiles(len(out), weight.num_out, tiles)
    parts = weight.counters  # unused
    if tiles.split > 1:
        assert num_tiles <= _COUNTERS
        parts = out.new_empty(num_tiles * tiles.split * tiles.rows * tiles.out, dtype=sums)
    *sizes, number = chunks
    kernel[(num_tiles, tiles.split)](
        *factors,
        out if bias is None else bias,
        out,
        parts,
        weight.counters,
        rows,
        weight.num_out,
        weight.size,
        *sizes,
        triton.cdiv(number, tiles.split),
        HAS_BIAS=bias is not None,
        TILES=tiles,
        **form,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return out


def _num_tiles(rows: int, num_out: int, tiles: Tiles) -> int:
    return triton.cdiv(rows, tiles.rows) * triton.cdiv(num_out, tiles.out)


@functools.cache
def num_sms(device: torch.device) -> int:
    """Number of multiprocessors."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


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
    EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TILES: tl.constexpr,
):
    """Program (tile, part): the sum of a tile over `chunks` chunks of columns."""
    BLOCK_K: tl.constexpr = TILES.columns
    m, n = _tile(num_rows, num_out, TILES)
    i = tl.arange(0, BLOCK_K)
    in_n, in_m = n < num_out, m < num_rows
    weight_at = weight + n.to(tl.int64)[:, None] * size + i[None, :]
    code_at = codes + m.to(tl.int64)[None, :] * size + i[:, None]
    SHAPE: tl.constexpr = (TILES.out, TILES.rows)
    total = tl.zeros(SHAPE, tl.int32 if IS_INT else tl.float32)
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
    if TILES.split > 1:
        total, is_last = _sum_parts(total, parts, counters, inside, TILES)
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
        rows, size = len(x.codes), self.size
        out = torch.empty(rows, self.num_out, dtype=dtype, device=x.codes.device)
        if rows == 0:
            return out
        is_int = self.codes.dtype == torch.int8
        if tiles is None:
            tiles = self.tiles(rows, num_sms(out.device))
            tiles = _fitting(tiles, (tiles.out + tiles.rows) * tiles.columns, out.device)
        return _multiply(
            _channels_product,
            (x.codes, x.scales, self.codes, self.scales),
            self,
            bias,
            out,
            tiles,
            torch.int32 if is_int else torch.float32,
            (triton.cdiv(size, tiles.columns),),
            IS_INT=is_int,
            EVEN=size % tiles.columns == 0,
        )

    def tiles(self, rows: int, sms: int) -> Tiles:
        """Tiles for `rows` rows on `sms` multiprocessors."""
        chosen = next(tiles for most, tiles in _CHANNEL_TILES if rows <= most)
        return divided(self, chosen, rows, sms)

    def columns(self, tiles: Tiles) -> int:
        """Columns of a chunk."""
        return tiles.columns

    @property
    def num_out(self) -> int:
        """Outputs: rows of the weight."""
        return len(self.codes)

    @property
    def size(self) -> int:
        """Inputs: columns of the weight."""
        return self.codes.shape[1]


def divided(weight: TiledChannels | TiledGroups, tiles: Tiles, rows: int, sms: int) -> Tiles:
    """Tiles whose `split` is programs per multiprocessor -> tiles whose `split` is parts."""
    num_tiles = _num_tiles(rows, weight.num_out, tiles)
    chunk = weight.columns(tiles)
    chunks = triton.cdiv(weight.size, chunk)
    # Adding up shorter parts would take longer than computing them.
    split = min(tiles.split * sms // num_tiles, chunks * chunk // _LEAST_COLUMNS, _MOST_PARTS)
    if split <= 1 or num_tiles > _COUNTERS:
        return replace(tiles, split=1)
    # No part is empty.
    return replace(tiles, split=triton.cdiv(chunks, triton.cdiv(chunks, split)))


_LEAST_COLUMNS, _MOST_PARTS = 512, 16

# Maximum rows, and the tiles for them; `split` is programs per multiprocessor.
_CHANNEL_TILES = (
    (16, Tiles(64, 16, 4, 4, 5, 128)),
    (32, Tiles(64, 32, 4, 4, 5, 128)),
    (64, Tiles(128, 64, 2, 4, 4, 128)),
    (256, Tiles(128, 128, 1, 8, 4, 128)),
    (math.inf, Tiles(128, 256, 1, 8, 3, 128)),
)


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


@dataclass(frozen=True)
class Packing:
    """How a weight is packed, as kernels are compiled for it.

    Attributes:
        bits, is_float: of a code.
        plane: columns multiplied at once; a chunk has as many, or with 4 bits four times as many.
        groups: groups of columns in a chunk.
        zero: the zero point of all groups; -1: each has its own.
        even: whether the last chunk is whole.
        asm: whether assembly unpacks codes.
    """

    bits: int
    is_float: bool
    plane: int
    groups: int
    zero: int
    even: bool
    asm: bool

    @property
    def places(self) -> int:
        """Codes in a word."""
        return 4 if self.bits == 4 else 1


@triton.jit
def _values(codes, zero, dtype: tl.constexpr, PLACE: tl.constexpr, PACKING: tl.constexpr):
    """Codes less their zero points, exact in `dtype`; with 4 bits, those at PLACE in words."""
    if PACKING.is_float:
        value = codes.to(dtype)
    elif PACKING.bits == 8:
        value = (codes.to(tl.int16) - zero[:, None]).to(dtype)
    elif PACKING.asm and dtype != tl.float32:
        UNPACK: tl.constexpr = _UNPACK_BF16 if dtype == tl.bfloat16 else _UNPACK_FP16
        BASE: tl.constexpr = 128 if dtype == tl.bfloat16 else 1024
        less = (-BASE - zero).to(dtype)[:, None]
        value = tl.inline_asm_elementwise(
            UNPACK[PLACE], "=r,r,r", [codes, less], less.dtype, is_pure=True, pack=2
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
    found = ()
    for group in tl.static_range(GROUPS):
        # Triton has no unpacking.
        found = found + (tl.load(scales + at + group * _ROWS),)  # type: ignore[assignment]  # noqa: RUF005
    return found


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
    PACKING: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TILES: tl.constexpr,
):
    """Program (tile, part): the sum of a tile over `chunks` chunks of columns."""
    dtype: tl.constexpr = x.dtype.element_ty
    PLANE: tl.constexpr = PACKING.plane
    GROUPS: tl.constexpr = PACKING.groups
    PLACES: tl.constexpr = PACKING.places
    m, n = _tile(num_rows, num_out, TILES)
    j = tl.arange(0, PLANE)
    in_n, in_m = n < num_out, m < num_rows
    line = tl.minimum(n // _ROWS, (num_out - 1) // _ROWS).to(tl.int64) * num_chunks
    code_at = codes + (line * (_ROWS * PLANE) + n % _ROWS * PLANE)[:, None] + j[None, :]
    group_at = line * (_ROWS * GROUPS) + n % _ROWS
    x_at = x + m.to(tl.int64)[None, :] * size + j[:, None]
    first = tl.program_id(1) * chunks
    last = tl.minimum(first + chunks, num_chunks)
    SHAPE: tl.constexpr = (TILES.out, TILES.rows)
    total = tl.zeros(SHAPE, tl.float32)
    # Scales are loaded a chunk before their use, so nothing waits for them.
    following = _scales_of(scales, group_at + first * (_ROWS * GROUPS), GROUPS)
    for chunk in range(first, last):
        scale = following
        at = group_at + tl.minimum(chunk + 1, last - 1) * (_ROWS * GROUPS)
        following = _scales_of(scales, at, GROUPS)
        word = tl.load(code_at + chunk * (_ROWS * PLANE))
        for group in tl.static_range(GROUPS):
            zero = _zero_of(zeros, group_at + (chunk * GROUPS + group) * _ROWS, PACKING.zero)
            part = tl.zeros(SHAPE, tl.float32)
            for place in tl.static_range(group * PLACES // GROUPS, (group + 1) * PLACES // GROUPS):
                column = (chunk * PLACES + place) * PLANE
                if PACKING.even:
                    right = tl.load(x_at + column, mask=in_m[None, :], other=0.0)
                else:
                    in_k = column + j < size
                    right = tl.load(x_at + column, mask=in_m[None, :] & in_k[:, None], other=0.0)
                left = _values(word, zero, dtype, place, PACKING)
                part = tl.dot(left, right, part, input_precision="ieee")
            total += part * scale[group].to(tl.float32)[:, None]
    inside = in_n[:, None] & in_m[None, :]
    is_last = True
    if TILES.split > 1:
        total, is_last = _sum_parts(total, parts, counters, inside, TILES)
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
    PACKING: tl.constexpr,
):
    """Program (chunk, rows): writes a block of the weight out."""
    PLANE: tl.constexpr = PACKING.plane
    GROUPS: tl.constexpr = PACKING.groups
    PLACES: tl.constexpr = PACKING.places
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
        zero = _zero_of(zeros, group_at, PACKING.zero)
        scale = tl.load(scales + group_at).to(tl.float32)
        value = _values(word, zero, dtype, place, PACKING).to(tl.float32)
        value *= scale[:, None]
        column = (tl.program_id(0) * PLACES + place) * PLANE
        inside = (n < num_out)[:, None]
        if not PACKING.even:
            inside = inside & (column + j < size)[None, :]
        tl.store(to + column, value.to(dtype), mask=inside)


@dataclass(frozen=True, eq=False)
class TiledGroups:
    """A weight `[num_out, size]` as the kernels read it: consecutive blocks of 64 rows and a chunk
    of columns.

    Attributes:
        codes: float8_e4m3fn or uint8 `[blocks, chunks, 64, plane]`; 4 bits: int16 (`in_words`).
        scales: `[blocks, chunks, groups of a chunk, 64]`, of 16 bits if these hold them exactly.
        zeros: int32, in the same shape, if groups have their own: wide enough for asynchronous
            copies.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    packing: Packing
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
        packing = Packing(
            bits,
            is_float=raw.is_floating_point(),
            plane=plane,
            groups=packed.shape[2],
            zero=first if alike else -1,
            even=size % chunk == 0,
            asm=raw.is_cuda,
        )
        return TiledGroups(raw, packed, many, packing, num_out, size, _counters(codes.device))

    def tensors(self) -> list[Tensor]:
        """All tensors held, for counting bytes."""
        return [self.codes, self.scales] + ([] if self.packing.zero >= 0 else [self.zeros])

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
            PACKING=self.packing,
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
            return self._of_row(x, bias, out)
        if tiles is None:
            tiles = self.tiles(rows, num_sms(x.device))
            words = self.codes.shape[3] * self.codes.itemsize
            stage = tiles.out * words + tiles.rows * self.columns() * x.itemsize
            tiles = _fitting(tiles, stage, x.device)
        chunks = self.codes.shape[1]
        return _multiply(
            _groups_product,
            (x, self.codes, self.scales, self.zeros),
            self,
            bias,
            out,
            tiles,
            torch.float32,
            (chunks, chunks),
            PACKING=self.packing,
        )

    def tiles(self, rows: int, sms: int) -> Tiles:
        """Tiles for `rows` rows on `sms` multiprocessors."""
        chosen = next(tiles for most, tiles in _GROUP_TILES if rows <= most)
        return divided(self, chosen, rows, sms)

    def takes_one_row(self, x: Tensor) -> bool:
        """Whether `one_row_product` multiplies `x`: it copies it to shared memory, 16 bytes at a
        time."""
        if not (x.is_cuda and len(x) == 1 and self.packing.bits == 4 and x.itemsize == 2):
            return False
        fits = self.size % 8 == 0 and self.size <= _LARGEST_ROW
        return fits and torch.cuda.get_device_capability(x.device) >= (8, 0)

    def takes_gated_row(self, x: Tensor) -> bool:
        """Whether `gated_row` takes `x`: a tile has as many outputs of the gate as of `up`."""
        return self.num_out % 128 == 0 and self.takes_one_row(x)

    def gated_row(self, x: Tensor, bias: Tensor | None, gate: Literal["silu", "gelu"]) -> Tensor:
        """gate(first half) * second half of what `product` gives for one row, rounded as it is:
        x `[1, size]`, contiguous -> `[1, num_out / 2]`. `gelu` is the approximation by tanh."""
        out = torch.empty(1, self.num_out // 2, dtype=x.dtype, device=x.device)
        return self._of_row(x, bias, out, gate)

    def _of_row(
        self,
        x: Tensor,
        bias: Tensor | None,
        out: Tensor,
        gate: Literal["silu", "gelu"] | None = None,
    ) -> Tensor:
        from onestem.ops.triton.one_row import one_row_product

        factors = self.codes, self.scales, self.zeros, self.packing.zero
        one_row_product(x, *factors, bias, out, num_sms(x.device), gate)
        return out

    def columns(self, tiles: Tiles | None = None) -> int:
        """Columns of a chunk."""
        return self.packing.plane * self.packing.places


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
