"""Reading of the work list, and the scores and states that both forms share."""

# mypy: allow-untyped-defs
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from onestem.ops.triton.words import (
    ENTRY,
    FIRST_ENTRY,
    HEADER,
    LN_2,
    LOG2_E,
    NUM_ROWS,
    QUEUED,
    RECORD,
    ROW_START,
)

__all__ = [
    "ROWS", "entry_of", "next_stage", "per_thread", "queue", "rows_ahead", "scores", "store_states",
    "tile_start", "tiles_of",
]  # fmt: skip

ROWS: gl.constexpr = gl.constexpr(64)  # of a warpgroup


@gluon.jit
def queue(control, PART: gl.constexpr):
    """The items of half of a program: the first, their end, the KV head, and the first item with
    queries as columns (-1: the program multiplies)."""
    words = control + HEADER + (2 * gl.program_id(0) + PART) * QUEUED
    return gl.load(words), gl.load(words + 1), gl.load(words + 2), gl.load(words + 3)


@gluon.jit
def entry_of(record, more, index):
    return gl.where(index == 0, record + FIRST_ENTRY, more + (index - 1) * ENTRY)


@gluon.jit
def tiles_of(lo, clear_lo, clear_hi, hi, PAGE_SIZE: gl.constexpr, BLOCK_N: gl.constexpr):
    """The tiles of a walk entry: start of the first (at a page), their number, and the range that
    all rows see whole: from `clear` on, before `tail`."""
    begin = lo // PAGE_SIZE * PAGE_SIZE
    tiles = (hi - begin + BLOCK_N - 1) // BLOCK_N
    clear = (gl.maximum(clear_lo, lo) - begin + BLOCK_N - 1) // BLOCK_N
    clear = gl.minimum(clear, tiles)
    tail = gl.maximum((clear_hi - begin) // BLOCK_N, clear)
    return begin, tiles, clear, gl.minimum(tail, tiles)


@gluon.jit
def tile_start(i, begin, clear, tail, BLOCK_N: gl.constexpr):
    """Start of the i-th tile in walking order: first those that all rows see whole."""
    whole = tail - clear
    masked = i - whole
    masked = gl.where(masked < clear, masked, masked + whole)
    return begin + gl.where(i < whole, clear + i, masked) * BLOCK_N


@gluon.jit
def next_stage(stage, phase, RING: gl.constexpr):
    """The next place in a ring of stages, and the parity of its barriers' phase."""
    stage += 1
    around = stage == RING
    return gl.where(around, 0, stage), gl.where(around, phase ^ 1, phase)


@gluon.jit
def per_thread(pointer):
    """The pointer, in a form that for the assembler may differ between a warp's threads.

    A value read through it stays in the threads' own registers, and only its use waits for it. A
    value that all threads read at one address is moved to a shared register right after the load,
    and that waits for it.
    """
    zero = gl.inline_asm_elementwise(
        "{ .reg .u32 lanes; mov.u32 lanes, %lanemask_lt; shr.u32 $0, lanes, 31; }",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )
    return pointer + zero


@gluon.jit
def rows_ahead(records, item, stop):
    """Start and number of a later item's rows (0: no such item). Brings its whole record into the
    cache."""
    record = records + item * RECORD
    num_rows = gl.load(record + NUM_ROWS, mask=item < stop, other=0)
    lo = gl.load(record + FIRST_ENTRY, mask=item < stop, other=0)
    return gl.load(record + ROW_START, mask=item < stop, other=0), gl.where(lo < 0, 0, num_rows)


@gluon.jit
def scores(
    product, n, lo, hi, last, oldest, distance, slope, scale, softcap, MASKED: gl.constexpr,
    WINDOWED: gl.constexpr, ALIBI: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Scores of a tile from its products, in powers of two, and a factor still to be applied.

    n: places of its tokens; last, oldest, distance, slope: of each query. All are shaped to be
    broadcast to the tile's shape.
    """
    score = product
    if SOFTCAP:
        exponent = gl.exp2(score * (scale / softcap * (2 * LOG2_E)))
        score = softcap * LOG2_E * (1.0 - 2.0 / (1.0 + exponent))
    elif ALIBI:
        score = score * (scale * LOG2_E)
    if ALIBI:
        score += slope * (n - distance).to(gl.float32)
    if MASKED:
        seen = n < gl.minimum(last, hi)
        if WINDOWED:
            seen &= n >= gl.maximum(oldest, lo)
        else:
            seen &= n >= lo
        score = gl.where(seen, score, float("-inf"))
    factor = 1.0 if SOFTCAP or ALIBI else scale * LOG2_E
    return score, factor


@gluon.jit
def store_states(
    total, running_max, denominator, row, dest, kind, q_head, out, lse, part_out, part_lse,
    NUM_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, AXIS: gl.constexpr,
):  # fmt: skip
    """Store the states of an item's queries (row -1: none), as results or as partial states.
    `total` has a head's dimensions along AXIS; from HEAD_DIM on nothing is stored."""
    layout: gl.constexpr = total.type.layout
    d = gl.arange(0, total.shape[AXIS], gl.SliceLayout(1 - AXIS, layout))  # [BLOCK_D]
    d = gl.expand_dims(d, 1 - AXIS)
    seen = denominator > 0.0
    safe = gl.where(seen, denominator, 1.0)
    total = total * gl.expand_dims(1.0 / safe, AXIS)
    log_sum = gl.where(seen, running_max + gl.log2(safe), float("-inf"))
    if kind != 1:
        final = (row >= 0) & (dest < 0)
        at = row.to(gl.int64) * NUM_HEADS + q_head
        where = out + gl.expand_dims(at * HEAD_DIM, AXIS) + d
        there = gl.expand_dims(final, AXIS) & (d < HEAD_DIM)
        gl.store(where, total.to(out.dtype.element_ty), mask=there)
        gl.store(lse + at, log_sum * LN_2, mask=final)
    if kind != 0:
        partial = (row >= 0) & (dest >= 0)
        at = dest.to(gl.int64) * NUM_HEADS + q_head
        where = part_out + gl.expand_dims(at * HEAD_DIM, AXIS) + d
        gl.store(where, total, mask=gl.expand_dims(partial, AXIS) & (d < HEAD_DIM))
        gl.store(part_lse + at, log_sum, mask=partial)
