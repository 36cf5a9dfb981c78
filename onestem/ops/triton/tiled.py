"""Products with quantised weights in Triton, weights on the left.

A tile of tensor cores has at least 64 rows. Weights fill them, and a few rows of a step do not. So
weights are the left factor here, from registers if they are unpacked there, and rows the right one.
A product of some rows has few tiles, whose columns are divided among programs. The last program of
a tile adds up all parts in order, so a row's bits do not depend on which program that is.

`TiledChannels`: float8 or int8 with a scale per row, times rows that are rounded the same way.
Scales per group of columns are in `onestem.ops.triton.tiled_groups`.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from onestem.ops.rounding import RoundedRows
from onestem.ops.triton.sizes import cdiv


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


@dataclass(frozen=True)
class Packing:
    """How a weight of `TiledGroups` is packed, as kernels are compiled for it.

    Attributes:
        bits, is_float: of a code.
        plane: columns multiplied at once; a chunk has `places` times as many.
        groups: groups of columns in a chunk.
        zero: the zero point of all groups; -1: each has its own.
        even: whether the last chunk is whole.
        asm: whether assembly unpacks codes. It does not know NaN.
        has_minimums: whether groups have minimums.
        span: chunks of a super-block; 0: scales and minimums have one level.
        is_e2m1: whether codes stand for the numbers of e2m1, doubled.
        whole: whether all columns are one group, whose numbers are there once.
    """

    bits: int
    is_float: bool
    plane: int
    groups: int
    zero: int
    even: bool
    asm: bool
    has_minimums: bool = False
    span: int = 0
    is_e2m1: bool = False
    whole: bool = False

    @property
    def in_word(self) -> int:
        """Codes in a word."""
        return 16 // self.bits

    @property
    def places(self) -> int:
        """Planes of a chunk: in one word after the other."""
        return 4 if self.plane <= 32 else self.in_word

    @property
    def columns(self) -> int:
        """Columns of a chunk."""
        return self.plane * self.places

    @property
    def kinds(self) -> int:
        """Numbers of a group: a scale, and perhaps a minimum."""
        return 1 + self.has_minimums

    @property
    def lines(self) -> int:
        """Numbers of a chunk in `TiledGroups.scales`, for each row."""
        return self.kinds if self.span else self.groups


class Tiled(Protocol):
    """A weight `[num_out, size]`."""

    @property
    def counters(self) -> Tensor:
        """See `counters_of`."""

    @property
    def num_out(self) -> int:
        """Outputs: rows of the weight."""

    @property
    def size(self) -> int:
        """Inputs: columns of the weight."""

    def columns(self, tiles: Tiles) -> int:
        """Columns of a chunk."""


@triton.jit
def tile_of(num_rows, num_out, TILES: tl.constexpr):
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
def sum_columns(
    total,
    weight,
    rows,
    n,
    m,
    in_n,
    in_m,
    size,
    first,
    last,
    EVEN: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A tile's sum, with the products of chunks first..last-1 of the weight's and rows' columns."""
    i = tl.arange(0, BLOCK_K)
    weight_at = weight + n.to(tl.int64)[:, None] * size + i[None, :]
    row_at = rows + m.to(tl.int64)[None, :] * size + i[:, None]
    for chunk in range(first, last):
        column = chunk * BLOCK_K
        if EVEN:
            left = tl.load(weight_at + column, mask=in_n[:, None], other=0.0)
            right = tl.load(row_at + column, mask=in_m[None, :], other=0.0)
        else:
            in_k = column + i < size
            left = tl.load(weight_at + column, mask=in_n[:, None] & in_k[None, :], other=0.0)
            right = tl.load(row_at + column, mask=in_m[None, :] & in_k[:, None], other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee", out_dtype=total.dtype)
    return total


@triton.jit
def sum_parts(total, parts, counters, inside, TILES: tl.constexpr):
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
def store_tile(total, bias, out, n, m, num_out, inside, HAS_BIAS: tl.constexpr):
    """Store a tile's sums, and its bias, rounded."""
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < num_out, other=0.0).to(tl.float32)[:, None]
    at = out + m.to(tl.int64)[None, :] * num_out + n[:, None]
    tl.store(at, total.to(out.dtype.element_ty), mask=inside)


@functools.cache
def _shared_bytes(device: torch.device) -> int:
    """Shared memory that a program may have for its stages."""
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index)
    return int(properties["max_shared_mem"]) - 4096


def fitting(tiles: Tiles, stage_bytes: int, device: torch.device) -> Tiles:
    """Tiles with the number of stages that fits a device's shared memory."""
    if device.type != "cuda":
        return tiles
    return replace(tiles, stages=max(1, min(tiles.stages, _shared_bytes(device) // stage_bytes)))


# Maximum tiles with divided columns.
_COUNTERS = 2048


def counters_of(device: torch.device) -> Tensor:
    """A weight's counters, which each product leaves at 0."""
    return torch.zeros(_COUNTERS, dtype=torch.int32, device=device)


def multiply(
    kernel: Any,
    factors: tuple[Tensor, ...],
    weight: Tiled,
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
        cdiv(number, tiles.split),
        HAS_BIAS=bias is not None,
        TILES=tiles,
        **form,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return out


def _num_tiles(rows: int, num_out: int, tiles: Tiles) -> int:
    return cdiv(rows, tiles.rows) * cdiv(num_out, tiles.out)


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
    m, n = tile_of(num_rows, num_out, TILES)
    in_n, in_m = n < num_out, m < num_rows
    SHAPE: tl.constexpr = (TILES.out, TILES.rows)
    total = tl.zeros(SHAPE, tl.int32 if IS_INT else tl.float32)
    first = tl.program_id(1) * chunks
    last = tl.minimum(first + chunks, tl.cdiv(size, TILES.columns))
    total = sum_columns(
        total, weight, codes, n, m, in_n, in_m, size, first, last, EVEN, TILES.columns
    )
    inside = in_n[:, None] & in_m[None, :]
    is_last = True
    if TILES.split > 1:
        total, is_last = sum_parts(total, parts, counters, inside, TILES)
    if is_last:
        row_scale = tl.load(row_scales + m, mask=in_m, other=0.0)
        scale = tl.load(scales + n, mask=in_n, other=0.0)
        result = total.to(tl.float32) * row_scale[None, :] * scale[:, None]
        store_tile(result, bias, out, n, m, num_out, inside, HAS_BIAS)


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
        object.__setattr__(self, "counters", counters_of(self.codes.device))

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
            tiles = fitting(tiles, (tiles.out + tiles.rows) * tiles.columns, out.device)
        return multiply(
            _channels_product,
            (x.codes, x.scales, self.codes, self.scales),
            self,
            bias,
            out,
            tiles,
            torch.int32 if is_int else torch.float32,
            (cdiv(size, tiles.columns),),
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


def divided(weight: Tiled, tiles: Tiles, rows: int, sms: int) -> Tiles:
    """Tiles whose `split` is programs per multiprocessor -> tiles whose `split` is parts."""
    num_tiles = _num_tiles(rows, weight.num_out, tiles)
    chunk = weight.columns(tiles)
    chunks = cdiv(weight.size, chunk)
    # Adding up shorter parts would take longer than computing them.
    split = min(tiles.split * sms // num_tiles, chunks * chunk // _LEAST_COLUMNS, _MOST_PARTS)
    if split <= 1 or num_tiles > _COUNTERS:
        return replace(tiles, split=1)
    # No part is empty.
    return replace(tiles, split=cdiv(chunks, cdiv(chunks, split)))


_LEAST_COLUMNS, _MOST_PARTS = 512, 16

# Maximum rows, and the tiles for them; `split` is programs per multiprocessor.
_CHANNEL_TILES = (
    (16, Tiles(64, 16, 4, 4, 5, 128)),
    (32, Tiles(64, 32, 4, 4, 5, 128)),
    (64, Tiles(128, 64, 2, 4, 4, 128)),
    (256, Tiles(128, 128, 1, 8, 4, 128)),
    (math.inf, Tiles(128, 256, 1, 8, 3, 128)),
)


def in_blocks(values: Tensor, columns: int) -> Tensor:
    """`[num_out, size]` -> `[blocks, chunks, 64, columns]`, with zeros at the ends."""
    lacking = -values.shape[1] % columns, -values.shape[0] % 64
    padded = torch.nn.functional.pad(values, (0, lacking[0], 0, lacking[1]))
    return padded.unflatten(0, (-1, 64)).unflatten(2, (-1, columns)).transpose(1, 2).contiguous()


def in_words(codes: Tensor, count: int = 4) -> Tensor:
    """Codes of 4 or 8 bits, `count` (4 or 2) in a word: uint8 `[..., count * plane]` -> int16
    `[..., plane]`. Word j holds column j in its lowest bits, above them columns `plane + j`,
    `2 * plane + j` and so on."""
    parts = codes.chunk(count, dim=-1)
    if count == 4:
        parts = parts[0] | parts[1] << 4, parts[2] | parts[3] << 4
    return torch.stack(parts, -1).view(torch.int16).squeeze(-1)
