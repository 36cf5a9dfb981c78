"""The two Triton kernels: `attend_kernel` walks the items of a work list, `merge_kernel` merges.

Both are persistent: a fixed grid of programs takes works from a list whose length stands on the
device, in the buffer that `ops.work` packs, so one CUDA graph serves every plan. A work is an item
for one KV head. Names: `m` counts rows of a tile (row of the item times query heads of the KV head),
`n` tokens, `d` dimensions of a head. Weights and sums are in powers of two: scores are scaled by
log2(e), and `lse` becomes a natural logarithm where it is final.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["attend_kernel", "merge_kernel"]

# Word layout of `ops.work`, as Triton constants.
HEADER: tl.constexpr = tl.constexpr(16)
RECORD: tl.constexpr = tl.constexpr(16)
ENTRY: tl.constexpr = tl.constexpr(8)
QUEUE: tl.constexpr = tl.constexpr(15)
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2_E)))


@triton.jit
def _attend_tile(
    query,
    running_max,
    denominator,
    total,
    start,
    stop,
    last,
    oldest,
    distance,
    pages,
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
    """Tokens start .. start + BLOCK_N - 1 of a walk entry. With MASKED, row m sees those from
    oldest[m] on that are below both stop and last[m]."""
    n = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    # Behind the end the last token is read again: a slot that nobody shows may hold NaN.
    x = tl.minimum(n, stop - 1) if MASKED else n
    page = tl.load(pages + x // PAGE_SIZE)
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
    more = control + tl.load(control + 2) + tl.load(record + 4) * ENTRY
    pages = control + tl.load(control + 6)

    m = tl.arange(0, BLOCK_M)  # [BLOCK_M]
    j = m // GROUP  # [BLOCK_M] row of the item
    q_head = head * GROUP + m % GROUP  # [BLOCK_M]
    used = j < num_rows
    d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    inside = used[:, None] & (d < HEAD_DIM)[None, :]
    row = tl.load(control + tl.load(control + 3) + row_start + j, mask=used, other=0)
    num_heads: tl.constexpr = NUM_KV_HEADS * GROUP
    at = (row.to(tl.int64) * num_heads + q_head) * HEAD_DIM  # [BLOCK_M]
    query = tl.load(q + at[:, None] + d[None, :], mask=inside, other=0.0)
    position = j  # [BLOCK_M] position id of the row, where it is needed
    slope = scale
    if WINDOWED or ALIBI:
        position = tl.load(control + tl.load(control + 7) + row, mask=used, other=0)
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
            oldest = distance - tl.load(control + 8) + 1
        tail = lo
        head_tiles = 0
        if SPLIT:
            tail = clear_lo + tl.maximum(clear_hi - clear_lo, 0) // BLOCK_N * BLOCK_N
            for start in tl.range(clear_lo, tail, BLOCK_N, num_stages=STAGES):
                running_max, denominator, total = _attend_tile(
                    query, running_max, denominator, total, start, hi, last, oldest, distance,
                    pages, k, v, head, slope, scale, softcap,
                    NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, BLOCK_N, BLOCK_D,
                    False, WINDOWED, ALIBI, SOFTCAP,
                )  # fmt: skip
            if WINDOWED:
                head_tiles = tl.cdiv(tl.maximum(tl.minimum(clear_lo, hi) - lo, 0), BLOCK_N)
        tiles = head_tiles + tl.cdiv(tl.maximum(hi - tail, 0), BLOCK_N)
        for tile in tl.range(0, tiles, num_stages=STAGES):
            start = tail + (tile - head_tiles) * BLOCK_N
            stop = hi
            if WINDOWED:
                in_head = tile < head_tiles
                start = tl.where(in_head, lo + tile * BLOCK_N, start)
                stop = tl.where(in_head, tl.minimum(clear_lo, hi), hi)
            running_max, denominator, total = _attend_tile(
                query, running_max, denominator, total, start, stop, last, oldest, distance,
                pages, k, v, head, slope, scale, softcap,
                NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, BLOCK_N, BLOCK_D,
                True, WINDOWED, ALIBI, SOFTCAP,
            )  # fmt: skip

    dest = tl.load(control + tl.load(control + 4) + row_start + j, mask=used, other=-1)
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
    M2: tl.constexpr,
    N2: tl.constexpr,
    STAGES2: tl.constexpr,
    WINDOWED: tl.constexpr,
    ALIBI: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Walk all items. Tile shapes 0 (narrow), 1 and 2 (wide); a record says which is its own.

    A program's first work has its own number, the next ones come from a counter that `merge_kernel`
    sets back.
    """
    num_works = tl.load(control) * NUM_KV_HEADS
    work = tl.program_id(0)
    while work < num_works:
        record = control + HEADER + (work // NUM_KV_HEADS) * RECORD
        head = work % NUM_KV_HEADS
        kind = tl.load(record)
        if kind == 0:
            _attend_item(
                control, record, head, q, k, v, out, lse, part_out, part_lse, slopes, scale,
                softcap, NUM_KV_HEADS, GROUP, HEAD_DIM, PAGE_SIZE, M0, N0, BLOCK_D, STAGES0, False,
                WINDOWED, ALIBI, SOFTCAP,
            )  # fmt: skip
        elif kind == 1:
            _attend_item(
                control, record, head, q, k, v, out, lse, part_out, part_lse, slopes, scale,
                softcap, NUM_KV_HEADS, GROUP, HEAD_DIM, PAGE_SIZE, M1, N1, BLOCK_D, STAGES1, True,
                WINDOWED, ALIBI, SOFTCAP,
            )  # fmt: skip
        else:
            _attend_item(
                control, record, head, q, k, v, out, lse, part_out, part_lse, slopes, scale,
                softcap, NUM_KV_HEADS, GROUP, HEAD_DIM, PAGE_SIZE, M2, N2, BLOCK_D, STAGES2, True,
                WINDOWED, ALIBI, SOFTCAP,
            )  # fmt: skip
        work = tl.num_programs(0) + tl.atomic_add(control + QUEUE, 1)


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
):
    """Merge the states of rows that have several, write (0, -inf) for those that have none."""
    blocks: tl.constexpr = (NUM_HEADS + BLOCK_H - 1) // BLOCK_H
    num_works = tl.load(control + 1) * blocks
    merges = control + tl.load(control + 5)
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
        for start in range(0, parts, UNROLL):
            for i in tl.static_range(UNROLL):
                mask = in_head_parts > start + i
                place = (first + start + i) * NUM_HEADS + h
                top = tl.maximum(top, tl.load(part_lse + place, mask=mask, other=float("-inf")))
        safe_top = tl.where(top == float("-inf"), 0.0, top)
        denominator = tl.zeros([BLOCK_H], tl.float32)
        total = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
        for start in range(0, parts, UNROLL):
            for i in tl.static_range(UNROLL):
                mask = in_head_parts > start + i
                place = (first + start + i) * NUM_HEADS + h
                part = tl.load(part_lse + place, mask=mask, other=float("-inf"))
                weight = tl.exp2(part - safe_top)
                value = tl.load(
                    part_out + place[:, None] * HEAD_DIM + d[None, :],
                    mask=inside & mask[:, None],
                    other=0.0,
                )
                denominator += weight
                total += value * weight[:, None]
        seen = denominator > 0.0
        safe = tl.where(seen, denominator, 1.0)
        place = row * NUM_HEADS + h
        tl.store(
            out + place[:, None] * HEAD_DIM + d[None, :],
            (total / safe[:, None]).to(out.dtype.element_ty),
            mask=inside,
        )
        log_sum = tl.where(seen, (safe_top + tl.log2(safe)) * LN_2, float("-inf"))
        tl.store(lse + place, log_sum, mask=in_head)
    if tl.program_id(0) == 0:
        tl.store(control + QUEUE, 0)
