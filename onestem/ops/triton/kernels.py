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

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from onestem.ops.triton.words import (
    AT_DEST,
    AT_MERGES,
    AT_PAGES,
    AT_POSITIONS,
    AT_ROWS,
    AT_WALK,
    CLEAR_HI,
    CLEAR_LO,
    END,
    ENTRY,
    FIRST_ENTRY,
    FIRST_STATE,
    HEADER,
    HI,
    LN_2,
    LOG2_E,
    NUM_MERGES,
    NUM_PARTS,
    NUM_ROWS,
    NUM_WALK,
    POSITION,
    QUEUE,
    RECORD,
    ROW_START,
    STEP,
    WALK_START,
    WINDOW,
)

__all__ = ["attend_kernel", "merge_kernel"]


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
    last,
    oldest,
    distance,
    k,
    v,
    head,
    slope,
    scale,
    softcap,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_MAJOR: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    ALIBI: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Attend to tokens start .. start + BLOCK_N - 1 of a walk entry, at places x. With MASKED, row
    m sees those from oldest[m] on that are below both stop and last[m]."""
    EXACT: tl.constexpr = query.dtype == tl.float32
    n = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    if HEAD_MAJOR:  # the tokens of a head are adjacent in a page
        line = (page.to(tl.int64) * NUM_KV_HEADS + head) * PAGE_SIZE + x % PAGE_SIZE
    else:
        line = (page.to(tl.int64) * PAGE_SIZE + x % PAGE_SIZE) * NUM_KV_HEADS + head
    where = line * HEAD_DIM  # [BLOCK_N]
    offsets = where[:, None] + d[None, :]  # [BLOCK_N, BLOCK_D]
    if HEAD_DIM == BLOCK_D:
        key = tl.load(k + offsets)
        value = tl.load(v + offsets)
    else:
        key = tl.load(k + offsets, mask=(d < HEAD_DIM)[None, :], other=0.0)
        value = tl.load(v + offsets, mask=(d < HEAD_DIM)[None, :], other=0.0)
    score = _products(query, key)  # [BLOCK_M, BLOCK_N]
    if SOFTCAP:
        score = softcap * _tanh(score * (scale / softcap), EXACT) * LOG2_E
    elif ALIBI:
        score = score * (scale * LOG2_E)
    if ALIBI:
        score += slope[:, None] * (n[None, :] - distance[:, None]).to(tl.float32)
    if MASKED:
        seen = n[None, :] < tl.minimum(last, stop)[:, None]
        if WINDOWED:
            seen &= n[None, :] >= oldest[:, None]
        score = tl.where(seen, score, float("-inf"))
    if SOFTCAP or ALIBI:
        new_max = tl.maximum(running_max, tl.max(score, 1))
        safe_max = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
        weight = _exp2(score - safe_max[:, None], EXACT)
    else:
        # The scale is applied in the exponent: one fused multiply-add per weight.
        new_max = tl.maximum(running_max, tl.max(score, 1) * (scale * LOG2_E))
        safe_max = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
        weight = _exp2(score * (scale * LOG2_E) - safe_max[:, None], EXACT)
    shrink = _exp2(running_max - safe_max, EXACT)
    denominator = denominator * shrink + tl.sum(weight, 1)
    total = total * shrink[:, None]
    total = tl.dot(weight.to(value.dtype), value, total, input_precision="ieee")
    return new_max, denominator, total


@triton.jit
def _attend_item(
    control,
    record,
    head,
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
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_MAJOR: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOWED: tl.constexpr,
    ALIBI: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Walk one item for one KV head. SPLIT: tokens that all rows see are walked without a mask."""
    num_rows = tl.load(record + NUM_ROWS)
    row_start = tl.load(record + ROW_START)
    num_walk = tl.load(record + NUM_WALK)
    more = control + tl.load(control + AT_WALK) + tl.load(record + WALK_START) * ENTRY
    pages = control + tl.load(control + AT_PAGES)

    m = tl.arange(0, BLOCK_M)  # [BLOCK_M]
    j = m // GROUP  # [BLOCK_M] row of the item
    q_head = head * GROUP + m % GROUP  # [BLOCK_M]
    used = j < num_rows
    d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    inside = used[:, None] & (d < HEAD_DIM)[None, :]
    row = tl.load(control + tl.load(control + AT_ROWS) + row_start + j, mask=used, other=0)
    num_heads: tl.constexpr = NUM_KV_HEADS * GROUP
    at = (row.to(tl.int64) * num_heads + q_head) * HEAD_DIM  # [BLOCK_M]
    query = tl.load(q + at[:, None] + d[None, :], mask=inside, other=0.0)
    position = j  # [BLOCK_M] position id of the row, if it is needed
    slope = scale
    if WINDOWED or ALIBI:
        position = tl.load(control + tl.load(control + AT_POSITIONS) + row, mask=used, other=0)
    if ALIBI:
        slope = tl.load(slopes + q_head, mask=used, other=0.0) * LOG2_E

    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    denominator = tl.zeros([BLOCK_M], tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for index in range(num_walk):
        entry = tl.where(index == 0, record + FIRST_ENTRY, more + (index - 1) * ENTRY)
        lo = tl.load(entry)
        clear_lo = tl.load(entry + CLEAR_LO)
        clear_hi = tl.load(entry + CLEAR_HI)
        hi = tl.load(entry + HI)
        last = tl.load(entry + END) + j * tl.load(entry + STEP)  # [BLOCK_M] each row's end
        distance = position - tl.load(entry + POSITION)  # [BLOCK_M] its own place in the entry
        oldest = distance
        if WINDOWED:
            oldest = distance - tl.load(control + WINDOW) + 1
        tail = lo
        head_tiles = 0
        if SPLIT:
            tail = clear_lo + tl.maximum(clear_hi - clear_lo, 0) // BLOCK_N * BLOCK_N
            x, page = _locate(pages, clear_lo, hi, PAGE_SIZE, BLOCK_N)
            for start in tl.range(clear_lo, tail, BLOCK_N, num_stages=STAGES):
                # Page ids are read one tile ahead of the keys, outside the chain of the loads.
                next_x, next_page = _locate(pages, start + BLOCK_N, hi, PAGE_SIZE, BLOCK_N)
                running_max, denominator, total = _attend_tile(
                    query, running_max, denominator, total, x, page, start, hi, last, oldest,
                    distance, k, v, head, slope, scale, softcap,
                    NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, HEAD_MAJOR, BLOCK_N, BLOCK_D,
                    False, WINDOWED, ALIBI, SOFTCAP,
                )  # fmt: skip
                x, page = next_x, next_page
            if WINDOWED:
                head_tiles = tl.cdiv(tl.maximum(tl.minimum(clear_lo, hi) - lo, 0), BLOCK_N)
        tiles = head_tiles + tl.cdiv(tl.maximum(hi - tail, 0), BLOCK_N)
        start = lo if WINDOWED else tail
        stop = hi
        if WINDOWED:
            start = tl.where(head_tiles > 0, lo, tail)
            stop = tl.where(head_tiles > 0, tl.minimum(clear_lo, hi), hi)
        x, page = _locate(pages, start, stop, PAGE_SIZE, BLOCK_N)
        for tile in tl.range(0, tiles, num_stages=STAGES):
            next_start = start + BLOCK_N
            next_stop = stop
            if WINDOWED:
                jump = tile + 1 == head_tiles
                next_start = tl.where(jump, tail, next_start)
                next_stop = tl.where(jump, hi, next_stop)
            next_x, next_page = _locate(pages, next_start, next_stop, PAGE_SIZE, BLOCK_N)
            running_max, denominator, total = _attend_tile(
                query, running_max, denominator, total, x, page, start, stop, last, oldest,
                distance, k, v, head, slope, scale, softcap,
                NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, HEAD_MAJOR, BLOCK_N, BLOCK_D,
                True, WINDOWED, ALIBI, SOFTCAP,
            )  # fmt: skip
            x, page, start, stop = next_x, next_page, next_start, next_stop

    dest = tl.load(control + tl.load(control + AT_DEST) + row_start + j, mask=used, other=-1)
    seen = denominator > 0.0
    safe = tl.where(seen, denominator, 1.0)
    result = _divide(total, safe[:, None], query.dtype == tl.float32)
    log_sum = tl.where(seen, running_max + _log2(safe, query.dtype == tl.float32), float("-inf"))
    final = used & (dest < 0)
    tl.store(
        out + at[:, None] + d[None, :],
        result.to(out.dtype.element_ty),
        mask=inside & final[:, None],
    )
    tl.store(lse + row * num_heads + q_head, log_sum * LN_2, mask=final)
    place = dest.to(tl.int64) * num_heads + q_head
    tl.store(
        part_out + place[:, None] * HEAD_DIM + d[None, :],
        result,
        mask=inside & (dest >= 0)[:, None],
    )
    tl.store(part_lse + place, log_sum, mask=used & (dest >= 0))


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
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_MAJOR: tl.constexpr,
    BLOCK_D: tl.constexpr,
    M0: tl.constexpr,
    N0: tl.constexpr,
    STAGES0: tl.constexpr,
    M1: tl.constexpr,
    N1: tl.constexpr,
    STAGES1: tl.constexpr,
    WIDE: tl.constexpr,
    WINDOWED: tl.constexpr,
    ALIBI: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Walk the items with many rows (WIDE: all of tile shape 1) or those with few (each record
    names its shape).

    A program's first work has the program's number; the next ones come from a counter. DEPENDENT:
    the launch after this one may begin at once.
    """
    if DEPENDENT:
        gdc_launch_dependents()
    records = control + HEADER
    if WIDE:
        records += tl.load(control) * RECORD
    num_works = tl.load(control + WIDE) * NUM_KV_HEADS
    work = tl.program_id(0)
    while work < num_works:
        record = records + (work // NUM_KV_HEADS) * RECORD
        head = work % NUM_KV_HEADS
        narrow = False if WIDE else tl.load(record) == 0
        if narrow:
            _attend_item(
                control, record, head, q, k, v, out, lse, part_out, part_lse, slopes, scale,
                softcap, NUM_KV_HEADS, GROUP, HEAD_DIM, PAGE_SIZE, HEAD_MAJOR, M0, N0, BLOCK_D,
                STAGES0, False, WINDOWED, ALIBI, SOFTCAP,
            )  # fmt: skip
        else:
            _attend_item(
                control, record, head, q, k, v, out, lse, part_out, part_lse, slopes, scale,
                softcap, NUM_KV_HEADS, GROUP, HEAD_DIM, PAGE_SIZE, HEAD_MAJOR, M1, N1, BLOCK_D,
                STAGES1, True, WINDOWED, ALIBI, SOFTCAP,
            )  # fmt: skip
        if num_works > tl.num_programs(0):
            taken = tl.atomic_add(control + QUEUE + WIDE, 1)
            work = tl.num_programs(0) + taken
            # One addition follows each work, so the last one can reset the counter.
            if taken == num_works - 1:
                tl.store(control + QUEUE + WIDE, 0)
        else:
            work = num_works


@triton.jit
def _merge(merges, index, there):
    """A merge's row, its first state and its number of states."""
    row = tl.load(merges + index * 4, mask=there, other=0)
    first = tl.load(merges + index * 4 + FIRST_STATE, mask=there, other=0)
    parts = tl.load(merges + index * 4 + NUM_PARTS, mask=there, other=0)
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
    num_works = tl.load(control + NUM_MERGES) * NUM_HEADS
    merges = control + tl.load(control + AT_MERGES)
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
