"""The Triton kernels: `attend_kernel` walks the items of a work list, `merge_kernel` merges states.

Both are persistent: a fixed grid of programs takes works from a list. Its length is on the device,
in the buffer that `ops.work` packs, so one CUDA graph serves every plan. A work is an item for one
KV head. `attend_kernel` is launched for items with few rows, which wait for memory, and again for
items with many, which wait for the tensor cores. On Hopper, `sm90.attend_hopper` does both at the
same time.

Names: `m` counts rows of a tile (row of the item times query heads of the KV head), `n` tokens, `d`
dimensions of a head. Weights and sums are in powers of two: scores are scaled by log2(e), and a
final `lse` becomes a natural logarithm.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from onestem.ops.triton.words import LN_2, LOG2_E, W


class _Inputs(NamedTuple):
    """The tensors of a launch but its list, and how scores change."""

    q: tl.tensor
    k: tl.tensor
    v: tl.tensor
    out: tl.tensor
    lse: tl.tensor
    part_out: tl.tensor
    part_lse: tl.tensor
    slopes: tl.tensor
    scale: tl.tensor
    softcap: tl.tensor


class _View(NamedTuple):
    """What each row of a tile sees of a walk entry, `[BLOCK_M]`: its end, its oldest token, its own
    place, and the slope of its head."""

    last: tl.tensor
    oldest: tl.tensor
    distance: tl.tensor
    slope: tl.tensor


@triton.jit
def _exp2(x, EXACT: tl.constexpr):
    """2^x for x up to 127. The GPU's instruction errs by up to 3 units in the last place. EXACT
    (float32, where that shows): a Taylor polynomial of the fraction, to 1e-8."""
    if EXACT:
        inside = tl.maximum(x, -126.0)
        whole = tl.floor(inside + 0.5)
        f = (inside - whole) * LN_2
        series = 1.0 / 720.0 + f * (1.0 / 5040.0 + f * (1.0 / 40320.0))
        series = 1.0 / 24.0 + f * (1.0 / 120.0 + f * series)
        series = 1.0 + f * (1.0 + f * (0.5 + f * (1.0 / 6.0 + f * series)))
        power = ((whole.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
        result = tl.where(x < -126.0, 0.0, series * power)
    else:
        result = tl.exp2(x)
    return result


@triton.jit
def _log2(x, EXACT: tl.constexpr):
    """log2 of x in 2^-126 .. 2^126; EXACT: with one step of Newton's method."""
    y = tl.log2(x)
    if EXACT:
        y += (x * _exp2(-y, True) - 1.0) * LOG2_E
    return y


@triton.jit
def _divide(x, y, EXACT: tl.constexpr):
    """x / y; EXACT: rounded as float32 is (the GPU's fast division errs by 2 units)."""
    if EXACT:
        result = tl.math.div_rn(x, y + tl.zeros_like(x))
    else:
        result = x / y
    return result


@triton.jit
def _tanh(x, EXACT: tl.constexpr):
    # Beyond 40 it is 1 to the last bit.
    power = _exp2(tl.minimum(x, 40.0) * (2.0 * LOG2_E), EXACT)
    result = 1.0 - _divide(tl.zeros_like(x) + 2.0, 1.0 + power, EXACT)
    if EXACT:
        # Near 0 the difference cancels: use Taylor's polynomial, to 1e-8.
        y = x * x
        series = 21844.0 / 6081075.0 - y * (929569.0 / 638512875.0)
        series = 62.0 / 2835.0 - y * (1382.0 / 155925.0 - y * series)
        series = 1.0 / 3.0 - y * (2.0 / 15.0 - y * (17.0 / 315.0 - y * series))
        result = tl.where(tl.abs(x) < 0.5, x - x * (y * series), result)
    return result


@triton.jit
def _locate(pages, start, stop, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Places of a tile's tokens and their pages, both `[BLOCK_N]`. From `stop` on the last token is
    repeated: an unused slot may hold NaN."""
    x = tl.minimum(start + tl.arange(0, BLOCK_N), stop - 1)
    return x, tl.load(pages + x // PAGE_SIZE)


@triton.jit
def _products(query, key):
    """Products `[BLOCK_M, BLOCK_N]`. float32 is summed in pieces of 16 dimensions: a single running
    sum rounds at the size of the whole each time, with three times a library's error."""
    if query.dtype == tl.float32:
        PIECES: tl.constexpr = query.shape[1] // 16
        rows = tl.permute(tl.reshape(query, [query.shape[0], PIECES, 16]), [1, 0, 2])
        columns = tl.permute(tl.reshape(key, [key.shape[0], PIECES, 16]), [1, 2, 0])
        result = tl.sum(tl.dot(rows, columns, input_precision="ieee"), 0)
    else:
        result = tl.dot(query, tl.trans(key))
    return result


@triton.jit
def _attend_tile(
    query,
    running_max,
    denominator,
    total,
    x,
    page,
    start,
    stop,
    view,
    head,
    inputs,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    HEAD_MAJOR: tl.constexpr,
    FORM: tl.constexpr,
):
    """Attend to tokens start .. start + BLOCK_N - 1 of a walk entry, at places x. With MASKED, row
    m sees those from oldest[m] on that are below both stop and last[m]."""
    scale, softcap = inputs.scale, inputs.softcap
    EXACT: tl.constexpr = query.dtype == tl.float32
    n = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    d = tl.arange(0, FORM.block_d)  # [BLOCK_D]
    if HEAD_MAJOR:  # the tokens of a head are adjacent in a page
        line = (page.to(tl.int64) * FORM.num_kv_heads + head) * FORM.page_size + x % FORM.page_size
    else:
        line = (page.to(tl.int64) * FORM.page_size + x % FORM.page_size) * FORM.num_kv_heads + head
    where = line * FORM.head_dim  # [BLOCK_N]
    offsets = where[:, None] + d[None, :]  # [BLOCK_N, BLOCK_D]
    if FORM.head_dim == FORM.block_d:
        key = tl.load(inputs.k + offsets)
        value = tl.load(inputs.v + offsets)
    else:
        key = tl.load(inputs.k + offsets, mask=(d < FORM.head_dim)[None, :], other=0.0)
        value = tl.load(inputs.v + offsets, mask=(d < FORM.head_dim)[None, :], other=0.0)
    score = _products(query, key)  # [BLOCK_M, BLOCK_N]
    if FORM.softcap:
        score = softcap * _tanh(score * (scale / softcap), EXACT) * LOG2_E
    elif FORM.alibi:
        score = score * (scale * LOG2_E)
    if FORM.alibi:
        score += view.slope[:, None] * (n[None, :] - view.distance[:, None]).to(tl.float32)
    if MASKED:
        seen = n[None, :] < tl.minimum(view.last, stop)[:, None]
        if FORM.windowed:
            seen &= n[None, :] >= view.oldest[:, None]
        score = tl.where(seen, score, float("-inf"))
    if FORM.softcap or FORM.alibi:
        new_max = tl.maximum(running_max, tl.max(score, 1))
        safe_max = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
        weight = _exp2(score - safe_max[:, None], EXACT)
    else:
        # The scale is applied in the exponent, by one instruction per weight.
        new_max = tl.maximum(running_max, tl.max(score, 1) * (scale * LOG2_E))
        safe_max = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
        weight = _exp2(tl.fma(score, scale * LOG2_E, -safe_max[:, None]), EXACT)
    shrink = _exp2(running_max - safe_max, EXACT)
    denominator = tl.fma(denominator, shrink, tl.sum(weight, 1))
    total = total * shrink[:, None]
    total = tl.dot(weight.to(value.dtype), value, total, input_precision="ieee")
    return new_max, denominator, total


@triton.jit
def _item_rows(control, record, head, inputs, BLOCK_M: tl.constexpr, FORM: tl.constexpr):
    """An item's rows for one KV head.

    Where its first one is; of each line of a tile `[BLOCK_M]` the row j of the item, the query
    head, and whether there is one. Dimensions `[BLOCK_D]`, and what of the tile is used. Then of
    each line its row of the step, the place of its query, and the query; a position id and a slope
    where they are needed.
    """
    num_rows = tl.load(record + W.NUM_ROWS)
    row_start = tl.load(record + W.ROW_START)
    m = tl.arange(0, BLOCK_M)
    j = m // FORM.group
    q_head = head * FORM.group + m % FORM.group
    used = j < num_rows
    d = tl.arange(0, FORM.block_d)
    inside = used[:, None] & (d < FORM.head_dim)[None, :]
    row = tl.load(control + tl.load(control + W.AT_ROWS) + row_start + j, mask=used, other=0)
    num_heads: tl.constexpr = FORM.num_kv_heads * FORM.group
    at = (row.to(tl.int64) * num_heads + q_head) * FORM.head_dim
    query = tl.load(inputs.q + at[:, None] + d[None, :], mask=inside, other=0.0)
    position = j
    slope = inputs.scale
    if FORM.windowed or FORM.alibi:
        position = tl.load(control + tl.load(control + W.AT_POSITIONS) + row, mask=used, other=0)
    if FORM.alibi:
        slope = tl.load(inputs.slopes + q_head, mask=used, other=0.0) * LOG2_E
    return row_start, j, q_head, used, d, inside, row, at, query, position, slope


@triton.jit
def _attend_item(
    control,
    record,
    head,
    inputs,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    HEAD_MAJOR: tl.constexpr,
    FORM: tl.constexpr,
):
    """Walk one item for one KV head. SPLIT: tokens that all rows see are walked without a mask."""
    num_walk = tl.load(record + W.NUM_WALK)
    more = control + tl.load(control + W.AT_WALK) + tl.load(record + W.WALK_START) * W.ENTRY
    pages = control + tl.load(control + W.AT_PAGES)
    num_heads: tl.constexpr = FORM.num_kv_heads * FORM.group
    row_start, j, q_head, used, d, inside, row, at, query, position, slope = _item_rows(
        control, record, head, inputs, BLOCK_M, FORM
    )

    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    denominator = tl.zeros([BLOCK_M], tl.float32)
    BLOCK_D: tl.constexpr = FORM.block_d  # Triton 3.6 takes no fields in a shape
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for index in range(num_walk):
        entry = tl.where(index == 0, record + W.FIRST_ENTRY, more + (index - 1) * W.ENTRY)
        lo = tl.load(entry)
        clear_lo = tl.load(entry + W.CLEAR_LO)
        clear_hi = tl.load(entry + W.CLEAR_HI)
        hi = tl.load(entry + W.HI)
        last = tl.load(entry + W.END) + j * tl.load(entry + W.STEP)  # [BLOCK_M] each row's end
        distance = position - tl.load(entry + W.POSITION)  # [BLOCK_M] its own place in the entry
        oldest = distance
        if FORM.windowed:
            oldest = distance - tl.load(control + W.WINDOW) + 1
        view = _View(last, oldest, distance, slope)
        tail = lo
        head_tiles = 0
        if SPLIT:
            tail = clear_lo + tl.maximum(clear_hi - clear_lo, 0) // BLOCK_N * BLOCK_N
            x, page = _locate(pages, clear_lo, hi, FORM.page_size, BLOCK_N)
            for start in tl.range(clear_lo, tail, BLOCK_N, num_stages=STAGES):
                # Page ids are read one tile ahead of the keys, outside the chain of the loads.
                next_x, next_page = _locate(pages, start + BLOCK_N, hi, FORM.page_size, BLOCK_N)
                running_max, denominator, total = _attend_tile(
                    query, running_max, denominator, total, x, page, start, hi, view, head,
                    inputs, BLOCK_N, False, HEAD_MAJOR, FORM,
                )  # fmt: skip
                x, page = next_x, next_page
            if FORM.windowed:
                head_tiles = tl.cdiv(tl.maximum(tl.minimum(clear_lo, hi) - lo, 0), BLOCK_N)
        tiles = head_tiles + tl.cdiv(tl.maximum(hi - tail, 0), BLOCK_N)
        start = lo if FORM.windowed else tail
        stop = hi
        if FORM.windowed:
            start = tl.where(head_tiles > 0, lo, tail)
            stop = tl.where(head_tiles > 0, tl.minimum(clear_lo, hi), hi)
        x, page = _locate(pages, start, stop, FORM.page_size, BLOCK_N)
        for tile in tl.range(0, tiles, num_stages=STAGES):
            next_start = start + BLOCK_N
            next_stop = stop
            if FORM.windowed:
                jump = tile + 1 == head_tiles
                next_start = tl.where(jump, tail, next_start)
                next_stop = tl.where(jump, hi, next_stop)
            next_x, next_page = _locate(pages, next_start, next_stop, FORM.page_size, BLOCK_N)
            running_max, denominator, total = _attend_tile(
                query, running_max, denominator, total, x, page, start, stop, view, head,
                inputs, BLOCK_N, True, HEAD_MAJOR, FORM,
            )  # fmt: skip
            x, page, start, stop = next_x, next_page, next_start, next_stop

    dest = tl.load(control + tl.load(control + W.AT_DEST) + row_start + j, mask=used, other=-1)
    seen = denominator > 0.0
    safe = tl.where(seen, denominator, 1.0)
    result = _divide(total, safe[:, None], query.dtype == tl.float32)
    log_sum = tl.where(seen, running_max + _log2(safe, query.dtype == tl.float32), float("-inf"))
    final = used & (dest < 0)
    tl.store(
        inputs.out + at[:, None] + d[None, :],
        result.to(inputs.out.dtype.element_ty),
        mask=inside & final[:, None],
    )
    tl.store(inputs.lse + row * num_heads + q_head, log_sum * LN_2, mask=final)
    place = dest.to(tl.int64) * num_heads + q_head
    tl.store(
        inputs.part_out + place[:, None] * FORM.head_dim + d[None, :],
        result,
        mask=inside & (dest >= 0)[:, None],
    )
    tl.store(inputs.part_lse + place, log_sum, mask=used & (dest >= 0))


@triton.jit
def attend_kernel(
    control,
    q,
    k,
    v,
    out,
    lse,
    part_out,
    part_lse,
    slopes,
    scale,
    softcap,
    M0: tl.constexpr,
    N0: tl.constexpr,
    STAGES0: tl.constexpr,
    M1: tl.constexpr,
    N1: tl.constexpr,
    STAGES1: tl.constexpr,
    WIDE: tl.constexpr,
    HEAD_MAJOR: tl.constexpr,
    DEPENDENT: tl.constexpr,
    FORM: tl.constexpr,
):
    """Walk the items with many rows (WIDE: all of tile shape 1) or those with few (each record
    names its shape).

    A program's first work has the program's number; the next ones come from a counter. DEPENDENT:
    the launch after this one may begin at once.
    """
    if DEPENDENT:
        gdc_launch_dependents()
    inputs = _Inputs(q, k, v, out, lse, part_out, part_lse, slopes, scale, softcap)
    records = control + W.HEADER
    if WIDE:
        records += tl.load(control) * W.RECORD
    num_works = tl.load(control + WIDE) * FORM.num_kv_heads
    work = tl.program_id(0)
    while work < num_works:
        record = records + (work // FORM.num_kv_heads) * W.RECORD
        head = work % FORM.num_kv_heads
        narrow = False if WIDE else tl.load(record) == 0
        if narrow:
            _attend_item(control, record, head, inputs, M0, N0, STAGES0, False, HEAD_MAJOR, FORM)
        else:
            _attend_item(control, record, head, inputs, M1, N1, STAGES1, True, HEAD_MAJOR, FORM)
        if num_works > tl.num_programs(0):
            taken = tl.atomic_add(control + W.QUEUE + WIDE, 1)
            work = tl.num_programs(0) + taken
            # One addition follows each work, so the last one can reset the counter.
            if taken == num_works - 1:
                tl.store(control + W.QUEUE + WIDE, 0)
        else:
            work = num_works


@triton.jit
def _merge(merges, index, there):
    """A merge's row, its first state and its number of states."""
    row = tl.load(merges + index * 4, mask=there, other=0)
    first = tl.load(merges + index * 4 + W.FIRST_STATE, mask=there, other=0)
    parts = tl.load(merges + index * 4 + W.NUM_PARTS, mask=there, other=0)
    return row.to(tl.int64), first.to(tl.int64), parts


@triton.jit
def merge_kernel(
    control,
    out,
    lse,
    part_out,
    part_lse,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UNROLL: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Merge the states of rows that have several; write (0, -inf) for rows that have none. A work
    is a head of a row, for one warp.

    DEPENDENT: the launch may begin before that of the states has ended (programmatic dependent
    launch). Programs with work wait for it, and so does the first, so that later launches come
    after both; the others end at once. UNROLL: states that are loaded at a time.
    """
    EXACT: tl.constexpr = out.dtype.element_ty == tl.float32
    num_works = tl.load(control + W.NUM_MERGES) * NUM_HEADS
    merges = control + tl.load(control + W.AT_MERGES)
    work = tl.program_id(0)
    row, first, parts = _merge(merges, work // NUM_HEADS, work < num_works)
    if DEPENDENT:  # noqa: SIM102 - decided when compiled
        if (work < num_works) | (work == 0):
            gdc_wait()
    d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    i = tl.arange(0, UNROLL)  # [UNROLL]
    while work < num_works:
        head = work % NUM_HEADS
        work += tl.num_programs(0)
        next_row, next_first, next_parts = _merge(merges, work // NUM_HEADS, work < num_works)
        top = float("-inf")
        denominator = 0.0
        total = tl.zeros([BLOCK_D], tl.float32)
        for start in range(0, parts, UNROLL):
            place = (first + start + i) * NUM_HEADS + head  # [UNROLL]
            there = start + i < parts
            part = tl.load(part_lse + place, mask=there, other=float("-inf"))
            value = tl.load(
                part_out + place[:, None] * HEAD_DIM + d[None, :],
                mask=there[:, None] & (d < HEAD_DIM)[None, :],
                other=0.0,
            )  # [UNROLL, BLOCK_D]
            new_top = tl.maximum(top, tl.max(part, 0))
            safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)
            shrink = _exp2(top - safe_top, EXACT)
            weight = _exp2(part - safe_top, EXACT)  # [UNROLL]
            denominator = denominator * shrink + tl.sum(weight, 0)
            total = total * shrink + tl.sum(value * weight[:, None], 0)
            top = new_top
        safe = tl.where(denominator > 0.0, denominator, 1.0)
        place = row * NUM_HEADS + head
        result = _divide(total, safe, EXACT).to(out.dtype.element_ty)
        tl.store(out + place * HEAD_DIM + d, result, mask=d < HEAD_DIM)
        log_sum = (top + _log2(safe, EXACT)) * LN_2
        tl.store(lse + place, tl.where(denominator > 0.0, log_sum, float("-inf")))
        row, first, parts = next_row, next_first, next_parts
