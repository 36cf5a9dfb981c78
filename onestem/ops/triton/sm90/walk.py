"""Reading of the work list, and the scores and states that both forms share."""

# mypy: allow-untyped-defs
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from onestem.ops.triton.words import (
    HEADER,
    LN_2,
    LOG2_E,
    QUEUE_FEW,
    QUEUE_HEAD,
    QUEUE_START,
    QUEUE_STOP,
    QUEUED,
    RECORD,
)

__all__ = [
    "ROWS", "lane", "line_of", "next_stage", "over", "queue", "record_line", "scores", "section",
    "start_of", "store_states", "tile_start", "tiles_of", "uniform", "word",
]  # fmt: skip

ROWS: gl.constexpr = gl.constexpr(64)  # of a warpgroup


@gluon.jit
def lane():
    """A thread's number in its warp."""
    return gl.inline_asm_elementwise(
        "mov.u32 $0, %laneid;", "=r", [], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def over(x, SIZE: gl.constexpr):
    """x // SIZE, for x >= 0: one instruction where SIZE is a power of two."""
    return (x.to(gl.uint32) // SIZE).to(gl.int32)


@gluon.jit
def line_of(pointer, WORDS: gl.constexpr, there=True):
    """WORDS words of the list in one load, each in a thread of a warp, over and over (`word` reads
    them). Only their use waits for it: one value that all threads load is moved to a shared
    register right after the load, and that waits."""
    return gl.load(pointer + (lane() & (WORDS - 1)), mask=there, other=0)


@gluon.jit
def record_line(records, item, stop):
    """An item's record; the last item's, if there is no such item."""
    return line_of(records + gl.minimum(item, stop - 1) * RECORD, RECORD)


@gluon.jit
def word(line, i):
    """Word i of `line_of`, in a shared register."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;",
        "=r,r,r",
        [line, i],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def uniform(value):
    """A value that is the same in all threads, in a form in which the assembler knows it: in a
    shared register. Addresses of tiles in shared memory are computed there at once, and each
    product needs one."""
    return word(value, 0)


@gluon.jit
def start_of(control, PART: gl.constexpr):
    """What half of a program begins with, in one load: the words of its queue, which are also its
    first item's record, then the list's header (`section`)."""
    i = lane()
    queue = HEADER + (2 * gl.program_id(0) + PART) * QUEUED
    return gl.load(control + gl.where(i < QUEUED, queue + i, i - QUEUED))


@gluon.jit
def queue(start):
    """The items of half of a program: the first, their end, the KV head, and the first item with
    queries as columns (-1: the program multiplies)."""
    item, stop = word(start, QUEUE_START), word(start, QUEUE_STOP)
    return item, stop, word(start, QUEUE_HEAD), word(start, QUEUE_FEW)


@gluon.jit
def section(control, start, AT: gl.constexpr):
    """Where a section of the work list begins."""
    return control + word(start, QUEUED + AT)


@gluon.jit
def tiles_of(lo, clear_lo, clear_hi, hi, PAGE_SIZE: gl.constexpr, BLOCK_N: gl.constexpr):
    """The tiles of a walk entry: start of the first (at a page), their number, and the range that
    all rows see whole: from `clear` on, before `tail`."""
    begin = over(lo, PAGE_SIZE) * PAGE_SIZE
    tiles = over(hi - begin + BLOCK_N - 1, BLOCK_N)
    clear = over(gl.maximum(clear_lo, lo) - begin + BLOCK_N - 1, BLOCK_N)
    clear = gl.minimum(clear, tiles)
    tail = gl.maximum(over(gl.maximum(clear_hi - begin, 0), BLOCK_N), clear)
    return begin, tiles, clear, gl.minimum(tail, tiles)


@gluon.jit
def tile_start(i, begin, clear, tail, BLOCK_N: gl.constexpr):
    """Start of the i-th tile in walking order: first those that all rows see whole."""
    whole = tail - clear
    masked = i - whole
    masked = gl.where(masked < clear, masked, masked + whole)
    return begin + gl.where(i < whole, clear + i, masked) * BLOCK_N


@gluon.jit
def next_stage(stage, phase, ring):
    """The next place in a ring of stages, and the parity of its barriers' phase."""
    stage += 1
    around = stage == ring
    return gl.where(around, 0, stage), gl.where(around, phase ^ 1, phase)


@gluon.jit
def _approximate(NAME: gl.constexpr, x):
    """`rcp` or `lg2` in one instruction, to 2^-22: exact ones take thirty, at each item's end."""
    return gl.inline_asm_elementwise(
        NAME + ".approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


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
    total = total * gl.expand_dims(_approximate("rcp", safe), AXIS)
    log_sum = gl.where(seen, running_max + _approximate("lg2", safe), float("-inf"))
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
        there = gl.expand_dims(partial, AXIS) & (d < HEAD_DIM)
        # Keys and values are read once. States are read again at once: they should stay in the L2.
        gl.store(where, total, mask=there, eviction_policy="evict_last")
        gl.store(part_lse + at, log_sum, mask=partial)
