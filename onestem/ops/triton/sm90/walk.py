"""What both forms share: reading of the work list, queries, scores and states."""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from onestem.ops.triton.words import LN_2, LOG2_E, W

ROWS: gl.constexpr = gl.constexpr(64)  # of a warpgroup


class Inputs(NamedTuple):
    """The tensors of `attend_hopper` that its multiplying warps use, and how scores change."""

    control: gl.tensor
    q: gl.tensor
    out: gl.tensor
    lse: gl.tensor
    part_out: gl.tensor
    part_lse: gl.tensor
    slopes: gl.tensor
    scale: gl.tensor
    softcap: gl.tensor


class Ring(NamedTuple):
    """Shared memory of a program: its queries, the ring of tiles, the same memory as boxes, and the
    barriers of each place of the ring."""

    queries: gl.shared_memory_descriptor
    tiles: gl.shared_memory_descriptor
    boxes: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


class View(NamedTuple):
    """What an item's queries see of a walk entry, lo .. hi - 1: each one's end, oldest token and
    own place; and how scores change, `slope` that of each query."""

    lo: gl.tensor
    hi: gl.tensor
    last: gl.tensor
    oldest: gl.tensor
    distance: gl.tensor
    slope: gl.tensor
    scale: gl.tensor
    softcap: gl.tensor


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
    return line_of(records + gl.minimum(item, stop - 1) * W.RECORD, W.RECORD)


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
    queue = W.HEADER + (2 * gl.program_id(0) + PART) * W.QUEUED
    return gl.load(control + gl.where(i < W.QUEUED, queue + i, i - W.QUEUED))


@gluon.jit
def queue(start):
    """The items of half of a program: the first, their end, the KV head, and the first item with
    queries as columns (-1: the program multiplies)."""
    item, stop = word(start, W.QUEUE_START), word(start, W.QUEUE_STOP)
    return item, stop, word(start, W.QUEUE_HEAD), word(start, W.QUEUE_FEW)


@gluon.jit
def section(control, start, AT: gl.constexpr):
    """Where a section of the work list begins."""
    return control + word(start, W.QUEUED + AT)


@gluon.jit
def tiles_of(entry, FORM: gl.constexpr):
    """The tiles of a walk entry: its range, start of the first tile (at a page), their number, and
    those that all rows see whole: from `clear` on, before `tail`."""
    BLOCK_N: gl.constexpr = FORM.block_n
    lo, hi = word(entry, W.FIRST_ENTRY), word(entry, W.FIRST_ENTRY + W.HI)
    clear_lo = word(entry, W.FIRST_ENTRY + W.CLEAR_LO)
    clear_hi = word(entry, W.FIRST_ENTRY + W.CLEAR_HI)
    begin = over(lo, FORM.page_size) * FORM.page_size
    tiles = over(hi - begin + BLOCK_N - 1, BLOCK_N)
    clear = over(gl.maximum(clear_lo, lo) - begin + BLOCK_N - 1, BLOCK_N)
    clear = gl.minimum(clear, tiles)
    tail = gl.maximum(over(gl.maximum(clear_hi - begin, 0), BLOCK_N), clear)
    return lo, hi, begin, tiles, clear, gl.minimum(tail, tiles)


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
def scores(product, start, view, AXIS: gl.constexpr, MASKED: gl.constexpr, FORM: gl.constexpr):
    """Scores of a tile that begins at `start` from its products, in powers of two, and a factor
    still to be applied. Tokens are along AXIS."""
    across: gl.constexpr = gl.SliceLayout(1 - AXIS, product.type.layout)
    n = gl.expand_dims(start + gl.arange(0, FORM.block_n, across), 1 - AXIS)
    score = product
    if FORM.softcap:
        exponent = gl.exp2(score * (view.scale / view.softcap * (2 * LOG2_E)))
        score = view.softcap * LOG2_E * (1.0 - 2.0 / (1.0 + exponent))
    elif FORM.alibi:
        score = score * (view.scale * LOG2_E)
    if FORM.alibi:
        distance = gl.expand_dims(view.distance, AXIS)
        score += gl.expand_dims(view.slope, AXIS) * (n - distance).to(gl.float32)
    if MASKED:
        seen = n < gl.minimum(gl.expand_dims(view.last, AXIS), view.hi)
        if FORM.windowed:
            seen &= n >= gl.maximum(gl.expand_dims(view.oldest, AXIS), view.lo)
        else:
            seen &= n >= view.lo
        score = gl.where(seen, score, float("-inf"))
    factor = 1.0 if FORM.softcap or FORM.alibi else view.scale * LOG2_E
    return score, factor


@gluon.jit
def store_states(
    total, running_max, denominator, row, dest, kind, q_head, inputs, AXIS: gl.constexpr,
    FORM: gl.constexpr,
):  # fmt: skip
    """Store the states of an item's queries (row -1: none), as results or as partial states.
    `total` has a head's dimensions along AXIS; those that heads do not have are not stored."""
    NUM_HEADS: gl.constexpr = FORM.num_kv_heads * FORM.group
    HEAD_DIM: gl.constexpr = FORM.head_dim
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
        where = inputs.out + gl.expand_dims(at * HEAD_DIM, AXIS) + d
        there = gl.expand_dims(final, AXIS) & (d < HEAD_DIM)
        gl.store(where, total.to(inputs.out.dtype.element_ty), mask=there)
        gl.store(inputs.lse + at, log_sum * LN_2, mask=final)
    if kind != 0:
        partial = (row >= 0) & (dest >= 0)
        at = dest.to(gl.int64) * NUM_HEADS + q_head
        where = inputs.part_out + gl.expand_dims(at * HEAD_DIM, AXIS) + d
        there = gl.expand_dims(partial, AXIS) & (d < HEAD_DIM)
        # Keys and values are read once. States are read again at once: they should stay in the L2.
        gl.store(where, total, mask=there, eviction_policy="evict_last")
        gl.store(inputs.part_lse + at, log_sum, mask=partial)


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
def blank(boxes, stage, start, lo, hi, FORM: gl.constexpr):
    """Set values of slots outside the walk to 0, in the pages where it begins and ends. They may be
    NaN, which a weight of 0 does not remove."""
    BLOCK_N: gl.constexpr = FORM.block_n
    BLOCK_D: gl.constexpr = FORM.block_d
    BOX: gl.constexpr = FORM.box
    across: gl.constexpr = BLOCK_N // BOX
    first = (FORM.stages + stage) * (across * (BLOCK_D // 64))
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
def query_rows(rows, record, first, COUNT: gl.constexpr, FORM: gl.constexpr, there=True):
    """The rows of queries first .. first + COUNT - 1 of an item; -1: there is none."""
    across: gl.constexpr = FORM.block_d // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])
    j = (first + gl.arange(0, COUNT, gl.SliceLayout(1, layout))) // FORM.group  # [COUNT]
    row_start = word(record, W.ROW_START)
    num_rows = gl.where(there, word(record, W.NUM_ROWS), 0)
    return gl.load(rows + row_start + j, mask=j < num_rows, other=-1)


@gluon.jit
def load_query(q, row, head, first, FORM: gl.constexpr):
    """The queries of rows (`query_rows`); 0 for rows of -1, and after a head's dimensions."""
    GROUP: gl.constexpr = FORM.group
    HEAD_DIM: gl.constexpr = FORM.head_dim
    layout: gl.constexpr = row.type.layout.parent
    m = first + gl.arange(0, row.shape[0], gl.SliceLayout(1, layout))  # [COUNT]
    d = gl.arange(0, FORM.block_d, gl.SliceLayout(0, layout))  # [BLOCK_D]
    at = (row.to(gl.int64) * (FORM.num_kv_heads * GROUP) + head * GROUP + m % GROUP) * HEAD_DIM
    there = (row >= 0)[:, None] & (d < HEAD_DIM)[None, :]
    return gl.load(q + at[:, None] + d[None, :], mask=there, other=0.0)
