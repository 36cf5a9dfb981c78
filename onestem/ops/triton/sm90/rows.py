"""Queries as rows of a tile, tokens as columns: the form of items with many queries.

In items of the widest tiles a warpgroup issues the scores of tile t and the weighted sum of tile
t - 1 together, so that the tensor cores work while it computes weights. Items with fewer rows walk
a few tiles: they attend to one after the other, by the same few instructions. For instructions are
in no cache when a launch begins. Where also single rows come in this form, it works ahead as well.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from onestem.ops.triton.sm90.walk import (
    ROWS,
    View,
    blank,
    line_of,
    load_query,
    query_rows,
    record_line,
    scores,
    section,
    store_states,
    tile_start,
    tiles_of,
    word,
)
from onestem.ops.triton.versions import barrier
from onestem.ops.triton.words import LOG2_E, W


@gluon.jit
def _folded(tile):
    """`[ROWS, BLOCK_N]` as `[ROWS, BLOCK_N / 8, 8]`: a reduction in two steps has shorter chains of
    dependent instructions, and the second step can wait until the end of an item."""
    return gl.reshape(tile, [tile.shape[0], tile.shape[1] // 8, 8])


@gluon.jit
def _weights(
    score, running_max, denominator, start, view, MASKED: gl.constexpr, FORM: gl.constexpr
):
    """Weights of a tile from its products, new maximum and denominator (`[ROWS, 8]`, parts of the
    sum), and the factor for old sums."""
    layout: gl.constexpr = score.type.layout
    score, factor = scores(score, start, view, 1, MASKED, FORM)
    top = gl.convert_layout(gl.max(gl.max(_folded(score), 1), 1), gl.SliceLayout(1, layout))
    new_max = gl.maximum(running_max, top * factor)
    safe_max = gl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
    weight = gl.exp2(score * factor - safe_max[:, None])
    shrink = gl.exp2(running_max - safe_max)
    part = gl.sum(_folded(weight), 1)  # [ROWS, 8]
    rows: gl.constexpr = gl.SliceLayout(1, part.type.layout)
    denominator = denominator * gl.convert_layout(shrink, rows)[:, None] + part
    return weight, new_max, denominator, shrink


@gluon.jit
def _done(value):
    """The value, computed before anything that follows in program order may begin.

    The assembler moves a wait for products up, before the work that it should overlap, unless a
    memory operation between them needs this work's result: here a store that never happens.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 a; mov.b32 a, 0; setp.lt.f32 p, $1, 0fBF800000; "
        "@p st.shared.f32 [a], $1; mov.b32 $0, $1; }",
        "=r,r",
        [value],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _products(query, ring, stage, phase, FORM: gl.constexpr):
    """Start multiplying queries by a tile of keys."""
    BLOCK_N: gl.constexpr = FORM.block_n
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    mbarrier.wait(ring.full.index(stage), phase)
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, layout)
    keys = ring.tiles.index(stage).permute((1, 0))
    return warpgroup_mma(query, keys, zero, use_acc=False, is_async=True)


@gluon.jit
def _tile(
    query, running_max, denominator, total, start, view, ring, count, base: gl.constexpr,
    size: gl.constexpr, arrivals: gl.constexpr, operand: gl.constexpr, FORM: gl.constexpr,
):  # fmt: skip
    """Attend to tile `count`, and release it."""
    stage = base + count % size
    score = _products(query, ring, stage, (count // size) & 1, FORM)
    blank(ring.boxes, stage, start, view.lo, view.hi, FORM)
    score = warpgroup_mma_wait(0, deps=(score,))
    new_weight, running_max, denominator, shrink = _weights(
        score, running_max, denominator, start, view, True, FORM
    )
    rows: gl.constexpr = gl.SliceLayout(1, total.type.layout)
    total = total * gl.convert_layout(shrink, rows)[:, None]
    weight = gl.convert_layout(new_weight.to(ring.tiles.dtype), operand)
    total = warpgroup_mma(weight, ring.tiles.index(FORM.stages + stage), total, is_async=True)
    total, weight = warpgroup_mma_wait(0, deps=(total, weight))
    mbarrier.arrive(ring.empty.index(stage), count=arrivals)
    return running_max, denominator, total, count + 1


@gluon.jit
def _step(
    query, running_max, denominator, total, weight, start, view, ring, count, first,
    base: gl.constexpr, size: gl.constexpr, arrivals: gl.constexpr, ALIKE: gl.constexpr,
    MASKED: gl.constexpr, FORM: gl.constexpr,
):  # fmt: skip
    """Scores of tile `count`, while the weights of the tile before are summed.

    ALIKE: it may be an item's `first`, which has none before it, and weights of 0 for its own
    values.
    """
    stage = base + count % size
    before = base + (count - 1) % size
    if ALIKE:
        before = gl.where(first, stage, before)
    score = _products(query, ring, stage, (count // size) & 1, FORM)
    if MASKED and ALIKE:
        blank(ring.boxes, stage, start, view.lo, view.hi, FORM)
    total = warpgroup_mma(weight, ring.tiles.index(FORM.stages + before), total, is_async=True)
    score = warpgroup_mma_wait(1, deps=(score,))
    new_weight, running_max, denominator, shrink = _weights(
        score, running_max, denominator, start, view, MASKED, FORM
    )
    denominator = _done(denominator)
    # The new weights become operands only after the wait, in the registers of the old ones.
    total, weight, new_weight = warpgroup_mma_wait(0, deps=(total, weight, new_weight))
    if ALIKE:
        mbarrier.arrive(ring.empty.index(before), count=arrivals, pred=first == 0)
    else:
        mbarrier.arrive(ring.empty.index(before), count=arrivals)
    rows: gl.constexpr = gl.SliceLayout(1, total.type.layout)
    total = total * gl.convert_layout(shrink, rows)[:, None]
    weight = gl.convert_layout(new_weight.to(weight.dtype), weight.type.layout)
    if MASKED and not ALIKE:
        blank(ring.boxes, stage, start, view.lo, view.hi, FORM)
    return running_max, denominator, total, weight, count + 1


@gluon.jit
def attend_rows(
    begin, item, stop, head, inputs, ring, PART: gl.constexpr, WIDE: gl.constexpr,
    AHEAD: gl.constexpr, FORM: gl.constexpr,
):  # fmt: skip
    """Walk items for a KV head, with their rows `first` .. `first` + 63; returns `count`. begin:
    `start_of`. AHEAD: whether the scores of a tile are issued before the tile before is summed, and
    tiles that all rows see whole come first (`tile_start`)."""
    GROUP: gl.constexpr = FORM.group
    BLOCK_N: gl.constexpr = FORM.block_n
    BLOCK_D: gl.constexpr = FORM.block_d
    size: gl.constexpr = FORM.stages if WIDE else FORM.stages // 2
    base: gl.constexpr = 0 if WIDE else PART * (FORM.stages // 2)
    first: gl.constexpr = PART * ROWS if WIDE else 0
    arrivals: gl.constexpr = 1 if WIDE else 2  # a tile is released after two arrivals
    product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    dtype: gl.constexpr = inputs.q.dtype.element_ty
    slots: gl.constexpr = gl.SliceLayout(1, layout)
    # Whether the first tile is walked like all others: its own code would come late, but where
    # heads are wide or copied in part, the others become slower than that.
    alike: gl.constexpr = BLOCK_D <= 128 and FORM.head_dim == BLOCK_D
    control, slopes = inputs.control, inputs.slopes
    query = ring.queries.index(PART)
    walk, records = section(control, begin, W.AT_WALK), section(control, begin, W.AT_RECORDS)
    rows, states = section(control, begin, W.AT_ROWS), section(control, begin, W.AT_DEST)
    count = 0
    this, following = begin, record_line(records, item + 1, stop)
    if item < stop:
        query_row = query_rows(rows, this, first, ROWS, FORM)
        query.store(load_query(inputs.q, query_row, head, first, FORM))
        fence_async_shared()
        barrier()  # here and at the end of an item: else before the products of each tile
    while item < stop:
        later = record_line(records, item + 2, stop)
        row_start, num_rows, num_walk = (
            word(this, W.ROW_START), word(this, W.NUM_ROWS), word(this, W.NUM_WALK)
        )  # fmt: skip
        # Load now what the end of this item and the next items need.
        j = (first + gl.arange(0, ROWS, slots)) // GROUP
        row = gl.load(rows + row_start + j, mask=j < num_rows, other=-1)
        dest = gl.load(states + row_start + j, mask=j < num_rows, other=0)
        next_row = query_rows(rows, following, first, ROWS, FORM, item + 1 < stop)
        more = walk + word(this, W.WALK_START) * W.ENTRY
        m = first + gl.arange(0, ROWS, gl.SliceLayout(1, product))  # [ROWS]
        j = m // GROUP  # [ROWS] row of the item
        position = j
        slope = j
        if FORM.windowed or FORM.alibi:
            used = j < num_rows
            own_row = gl.load(rows + row_start + j, mask=used, other=0)
            position = gl.load(
                section(control, begin, W.AT_POSITIONS) + own_row, mask=used, other=0
            )
        if FORM.alibi:
            slope = gl.load(slopes + head * GROUP + m % GROUP) * LOG2_E
        running_max = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, product))
        zero = gl.zeros([ROWS, BLOCK_N], gl.float32, product)
        denominator = gl.sum(_folded(zero), 1)  # [ROWS, 8]
        total = gl.zeros([ROWS, BLOCK_D], gl.float32, layout)
        weight = gl.convert_layout(zero.to(dtype), operand)
        entry = this
        for index in range(num_walk):
            next_entry = line_of(more + index * W.ENTRY, W.ENTRY, index + 1 < num_walk)
            lo, hi, page, tiles, clear, tail = tiles_of(entry, FORM)
            # [ROWS] each row's end, and its own place in the entry
            last = word(entry, W.FIRST_ENTRY + W.END) + j * word(entry, W.FIRST_ENTRY + W.STEP)
            distance = position - word(entry, W.FIRST_ENTRY + W.POSITION)
            oldest = distance
            if FORM.windowed:
                oldest = distance - word(begin, W.QUEUED + W.WINDOW) + 1
            view = View(lo, hi, last, oldest, distance, slope, inputs.scale, inputs.softcap)
            if AHEAD:
                skip = 0
                if not alike:  # noqa: SIM102 - decided when compiled
                    if index == 0:
                        # Before the first tile there are no weights to sum.
                        skip = 1
                        stage = base + count % size
                        start = tile_start(0, page, clear, tail, BLOCK_N)
                        score = _products(query, ring, stage, (count // size) & 1, FORM)
                        score = warpgroup_mma_wait(0, deps=(score,))
                        first_weight, running_max, denominator, _ = _weights(
                            score, running_max, denominator, start, view, True, FORM
                        )
                        weight = gl.convert_layout(first_weight.to(dtype), operand)
                        blank(ring.boxes, stage, start, lo, hi, FORM)
                        count += 1
                whole = tail - clear
                for i in range(gl.minimum(skip, whole), whole):
                    running_max, denominator, total, weight, count = _step(
                        query, running_max, denominator, total, weight,
                        page + (clear + i) * BLOCK_N, view, ring, count, index + i == 0, base,
                        size, arrivals, alike, False, FORM,
                    )  # fmt: skip
                for i in range(gl.maximum(whole, skip), tiles):
                    running_max, denominator, total, weight, count = _step(
                        query, running_max, denominator, total, weight,
                        tile_start(i, page, clear, tail, BLOCK_N), view, ring, count,
                        index + i == 0, base, size, arrivals, alike, True, FORM,
                    )  # fmt: skip
            else:
                for i in range(tiles):
                    running_max, denominator, total, count = _tile(
                        query, running_max, denominator, total, page + i * BLOCK_N, view, ring,
                        count, base, size, arrivals, operand, FORM,
                    )  # fmt: skip
            entry = next_entry
        if AHEAD:
            before = base + (count - 1) % size
            values = ring.tiles.index(FORM.stages + before)
            total = warpgroup_mma(weight, values, total, is_async=True)
        next_query = load_query(inputs.q, next_row, head, first, FORM)
        if AHEAD:
            total, weight = warpgroup_mma_wait(0, deps=(total, weight))
            mbarrier.arrive(ring.empty.index(before), count=arrivals)
        store_states(
            total, gl.convert_layout(running_max, slots),
            gl.convert_layout(gl.sum(denominator, 1), slots), row, dest, word(this, W.SHARED),
            head * GROUP + (first + gl.arange(0, ROWS, slots)) % GROUP, inputs, 1, FORM,
        )  # fmt: skip
        query.store(next_query)
        fence_async_shared()
        barrier()
        item += 1
        this, following = following, later
    return count
