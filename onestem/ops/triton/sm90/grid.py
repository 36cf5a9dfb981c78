"""`grid_rows`: the widest items of `ops.triton.grid` on Hopper, with the bits of `grid_kernel`.

Two warpgroups walk 128 queries, 64 each. They issue the scores of tile t and the weighted sum of
tile t - 1 together, and compute weights while the second is summed. Four warps take works and copy
tiles ahead of both, token by token, since tiles lie at positions and not at pages.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

from onestem.ops.triton.sm90.rows import _done
from onestem.ops.triton.sm90.walk import ROWS, load_query, next_stage, over
from onestem.ops.triton.versions import barrier, copy_lines
from onestem.ops.triton.words import LN_2, LOG2_E, W
from onestem.ops.work.grid import FIRST_SEGMENT, FIRST_TO, SEGMENT

_SEGMENT: gl.constexpr = gl.constexpr(SEGMENT)
_FIRST: gl.constexpr = gl.constexpr(FIRST_SEGMENT)
_FIRST_TO: gl.constexpr = gl.constexpr(FIRST_TO)
STAGES: gl.constexpr = gl.constexpr(4)
BLOCK_N: gl.constexpr = gl.constexpr(64)
# Of a multiplying and of a copying thread.
REGISTERS: gl.constexpr = gl.constexpr(232)
COPY_REGISTERS: gl.constexpr = gl.constexpr(48)
_LINE: gl.constexpr = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


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


class _Inputs(NamedTuple):
    """The tensors, and the factor of scores."""

    control: gl.tensor
    q: gl.tensor
    k: gl.tensor
    v: gl.tensor
    out: gl.tensor
    lse: gl.tensor
    part_out: gl.tensor
    part_top: gl.tensor
    part_weights: gl.tensor
    scale: gl.tensor


class _Ring(NamedTuple):
    """Shared memory of a program: queries of both warpgroups, the ring of tiles with each place's
    barriers, and the next works with theirs."""

    queries: gl.shared_memory_descriptor
    key_tiles: gl.shared_memory_descriptor
    value_tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    works: gl.shared_memory_descriptor
    given: gl.shared_memory_descriptor
    taken: gl.shared_memory_descriptor


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
    page = gl.load(walk.pages + over(x, PAGE_SIZE))
    return _Place(base, until, following, x, page)


@gluon.jit
def _copy(inputs, ring, stage, phase, place, head, HEAD_MAJOR: gl.constexpr, FORM: gl.constexpr):
    """Begin to copy a tile's keys and values, once its place in the ring is empty."""
    layout: gl.constexpr = place.x.type.layout.parent
    d = gl.arange(0, FORM.block_d, gl.SliceLayout(0, layout))[None, :]
    page, inside = place.page, place.x - over(place.x, FORM.page_size) * FORM.page_size
    # No memory holds as many lines as 32 bits count.
    if HEAD_MAJOR:
        line = (page * FORM.num_kv_heads + head) * FORM.page_size + inside
    else:
        line = (page * FORM.page_size + inside) * FORM.num_kv_heads + head
    where = (line.to(gl.int64) * FORM.head_dim)[:, None] + d
    mbarrier.wait(ring.empty.index(stage), phase)
    copy_lines(ring.key_tiles.index(stage), inputs.k + where)
    copy_lines(ring.value_tiles.index(stage), inputs.v + where)
    async_copy.mbarrier_arrive(ring.full.index(stage), increment_count=False)


@gluon.jit
def _walk_of(control, record):
    """The list of pages, first position and end of an item's tokens, and its last entry."""
    num_walk = gl.load(record + W.NUM_WALK)
    entry = record + W.FIRST_ENTRY
    more = control + gl.load(control + W.AT_WALK) + gl.load(record + W.WALK_START) * W.ENTRY
    begin = gl.load(entry + W.LO) + gl.load(entry + W.POSITION)
    if num_walk > 1:
        entry = more + (num_walk - 2) * W.ENTRY
    stop = gl.load(entry + W.HI) + gl.load(entry + W.POSITION)
    return _Walk(control + gl.load(control + W.AT_PAGES), begin, stop), entry, more


@gluon.jit
def _works(control, FORM: gl.constexpr):
    """The records of the widest tiles' items, and the number of their works."""
    narrower = gl.load(control + W.SPLIT)
    skipped = gl.load(control + W.NUM_NARROW) + narrower
    records = control + gl.load(control + W.AT_RECORDS) + skipped * W.RECORD
    return records, (gl.load(control + W.NUM_WIDE) - narrower) * FORM.num_kv_heads


@gluon.jit
def _give(ring, work, turn, phase):
    """Say the next work to both warpgroups."""
    mbarrier.wait(ring.taken.index(turn), phase)
    ring.works.index(turn).store(gl.full([32], work, gl.int32, _LINE))
    barrier()
    mbarrier.arrive(ring.given.index(turn))
    return next_stage(turn, phase, 2)


@gluon.jit
def _taken(ring, turn, phase):
    """The next work; -1: there is none."""
    mbarrier.wait(ring.given.index(turn), phase)
    work = gl.max(ring.works.index(turn).load(_LINE), 0)
    barrier()
    mbarrier.arrive(ring.taken.index(turn))
    turn, phase = next_stage(turn, phase, 2)
    return work, turn, phase


@gluon.jit
def _copy_items(inputs, ring, HEAD_MAJOR: gl.constexpr, FORM: gl.constexpr):
    """Run the copying warps: take works, and copy the tiles that they walk."""
    lanes: gl.constexpr = FORM.block_d // 8
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])
    across: gl.constexpr = gl.SliceLayout(1, copied)
    control = inputs.control
    records, num_works = _works(control, FORM)
    work, stage, phase, turn, turn_phase = gl.program_id(0), 0, 1, 0, 1
    while work < num_works:
        turn, turn_phase = _give(ring, work, turn, turn_phase)
        record = records + (work // FORM.num_kv_heads) * W.RECORD
        walk, _, following = _walk_of(control, record)
        base = gl.load(record + W.FIRST_ENTRY + W.POSITION)
        until = gl.load(record + W.FIRST_ENTRY + W.HI) + base
        start = walk.begin // BLOCK_N * BLOCK_N
        place = _find(walk, start, base, until, following, FORM.page_size, across)
        while start < walk.stop:
            this = place
            start += BLOCK_N
            place = _find(
                walk, start, place.base, place.until, place.following, FORM.page_size, across
            )
            _copy(inputs, ring, stage, phase, this, work % FORM.num_kv_heads, HEAD_MAJOR, FORM)
            stage, phase = next_stage(stage, phase, STAGES)
        if num_works > gl.num_programs(0):
            taken = gl.atomic_add(control + W.GRID_QUEUE + 2, 1)
            work = gl.num_programs(0) + taken
            # One addition follows each work, so the last one can reset the counter.
            if taken == num_works - 1:
                gl.store(control + W.GRID_QUEUE + 2, 0)
        else:
            work = num_works
    _give(ring, -1, turn, turn_phase)


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
def _store(state, row, dest, used, q_head, inputs, FORM: gl.constexpr):
    """Store the states of an item's queries, as results or as partial states (`dest`)."""
    num_heads: gl.constexpr = FORM.num_kv_heads * FORM.group
    layout: gl.constexpr = state.total.type.layout
    slots: gl.constexpr = gl.SliceLayout(1, layout)
    seen = state.weights > 0.0
    safe = gl.where(seen, state.weights, 1.0)
    log_sum = gl.where(seen, (state.top + gl.log2(safe)) * LN_2, float("-inf"))
    factor = gl.convert_layout(gl.div_rn(gl.zeros_like(safe) + 1.0, safe), slots)
    value = state.total * factor[:, None]
    value = gl.where(value == 0.0, 0.0, value)
    d = gl.arange(0, FORM.block_d, gl.SliceLayout(0, layout))[None, :]
    final, part = used & (dest < 0), used & (dest >= 0)
    inside = d < FORM.head_dim
    at = row.to(gl.int64) * num_heads + q_head
    to = inputs.out + (at * FORM.head_dim)[:, None] + d
    gl.store(to, value.to(inputs.out.dtype.element_ty), mask=final[:, None] & inside)
    gl.store(inputs.lse + at, gl.convert_layout(log_sum, slots), mask=final)
    at = dest.to(gl.int64) * num_heads + q_head
    to = inputs.part_out + (at * FORM.head_dim)[:, None] + d
    gl.store(to, state.total, mask=part[:, None] & inside)
    gl.store(inputs.part_top + at, gl.convert_layout(state.top, slots), mask=part)
    gl.store(inputs.part_weights + at, gl.convert_layout(state.weights, slots), mask=part)


@gluon.jit
def _attend_item(inputs, ring, record, head, stage, phase, PART: gl.constexpr, FORM: gl.constexpr):
    """Walk one item for one KV head with a warpgroup's queries."""
    BLOCK_D: gl.constexpr = FORM.block_d
    GROUP: gl.constexpr = FORM.group
    dtype: gl.constexpr = inputs.q.dtype.element_ty
    product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    scored: gl.constexpr = gl.SliceLayout(1, product)
    slots: gl.constexpr = gl.SliceLayout(1, layout)
    skipped: gl.constexpr = PART * ROWS
    control, scale, queries = inputs.control, inputs.scale, ring.queries.index(PART)

    queries.store(
        load_query(inputs.q, _query_rows(control, record, skipped, FORM), head, skipped, FORM)
    )
    fence_async_shared()
    barrier()
    walk, entry, _ = _walk_of(control, record)
    first = walk.begin // BLOCK_N * BLOCK_N
    tiles = (walk.stop - first + BLOCK_N - 1) // BLOCK_N
    num_rows, row_start = gl.load(record + W.NUM_ROWS), gl.load(record + W.ROW_START)
    rows = control + gl.load(control + W.AT_ROWS) + row_start
    end, step = gl.load(entry + W.END) + gl.load(entry + W.POSITION), gl.load(entry + W.STEP)
    j = (skipped + gl.arange(0, ROWS, scored)) // GROUP
    last = gl.minimum(end + j * step, walk.stop)
    oldest, clear = last, gl.minimum(end, walk.stop)  # all rows see the tokens before `clear`
    if FORM.windowed:
        clear = walk.begin
        position = control + gl.load(control + W.AT_POSITIONS)
        row = gl.load(rows + j, mask=j < num_rows, other=0)
        oldest = gl.load(position + row, mask=j < num_rows, other=0)
        oldest = oldest - gl.load(control + W.WINDOW) + 1

    nothing = gl.full([ROWS], float("-inf"), gl.float32, scored)
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, product)
    weight = gl.convert_layout(zero.to(dtype), operand)
    none = gl.zeros([ROWS, BLOCK_D], gl.float32, layout)
    state = _State(nothing, gl.zeros_like(nothing), none)
    old = state
    for t in range(tiles):
        start = first + t * BLOCK_N
        # The first tile has none before it, and weights of 0 for its own values.
        before = gl.where(t == 0, stage, (stage + STAGES - 1) % STAGES)
        mbarrier.wait(ring.full.index(stage), phase)
        fence_async_shared()  # copies by threads were not of the proxy that multiplies
        score = warpgroup_mma(
            queries, ring.key_tiles.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        total = warpgroup_mma(weight, ring.value_tiles.index(before), state.total, is_async=True)
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
        mbarrier.arrive(ring.empty.index(before), pred=t > 0)
        if border:
            old = _fold(old, _State(state.top, state.weights, total))
            total = none
        total = total * gl.convert_layout(shrink, slots)[:, None]
        weight = gl.convert_layout(new_weight.to(dtype), operand)
        state = _State(new_top, weights, total)
        stage, phase = next_stage(stage, phase, STAGES)
    before = (stage + STAGES - 1) % STAGES
    total = warpgroup_mma(weight, ring.value_tiles.index(before), state.total, is_async=True)
    total, weight = warpgroup_mma_wait(0, deps=(total, weight))
    mbarrier.arrive(ring.empty.index(before))
    state = _fold(old, _State(state.top, state.weights, total))
    m = skipped + gl.arange(0, ROWS, slots)
    used = m // GROUP < num_rows
    row = gl.load(rows + m // GROUP, mask=used, other=0)
    dest = control + gl.load(control + W.AT_DEST) + row_start
    dest = gl.load(dest + m // GROUP, mask=used, other=-1)
    _store(state, row, dest, used, head * GROUP + m % GROUP, inputs, FORM)
    if gl.load(record + W.HANDED) < 0:
        barrier()  # all threads have stored
        gl.atomic_add(control + W.LEFT, 1)
    return stage, phase


@gluon.jit
def _query_rows(control, record, skipped: gl.constexpr, FORM: gl.constexpr):
    """The rows of a warpgroup's queries; -1: there is none."""
    lanes: gl.constexpr = FORM.block_d // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])
    j = (skipped + gl.arange(0, ROWS, gl.SliceLayout(1, layout))) // FORM.group
    rows = control + gl.load(control + W.AT_ROWS) + gl.load(record + W.ROW_START)
    return gl.load(rows + j, mask=j < gl.load(record + W.NUM_ROWS), other=-1)


@gluon.jit
def _attend_items(inputs, ring, PART: gl.constexpr, FORM: gl.constexpr):
    """Run a multiplying warpgroup, with each work's queries from 64 * PART on."""
    records, _ = _works(inputs.control, FORM)
    stage, phase = 0, 0
    work, turn, turn_phase = _taken(ring, 0, 0)
    while work >= 0:
        record = records + (work // FORM.num_kv_heads) * W.RECORD
        stage, phase = _attend_item(
            inputs, ring, record, work % FORM.num_kv_heads, stage, phase, PART, FORM
        )
        work, turn, turn_phase = _taken(ring, turn, turn_phase)


@gluon.jit
def grid_rows(control, q, k, v, out, lse, part_out, part_top, part_weights, slopes, scale, softcap,
              HEAD_MAJOR: gl.constexpr, FORM: gl.constexpr):  # fmt: skip
    """Walk all items of the widest tiles, each for every KV head; see `grid_kernel`. One program a
    multiprocessor, 4 warps and 8 more inside. The launch after this one may begin at once."""
    gdc_launch_dependents()
    dtype: gl.constexpr = q.dtype.element_ty
    BLOCK_D: gl.constexpr = FORM.block_d
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_D], dtype)
    keys = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_D], tile)
    values = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_D], tile)
    queries = gl.allocate_shared_memory(
        dtype, [2, ROWS, BLOCK_D], gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_D], dtype)
    )
    flags: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], flags)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], flags)
    works = gl.allocate_shared_memory(gl.int32, [2, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    given = gl.allocate_shared_memory(gl.int64, [2, 1], flags)
    taken = gl.allocate_shared_memory(gl.int64, [2, 1], flags)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=128)  # each copying thread, when its copies have come
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(given.index(i), count=1)
        mbarrier.init(taken.index(i), count=2)
    inputs = _Inputs(control, q, k, v, out, lse, part_out, part_top, part_weights, scale)
    ring = _Ring(queries, keys, values, full, empty, works, given, taken)
    gl.warp_specialize(
        [
            (_attend_items, (inputs, ring, gl.constexpr(0), FORM)),
            (_attend_items, (inputs, ring, gl.constexpr(1), FORM)),
            (_copy_items, (inputs, ring, HEAD_MAJOR, FORM)),
        ],
        [4, 4],
        [REGISTERS, COPY_REGISTERS],
    )
