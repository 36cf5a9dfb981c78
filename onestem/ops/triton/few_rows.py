"""Products whose sums walk a weight's columns in one order, whatever the number of rows.

A library that cuts columns where rows are few computes rows with other bits there. Here a tile of
outputs walks all columns, weights on the left, since a few rows fill no tile of tensor cores. On
Hopper a few rows have a form of their own (`ops.triton.streamed`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from onestem.ops.triton.sizes import cdiv
from onestem.ops.triton.tiled import Tiles, fitting, num_sms, store_tile, sum_columns, tile_of

# Maximum rows, and tiles for them. The first ones are multiplied by other instructions than the
# others, of which more programs share a weight.
FEW_ROWS = (
    (16, (Tiles(32, 16, 1, 4, 6, 128), Tiles(64, 16, 1, 4, 5, 128))),
    (32, (Tiles(64, 32, 1, 4, 5, 128),)),
    (64, (Tiles(64, 64, 1, 4, 4, 128),)),
    (256, (Tiles(64, 128, 1, 4, 4, 64),)),
)
ANY_ROWS = Tiles(128, 256, 1, 8, 3, 64)


@dataclass(frozen=True)
class Streamed(Tiles):
    """Tiles of `streamed_product`."""


# Those above 64 rows do not wait for the weight, but for what a multiprocessor takes in.
STREAMED = (
    (8, (Streamed(32, 8, 1, 4, 5, 256),)),
    (16, (Streamed(32, 16, 1, 4, 5, 256),)),
    (32, (Streamed(32, 32, 1, 4, 5, 256),)),
    (64, (Streamed(32, 64, 1, 4, 4, 256),)),
    (128, (Streamed(32, 128, 1, 4, 5, 128),)),
    (256, (Streamed(64, 128, 1, 4, 4, 128),)),
)


def streamed_tiles(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device, offset: int
) -> tuple[tuple[int, tuple[Streamed, ...]], ...]:
    """Those of `STREAMED` for a weight of a shape, `offset` bytes from a multiple of 64."""
    suits = dtype.itemsize == 2 and shape[1] % 64 == 0 and offset % 16 == 0
    if not suits or device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return ()

    def programs(most: int, tiles: Streamed) -> int:
        return cdiv(shape[0], tiles.out) * cdiv(most, tiles.rows)

    sms = num_sms(device)
    return tuple(
        (most, some)
        for most, some in STREAMED
        if most <= 64 or 0.75 * sms <= programs(most, *some) <= sms
    )


@triton.jit(do_not_specialize=("num_rows",))
def _rows_product(
    x,
    weight,
    bias,
    out,
    num_rows,
    num_out,
    size,
    EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TILES: tl.constexpr,
):
    """Program (tile): the sums of a tile over all columns."""
    m, n = tile_of(num_rows, num_out, TILES)
    in_n, in_m = n < num_out, m < num_rows
    SHAPE: tl.constexpr = (TILES.out, TILES.rows)
    total = tl.zeros(SHAPE, tl.float32)
    chunks = tl.cdiv(size, TILES.columns)
    total = sum_columns(total, weight, x, n, m, in_n, in_m, size, 0, chunks, EVEN, TILES.columns)
    inside = in_n[:, None] & in_m[None, :]
    store_tile(total, bias, out, n, m, num_out, inside, HAS_BIAS)


def rows_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, tiles: Tiles, dtype: torch.dtype
) -> Tensor:
    """x `[n, size]` times a weight `[num_out, size]`, plus a bias `[num_out]`, contiguous, of one
    dtype: `[n, num_out]` in a dtype, rounded once."""
    (rows, size), num_out = x.shape, len(weight)
    out = torch.empty(rows, num_out, dtype=dtype, device=x.device)
    if not rows:
        return out
    if isinstance(tiles, Streamed):
        from onestem.ops.triton.streamed import streamed_product

        streamed_product(x, weight, bias, tiles, out)
        return out
    stage = (tiles.out + tiles.rows) * tiles.columns * x.itemsize
    tiles = fitting(tiles, stage, x.device)
    _rows_product[(cdiv(rows, tiles.rows) * cdiv(num_out, tiles.out),)](
        x,
        weight,
        out if bias is None else bias,
        out,
        rows,
        num_out,
        size,
        EVEN=size % tiles.columns == 0,
        HAS_BIAS=bias is not None,
        TILES=tiles,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return out
