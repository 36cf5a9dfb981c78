"""`attend_hopper`: the launch, and the work of its warps."""

# mypy: allow-untyped-defs
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents

from onestem.ops.triton.sm90.columns import attend_columns
from onestem.ops.triton.sm90.copy import copy, fetch_list
from onestem.ops.triton.sm90.rows import attend_rows
from onestem.ops.triton.sm90.walk import ROWS, queue, start_of, uniform
from onestem.ops.triton.versions import viewed

__all__ = ["attend_hopper"]


@gluon.jit
def _attend(
    control, q, out, lse, part_out, part_lse, slopes, scale, softcap, queries, ring_memory, boxes,
    full, empty, PART: gl.constexpr, AHEAD: gl.constexpr, NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr, PAGE_SIZE: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, BOX: gl.constexpr, COLUMNS: gl.constexpr,
    MOST: gl.constexpr, WINDOWED: gl.constexpr, ALIBI: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Run a warpgroup in the role of its program."""
    start = start_of(control, PART)
    item, stop, head, columns = queue(start)
    # Of a row with a few more queries than a warpgroup has rows (Falcon 7B: 71 query heads on a KV
    # head), the second warpgroup takes the others as columns, in long tiles (`KernelConfig`).
    over: gl.constexpr = GROUP - ROWS if PART == 1 and BLOCK_N > ROWS else 0
    rest: gl.constexpr = 0 if over <= 0 or over > 16 else 8 if over <= 8 else 16
    if MOST > ROWS and columns < 0:
        if rest == 0:
            attend_rows(
                control, start, item, stop, head, q, out, lse, part_out, part_lse, slopes, scale,
                softcap, queries, ring_memory, boxes, full, empty, PART, True, True, NUM_KV_HEADS,
                GROUP, HEAD_DIM, BLOCK_D, PAGE_SIZE, BLOCK_N, STAGES, BOX, WINDOWED, ALIBI, SOFTCAP,
            )  # fmt: skip
        elif item < stop:
            attend_columns(
                control, start, item, stop, 0, head, q, out, lse, part_out, part_lse, slopes, scale,
                softcap, queries, ring_memory, boxes, full, empty, PART, True, NUM_KV_HEADS, GROUP,
                HEAD_DIM, BLOCK_D, PAGE_SIZE, BLOCK_N, STAGES, BOX, rest, WINDOWED, ALIBI, SOFTCAP,
            )  # fmt: skip
    else:
        count = 0
        if MOST > COLUMNS and item < columns:
            count = attend_rows(
                control, start, item, columns, head, q, out, lse, part_out, part_lse, slopes,
                scale, softcap, queries, ring_memory, boxes, full, empty, PART, False, AHEAD,
                NUM_KV_HEADS, GROUP, HEAD_DIM, BLOCK_D, PAGE_SIZE, BLOCK_N, STAGES, BOX, WINDOWED,
                ALIBI, SOFTCAP,
            )  # fmt: skip
        if COLUMNS > 0 and columns < stop:
            attend_columns(
                control, start, columns, stop, count, head, q, out, lse, part_out, part_lse, slopes,
                scale, softcap, queries, ring_memory, boxes, full, empty, PART, False, NUM_KV_HEADS,
                GROUP, HEAD_DIM, BLOCK_D, PAGE_SIZE, BLOCK_N, STAGES, BOX, COLUMNS, WINDOWED, ALIBI,
                SOFTCAP,
            )  # fmt: skip


@gluon.jit(do_not_specialize=("num_words",))
def attend_hopper(
    control, q, k_pages, v_pages, out, lse, part_out, part_lse, slopes, scale, softcap, num_words,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr,
    PAGE_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, BOX: gl.constexpr,
    COLUMNS: gl.constexpr, MOST: gl.constexpr, WINDOWED: gl.constexpr, ALIBI: gl.constexpr,
    SOFTCAP: gl.constexpr, REGISTERS: gl.constexpr, COPY_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Walk all items; one program per multiprocessor, 4 warps and 8 more inside. The next launch
    may begin at once.

    k_pages, v_pages: `descriptors`. num_words: length of `control`. COLUMNS: queries of the items
    with few; 0: there are none. MOST: maximum queries of an item: without the code of larger ones
    a launch begins sooner.
    """
    gdc_launch_dependents()
    fetch_list(control, num_words)
    dtype: gl.constexpr = q.dtype.element_ty
    across: gl.constexpr = BLOCK_N // BOX
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_D], dtype)
    box: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BOX, 64], dtype)
    num_boxes: gl.constexpr = 2 * STAGES * BLOCK_D // 64 * across
    # Keys, then values; the same memory seen as boxes and as tiles.
    boxes = gl.allocate_shared_memory(dtype, [num_boxes, BOX, 64], box)
    ring_memory = viewed(boxes, dtype, [2 * STAGES, BLOCK_N, BLOCK_D], tile)
    queries = gl.allocate_shared_memory(
        dtype, [2, ROWS, BLOCK_D], gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_D], dtype)
    )
    flags: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], flags)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], flags)
    for i in range(uniform(STAGES)):  # not unrolled: the start waits for its instructions
        mbarrier.init(full.index(i), count=2)
        mbarrier.init(empty.index(i), count=2)
    # Heads with dimensions that are not copied have too few bytes on their way as it is.
    loop: gl.constexpr = HEAD_DIM == BLOCK_D
    # Items in rows and their copies must have the same order of tiles.
    ahead: gl.constexpr = COLUMNS == 0
    gl.warp_specialize(
        [
            (
                _attend,
                (
                    control, q, out, lse, part_out, part_lse, slopes, scale, softcap, queries,
                    ring_memory, boxes, full, empty, gl.constexpr(0), ahead, NUM_KV_HEADS, GROUP,
                    HEAD_DIM, BLOCK_D, PAGE_SIZE, BLOCK_N, STAGES, BOX, COLUMNS, MOST, WINDOWED,
                    ALIBI, SOFTCAP,
                ),
            ),
            (
                _attend,
                (
                    control, q, out, lse, part_out, part_lse, slopes, scale, softcap, queries,
                    ring_memory, boxes, full, empty, gl.constexpr(1), ahead, NUM_KV_HEADS, GROUP,
                    HEAD_DIM, BLOCK_D, PAGE_SIZE, BLOCK_N, STAGES, BOX, COLUMNS, MOST, WINDOWED,
                    ALIBI, SOFTCAP,
                ),
            ),
            (
                copy,
                (
                    control, k_pages, boxes, full, empty, gl.constexpr(0), gl.constexpr(0),
                    loop, ahead, MOST, BLOCK_D, PAGE_SIZE, BLOCK_N, STAGES, BOX,
                ),
            ),
            (
                copy,
                (
                    control, v_pages, boxes, full, empty, gl.constexpr(1), gl.constexpr(0),
                    loop, ahead, MOST, BLOCK_D, PAGE_SIZE, BLOCK_N, STAGES, BOX,
                ),
            ),
            (
                copy,
                (
                    control, k_pages, boxes, full, empty, gl.constexpr(0), gl.constexpr(1),
                    loop, ahead, MOST, BLOCK_D, PAGE_SIZE, BLOCK_N, STAGES, BOX,
                ),
            ),
            (
                copy,
                (
                    control, v_pages, boxes, full, empty, gl.constexpr(1), gl.constexpr(1),
                    loop, ahead, MOST, BLOCK_D, PAGE_SIZE, BLOCK_N, STAGES, BOX,
                ),
            ),
        ],
        [4, 1, 1, 1, 1],
        [REGISTERS, COPY_REGISTERS, COPY_REGISTERS, COPY_REGISTERS, COPY_REGISTERS],
    )  # fmt: skip
