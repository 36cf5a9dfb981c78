"""A product of a few rows whose sums walk a weight's columns in one order, as fast as memory gives.

A program has 32 outputs, half a tile of the tensor cores, so that all multiprocessors read; where
rows are more than 128 it has 64 outputs of 128 of them. The copy engine fills a ring of boxes of 64
columns, whose weights do not wait for the launch before: only rows do. Products are of 64 rows of
shared memory: those after a box of 32 are of the box after it, and their sums are not stored.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from onestem.ops.triton.dependent import dependent_launch
from onestem.ops.triton.sizes import cdiv
from onestem.ops.triton.tiled import Tiles
from onestem.ops.triton.versions import barrier, copy_box, viewed, without_first

COLUMNS: gl.constexpr = gl.constexpr(64)  # of a box: 128 bytes
WHOLE: gl.constexpr = gl.constexpr(64)  # rows of a tile of tensor cores
# The copy engine takes twice as long for a row that is not there: more of them are made up.
MOST_LACKING = 8


@gluon.jit
def _copy(source, line, chunk, ring, full):
    """Begin to copy a chunk of columns, from a line on, to its place in the ring."""
    stage = chunk % full.shape[0]
    copy_box(source, [chunk * source.block_shape[0], line, 0], full.index(stage), ring.index(stage))


@gluon.jit(do_not_specialize=("num_rows",))
def _streamed(
    x, weight, bias, out, num_rows, num_out, chunks,
    STAGES: gl.constexpr, HAS_BIAS: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Program (i, j): sums of the i-th outputs and the j-th rows over all chunks of columns."""
    if DEPENDENT:
        gdc_launch_dependents()
    dtype: gl.constexpr = weight.dtype
    BOXES: gl.constexpr = weight.block_shape[0]
    OUT: gl.constexpr = weight.block_shape[1]
    ROWS: gl.constexpr = x.block_shape[1]
    lines: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    boxes: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=3)
    RING: gl.constexpr = STAGES * BOXES
    PARTS: gl.constexpr = WHOLE // OUT
    memory = gl.allocate_shared_memory(dtype, [RING + PARTS - 1, OUT, COLUMNS], lines)
    weights = viewed(memory, dtype, [STAGES, BOXES, OUT, COLUMNS], boxes)
    even = viewed(memory, dtype, [RING // PARTS, WHOLE, COLUMNS], lines)
    odd = even
    if PARTS == 2:
        odd = viewed(without_first(memory), dtype, [RING // PARTS, WHOLE, COLUMNS], lines)
    rows = gl.allocate_shared_memory(dtype, [STAGES, BOXES, ROWS, COLUMNS], boxes)
    right_boxes = viewed(rows, dtype, [RING, ROWS, COLUMNS], lines)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    first, first_row = gl.program_id(0) * OUT, gl.program_id(1) * ROWS
    num_bytes: gl.constexpr = (OUT + ROWS) * BOXES * COLUMNS * 2
    for chunk in range(gl.minimum(STAGES, chunks)):
        mbarrier.expect(full.index(chunk), num_bytes)
        _copy(weight, first, chunk, weights, full)
    if DEPENDENT:
        gdc_wait()
    for chunk in range(gl.minimum(STAGES, chunks)):
        _copy(x, first_row, chunk, rows, full)
    gl.assume(chunks > 0)  # else products would wait for each other
    total = gl.zeros([WHOLE, ROWS], gl.float32, layout)
    for chunk in range(chunks):
        stage = chunk % STAGES
        mbarrier.wait(full.index(stage), (chunk // STAGES) & 1)
        for i in gl.static_range(BOXES):
            left = (even, odd)[i % PARTS].index(stage * (BOXES // PARTS) + i // PARTS)
            right = right_boxes.index(stage * BOXES + i).permute((1, 0))
            total = warpgroup_mma(left, right, total, is_async=True)
        total = warpgroup_mma_wait(BOXES, deps=(total,))
        # All threads have waited for the products of the chunk before: its place is free.
        following = chunk - 1 + STAGES
        if (chunk > 0) & (following < chunks):
            barrier()
            mbarrier.expect(full.index(following % STAGES), num_bytes)
            _copy(weight, first, following, weights, full)
            _copy(x, first_row, following, rows, full)
    total = warpgroup_mma_wait(0, deps=(total,))
    i = gl.arange(0, WHOLE, gl.SliceLayout(1, layout))
    n, m = first + i, first_row + gl.arange(0, ROWS, gl.SliceLayout(0, layout))
    there = (i < OUT) & (n < num_out)
    if HAS_BIAS:
        total += gl.load(bias + n, mask=there, other=0.0).to(gl.float32)[:, None]
    at = out + m[None, :] * num_out + n[:, None]
    inside = there[:, None] & (m < num_rows)[None, :]
    gl.store(at, total.to(out.dtype.element_ty), mask=inside)


def streamed_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, tiles: Tiles, out: Tensor
) -> None:
    """x `[n, size]` times a weight `[num_out, size]`, plus a bias, of 16 bits, into out `[n,
    num_out]`, rounded once: what `few_rows.streamed_tiles` takes."""
    (rows, size), num_out = x.shape, len(weight)
    lacking = -rows % tiles.rows
    if lacking > MOST_LACKING:
        there, x = x, x.new_empty(rows + lacking, size)
        x[:rows] = there
    layout = gl.NVMMASharedLayout(128, 16, rank=3)
    boxes = tiles.columns // COLUMNS.value

    def in_boxes(lines: Tensor, count: int) -> TensorDescriptor:
        """Boxes of `count` lines, side by side: `[boxes, count, COLUMNS]`."""
        view = lines.unflatten(1, (-1, COLUMNS.value)).transpose(0, 1)
        return TensorDescriptor.from_tensor(view, [boxes, count, COLUMNS.value], layout)

    _streamed[(cdiv(num_out, tiles.out), cdiv(rows, tiles.rows))](
        in_boxes(x, tiles.rows),
        in_boxes(weight, tiles.out),
        out if bias is None else bias,
        out,
        rows,
        num_out,
        cdiv(size, tiles.columns),
        STAGES=tiles.stages,
        HAS_BIAS=bias is not None,
        num_warps=tiles.warps,
        **dependent_launch(x.device),
    )
