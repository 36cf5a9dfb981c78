"""Queries, and values that no query may see, in shared memory."""

# mypy: allow-untyped-defs
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

__all__ = ["blank", "load_query", "query_rows"]


@gluon.jit
def _blank_box(boxes, first, start, lo, hi, STEP: gl.constexpr, BLOCK_D: gl.constexpr):
    """Set values of a box's tokens outside lo .. hi - 1 to 0, in all dimensions."""
    box: gl.constexpr = boxes.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    n = start + gl.arange(0, box, gl.SliceLayout(1, layout))  # [BOX]
    inside = ((n >= lo) & (n < hi))[:, None]
    loaded = ()
    for c in gl.static_range(BLOCK_D // 64):
        box_values = boxes.index(first + c * STEP).load(layout)
        # Triton has no unpacking.
        loaded = loaded + (box_values,)  # type: ignore[assignment]  # noqa: RUF005
    for c in gl.static_range(BLOCK_D // 64):
        kept = gl.where(inside, loaded[c], gl.zeros_like(loaded[c]))
        boxes.index(first + c * STEP).store(kept)


@gluon.jit
def blank(
    boxes, tile, start, lo, hi, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, BOX: gl.constexpr
):
    """Set values of slots outside the walk to 0, in the pages where it begins and ends. They may be
    NaN, which a weight of 0 does not remove. tile: its number in the ring's memory."""
    across: gl.constexpr = BLOCK_N // BOX
    first = tile * (across * (BLOCK_D // 64))
    begins = (lo > start) & (lo < start + BLOCK_N) & (lo % BOX != 0)
    ends = (hi > start) & (hi < start + BLOCK_N) & (hi % BOX != 0)
    if begins | ends:
        if begins:
            i = (lo - start) // BOX
            _blank_box(boxes, first + i, start + i * BOX, lo, hi, across, BLOCK_D)
        if ends:
            i = (hi - start) // BOX
            _blank_box(boxes, first + i, start + i * BOX, lo, hi, across, BLOCK_D)
        fence_async_shared()


@gluon.jit
def query_rows(
    rows, row_start, num_rows, first, COUNT: gl.constexpr, GROUP: gl.constexpr,
    BLOCK_D: gl.constexpr,
):  # fmt: skip
    """The rows of queries first .. first + COUNT - 1 of an item; -1: there is none."""
    across: gl.constexpr = BLOCK_D // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])
    j = (first + gl.arange(0, COUNT, gl.SliceLayout(1, layout))) // GROUP  # [COUNT]
    return gl.load(rows + row_start + j, mask=j < num_rows, other=-1)


@gluon.jit
def load_query(
    q, row, head, first, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr,
):  # fmt: skip
    """The queries of rows (`query_rows`); 0 for rows of -1 and from HEAD_DIM on."""
    layout: gl.constexpr = row.type.layout.parent
    m = first + gl.arange(0, row.shape[0], gl.SliceLayout(1, layout))  # [COUNT]
    d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, layout))  # [BLOCK_D]
    at = (row.to(gl.int64) * (NUM_KV_HEADS * GROUP) + head * GROUP + m % GROUP) * HEAD_DIM
    there = (row >= 0)[:, None] & (d < HEAD_DIM)[None, :]
    return gl.load(q + at[:, None] + d[None, :], mask=there, other=0.0)
