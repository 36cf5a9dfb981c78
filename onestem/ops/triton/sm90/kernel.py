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
from onestem.ops.triton.sm90.walk import ROWS, Inputs, Ring, queue, start_of, uniform
from onestem.ops.triton.versions import viewed


@gluon.jit
def _attend(inputs, ring, PART: gl.constexpr, FORM: gl.constexpr):
    """Run a warpgroup in the role of its program."""
    start = start_of(inputs.control, PART)
    item, stop, head, columns = queue(start)
    # Of a row with a few more queries than a warpgroup has rows (Falcon 7B: 71 query heads on a KV
    # head), the second warpgroup takes the others as columns, in long tiles (`KernelConfig`).
    over: gl.constexpr = FORM.group - ROWS if PART == 1 and FORM.block_n > ROWS else 0
    rest: gl.constexpr = 0 if over <= 0 or over > 16 else 8 if over <= 8 else 16
    if FORM.most > ROWS and columns < 0:
        if rest == 0:
            attend_rows(start, item, stop, head, inputs, ring, PART, True, True, FORM)
        elif item < stop:
            attend_columns(start, item, stop, 0, head, inputs, ring, PART, True, rest, FORM)
    else:
        count = 0
        if FORM.most > FORM.columns and item < columns:
            count = attend_rows(
                start, item, columns, head, inputs, ring, PART, False, FORM.ahead, FORM
            )
        if FORM.columns > 0 and columns < stop:
            attend_columns(
                start, columns, stop, count, head, inputs, ring, PART, False, FORM.columns, FORM
            )


@gluon.jit(do_not_specialize=("num_words",))
def attend_hopper(
    control, q, k_pages, v_pages, out, lse, part_out, part_lse, slopes, scale, softcap, num_words,
    FORM: gl.constexpr, REGISTERS: gl.constexpr, COPY_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Walk all items; one program per multiprocessor, 4 warps and 8 more inside. The next launch
    may begin at once.

    k_pages, v_pages: `descriptors`. num_words: length of `control`. FORM: a `HopperForm`.
    """
    gdc_launch_dependents()
    fetch_list(control, num_words)
    BLOCK_N: gl.constexpr = FORM.block_n
    BLOCK_D: gl.constexpr = FORM.block_d
    STAGES: gl.constexpr = FORM.stages
    BOX: gl.constexpr = FORM.box
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
    inputs = Inputs(control, q, out, lse, part_out, part_lse, slopes, scale, softcap)
    ring = Ring(queries, ring_memory, boxes, full, empty)
    gl.warp_specialize(
        [
            (_attend, (inputs, ring, gl.constexpr(0), FORM)),
            (_attend, (inputs, ring, gl.constexpr(1), FORM)),
            (copy, (control, k_pages, boxes, full, empty, gl.constexpr(0), gl.constexpr(0), FORM)),
            (copy, (control, v_pages, boxes, full, empty, gl.constexpr(1), gl.constexpr(0), FORM)),
            (copy, (control, k_pages, boxes, full, empty, gl.constexpr(0), gl.constexpr(1), FORM)),
            (copy, (control, v_pages, boxes, full, empty, gl.constexpr(1), gl.constexpr(1), FORM)),
        ],
        [4, 1, 1, 1, 1],
        [REGISTERS, COPY_REGISTERS, COPY_REGISTERS, COPY_REGISTERS, COPY_REGISTERS],
    )
