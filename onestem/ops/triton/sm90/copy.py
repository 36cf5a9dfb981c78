"""The copying warps: they fill the ring of tiles in shared memory by the copy engine."""

# mypy: allow-untyped-defs
from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from onestem.ops.triton.sm90.walk import (
    ROWS,
    lane,
    line_of,
    next_stage,
    over,
    queue,
    record_line,
    section,
    start_of,
    tile_start,
    tiles_of,
    uniform,
    word,
)
from onestem.ops.triton.versions import copy_box, viewed
from onestem.ops.triton.words import W

LINE: gl.constexpr = gl.constexpr(32)  # words of a cache line
LINES: gl.constexpr = gl.constexpr(16)  # of a work list that each program fetches


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
def _pages_of(start, lo, hi, pages, FORM: gl.constexpr):
    """Pages of a tile's boxes, each in a thread of a warp, over and over (`word` reads them). A box
    without any walked token gets a place outside of the pool: the copy engine writes zeros."""
    x = start + (lane() & (FORM.block_n // FORM.box - 1)) * FORM.box
    inside = (x < hi) & (x + FORM.box > lo)
    return gl.where(inside, gl.load(pages + over(x, FORM.page_size), mask=inside, other=0), -1)


@gluon.jit
def _copy_boxes(i, page, start, pool, head, boxes, flag, first, FORM: gl.constexpr):
    """Copy the i-th tokens of a tile; see `_copy_tile`."""
    BOX: gl.constexpr = FORM.box
    for c in gl.static_range(FORM.block_d // 64):
        at = [word(page, i), head, (start + i * BOX) % FORM.page_size, c * 64]
        copy_box(pool, at, flag, boxes.index(first + c * (FORM.block_n // BOX) + i))


@gluon.jit
def _copy_tile(page, start, pool, head, boxes, flag, first, FORM: gl.constexpr):
    """Copy a tile to the boxes from `first` on. In shared memory they are laid out like a tile's
    columns, 64 dimensions after 64 dimensions. page: `_pages_of`."""
    across: gl.constexpr = FORM.block_n // FORM.box
    mbarrier.expect(flag, FORM.block_n * FORM.block_d * 2)
    # In cold caches a loop's few instructions come sooner, in warm ones the tile comes later. Heads
    # with dimensions that are not copied have too few bytes on their way as it is.
    if FORM.head_dim == FORM.block_d:
        for i in range(uniform(across)):
            _copy_boxes(i, page, start, pool, head, boxes, flag, first, FORM)
    else:
        for i in gl.static_range(across):
            _copy_boxes(i, page, start, pool, head, boxes, flag, first, FORM)


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
def copy(
    control, pool, boxes, full, empty, SIDE: gl.constexpr, PART: gl.constexpr, FORM: gl.constexpr
):
    """Run a copying warp: copy the keys (SIDE 0) or values (SIDE 1) that items walk, tile after
    tile, for one warpgroup, or, as one of the first warpgroup's, for the pair. An item's record and
    first page ids are loaded while the item before is copied, and a walk's entry one ahead.
    """
    BLOCK_N: gl.constexpr = FORM.block_n
    BOX: gl.constexpr = FORM.box
    STAGES: gl.constexpr = FORM.stages
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=4)
    shape: gl.constexpr = [boxes.shape[0], 1, 1, BOX, 64]
    size: gl.constexpr = FORM.block_d // 64 * (BLOCK_N // BOX)  # boxes of a tile
    boxes = viewed(boxes, boxes.dtype, shape, layout)
    this = start_of(control, PART)
    item, stop, head, columns = queue(this)
    pages, walk = section(control, this, W.AT_PAGES), section(control, this, W.AT_WALK)
    records = section(control, this, W.AT_RECORDS)
    wide = FORM.most > ROWS and columns < 0
    ring, base = gl.where(wide, STAGES, STAGES // 2), 0
    if PART == 1:
        stop, base = gl.where(wide, item, stop), STAGES // 2
    stage, phase = 0, 1
    while item < stop:
        following = record_line(records, item + 1, stop)
        entry, num_walk = this, word(this, W.NUM_WALK)
        more = walk + word(this, W.WALK_START) * W.ENTRY
        for index in range(num_walk):
            next_entry = line_of(more + index * W.ENTRY, W.ENTRY, index + 1 < num_walk)
            lo, hi, begin, tiles, clear, tail = tiles_of(entry, FORM)
            if not FORM.ahead:
                clear, tail = gl.where(wide, clear, 0), gl.where(wide, tail, tiles)
            for i in range(tiles):
                start = tile_start(i, begin, clear, tail, BLOCK_N)
                page = _pages_of(start, lo, hi, pages, FORM)
                mbarrier.wait(empty.index(base + stage), phase)
                _copy_tile(
                    page, start, pool, head, boxes, full.index(base + stage),
                    (SIDE * STAGES + base + stage) * size, FORM,
                )  # fmt: skip
                stage, phase = next_stage(stage, phase, ring)
                if i == 0:
                    _fetch(pages + over(word(following, W.FIRST_ENTRY), FORM.page_size))
            entry = next_entry
        item += 1
        this = following
