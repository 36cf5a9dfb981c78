"""The copying warps: they fill the ring of tiles in shared memory by the copy engine."""

# mypy: allow-untyped-defs
from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from onestem.ops.triton.sm90.walk import (
    line_of,
    next_stage,
    queue,
    record_line,
    section,
    start_of,
    tile_start,
    tiles_of,
    word,
)
from onestem.ops.triton.versions import copy_box, viewed
from onestem.ops.triton.words import (
    AT_PAGES,
    AT_RECORDS,
    AT_WALK,
    CLEAR_HI,
    CLEAR_LO,
    ENTRY,
    FIRST_ENTRY,
    HI,
    NUM_WALK,
    WALK_START,
)

__all__ = ["box_tokens", "copy", "descriptors", "fetch_list"]

LINE: gl.constexpr = gl.constexpr(32)  # words of a cache line
LINES: gl.constexpr = gl.constexpr(16)  # of a work list that each program fetches


def box_tokens(page_size: int, block_n: int) -> int:
    """Tokens that the copy engine takes at a time; 0 if it cannot copy pages of this size."""
    whole = page_size >= 8 and page_size & (page_size - 1) == 0
    return min(page_size, block_n) if whole else 0


def descriptors(k_pages: Tensor, v_pages: Tensor, box: int) -> tuple[TensorDescriptor, ...]:
    """Descriptors of the pages, `[num_pages, page_size, num_kv_heads, head_dim]`, with which the
    copy engine copies boxes of `box` tokens and 64 dimensions (128 bytes) of a head. Beyond a
    head's last dimension it writes zeros, and reads nothing."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    return tuple(
        TensorDescriptor.from_tensor(pages.transpose(1, 2), [1, 1, box, 64], layout)
        for pages in (k_pages, v_pages)
    )


@gluon.jit
def fetch_list(control, num_words):
    """Fetch the beginning of the work list (132 programs: 270 KB) into the L2 cache, each line by
    one program of 4 warps. Loads that depend on each other then hit the cache.
    """
    i = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    line = i * gl.num_programs(0) + gl.program_id(0)
    stop = gl.where(i < LINES, num_words // LINE, 0)
    gl.inline_asm_elementwise(
        "{ .reg .pred there; setp.lt.s32 there, $2, $3; @there prefetch.global.L2 [$1]; "
        "mov.b32 $0, 0; }",
        "=r,l,r,r",
        [(control + line * LINE).to(gl.int64, bitcast=True), line, stop],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _places(
    start, lo, hi, pages, PAGE_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, BOX: gl.constexpr
):
    """Pages and places in them at which the boxes of a tile begin. A box without any walked token
    gets a place outside of the pool: the copy engine writes zeros."""
    places = ()
    for i in gl.static_range(BLOCK_N // BOX):
        x = start + i * BOX
        inside = (x < hi) & (x + BOX > lo)
        page = gl.load(pages + x // PAGE_SIZE, mask=inside, other=0)
        # Triton has no unpacking.
        place = (gl.where(inside, page, -1), x % PAGE_SIZE)
        places = places + (place,)  # type: ignore[assignment]  # noqa: RUF005
    return places


@gluon.jit
def _copy_tile(
    places, pool, head, boxes, flag, first, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr,
    BOX: gl.constexpr,
):  # fmt: skip
    """Copy a tile to the boxes from `first` on. In shared memory they are laid out like a tile's
    columns, 64 dimensions after 64 dimensions."""
    across: gl.constexpr = BLOCK_N // BOX
    mbarrier.expect(flag, BLOCK_N * BLOCK_D * 2)
    for i in gl.static_range(across):
        for c in gl.static_range(BLOCK_D // 64):
            at = [places[i][0], head, places[i][1], c * 64]
            copy_box(pool, at, flag, boxes.index(first + c * across + i))


@gluon.jit
def _fetch(address):
    """Fetch the cache line of an address to the multiprocessor."""
    gl.inline_asm_elementwise(
        "{ prefetch.global.L1 [$1]; mov.b32 $0, 0; }",
        "=r,l",
        [address.to(gl.int64, bitcast=True)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _copy_items(
    pages, walk, records, this, item, columns, stop, head, pool, boxes, full, empty,
    SIDE: gl.constexpr, PART: gl.constexpr, WIDE: gl.constexpr, BLOCK_D: gl.constexpr,
    PAGE_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, BOX: gl.constexpr,
):  # fmt: skip
    """Copy the keys or values that items walk, tile after tile; for items from `columns` on, in
    order. this: the first item's record. A record is loaded two items ahead, the first of its page
    ids one ahead, a walk's entry one ahead."""
    ring: gl.constexpr = STAGES if WIDE else STAGES // 2
    base: gl.constexpr = 0 if WIDE else PART * (STAGES // 2)
    size: gl.constexpr = BLOCK_D // 64 * (BLOCK_N // BOX)  # boxes of a tile
    following = record_line(records, item + 1, stop)
    stage, phase = 0, 1
    while item < stop:
        later = record_line(records, item + 2, stop)
        entry, num_walk = this, word(this, NUM_WALK)
        more = walk + word(this, WALK_START) * ENTRY
        _fetch(pages + word(following, FIRST_ENTRY) // PAGE_SIZE)
        for index in range(num_walk):
            next_entry = line_of(more + index * ENTRY, ENTRY, index + 1 < num_walk)
            lo, hi = word(entry, FIRST_ENTRY), word(entry, FIRST_ENTRY + HI)
            clear_lo = word(entry, FIRST_ENTRY + CLEAR_LO)
            clear_hi = word(entry, FIRST_ENTRY + CLEAR_HI)
            begin, tiles, clear, tail = tiles_of(lo, clear_lo, clear_hi, hi, PAGE_SIZE, BLOCK_N)
            in_order = item >= columns
            clear, tail = gl.where(in_order, 0, clear), gl.where(in_order, tiles, tail)
            for i in range(tiles):
                start = tile_start(i, begin, clear, tail, BLOCK_N)
                places = _places(start, lo, hi, pages, PAGE_SIZE, BLOCK_N, BOX)
                mbarrier.wait(empty.index(base + stage), phase)
                _copy_tile(
                    places, pool, head, boxes, full.index(base + stage),
                    (SIDE * STAGES + base + stage) * size, BLOCK_D, BLOCK_N, BOX,
                )  # fmt: skip
                stage, phase = next_stage(stage, phase, ring)
            entry = next_entry
        item += 1
        this = following
        following = later


@gluon.jit
def copy(
    control, pool, boxes, full, empty, SIDE: gl.constexpr, PART: gl.constexpr,
    BLOCK_D: gl.constexpr, PAGE_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    BOX: gl.constexpr,
):  # fmt: skip
    """Run a copying warp. It copies keys (SIDE 0) or values (SIDE 1) for one warpgroup, or, as one
    of the first warpgroup's, for the pair."""
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=4)
    shape: gl.constexpr = [boxes.shape[0], 1, 1, BOX, 64]
    boxes = viewed(boxes, boxes.dtype, shape, layout)
    start = start_of(control, PART)
    item, stop, head, columns = queue(start)
    pages, walk = section(control, start, AT_PAGES), section(control, start, AT_WALK)
    records = section(control, start, AT_RECORDS)
    if columns >= 0:
        _copy_items(
            pages, walk, records, start, item, columns, stop, head, pool, boxes, full, empty, SIDE,
            PART, False, BLOCK_D, PAGE_SIZE, BLOCK_N, STAGES, BOX,
        )  # fmt: skip
    elif PART == 0:
        _copy_items(
            pages, walk, records, start, item, stop, stop, head, pool, boxes, full, empty, SIDE,
            PART, True, BLOCK_D, PAGE_SIZE, BLOCK_N, STAGES, BOX,
        )  # fmt: skip
