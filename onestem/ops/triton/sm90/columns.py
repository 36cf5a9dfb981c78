"""Queries as columns of a tile, tokens as rows: the form of items with a few queries.

Scores are K Q^T `[BLOCK_N, COLUMNS]`, and V^T P^T `[BLOCK_D, COLUMNS]` is summed. Keys and values
are the tensor cores' first operand, read from the ring in shared memory. So few queries make small
products, few scores and a small result.
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
    next_stage,
    query_rows,
    record_line,
    scores,
    section,
    store_states,
    tile_start,
    tiles_of,
    uniform,
    word,
)
from onestem.ops.triton.versions import barrier, viewed
from onestem.ops.triton.words import LOG2_E, W


@gluon.jit
def _pieces(queries, COLUMNS: gl.constexpr, WIDTH: gl.constexpr, BLOCK_D: gl.constexpr):
    """The memory of queries as pieces of `[COLUMNS, WIDTH]`."""
    dtype: gl.constexpr = queries.dtype
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([COLUMNS, WIDTH], dtype)
    number: gl.constexpr = 2 * ROWS * BLOCK_D // (COLUMNS * WIDTH)
    return viewed(queries, dtype, [number, COLUMNS, WIDTH], layout)


@gluon.jit
def _by_warp(tile):
    """`[BLOCK_N, COLUMNS]` as `[4, BLOCK_N / 4, COLUMNS]`, by the warp that holds it."""
    return gl.reshape(tile, [4, tile.shape[0] // 4, tile.shape[1]])


@gluon.jit
def _everywhere(parts):
    """The warps' results of their parts, `[4, COLUMNS]`, copied to every warp: reducing these takes
    two barriers less than reducing a tile."""
    layout: gl.constexpr = gl.BlockedLayout([4, 2], [8, 4], [4, 1], [1, 0])
    return gl.convert_layout(parts, layout)


@gluon.jit
def _weights(score, running_max, denominator, start, view, FORM: gl.constexpr):
    """Weights of a tile from its products, new maximum `[COLUMNS]` and denominator
    (`[BLOCK_N, COLUMNS]`, parts of the sum), and the factor for old sums."""
    score, factor = scores(score, start, view, 0, True, FORM)
    across: gl.constexpr = running_max.type.layout
    top = gl.max(_everywhere(gl.max(_by_warp(score), 1)), 0)
    new_max = gl.maximum(running_max, gl.convert_layout(top, across) * factor)
    safe_max = gl.where(new_max == float("-inf"), 0.0, new_max)
    weight = gl.exp2(score * factor - safe_max[None, :])
    shrink = gl.exp2(running_max - safe_max)
    return weight, new_max, denominator * shrink[None, :] + weight, shrink


@gluon.jit
def _tile(
    query, weights, running_max, denominator, total, start, view, ring, stage, phase,
    ARRIVALS: gl.constexpr, FORM: gl.constexpr,
):  # fmt: skip
    """Attend to the tile in a stage of the ring, and release it."""
    stage = uniform(stage)
    values = ring.tiles.index(FORM.stages + stage)
    mbarrier.wait(ring.full.index(stage), phase)
    zero = gl.zeros_like(denominator)
    score = warpgroup_mma(
        ring.tiles.index(stage), query.permute((1, 0)), zero, use_acc=False, is_async=True
    )
    blank(ring.boxes, stage, start, view.lo, view.hi, FORM)
    score = warpgroup_mma_wait(0, deps=(score,))
    weight, running_max, denominator, shrink = _weights(
        score, running_max, denominator, start, view, FORM
    )
    weights.store(gl.permute(weight.to(weights.dtype), (1, 0)))
    fence_async_shared()
    total = total * shrink[None, :]
    total = warpgroup_mma(values.permute((1, 0)), weights.permute((1, 0)), total, is_async=True)
    total = warpgroup_mma_wait(0, deps=(total,))
    mbarrier.arrive(ring.empty.index(stage), count=ARRIVALS)
    return running_max, denominator, total


@gluon.jit
def attend_columns(
    begin, item, stop, count, head, inputs, ring, PART: gl.constexpr, WIDE: gl.constexpr,
    COLUMNS: gl.constexpr, FORM: gl.constexpr,
):  # fmt: skip
    """Walk items (at least one) of at most COLUMNS queries for a KV head, through one half of the
    ring. WIDE: of at most ROWS + COLUMNS, those from ROWS on, through the whole ring, while the
    first warpgroup takes the others. begin: `start_of`; its record is the first item's where count
    is 0.

    A load from memory takes as long as a tile, so an item's record is loaded three items ahead, its
    rows two ahead, its queries one ahead.
    """
    GROUP: gl.constexpr = FORM.group
    BLOCK_N: gl.constexpr = FORM.block_n
    BLOCK_D: gl.constexpr = FORM.block_d
    size: gl.constexpr = FORM.stages if WIDE else FORM.stages // 2
    base: gl.constexpr = 0 if WIDE else PART * (FORM.stages // 2)
    first: gl.constexpr = ROWS if WIDE else 0
    arrivals: gl.constexpr = 1 if WIDE else 2  # a tile is released after two arrivals
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    across: gl.constexpr = gl.SliceLayout(0, layout)
    control, slopes = inputs.control, inputs.slopes
    two_queries = _pieces(ring.queries, COLUMNS, BLOCK_D, BLOCK_D)
    first_query: gl.constexpr = PART * ROWS // COLUMNS
    # In memory after the queries of this item and of the next.
    first_weights: gl.constexpr = (PART * ROWS + 2 * COLUMNS) * BLOCK_D // (COLUMNS * BLOCK_N)
    weights = _pieces(ring.queries, COLUMNS, BLOCK_N, BLOCK_D).index(first_weights)
    walk, records = section(control, begin, W.AT_WALK), section(control, begin, W.AT_RECORDS)
    rows, states = section(control, begin, W.AT_ROWS), section(control, begin, W.AT_DEST)
    c = first + gl.arange(0, COLUMNS, across)
    j = c // GROUP  # [COLUMNS] row of the item
    q_head = head * GROUP + c % GROUP
    slope = j
    if FORM.alibi:
        slope = gl.load(slopes + q_head) * LOG2_E
    this = begin
    if count > 0:
        this = record_line(records, item, stop)
    following = record_line(records, item + 1, stop)
    later = record_line(records, item + 2, stop)
    turn = 0
    stage, phase = count % size, (count // size) & 1
    this_row = query_rows(rows, this, first, COLUMNS, FORM)
    next_row = query_rows(rows, following, first, COLUMNS, FORM)
    two_queries.index(first_query).store(load_query(inputs.q, this_row, head, first, FORM))
    fence_async_shared()
    barrier()  # here and at the end of an item: else before the products of each tile
    while item < stop:
        next_query = load_query(inputs.q, next_row, head, first, FORM)
        next_row = query_rows(rows, later, first, COLUMNS, FORM)
        last = record_line(records, item + 3, stop)
        row_start, num_rows, num_walk = (
            word(this, W.ROW_START), word(this, W.NUM_ROWS), word(this, W.NUM_WALK)
        )  # fmt: skip
        row = gl.load(rows + row_start + j, mask=j < num_rows, other=-1)  # [COLUMNS]
        dest = gl.load(states + row_start + j, mask=j < num_rows, other=0)
        position = j
        if FORM.windowed or FORM.alibi:
            positions = section(control, begin, W.AT_POSITIONS)
            position = gl.load(positions + row, mask=row >= 0, other=0)
        running_max = gl.full([COLUMNS], float("-inf"), gl.float32, across)
        denominator = gl.zeros([BLOCK_N, COLUMNS], gl.float32, layout)
        total = gl.zeros([BLOCK_D, COLUMNS], gl.float32, layout)
        query = two_queries.index(first_query + turn)
        entry = this
        more = walk + word(this, W.WALK_START) * W.ENTRY
        for index in range(num_walk):
            next_entry = line_of(more + index * W.ENTRY, W.ENTRY, index + 1 < num_walk)
            lo, hi, page, tiles, clear, tail = tiles_of(entry, FORM)
            # [COLUMNS] each row's end, and its own place in the entry
            ends = word(entry, W.FIRST_ENTRY + W.END) + j * word(entry, W.FIRST_ENTRY + W.STEP)
            distance = position - word(entry, W.FIRST_ENTRY + W.POSITION)
            oldest = distance
            if FORM.windowed:
                oldest = distance - word(begin, W.QUEUED + W.WINDOW) + 1
            view = View(lo, hi, ends, oldest, distance, slope, inputs.scale, inputs.softcap)
            for i in range(tiles):
                start = page + i * BLOCK_N
                if WIDE:
                    start = tile_start(i, page, clear, tail, BLOCK_N)
                running_max, denominator, total = _tile(
                    query, weights, running_max, denominator, total, start, view, ring,
                    base + stage, phase, arrivals, FORM,
                )  # fmt: skip
                stage, phase = next_stage(stage, phase, size)
            entry = next_entry
        turn = 1 - turn
        two_queries.index(first_query + turn).store(next_query)
        fence_async_shared()
        barrier()
        whole = gl.sum(_everywhere(gl.sum(_by_warp(denominator), 1)), 0)
        store_states(
            total, running_max, gl.convert_layout(whole, across), row, dest, word(this, W.SHARED),
            q_head, inputs, 0, FORM,
        )  # fmt: skip
        item += 1
        this, following, later = following, later, last
