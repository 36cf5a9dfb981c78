"""Attention on a grid of positions: a row's bits depend on what it sees alone.

`grid_kernel` walks the items of `ops.work.grid` in tiles that lie at multiples of their size, from
nothing in each segment, and folds the segments' states from left to right. `fold_kernel` goes on
where a row's segments are in several items: states are not normalised, and folded by the same
operations. A tile that a row does not see leaves its state's bits alone. All tiles have as many
tokens and one order of sums, so that a row's bits are the same whatever is beside it. No operations
are contracted but those that are written as `fma`: the compiler might do so in one place and not in
another.

Items of few queries wait for memory, so they have a form of their own where a device's products
allow that: one warp for each, of which a multiprocessor holds many. It walks one segment. Each form
has a launch, the widest first: the next ones run beside it, and wait for the states that they go on
from. On Hopper the widest is `sm90.grid_rows`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from onestem.ops.triton.config import KernelConfig
from onestem.ops.triton.kernels import (
    _attend_tile,
    _divide,
    _exp2,
    _Inputs,
    _item_rows,
    _locate,
    _log2,
    _merge,
    _View,
)
from onestem.ops.triton.words import LN_2, W
from onestem.ops.work import Tile
from onestem.ops.work.grid import FIRST_SEGMENT, FIRST_TO, SEGMENT

_SEGMENT, _FIRST = tl.constexpr(SEGMENT), tl.constexpr(FIRST_SEGMENT)
_FIRST_TO = tl.constexpr(FIRST_TO)
FEW_QUERIES = 16  # rows of one warp's products


@triton.jit
def _is_border(start):
    """Whether a segment begins at a position."""
    return start % tl.where(start < _FIRST_TO, _FIRST, _SEGMENT) == 0


@triton.jit
def _factors(top, top_of_more, EXACT: tl.constexpr):
    """The maximum of two states, and what sums of the first and of the second are multiplied by."""
    highest = tl.maximum(top, top_of_more)
    safe = tl.where(highest == float("-inf"), 0.0, highest)
    return highest, _exp2(top - safe, EXACT), _exp2(top_of_more - safe, EXACT)


@triton.jit
def _fold(top, weights, total, more_top, more_weights, more_total, EXACT: tl.constexpr):
    """The state of some tokens and of those after them, `[BLOCK_M]` and `[BLOCK_M, BLOCK_D]`."""
    top, old, more = _factors(top, more_top, EXACT)
    weights = tl.fma(more_weights, more, weights * old)
    return top, weights, tl.fma(more_total, more[:, None], total * old[:, None])


@triton.jit
def _at_border(
    start, first, old_top, old_weights, old_total, top, weights, total, EXACT: tl.constexpr
):
    """Before a tile: where it begins a segment that is not the item's `first`, the state of the one
    before it is folded into the old ones, and begins from nothing."""
    if _is_border(start) & (start > first):
        old_top, old_weights, old_total = _fold(
            old_top, old_weights, old_total, top, weights, total, EXACT
        )
        top = tl.full(top.shape, float("-inf"), tl.float32)
        weights = tl.zeros_like(weights)
        total = tl.zeros_like(total)
    return old_top, old_weights, old_total, top, weights, total


@triton.jit
def _entry_at(entry):
    """A walk entry's base, and the positions of its end, and of the first and last tokens that all
    rows see."""
    base = tl.load(entry + W.POSITION)
    until = tl.load(entry + W.HI) + base
    return base, until, tl.load(entry + W.CLEAR_LO) + base, tl.load(entry + W.CLEAR_HI) + base


@triton.jit
def _result(top, weights, EXACT: tl.constexpr):
    """The factor of a state's sum of values, and its log-sum-exp."""
    seen = weights > 0.0
    safe = tl.where(seen, weights, 1.0)
    log_sum = tl.where(seen, (top + _log2(safe, EXACT)) * LN_2, float("-inf"))
    return _divide(tl.zeros_like(safe) + 1.0, safe, True), log_sum


@triton.jit
def _rounded(total, factor, dtype: tl.constexpr):
    """A row's result. States that saw nothing were added to some: a zero has any sign."""
    value = total * factor
    return tl.where(value == 0.0, 0.0, value).to(dtype)


@triton.jit
def _walk_item(
    control,
    record,
    head,
    inputs,
    part_weights,
    left,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    FEW: tl.constexpr,
    HEAD_MAJOR: tl.constexpr,
    FORM: tl.constexpr,
):
    """Walk one item for one KV head; return `left`, how many had left states when the program last
    looked: a look orders memory. FEW: it is in one segment, and all tiles are masked; it may go on
    from a state that another has left."""
    EXACT: tl.constexpr = inputs.q.dtype.element_ty == tl.float32
    num_walk = tl.load(record + W.NUM_WALK)
    more = control + tl.load(control + W.AT_WALK) + tl.load(record + W.WALK_START) * W.ENTRY
    pages = control + tl.load(control + W.AT_PAGES)
    num_heads: tl.constexpr = FORM.num_kv_heads * FORM.group
    row_start, j, q_head, used, d, inside, row, at, query, position, slope = _item_rows(
        control, record, head, inputs, BLOCK_M, FORM
    )
    dest = tl.load(control + tl.load(control + W.AT_DEST) + row_start + j, mask=used, other=-1)
    oldest = position
    if FORM.windowed:
        oldest = position - tl.load(control + W.WINDOW) + 1

    # Positions: the item's, and of the next token's entry, whose places are x = position - base.
    entry, index = record + W.FIRST_ENTRY, 0
    final = tl.where(num_walk > 1, more + (num_walk - 2) * W.ENTRY, entry)
    base = tl.load(final + W.POSITION)
    stop = tl.load(final + W.HI) + base
    last = tl.load(final + W.END) + base + j * tl.load(final + W.STEP)  # [BLOCK_M] each row's end
    view = _View(last, oldest, position, slope)
    base, until, clear_lo, clear_hi = _entry_at(entry)
    begin = tl.load(entry + W.LO) + base
    first = begin // BLOCK_N * BLOCK_N
    start = first

    BLOCK_D: tl.constexpr = FORM.block_d  # Triton 3.6 takes no fields in a shape
    # Of the segment, and of those before it.
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weights = tl.zeros([BLOCK_M], tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if FEW:
        handed = tl.load(record + W.HANDED)
        if handed > 0:
            awaited = tl.load(record + W.AWAITED)
            while left < awaited:
                left = tl.atomic_add(control + W.LEFT, 0)
            place = (handed - 1).to(tl.int64) * num_heads + q_head
            top = tl.load(inputs.part_lse + place, mask=used, other=float("-inf"))
            weights = tl.load(part_weights + place, mask=used, other=0.0)
            at_total = inputs.part_out + place[:, None] * FORM.head_dim + d[None, :]
            total = tl.load(at_total, mask=inside, other=0.0)
    else:
        old_top, old_weights, old_total = top, weights, total
    while start < stop:
        if not FEW:
            # Whole tiles of one entry that all rows see.
            whole = tl.minimum(until, clear_hi) // BLOCK_N * BLOCK_N
            whole = tl.where(start >= clear_lo, whole, start)
            begin_x = tl.maximum(start, begin) - base
            x, page = _locate(pages, begin_x, until - base, FORM.page_size, BLOCK_N)
            for tile in tl.range(start, whole, BLOCK_N, num_stages=STAGES):
                # Page ids are read one tile ahead of the keys, outside the chain of the loads.
                next_x, next_page = _locate(
                    pages, tile + BLOCK_N - base, until - base, FORM.page_size, BLOCK_N
                )
                old_top, old_weights, old_total, top, weights, total = _at_border(
                    tile, first, old_top, old_weights, old_total, top, weights, total, EXACT
                )
                top, weights, total = _attend_tile(
                    query, top, weights, total, x, page, tile, stop, view, head, inputs, BLOCK_N,
                    False, HEAD_MAJOR, FORM,
                )  # fmt: skip
                x, page = next_x, next_page
            start = tl.maximum(start, whole)
        if start < stop:
            # A tile of several entries, or one that not all rows see; FEW: those after it too.
            token = tl.minimum(tl.maximum(start + tl.arange(0, BLOCK_N), begin), stop - 1)
            x = token - base
            while until < tl.minimum(start + BLOCK_N, stop):
                before = until
                base, until, clear_lo, clear_hi = _entry_at(more + index * W.ENTRY)
                index += 1
                x = tl.where(token >= before, token - base, x)
            page = tl.load(pages + x // FORM.page_size)
            end = start + BLOCK_N
            if FEW:
                end = tl.where(until < stop, tl.maximum(end, until // BLOCK_N * BLOCK_N), stop)
            for tile in tl.range(start, end, BLOCK_N, num_stages=STAGES if FEW else 1):
                next_x, next_page = x, page
                if FEW:
                    next_x, next_page = _locate(
                        pages, tile + BLOCK_N - base, until - base, FORM.page_size, BLOCK_N
                    )
                if not FEW:
                    old_top, old_weights, old_total, top, weights, total = _at_border(
                        tile, first, old_top, old_weights, old_total, top, weights, total, EXACT
                    )
                top, weights, total = _attend_tile(
                    query, top, weights, total, x, page, tile, stop, view, head, inputs, BLOCK_N,
                    True, HEAD_MAJOR, FORM,
                )  # fmt: skip
                x, page = next_x, next_page
            start = end
        if (until <= start) & (start < stop):
            base, until, clear_lo, clear_hi = _entry_at(more + index * W.ENTRY)
            index += 1
    if not FEW:
        top, weights, total = _fold(old_top, old_weights, old_total, top, weights, total, EXACT)

    factor, log_sum = _result(top, weights, EXACT)
    is_final = used & (dest < 0)
    tl.store(
        inputs.out + at[:, None] + d[None, :],
        _rounded(total, factor[:, None], inputs.out.dtype.element_ty),
        mask=inside & is_final[:, None],
    )
    tl.store(inputs.lse + row * num_heads + q_head, log_sum, mask=is_final)
    is_part = used & (dest >= 0)
    place = dest.to(tl.int64) * num_heads + q_head
    to = inputs.part_out + place[:, None] * FORM.head_dim + d[None, :]
    tl.store(to, total, mask=inside & is_part[:, None])
    tl.store(inputs.part_lse + place, top, mask=is_part)
    tl.store(part_weights + place, weights, mask=is_part)
    if not FEW:  # noqa: SIM102 - decided when compiled
        if tl.load(record + W.HANDED) < 0:
            tl.debug_barrier()  # all threads have stored
            tl.atomic_add(control + W.LEFT, 2)  # halves: see `WorkList.records`
    return left


@triton.jit
def _take(control, num_works, KIND: tl.constexpr):
    """The next work of a counter. After its last works each program takes one that is none: the
    last of these can reset the counter, and nothing waits for states any more."""
    work = tl.atomic_add(control + W.GRID_QUEUE + KIND, 1, sem="relaxed")
    if work == num_works + tl.num_programs(0) - 1:
        tl.store(control + W.GRID_QUEUE + KIND, 0)
        if KIND == 0:
            tl.store(control + W.LEFT, 0)
    return work


@triton.jit
def grid_kernel(
    control,
    q,
    k,
    v,
    out,
    lse,
    part_out,
    part_top,
    part_weights,
    slopes,
    scale,
    softcap,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    KIND: tl.constexpr,
    FEW: tl.constexpr,
    BESIDE: tl.constexpr,
    HEAD_MAJOR: tl.constexpr,
    DEPENDENT: tl.constexpr,
    FORM: tl.constexpr,
):
    """Walk all items of a tile (KIND), each for every KV head. Works come from a counter, so that a
    program that begins late, beside wider items, has none that is waited for. A few need none.

    DEPENDENT: the launch after this one may begin at once. BESIDE: so did this one, while the one
    before it was running, and it ends after that: one program waits, so that the others leave their
    multiprocessors to the next launch.
    """
    if DEPENDENT:
        gdc_launch_dependents()
    inputs = _Inputs(q, k, v, out, lse, part_out, part_top, slopes, scale, softcap)
    records = control + tl.load(control + W.AT_RECORDS)
    num_items, wider = tl.load(control + W.NUM_NARROW), tl.load(control + W.NUM_WIDE)
    if KIND > 0:
        records += num_items * W.RECORD
        num_items = tl.load(control + W.SPLIT)
        wider -= num_items
    if KIND > 1:
        records += num_items * W.RECORD
        num_items, wider = wider, 0
    num_works = num_items * FORM.num_kv_heads
    work, left = tl.program_id(0), 0
    is_counted = (num_works > tl.num_programs(0)) | ((wider > 0) & (num_works > 0))
    if is_counted:
        work = _take(control, num_works, KIND)
    while work < num_works:
        record = records + (work // FORM.num_kv_heads) * W.RECORD
        left = _walk_item(
            control, record, work % FORM.num_kv_heads, inputs, part_weights, left, BLOCK_M, BLOCK_N,
            STAGES, FEW, HEAD_MAJOR, FORM,
        )  # fmt: skip
        if is_counted:
            work = _take(control, num_works, KIND)
        else:
            work = num_works
    if BESIDE:  # noqa: SIM102 - decided when compiled
        if tl.program_id(0) == 0:
            gdc_wait()


@triton.jit
def fold_kernel(
    control,
    out,
    lse,
    part_out,
    part_top,
    part_weights,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UNROLL: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Fold the states of rows that have several; write (0, -inf) for rows that have none. A work is
    a head of a row, for one warp. DEPENDENT, UNROLL: see `merge_kernel`."""
    EXACT: tl.constexpr = out.dtype.element_ty == tl.float32
    num_works = tl.load(control + W.NUM_MERGES) * NUM_HEADS
    merges = control + tl.load(control + W.AT_MERGES)
    work = tl.program_id(0)
    row, first, parts = _merge(merges, work // NUM_HEADS, work < num_works)
    if DEPENDENT:  # noqa: SIM102 - decided when compiled
        if (work < num_works) | (work == 0):
            gdc_wait()
    d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    while work < num_works:
        head = work % NUM_HEADS
        work += tl.num_programs(0)
        next_row, next_first, next_parts = _merge(merges, work // NUM_HEADS, work < num_works)
        top, weights = float("-inf"), 0.0
        total = tl.zeros([BLOCK_D], tl.float32)
        for start in range(0, parts, UNROLL):
            for i in tl.static_range(UNROLL):
                state = first + start + i
                there = state < first + parts
                place = state * NUM_HEADS + head
                more_top = tl.load(part_top + place, mask=there, other=float("-inf"))
                more_weights = tl.load(part_weights + place, mask=there, other=0.0)
                at = part_out + place * HEAD_DIM + d
                more_total = tl.load(at, mask=d < tl.where(there, HEAD_DIM, 0), other=0.0)
                top, old, more = _factors(top, more_top, EXACT)
                weights = tl.fma(more_weights, more, weights * old)
                total = tl.fma(more_total, more, total * old)
        factor, log_sum = _result(top, weights, EXACT)
        place = row * NUM_HEADS + head
        result = _rounded(total, factor, out.dtype.element_ty)
        tl.store(out + place * HEAD_DIM + d, result, mask=d < HEAD_DIM)
        tl.store(lse + place, log_sum)
        row, first, parts = next_row, next_first, next_parts


def grid_config(
    dtype: torch.dtype, head_dim: int, group: int, few: bool, hopper: bool
) -> KernelConfig:
    """The shapes of tiles for heads of a size. Tiles of tokens divide segments.

    few: items of up to 16 queries may have a form of their own: on this device the products of one
    warp (`mma.sync`) have the bits of those of four. A warp sums a row's weights in the same order:
    each thread its two of every eight tokens, then the four threads of a row. hopper: items of more
    than 64 queries are walked by `sm90.grid_rows`, 128 at a time.
    """
    wide = head_dim > 128
    if dtype == torch.float32:  # what is not multiplied by tensor cores takes its time by rows
        rows, tokens, stages = 16, 16 if wide else 32, 1 if wide else 2
    elif head_dim > 256:
        rows, tokens, stages = 32, 16, 3
    else:
        rows, tokens, stages = 64, 32 if wide else 64, 3
    rows = max(rows, 1 << (group - 1).bit_length())
    warps = 8 if rows > 64 or head_dim > (256 if dtype == torch.float32 else 128) else 4
    programs = 2 if warps == 4 else 1
    tile = Tile(rows, tokens)
    if few and dtype != torch.float32 and rows == 64 and warps == 4 and group <= FEW_QUERIES:
        beside = 6 if head_dim > 64 else 8  # that have room for one tile of keys and values each
        tiles, more = (Tile(FEW_QUERIES, tokens), tile), (Tile(128, tokens),) * hopper
        each = (2, stages, stages), (1, warps, 8), (beside, programs, 1)
        return KernelConfig((*tiles, *more), *each)
    return KernelConfig((tile,), (stages,), (warps, warps), (programs, programs))
