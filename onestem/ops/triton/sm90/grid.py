"""`grid_rows`: the widest items of `ops.triton.grid` on Hopper, with the bits of `grid_kernel`.

Eight warps walk 128 queries. They issue the scores of tile t and the weighted sum of tile t - 1
together, and compute weights while the second is summed. Tiles are copied two ahead.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

from onestem.ops.triton.sm90.rows import _done
from onestem.ops.triton.versions import barrier, copy_lines
from onestem.ops.triton.words import LN_2, LOG2_E, W
from onestem.ops.work.grid import FIRST_SEGMENT, FIRST_TO, SEGMENT

_SEGMENT: gl.constexpr = gl.constexpr(SEGMENT)
_FIRST: gl.constexpr = gl.constexpr(FIRST_SEGMENT)
_FIRST_TO: gl.constexpr = gl.constexpr(FIRST_TO)
STAGES: gl.constexpr = gl.constexpr(4)
BLOCK_N: gl.constexpr = gl.constexpr(64)


class _Walk(NamedTuple):
    """An item's tokens: the list of pages, its first position and the end."""

    pages: gl.tensor
    begin: gl.tensor
    stop: gl.tensor


class _Place(NamedTuple):
    """Where a tile's tokens are: the entry of the last one, its end, and the next entry;
    each token's place and page, `[BLOCK_N]`."""

    base: gl.tensor
    until: gl.tensor
    following: gl.tensor
    x: gl.tensor
    page: gl.tensor


class _State(NamedTuple):
    """Maximum, sum of weights, and weighted sum of values of some tokens."""

    top: gl.tensor
    weights: gl.tensor
    total: gl.tensor


@gluon.jit
def _find(walk, start, base, until, following, PAGE_SIZE: gl.constexpr, across: gl.constexpr):
    """The `_Place` of the tile at `start`, which the entries before it lead to."""
    n = start + gl.arange(0, BLOCK_N, across)
    token = gl.minimum(gl.maximum(n, walk.begin), walk.stop - 1)
    x = token - base
    while until < gl.minimum(start + BLOCK_N, walk.stop):
        before = until
        base = gl.load(following + W.POSITION)
        until = gl.load(following + W.HI) + base
        following += W.ENTRY
        x = gl.where(token >= before, token - base, x)
    page = gl.load(walk.pages + x // PAGE_SIZE)
    return _Place(base, until, following, x, page)


@gluon.jit
def _copy(k, v, keys, values, stage, place, there, head, HEAD_MAJOR: gl.constexpr,
          FORM: gl.constexpr):  # fmt: skip
    """Begin to copy a tile's keys and values."""
    layout: gl.constexpr = place.x.type.layout.parent
    d = gl.arange(0, FORM.block_d, gl.SliceLayout(0, layout))[None, :]
    page, inside = place.page.to(gl.int64), place.x % FORM.page_size
    if HEAD_MAJOR:
        line = (page * FORM.num_kv_heads + head) * FORM.page_size + inside
    else:
        line = (page * FORM.page_size + inside) * FORM.num_kv_heads + head
    where = (line * FORM.head_dim)[:, None] + d
    mask = (d < FORM.head_dim) & there
    copy_lines(keys.index(stage), k + where, mask=mask)
    copy_lines(values.index(stage), v + where, mask=mask)
    async_copy.commit_group()


@gluon.jit
def _fold(old, new):
    """The state of some tokens and of those after them."""
    top = gl.maximum(old.top, new.top)
    safe = gl.where(top == float("-inf"), 0.0, top)
    before, after = gl.exp2(old.top - safe), gl.exp2(new.top - safe)
    rows: gl.constexpr = gl.SliceLayout(1, old.total.type.layout)
    weights = gl.fma(new.weights, after, old.weights * before)
    before, after = gl.convert_layout(before, rows), gl.convert_layout(after, rows)
    return _State(top, weights, gl.fma(new.total, after[:, None], old.total * before[:, None]))


@gluon.jit
def _masked(score, start, last, oldest, FORM: gl.constexpr):
    """A tile's products, -inf for tokens that rows do not see."""
    n = (start + gl.arange(0, BLOCK_N, gl.SliceLayout(0, score.type.layout)))[None, :]
    seen = n < last[:, None]
    if FORM.windowed:
        seen &= n >= oldest[:, None]
    return gl.where(seen, score, float("-inf"))


@gluon.jit
def _store(state, row, dest, used, head, out, lse, part_out, part_top, part_weights,
           FORM: gl.constexpr):  # fmt: skip
    """Store the states of an item's queries, as results or as partial states (`dest`)."""
    ROWS: gl.constexpr = state.total.shape[0]
    GROUP: gl.constexpr = FORM.group
    num_heads: gl.constexpr = FORM.num_kv_heads * GROUP
    layout: gl.constexpr = state.total.type.layout
    slots: gl.constexpr = gl.SliceLayout(1, layout)
    seen = state.weights > 0.0
    safe = gl.where(seen, state.weights, 1.0)
    log_sum = gl.where(seen, (state.top + gl.log2(safe)) * LN_2, float("-inf"))
    factor = gl.convert_layout(gl.div_rn(gl.zeros_like(safe) + 1.0, safe), slots)
    value = state.total * factor[:, None]
    value = gl.where(value == 0.0, 0.0, value)
    q_head = head * GROUP + gl.arange(0, ROWS, slots) % GROUP
    d = gl.arange(0, FORM.block_d, gl.SliceLayout(0, layout))[None, :]
    final, part = used & (dest < 0), used & (dest >= 0)
    inside = d < FORM.head_dim
    at = row.to(gl.int64) * num_heads + q_head
    to = out + (at * FORM.head_dim)[:, None] + d
    gl.store(to, value.to(out.dtype.element_ty), mask=final[:, None] & inside)
    gl.store(lse + at, gl.convert_layout(log_sum, slots), mask=final)
    at = dest.to(gl.int64) * num_heads + q_head
    to = part_out + (at * FORM.head_dim)[:, None] + d
    gl.store(to, state.total, mask=part[:, None] & inside)
    gl.store(part_top + at, gl.convert_layout(state.top, slots), mask=part)
    gl.store(part_weights + at, gl.convert_layout(state.weights, slots), mask=part)


@gluon.jit
def _walk(control, record, head, q, k, v, out, lse, part_out, part_top, part_weights, scale,
          queries, keys, values, HEAD_MAJOR: gl.constexpr, FORM: gl.constexpr):  # fmt: skip
    """Walk one item for one KV head."""
    ROWS: gl.constexpr = queries.shape[0]
    BLOCK_D: gl.constexpr = FORM.block_d
    GROUP: gl.constexpr = FORM.group
    num_heads: gl.constexpr = FORM.num_kv_heads * GROUP
    dtype: gl.constexpr = q.dtype.element_ty
    lanes: gl.constexpr = BLOCK_D // 8
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [32 // lanes, lanes], [8, 1], [1, 0])
    product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BLOCK_N, 16])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BLOCK_D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    scored: gl.constexpr = gl.SliceLayout(1, product)
    slots: gl.constexpr = gl.SliceLayout(1, layout)
    across: gl.constexpr = gl.SliceLayout(1, copied)

    # The entries, and the first tiles.
    num_walk = gl.load(record + W.NUM_WALK)
    entry = record + W.FIRST_ENTRY
    more = control + gl.load(control + W.AT_WALK) + gl.load(record + W.WALK_START) * W.ENTRY
    pages = control + gl.load(control + W.AT_PAGES)
    base = gl.load(entry + W.POSITION)
    begin, until = gl.load(entry + W.LO) + base, gl.load(entry + W.HI) + base
    if num_walk > 1:
        entry = more + (num_walk - 2) * W.ENTRY
    final = gl.load(entry + W.POSITION)
    stop = gl.load(entry + W.HI) + final
    end, step = gl.load(entry + W.END) + final, gl.load(entry + W.STEP)
    walk = _Walk(pages, begin, stop)
    first = begin // BLOCK_N * BLOCK_N
    tiles = (stop - first + BLOCK_N - 1) // BLOCK_N
    place = _find(walk, first, base, until, more, FORM.page_size, across)
    for i in gl.static_range(STAGES - 2):
        start = first + i * BLOCK_N
        _copy(k, v, keys, values, i, place, start < stop, head, HEAD_MAJOR, FORM)
        place = _find(
            walk, start + BLOCK_N, place.base, place.until, place.following, FORM.page_size, across
        )

    # The queries.
    num_rows, row_start = gl.load(record + W.NUM_ROWS), gl.load(record + W.ROW_START)
    rows = control + gl.load(control + W.AT_ROWS) + row_start
    m = gl.arange(0, ROWS, across)
    row = gl.load(rows + m // GROUP, mask=m // GROUP < num_rows, other=0)
    at = (row.to(gl.int64) * num_heads + head * GROUP + m % GROUP) * FORM.head_dim
    d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, copied))[None, :]
    there = (m // GROUP < num_rows)[:, None] & (d < FORM.head_dim)
    queries.store(gl.load(q + at[:, None] + d, mask=there, other=0.0))
    j = gl.arange(0, ROWS, scored) // GROUP
    last = gl.minimum(end + j * step, stop)
    oldest, clear = last, gl.minimum(end, stop)  # all rows see the tokens before `clear`
    if FORM.windowed:
        clear = begin
        position = control + gl.load(control + W.AT_POSITIONS)
        row = gl.load(rows + j, mask=j < num_rows, other=0)
        oldest = gl.load(position + row, mask=j < num_rows, other=0)
        oldest = oldest - gl.load(control + W.WINDOW) + 1
    j = gl.arange(0, ROWS, slots) // GROUP
    row = gl.load(rows + j, mask=j < num_rows, other=0)
    dest = control + gl.load(control + W.AT_DEST) + row_start
    dest = gl.load(dest + j, mask=j < num_rows, other=-1)

    nothing = gl.full([ROWS], float("-inf"), gl.float32, scored)
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, product)
    weight = gl.convert_layout(zero.to(dtype), operand)
    none = gl.zeros([ROWS, BLOCK_D], gl.float32, layout)
    state = _State(nothing, gl.zeros_like(nothing), none)
    old = state
    for t in range(tiles):
        start, stage = first + t * BLOCK_N, t % STAGES
        async_copy.wait_group(STAGES - 3)
        fence_async_shared()
        barrier()
        # The first tile has none before it, and weights of 0 for its own values.
        before = gl.where(t == 0, 0, (t + STAGES - 1) % STAGES)
        score = warpgroup_mma(
            queries, keys.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        total = warpgroup_mma(weight, values.index(before), state.total, is_async=True)
        ahead = start + (STAGES - 2) * BLOCK_N
        into = (t + STAGES - 2) % STAGES
        _copy(k, v, keys, values, into, place, ahead < stop, head, HEAD_MAJOR, FORM)
        place = _find(
            walk, ahead + BLOCK_N, place.base, place.until, place.following, FORM.page_size, across
        )
        score = warpgroup_mma_wait(1, deps=(score,))
        if start + BLOCK_N > clear:
            score = _masked(score, start, last, oldest, FORM)
        border = (start % gl.where(start < _FIRST_TO, _FIRST, _SEGMENT) == 0) & (t > 0)
        top = gl.where(border, float("-inf"), state.top)
        new_top = gl.maximum(top, gl.max(score, 1) * (scale * LOG2_E))
        safe = gl.where(new_top == float("-inf"), 0.0, new_top)
        new_weight = gl.exp2(gl.fma(score, scale * LOG2_E, -safe[:, None]))
        shrink = gl.exp2(top - safe)
        weights = gl.where(border, 0.0, state.weights)
        weights = _done(gl.fma(weights, shrink, gl.sum(new_weight, 1)))
        # The new weights become operands only after the wait, in the registers of the old ones.
        total, weight, new_weight = warpgroup_mma_wait(0, deps=(total, weight, new_weight))
        if border:
            old = _fold(old, _State(state.top, state.weights, total))
            total = none
        total = total * gl.convert_layout(shrink, slots)[:, None]
        weight = gl.convert_layout(new_weight.to(dtype), operand)
        state = _State(new_top, weights, total)
    total = warpgroup_mma(weight, values.index((tiles - 1) % STAGES), state.total, is_async=True)
    total, weight = warpgroup_mma_wait(0, deps=(total, weight))
    async_copy.wait_group(0)
    barrier()  # before the next item's queries and tiles
    state = _fold(old, _State(state.top, state.weights, total))
    _store(
        state, row, dest, j < num_rows, head, out, lse, part_out, part_top, part_weights, FORM
    )  # fmt: skip
    if gl.load(record + W.HANDED) < 0:
        barrier()  # all threads have stored
        gl.atomic_add(control + W.LEFT, 1)


@gluon.jit
def grid_rows(control, q, k, v, out, lse, part_out, part_top, part_weights, slopes, scale, softcap,
              BLOCK_M: gl.constexpr, HEAD_MAJOR: gl.constexpr, FORM: gl.constexpr):  # fmt: skip
    """Walk all items of the widest tiles, each for every KV head; see `grid_kernel`. The launch
    after this one may begin at once."""
    gdc_launch_dependents()
    dtype: gl.constexpr = q.dtype.element_ty
    BLOCK_D: gl.constexpr = FORM.block_d
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_D], dtype)
    keys = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_D], tile)
    values = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_D], tile)
    queries = gl.allocate_shared_memory(
        dtype, [BLOCK_M, BLOCK_D], gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_D], dtype)
    )
    records = control + gl.load(control + W.AT_RECORDS)
    narrower = gl.load(control + W.SPLIT)
    records += (gl.load(control + W.NUM_NARROW) + narrower) * W.RECORD
    num_works = (gl.load(control + W.NUM_WIDE) - narrower) * FORM.num_kv_heads
    work = gl.program_id(0)
    while work < num_works:
        _walk(
            control, records + (work // FORM.num_kv_heads) * W.RECORD, work % FORM.num_kv_heads,
            q, k, v, out, lse, part_out, part_top, part_weights, scale, queries, keys, values,
            HEAD_MAJOR, FORM,
        )  # fmt: skip
        if num_works > gl.num_programs(0):
            taken = gl.atomic_add(control + W.GRID_QUEUE + 2, 1)
            work = gl.num_programs(0) + taken
            # One addition follows each work, so the last one can reset the counter.
            if taken == num_works - 1:
                gl.store(control + W.GRID_QUEUE + 2, 0)
        else:
            work = num_works
