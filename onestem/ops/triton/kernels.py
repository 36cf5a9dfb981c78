"""The Triton kernels: `attend_kernel` walks the items of a work list, `merge_kernel` merges states.

Both are persistent: a fixed grid of programs takes works from a list whose length stands on the
device, in the buffer that `ops.work` packs, so one CUDA graph serves every plan. A work is an item
for one KV head. `attend_kernel` is launched for items with few rows, which wait for memory, and
again for those with many, which wait for the tensor cores (`hopper.attend_hopper` does both at the
same time, where there is such a device).

Names: `m` counts rows of a tile (row of the item times query heads of the KV head), `n` tokens, `d`
dimensions of a head. Weights and sums are in powers of two: scores are scaled by log2(e), and `lse`
becomes a natural logarithm where it is final.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

__all__ = ["attend_kernel", "merge_kernel"]

# Word layout of `ops.work`, as Triton constants.
HEADER: tl.constexpr = tl.constexpr(16)
RECORD: tl.constexpr = tl.constexpr(16)
ENTRY: tl.constexpr = tl.constexpr(8)
QUEUE: tl.constexpr = tl.constexpr(14)
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2_E)))


@triton.jit
def _locate(pages, start, stop, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Places of a tile's tokens and the pages they stand in, both `[BLOCK_N]`. Behind `stop` the
    last token is taken again: a slot that nobody shows may hold NaN."""
    x = tl.minimum(start + tl.arange(0, BLOCK_N), stop - 1)
    return x, tl.load(pages + x // PAGE_SIZE)


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
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    ALIBI: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Tokens start .. start + BLOCK_N - 1 of a walk entry, at places x. With MASKED, row m sees
    those from oldest[m] on that are below both stop and last[m]."""
    n = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    slot = page.to(tl.int64) * PAGE_SIZE + x % PAGE_SIZE
    where = (slot * NUM_KV_HEADS + head) * HEAD_DIM  # [BLOCK_N]
    offsets = where[:, None] + d[None, :]  # [BLOCK_N, BLOCK_D]
    if HEAD_DIM == BLOCK_D:
        key = tl.load(k + offsets)
        value = tl.load(v + offsets)
    else:
        key = tl.load(k + offsets, mask=(d < HEAD_DIM)[None, :], other=0.0)
        value = tl.load(v + offsets, mask=(d < HEAD_DIM)[None, :], other=0.0)
    score = tl.dot(query, tl.trans(key), input_precision="ieee")  # [BLOCK_M, BLOCK_N]
    if SOFTCAP:
        score = softcap * _tanh(score * (scale / softcap)) * LOG2_E
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
        weight = tl.exp2(score - safe_max[:, None])
    else:
        # The scale is applied in the exponent: one fused multiply-add per weight.
        new_max = tl.maximum(running_max, tl.max(score, 1) * (scale * LOG2_E))
        safe_max = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
        weight = tl.exp2(score * (scale * LOG2_E) - safe_max[:, None])
    shrink = tl.exp2(running_max - safe_max)
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOWED: tl.constexpr,
    ALIBI: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """One item for one KV head. SPLIT: tokens that all rows see are walked without a mask."""
    num_rows = tl.load(record + 1)
    row_start = tl.load(record + 2)
    num_walk = tl.load(record + 3)
    more = control + tl.load(control + 3) + tl.load(record + 4) * ENTRY
    pages = control + tl.load(control + 7)

    m = tl.arange(0, BLOCK_M)  # [BLOCK_M]
    j = m // GROUP  # [BLOCK_M] row of the item
    q_head = head * GROUP + m % GROUP  # [BLOCK_M]
    used = j < num_rows
    d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    inside = used[:, None] & (d < HEAD_DIM)[None, :]
    row = tl.load(control + tl.load(control + 4) + row_start + j, mask=used, other=0)
    num_heads: tl.constexpr = NUM_KV_HEADS * GROUP
    at = (row.to(tl.int64) * num_heads + q_head) * HEAD_DIM  # [BLOCK_M]
    query = tl.load(q + at[:, None] + d[None, :], mask=inside, other=0.0)
    position = j  # [BLOCK_M] position id of the row, where it is needed
    slope = scale
    if WINDOWED or ALIBI:
        position = tl.load(control + tl.load(control + 8) + row, mask=used, other=0)
    if ALIBI:
        slope = tl.load(slopes + q_head, mask=used, other=0.0) * LOG2_E

    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    denominator = tl.zeros([BLOCK_M], tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for index in range(num_walk):
        entry = tl.where(index == 0, record + 8, more + (index - 1) * ENTRY)
        lo = tl.load(entry)
        clear_lo = tl.load(entry + 1)
        clear_hi = tl.load(entry + 2)
        hi = tl.load(entry + 3)
        last = tl.load(entry + 4) + j * tl.load(entry + 5)  # [BLOCK_M] each row's end
        distance = position - tl.load(entry + 6)  # [BLOCK_M] the row's own place in the entry
        oldest = distance
        if WINDOWED:
            oldest = distance - tl.load(control + 9) + 1
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
                    NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, BLOCK_N, BLOCK_D,
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
                NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, BLOCK_N, BLOCK_D,
                True, WINDOWED, ALIBI, SOFTCAP,
            )  # fmt: skip
            x, page, start, stop = next_x, next_page, next_start, next_stop

    dest = tl.load(control + tl.load(control + 5) + row_start + j, mask=used, other=-1)
    seen = denominator > 0.0
    safe = tl.where(seen, denominator, 1.0)
    result = total / safe[:, None]
    log_sum = tl.where(seen, running_max + tl.log2(safe), float("-inf"))
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
):
    """Walk the items with many rows (WIDE: all of tile shape 1) or those with few (a record says
    which shape is its own).

    A program's first work has its own number, the next ones come from a counter that `merge_kernel`
    sets back.
    """
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
                softcap, NUM_KV_HEADS, GROUP, HEAD_DIM, PAGE_SIZE, M0, N0, BLOCK_D, STAGES0, False,
                WINDOWED, ALIBI, SOFTCAP,
            )  # fmt: skip
        else:
            _attend_item(
                control, record, head, q, k, v, out, lse, part_out, part_lse, slopes, scale,
                softcap, NUM_KV_HEADS, GROUP, HEAD_DIM, PAGE_SIZE, M1, N1, BLOCK_D, STAGES1, True,
                WINDOWED, ALIBI, SOFTCAP,
            )  # fmt: skip
        work = tl.num_programs(0) + tl.atomic_add(control + QUEUE + WIDE, 1)


@triton.jit
def merge_kernel(
    control,
    out,
    lse,
    part_out,
    part_lse,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UNROLL: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Merge the states of rows that have several, write (0, -inf) for those that have none.

    DEPENDENT: the launch may begin before that of the states has ended (programmatic dependent
    launch); it waits for it. UNROLL: states that are on their way at a time.
    """
    blocks: tl.constexpr = (NUM_HEADS + BLOCK_H - 1) // BLOCK_H
    num_works = tl.load(control + 2) * blocks
    merges = control + tl.load(control + 6)
    if DEPENDENT:
        gdc_wait()
    d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    for work in range(tl.program_id(0), num_works, tl.num_programs(0)):
        merge = merges + (work // blocks) * 4
        row = tl.load(merge).to(tl.int64)
        first = tl.load(merge + 1).to(tl.int64)
        parts = tl.load(merge + 2)
        h = (work % blocks) * BLOCK_H + tl.arange(0, BLOCK_H)  # [BLOCK_H]
        in_head = h < NUM_HEADS
        in_head_parts = tl.where(in_head, parts, 0)  # [BLOCK_H]
        inside = in_head[:, None] & (d < HEAD_DIM)[None, :]
        top = tl.full([BLOCK_H], float("-inf"), tl.float32)
        denominator = tl.zeros([BLOCK_H], tl.float32)
        total = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
        for start in range(0, parts, UNROLL):
            chunk_top = top
            for i in tl.static_range(UNROLL):
                place = (first + start + i) * NUM_HEADS + h
                part = tl.load(
                    part_lse + place, mask=in_head_parts > start + i, other=float("-inf")
                )
                chunk_top = tl.maximum(chunk_top, part)
            safe_top = tl.where(chunk_top == float("-inf"), 0.0, chunk_top)
            shrink = tl.exp2(top - safe_top)
            denominator = denominator * shrink
            total = total * shrink[:, None]
            for i in tl.static_range(UNROLL):
                mask = in_head_parts > start + i
                place = (first + start + i) * NUM_HEADS + h
                part = tl.load(part_lse + place, mask=mask, other=float("-inf"))
                value = tl.load(
                    part_out + place[:, None] * HEAD_DIM + d[None, :],
                    mask=inside & mask[:, None],
                    other=0.0,
                )
                weight = tl.exp2(part - safe_top)
                denominator += weight
                total += value * weight[:, None]
            top = chunk_top
        seen = denominator > 0.0
        safe = tl.where(seen, denominator, 1.0)
        place = row * NUM_HEADS + h
        tl.store(
            out + place[:, None] * HEAD_DIM + d[None, :],
            (total / safe[:, None]).to(out.dtype.element_ty),
            mask=inside,
        )
        log_sum = tl.where(seen, (top + tl.log2(safe)) * LN_2, float("-inf"))
        tl.store(lse + place, log_sum, mask=in_head)
    if tl.program_id(0) == 0:
        tl.store(control + QUEUE, 0)
        tl.store(control + QUEUE + 1, 0)
