"""All items in one launch on Hopper GPUs: `attend_hopper`, written in Gluon.

The same mathematics as `kernels.attend_kernel`, which is its twin for all other devices, laid out
by hand as FlashAttention-3 does it (arXiv 2407.08608, sections 3.1 and 3.2): copying warps fill a
ring of tiles in shared memory by the copy engine, a page at a time, and two warpgroups multiply, 64
rows each. A multiplying warpgroup issues the scores of tile t and the weighted sum of tile t - 1
together, so that the tensor cores work while it computes weights.

A program has one of two roles for a whole launch. To *multiply*: both warpgroups walk one item of
128 rows, and share the ring. To *read*: each walks items of up to 64 rows of its own, through half
the ring, which runs on from one item to the next, so that the memory never waits. Who does which,
and with which items, stands in the work list's queues.

Names are those of `kernels.py`; `count` numbers the tiles that a warpgroup has walked, and with it
its place in the ring.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents

__all__ = ["attend_hopper", "box_tokens", "descriptors"]

HEADER: gl.constexpr = gl.constexpr(16)
QUEUED: gl.constexpr = gl.constexpr(4)
RECORD: gl.constexpr = gl.constexpr(16)
ENTRY: gl.constexpr = gl.constexpr(8)
LOG2_E: gl.constexpr = gl.constexpr(1.4426950408889634)
LN_2: gl.constexpr = gl.constexpr(0.6931471805599453)
ROWS: gl.constexpr = gl.constexpr(64)  # of a warpgroup


def box_tokens(page_size: int, block_n: int) -> int:
    """Tokens that the copy engine takes at a time; 0 if it cannot copy pages of this size."""
    whole = page_size >= 8 and page_size & (page_size - 1) == 0
    return min(page_size, block_n) if whole else 0


def descriptors(k_pages: Tensor, v_pages: Tensor, box: int) -> tuple[TensorDescriptor, ...]:
    """What the copy engine must know of the pages, `[num_pages, page_size, num_kv_heads,
    head_dim]`, to copy boxes of `box` tokens and 64 dimensions (128 bytes)."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16)
    return tuple(
        TensorDescriptor.from_tensor(pages.view(-1, pages[0, 0].numel()), [box, 64], layout)
        for pages in (k_pages, v_pages)
    )


# ---------------------------------------------------------------------------- what there is to do


@gluon.jit
def _queue(control, PART: gl.constexpr):
    """What half of a program takes: its first item, the end of them, its KV head, and whether the
    program multiplies."""
    queue = control + HEADER + (2 * gl.program_id(0) + PART) * QUEUED
    return gl.load(queue), gl.load(queue + 1), gl.load(queue + 2), gl.load(queue + 3) != 0


@gluon.jit
def _entry(record, more, index):
    return gl.where(index == 0, record + 8, more + (index - 1) * ENTRY)


@gluon.jit
def _tiles(lo, clear_lo, clear_hi, hi, PAGE_SIZE: gl.constexpr, BLOCK_N: gl.constexpr):
    """Of a walk entry: where its first tile begins (at a page), how many tiles there are, and
    which of them all rows see whole: from `clear` on, before `tail`."""
    begin = lo // PAGE_SIZE * PAGE_SIZE
    tiles = (hi - begin + BLOCK_N - 1) // BLOCK_N
    clear = (gl.maximum(clear_lo, lo) - begin + BLOCK_N - 1) // BLOCK_N
    clear = gl.minimum(clear, tiles)
    tail = gl.maximum((clear_hi - begin) // BLOCK_N, clear)
    return begin, tiles, clear, gl.minimum(tail, tiles)


@gluon.jit
def _tile(i, begin, clear, tail, BLOCK_N: gl.constexpr):
    """Where the i-th tile in walking order begins: first those that all rows see whole."""
    whole = tail - clear
    masked = i - whole
    masked = gl.where(masked < clear, masked, masked + whole)
    return begin + gl.where(i < whole, clear + i, masked) * BLOCK_N


# --------------------------------------------------------------------------------------- copying


@gluon.jit
def _copy_tile(
    start, hi, pages, k_pages, v_pages, head, boxes, flag, stage, PAGE_SIZE: gl.constexpr,
    HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, BOX: gl.constexpr,
):  # fmt: skip
    """Copy the pages of a tile of keys and of values, up to the one that holds the last token.

    Boxes lie in shared memory as the columns of a tile do, 64 dimensions after 64 dimensions.
    """
    columns: gl.constexpr = HEAD_DIM // 64
    across: gl.constexpr = BLOCK_N // BOX
    size: gl.constexpr = columns * across  # boxes of a tile
    for i in gl.static_range(across):
        x = start + i * BOX
        inside = x < hi
        page = gl.load(pages + x // PAGE_SIZE, mask=inside, other=0)
        at = page * PAGE_SIZE + x % PAGE_SIZE
        mbarrier.expect(flag, 2 * BOX * HEAD_DIM * 2, pred=inside)
        mbarrier.arrive(flag, count=1, pred=x >= hi)
        for c in gl.static_range(columns):
            box = stage * size + c * across + i
            column = head * HEAD_DIM + c * 64
            tma.async_copy_global_to_shared(
                k_pages, [at, column], flag, boxes.index(box), pred=inside
            )
            tma.async_copy_global_to_shared(
                v_pages, [at, column], flag, boxes.index(STAGES * size + box), pred=inside
            )


@gluon.jit
def _walk(records, item, stop):
    """Of an item's record, or of nothing: how many entries it has, where they begin, and the first
    one's lo, clear_lo, clear_hi and hi."""
    record = records + item * RECORD
    there = item < stop
    num_walk = gl.load(record + 3, mask=there, other=0)
    walk_start = gl.load(record + 4, mask=there, other=0)
    lo = gl.load(record + 8, mask=there, other=0)
    clear_lo = gl.load(record + 9, mask=there, other=0)
    clear_hi = gl.load(record + 10, mask=there, other=0)
    hi = gl.load(record + 11, mask=there, other=0)
    return num_walk, walk_start, lo, clear_lo, clear_hi, hi


@gluon.jit
def _fetch(address):
    """Have the cache line of an address brought to the multiprocessor."""
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
    control, item, stop, head, k_pages, v_pages, boxes, full, empty, PART: gl.constexpr,
    WIDE: gl.constexpr, HEAD_DIM: gl.constexpr, PAGE_SIZE: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, BOX: gl.constexpr,
):  # fmt: skip
    """Copy what items walk, tile after tile. An item's record is read two items ahead, so that
    nothing waits for it, nor for the first of its page ids."""
    ring: gl.constexpr = STAGES if WIDE else STAGES // 2
    base: gl.constexpr = 0 if WIDE else PART * (STAGES // 2)
    pages = control + gl.load(control + 7)
    records = control + gl.load(control + 12)
    num_walk, walk_start, lo, clear_lo, clear_hi, hi = _walk(records, item, stop)
    next_num, next_start, next_lo, next_clear_lo, next_clear_hi, next_hi = _walk(
        records, item + 1, stop
    )
    count = 0
    while item < stop:
        _fetch(pages + next_lo // PAGE_SIZE)
        later = _walk(records, item + 2, stop)
        more = control + gl.load(control + 3) + walk_start * ENTRY
        for index in range(num_walk):
            if index > 0:
                entry = more + (index - 1) * ENTRY
                lo, clear_lo = gl.load(entry), gl.load(entry + 1)
                clear_hi, hi = gl.load(entry + 2), gl.load(entry + 3)
            begin, tiles, clear, tail = _tiles(lo, clear_lo, clear_hi, hi, PAGE_SIZE, BLOCK_N)
            for i in range(tiles):
                stage = base + count % ring
                start = _tile(i, begin, clear, tail, BLOCK_N)
                mbarrier.wait(empty.index(stage), ((count // ring) & 1) ^ 1)
                _copy_tile(
                    start, hi, pages, k_pages, v_pages, head, boxes, full.index(stage), stage,
                    PAGE_SIZE, HEAD_DIM, BLOCK_N, STAGES, BOX,
                )  # fmt: skip
                count += 1
        item += 1
        num_walk, walk_start, lo = next_num, next_start, next_lo
        clear_lo, clear_hi, hi = next_clear_lo, next_clear_hi, next_hi
        next_num, next_start, next_lo, next_clear_lo, next_clear_hi, next_hi = later


@gluon.jit
def _copy(
    control, k_pages, v_pages, boxes, full, empty, PART: gl.constexpr, HEAD_DIM: gl.constexpr,
    PAGE_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, BOX: gl.constexpr,
):  # fmt: skip
    """A copying warp: it serves one warpgroup, or (the first one) the pair."""
    item, stop, head, multiplies = _queue(control, PART)
    if not multiplies:
        _copy_items(
            control, item, stop, head, k_pages, v_pages, boxes, full, empty, PART, False,
            HEAD_DIM, PAGE_SIZE, BLOCK_N, STAGES, BOX,
        )  # fmt: skip
    elif PART == 0:
        _copy_items(
            control, item, stop, head, k_pages, v_pages, boxes, full, empty, PART, True,
            HEAD_DIM, PAGE_SIZE, BLOCK_N, STAGES, BOX,
        )  # fmt: skip


# ----------------------------------------------------------------------------------- multiplying


@gluon.jit
def _folded(tile):
    """`[ROWS, BLOCK_N]` as `[ROWS, BLOCK_N / 8, 8]`: reducing it in two steps makes shorter chains
    of dependent instructions, and the second step can wait until the end of an item."""
    return gl.reshape(tile, [tile.shape[0], tile.shape[1] // 8, 8])


@gluon.jit
def _weights(
    score, running_max, denominator, start, lo, hi, last, oldest, distance, slope, scale, softcap,
    BLOCK_N: gl.constexpr, MASKED: gl.constexpr, WINDOWED: gl.constexpr, ALIBI: gl.constexpr,
    SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Weights of a tile from its products, new maximum and denominator (`[ROWS, 8]`, parts of the
    sum), and what old sums shrink by."""
    layout: gl.constexpr = score.type.layout
    n = start + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))  # [BLOCK_N]
    if SOFTCAP:
        exponent = gl.exp2(score * (scale / softcap * (2 * LOG2_E)))
        score = softcap * LOG2_E * (1.0 - 2.0 / (1.0 + exponent))
    elif ALIBI:
        score = score * (scale * LOG2_E)
    if ALIBI:
        score += slope[:, None] * (n[None, :] - distance[:, None]).to(gl.float32)
    if MASKED:
        seen = n[None, :] < gl.minimum(last, hi)[:, None]
        if WINDOWED:
            seen &= n[None, :] >= gl.maximum(oldest, lo)[:, None]
        else:
            seen &= (n >= lo)[None, :]
        score = gl.where(seen, score, float("-inf"))
    factor = 1.0 if SOFTCAP or ALIBI else scale * LOG2_E
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
    """The value, which must be there before anything that follows in program order may begin.

    The assembler moves a wait for products up, before the work that it should overlap, unless a
    memory operation stands between that needs this work's result: here a store that never happens.
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
def _products(query, keys, full, stage, phase, BLOCK_N: gl.constexpr):
    """Start multiplying queries by a tile of keys."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    mbarrier.wait(full.index(stage), phase)
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, layout)
    keys = keys.index(stage).permute((1, 0))
    return warpgroup_mma(query, keys, zero, use_acc=False, is_async=True)


@gluon.jit
def _blank(values, start, lo, hi, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Values of slots outside the walk become 0: they may be NaN, which no weight of 0 removes."""
    if (start < lo) | (start + BLOCK_N > hi):
        across: gl.constexpr = HEAD_DIM // 8
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])
        n = start + gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout))  # [BLOCK_N]
        inside = ((n >= lo) & (n < hi))[:, None]
        loaded = values.load(layout)
        values.store(gl.where(inside, loaded, gl.zeros_like(loaded)))
        fence_async_shared()


@gluon.jit
def _query_rows(rows, row_start, num_rows, first, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Which rows an item's queries stand in; -1 where the tile has none."""
    across: gl.constexpr = HEAD_DIM // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])
    j = (first + gl.arange(0, ROWS, gl.SliceLayout(1, layout))) // GROUP  # [ROWS]
    return gl.load(rows + row_start + j, mask=j < num_rows, other=-1)


@gluon.jit
def _load_query(
    q, row, head, first, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr
):
    """The queries of rows (`_query_rows`), 0 where there is none."""
    layout: gl.constexpr = row.type.layout.parent
    m = first + gl.arange(0, ROWS, gl.SliceLayout(1, layout))  # [ROWS]
    d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, layout))  # [HEAD_DIM]
    at = (row.to(gl.int64) * (NUM_KV_HEADS * GROUP) + head * GROUP + m % GROUP) * HEAD_DIM
    return gl.load(q + at[:, None] + d[None, :], mask=(row >= 0)[:, None], other=0.0)


@gluon.jit
def _store(
    total, running_max, denominator, row, dest, kind, head, first, out, lse, part_out, part_lse,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """The states of an item's rows (-1: none), as results or as partial states."""
    num_heads: gl.constexpr = NUM_KV_HEADS * GROUP
    layout: gl.constexpr = total.type.layout
    m = first + gl.arange(0, ROWS, gl.SliceLayout(1, layout))  # [ROWS]
    d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, layout))  # [HEAD_DIM]
    q_head = head * GROUP + m % GROUP
    seen = denominator > 0.0
    safe = gl.where(seen, denominator, 1.0)
    total = total * (1.0 / safe)[:, None]
    log_sum = gl.where(seen, running_max + gl.log2(safe), float("-inf"))
    if kind != 1:
        final = (row >= 0) & (dest < 0)
        at = row.to(gl.int64) * num_heads + q_head  # [ROWS]
        where = out + at[:, None] * HEAD_DIM + d[None, :]
        gl.store(where, total.to(out.dtype.element_ty), mask=final[:, None])
        gl.store(lse + at, log_sum * LN_2, mask=final)
    if kind != 0:
        partial = (row >= 0) & (dest >= 0)
        at = dest.to(gl.int64) * num_heads + q_head
        where = part_out + at[:, None] * HEAD_DIM + d[None, :]
        gl.store(where, total, mask=partial[:, None])
        gl.store(part_lse + at, log_sum, mask=partial)


@gluon.jit
def _ahead(records, item, stop):
    """Of an item that is yet to come: where its rows begin and how many they are (0: no such item).
    Its whole record is then in the cache."""
    record = records + item * RECORD
    num_rows = gl.load(record + 1, mask=item < stop, other=0)
    lo = gl.load(record + 8, mask=item < stop, other=0)
    return gl.load(record + 2, mask=item < stop, other=0), gl.where(lo < 0, 0, num_rows)


@gluon.jit
def _multiply_items(
    control, item, stop, head, q, out, lse, part_out, part_lse, slopes, scale, softcap, queries,
    ring_memory, full, empty, PART: gl.constexpr, WIDE: gl.constexpr,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
    PAGE_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    WINDOWED: gl.constexpr, ALIBI: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Walk items for a KV head, with rows `first` .. `first` + 63 of them."""
    ring: gl.constexpr = STAGES if WIDE else STAGES // 2
    base: gl.constexpr = 0 if WIDE else PART * (STAGES // 2)
    first: gl.constexpr = PART * ROWS if WIDE else 0
    arrivals: gl.constexpr = 1 if WIDE else 2  # a tile is let go when two have arrived
    product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    dtype: gl.constexpr = q.dtype.element_ty
    slots: gl.constexpr = gl.SliceLayout(1, layout)
    query = queries.index(PART)
    rows = control + gl.load(control + 4)
    states = control + gl.load(control + 5)
    records = control + gl.load(control + 12)
    count = 0
    row_start, num_rows = _ahead(records, item, stop)
    next_start, next_rows = _ahead(records, item + 1, stop)
    if item < stop:
        query_row = _query_rows(rows, row_start, num_rows, first, GROUP, HEAD_DIM)
        query.store(_load_query(q, query_row, head, first, NUM_KV_HEADS, GROUP, HEAD_DIM))
        fence_async_shared()
    while item < stop:
        record = records + item * RECORD
        # What is needed at the end of this item and by the next ones is asked for now.
        j = (first + gl.arange(0, ROWS, slots)) // GROUP
        row = gl.load(rows + row_start + j, mask=j < num_rows, other=-1)
        dest = gl.load(states + row_start + j, mask=j < num_rows, other=0)
        next_row = _query_rows(rows, next_start, next_rows, first, GROUP, HEAD_DIM)
        later_start, later_rows = _ahead(records, item + 2, stop)
        more = control + gl.load(control + 3) + gl.load(record + 4) * ENTRY
        m = first + gl.arange(0, ROWS, gl.SliceLayout(1, product))  # [ROWS]
        j = m // GROUP  # [ROWS] row of the item
        position = j
        slope = scale
        if WINDOWED or ALIBI:
            used = j < num_rows
            own_row = gl.load(rows + row_start + j, mask=used, other=0)
            position = gl.load(control + gl.load(control + 8) + own_row, mask=used, other=0)
        if ALIBI:
            slope = gl.load(slopes + head * GROUP + m % GROUP) * LOG2_E
        running_max = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, product))
        zero = gl.zeros([ROWS, BLOCK_N], gl.float32, product)
        denominator = gl.sum(_folded(zero), 1)  # [ROWS, 8]
        total = gl.zeros([ROWS, HEAD_DIM], gl.float32, layout)
        weight = gl.convert_layout(zero.to(dtype), operand)
        for index in range(gl.load(record + 3)):
            entry = _entry(record, more, index)
            lo = gl.load(entry)
            hi = gl.load(entry + 3)
            begin, tiles, clear, tail = _tiles(
                lo, gl.load(entry + 1), gl.load(entry + 2), hi, PAGE_SIZE, BLOCK_N
            )
            last = gl.load(entry + 4) + j * gl.load(entry + 5)  # [ROWS] each row's end
            distance = position - gl.load(entry + 6)  # [ROWS] the row's own place in the entry
            oldest = distance
            if WINDOWED:
                oldest = distance - gl.load(control + 9) + 1
            skip = 0
            if index == 0:
                # The first tile has none before it whose weights would wait to be summed.
                skip = 1
                stage = base + count % ring
                start = _tile(0, begin, clear, tail, BLOCK_N)
                score = _products(query, ring_memory, full, stage, (count // ring) & 1, BLOCK_N)
                score = warpgroup_mma_wait(0, deps=(score,))
                first_weight, running_max, denominator, _ = _weights(
                    score, running_max, denominator, start, lo, hi, last, oldest, distance, slope,
                    scale, softcap, BLOCK_N, True, WINDOWED, ALIBI, SOFTCAP,
                )  # fmt: skip
                weight = gl.convert_layout(first_weight.to(dtype), operand)
                _blank(ring_memory.index(STAGES + stage), start, lo, hi, BLOCK_N, HEAD_DIM)
                count += 1
            whole = tail - clear
            for i in range(gl.minimum(skip, whole), whole):
                running_max, denominator, total, weight, count = _step(
                    query, running_max, denominator, total, weight, begin + (clear + i) * BLOCK_N,
                    lo, hi, last, oldest, distance, slope, scale, softcap, ring_memory, full,
                    empty, count, base, ring, arrivals, BLOCK_N, STAGES, HEAD_DIM, False, WINDOWED,
                    ALIBI, SOFTCAP,
                )  # fmt: skip
            for i in range(gl.maximum(whole, skip), tiles):
                running_max, denominator, total, weight, count = _step(
                    query, running_max, denominator, total, weight,
                    _tile(i, begin, clear, tail, BLOCK_N), lo, hi, last, oldest, distance, slope,
                    scale, softcap, ring_memory, full, empty, count, base, ring, arrivals, BLOCK_N,
                    STAGES, HEAD_DIM, True, WINDOWED, ALIBI, SOFTCAP,
                )  # fmt: skip
        before = base + (count - 1) % ring
        total = warpgroup_mma(weight, ring_memory.index(STAGES + before), total, is_async=True)
        next_query = _load_query(q, next_row, head, first, NUM_KV_HEADS, GROUP, HEAD_DIM)
        total, weight = warpgroup_mma_wait(0, deps=(total, weight))
        mbarrier.arrive(empty.index(before), count=arrivals)
        _store(
            total, gl.convert_layout(running_max, slots),
            gl.convert_layout(gl.sum(denominator, 1), slots), row, dest, gl.load(record + 5), head,
            first, out, lse, part_out, part_lse, NUM_KV_HEADS, GROUP, HEAD_DIM,
        )  # fmt: skip
        query.store(next_query)
        fence_async_shared()
        item += 1
        row_start, num_rows = next_start, next_rows
        next_start, next_rows = later_start, later_rows


@gluon.jit
def _step(
    query, running_max, denominator, total, weight, start, lo, hi, last, oldest, distance, slope,
    scale, softcap, ring_memory, full, empty, count, base: gl.constexpr, ring: gl.constexpr,
    arrivals: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, HEAD_DIM: gl.constexpr,
    MASKED: gl.constexpr, WINDOWED: gl.constexpr, ALIBI: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Scores of tile `count`, while the weights of the tile before are summed."""
    stage = base + count % ring
    before = base + (count - 1) % ring
    score = _products(query, ring_memory, full, stage, (count // ring) & 1, BLOCK_N)
    total = warpgroup_mma(weight, ring_memory.index(STAGES + before), total, is_async=True)
    score = warpgroup_mma_wait(1, deps=(score,))
    new_weight, running_max, denominator, shrink = _weights(
        score, running_max, denominator, start, lo, hi, last, oldest, distance, slope, scale,
        softcap, BLOCK_N, MASKED, WINDOWED, ALIBI, SOFTCAP,
    )  # fmt: skip
    denominator = _done(denominator)
    # The new weights become operands only behind the wait, in the registers of the old ones.
    total, weight, new_weight = warpgroup_mma_wait(0, deps=(total, weight, new_weight))
    mbarrier.arrive(empty.index(before), count=arrivals)
    rows: gl.constexpr = gl.SliceLayout(1, total.type.layout)
    total = total * gl.convert_layout(shrink, rows)[:, None]
    weight = gl.convert_layout(new_weight.to(weight.dtype), weight.type.layout)
    if MASKED:
        _blank(ring_memory.index(STAGES + stage), start, lo, hi, BLOCK_N, HEAD_DIM)
    return running_max, denominator, total, weight, count + 1


@gluon.jit
def _multiply(
    control, q, out, lse, part_out, part_lse, slopes, scale, softcap, queries, ring_memory, full,
    empty, PART: gl.constexpr,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
    PAGE_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    WINDOWED: gl.constexpr, ALIBI: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """A multiplying warpgroup, in the role of its program."""
    item, stop, head, multiplies = _queue(control, PART)
    if multiplies:
        _multiply_items(
            control, item, stop, head, q, out, lse, part_out, part_lse, slopes, scale, softcap,
            queries, ring_memory, full, empty, PART, True, NUM_KV_HEADS, GROUP, HEAD_DIM,
            PAGE_SIZE, BLOCK_N, STAGES, WINDOWED, ALIBI, SOFTCAP,
        )  # fmt: skip
    else:
        _multiply_items(
            control, item, stop, head, q, out, lse, part_out, part_lse, slopes, scale, softcap,
            queries, ring_memory, full, empty, PART, False, NUM_KV_HEADS, GROUP, HEAD_DIM,
            PAGE_SIZE, BLOCK_N, STAGES, WINDOWED, ALIBI, SOFTCAP,
        )  # fmt: skip


@gluon.jit
def attend_hopper(
    control, q, k_pages, v_pages, out, lse, part_out, part_lse, slopes, scale, softcap,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
    PAGE_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, BOX: gl.constexpr,
    WINDOWED: gl.constexpr, ALIBI: gl.constexpr, SOFTCAP: gl.constexpr,
    REGISTERS: gl.constexpr, COPY_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Walk all items; one program per multiprocessor, 4 warps and 6 more inside. The launch behind
    it may begin at once.

    k_pages, v_pages: `descriptors`.
    """
    gdc_launch_dependents()
    dtype: gl.constexpr = q.dtype.element_ty
    across: gl.constexpr = BLOCK_N // BOX
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, HEAD_DIM], dtype)
    box: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BOX, 64], dtype)
    num_boxes: gl.constexpr = 2 * STAGES * HEAD_DIM // 64 * across
    # Keys, then values; the same memory as boxes and as tiles.
    boxes = gl.allocate_shared_memory(dtype, [num_boxes, BOX, 64], box)
    ring_memory = boxes._reinterpret(dtype, [2 * STAGES, BLOCK_N, HEAD_DIM], tile)
    queries = gl.allocate_shared_memory(
        dtype, [2, ROWS, HEAD_DIM], gl.NVMMASharedLayout.get_default_for([ROWS, HEAD_DIM], dtype)
    )
    flags: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], flags)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], flags)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=across)
        mbarrier.init(empty.index(i), count=2)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    control, q, out, lse, part_out, part_lse, slopes, scale, softcap, queries,
                    ring_memory, full, empty, gl.constexpr(0), NUM_KV_HEADS, GROUP, HEAD_DIM,
                    PAGE_SIZE, BLOCK_N, STAGES, WINDOWED, ALIBI, SOFTCAP,
                ),
            ),
            (
                _multiply,
                (
                    control, q, out, lse, part_out, part_lse, slopes, scale, softcap, queries,
                    ring_memory, full, empty, gl.constexpr(1), NUM_KV_HEADS, GROUP, HEAD_DIM,
                    PAGE_SIZE, BLOCK_N, STAGES, WINDOWED, ALIBI, SOFTCAP,
                ),
            ),
            (
                _copy,
                (
                    control, k_pages, v_pages, boxes, full, empty, gl.constexpr(0), HEAD_DIM,
                    PAGE_SIZE, BLOCK_N, STAGES, BOX,
                ),
            ),
            (
                _copy,
                (
                    control, k_pages, v_pages, boxes, full, empty, gl.constexpr(1), HEAD_DIM,
                    PAGE_SIZE, BLOCK_N, STAGES, BOX,
                ),
            ),
        ],
        [4, 1, 1],
        [REGISTERS, COPY_REGISTERS, COPY_REGISTERS],
    )  # fmt: skip
