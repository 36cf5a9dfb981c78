"""Operations of layers with a gated delta rule in Triton.

Parts of few rows are taken row by row, each program with a piece of a state in registers; launches
over tables of the same sizes are alike, so that a graph can hold them. Longer parts are taken in
chunks, in two launches. The first is over all chunks at once: it inverts the triangular system of
each, and finds what its rows see of each other. The second walks the chunks of a part, a piece of
its state in registers. q and k are multiplied as they are given, and scaled by their lengths in
float32.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from onestem.errors import UnsupportedError
from onestem.ops.delta import NORM_EPS, DeltaOps, PartRows, check_conv, check_delta, check_norm
from onestem.ops.state_rows import CHUNK, FEW_ROWS
from onestem.ops.triton.dependent import dependent_launch, wait_for_launch
from onestem.ops.triton.sizes import cdiv, power_of_2

# Rows and channels of a program, and its warps: without chunks, where most parts are one row; with.
_CONV = (1, 256, 1), (8, 128, 2)
_NORM_HEADS, _GATE_BLOCK = (4, 16), 256  # of a program: for few rows, for many
# Columns of a state in a program, its warps, and registers of a thread. One warp sums without
# barriers, and more states are read at once where fewer registers hold them.
_FEW_COLUMNS, _FEW_WARPS, _FEW_REGISTERS = 16, 1, 128
# Of chunks. With two stages a read begins when it is waited for; with 8 warps and float32, ptxas
# 12.8 makes addresses of shared memory from registers that hold other values by then.
_WARPS, _SCAN_COLUMNS, _SCAN_STAGES = 4, (64, 32, 16), 3
_EPS: tl.constexpr = tl.constexpr(NORM_EPS)
_FEW: tl.constexpr = tl.constexpr(FEW_ROWS)
_ANY_ROWS = 2**31 - 1


@triton.jit
def _part_of(parts, part):
    """A part's first row, the one after its last, and the slots before and after it."""
    line = parts + part * 5
    first = tl.load(line)
    return first, first + tl.load(line + 1), tl.load(line + 3), tl.load(line + 4)


@triton.jit
def _inputs(x, states, row, first, end, source, at, inside, stride, channels, KEEP: tl.constexpr):
    """Inputs of a convolution at rows `row`, those before the part from its state: `[rows, at]`."""
    lowest = tl.where(source < 0, first, first - KEEP)
    old = (row < first) & (row >= lowest)
    place = source.to(tl.int64) * KEEP + KEEP + row - first
    before = states + place[:, None] * channels + at[None, :]
    new = x + row.to(tl.int64)[:, None] * stride + at[None, :]
    kept = tl.load(before, mask=old[:, None] & inside[None, :], other=0.0)
    given = tl.load(new, mask=((row >= first) & (row < end))[:, None] & inside[None, :], other=0.0)
    return tl.where((row < first)[:, None], kept, given)


@triton.jit
def _causal_conv(
    x,
    weight,
    states,
    out,
    parts,
    chunks,
    num_parts,
    stride,
    channels,
    KEEP: tl.constexpr,
    DEPENDENT: tl.constexpr,
    CHUNK: tl.constexpr,
    KEPT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (part, or chunk; block of channels). A part's takes its first rows, which alone may
    need the state, and writes the state; a chunk's takes the others."""
    wait_for_launch(DEPENDENT)
    part, chunk = tl.program_id(0), tl.program_id(0) - num_parts
    is_chunk = chunk >= 0
    if is_chunk:
        part = tl.load(chunks + chunk * 2)
    first, end, source, target = _part_of(parts, part)
    begin, stop = first, tl.minimum(first + _FEW, end)
    if is_chunk:
        base = tl.load(chunks + chunk * 2 + 1)
        begin, stop = tl.maximum(base, first + _FEW), tl.minimum(base + CHUNK, end)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < channels
    for first_rows in tl.static_range(2):
        for start in range(begin, tl.where(is_chunk != first_rows, stop, begin), ROWS):
            row = start + tl.arange(0, ROWS)
            mask = (row < stop)[:, None] & inside[None, :]
            total = tl.zeros([ROWS, BLOCK], tl.float32)
            for tap in tl.static_range(KEEP + 1):
                w = tl.load(weight + tap * channels + at, mask=inside, other=0.0).to(tl.float32)
                i = row - KEEP + tap
                if first_rows:
                    y = _inputs(
                        x, states, i, first, end, source, at, inside, stride, channels, KEEP
                    )
                else:
                    y = tl.load(x + i.to(tl.int64)[:, None] * stride + at[None, :], mask, other=0.0)
                total += y.to(tl.float32) * w[None, :]
            to = out + row.to(tl.int64)[:, None] * channels + at[None, :]
            tl.store(to, (total / (1.0 + tl.exp(-total))).to(out.dtype.element_ty), mask=mask)
    if (chunk < 0) & (stop > begin):
        i = tl.arange(0, KEPT)
        last = _inputs(
            x, states, end - KEEP + i, first, end, source, at, inside, stride, channels, KEEP
        )
        tl.debug_barrier()  # all of the state is read before any is written
        to = states + (target.to(tl.int64) * KEEP + i)[:, None] * channels + at[None, :]
        tl.store(to, last, mask=(i < KEEP)[:, None] & inside[None, :])


@triton.jit
def _gates(
    a,
    b,
    a_log,
    dt_bias,
    decay,
    beta,
    rows,
    heads,
    a_stride,
    b_stride,
    DEPENDENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < rows * heads
    row, head = (place // heads).to(tl.int64), place % heads
    rate = tl.exp(tl.load(a_log + head, mask=inside, other=0.0))
    bias = tl.load(dt_bias + head, mask=inside, other=0.0)
    wait_for_launch(DEPENDENT)
    step = tl.load(a + row * a_stride + head, mask=inside, other=0.0).to(tl.float32) + bias
    gate = tl.load(b + row * b_stride + head, mask=inside, other=0.0).to(tl.float32)
    # log(1 + e^x), of which 1 + e^x loses digits where x is far below 0 and overflows far above it
    power = tl.exp(-tl.abs(step))
    whole = 1.0 + power
    rest = tl.where(
        whole == 1.0, power, tl.log(whole) * (power / tl.where(whole == 1.0, 1.0, whole - 1.0))
    )
    tl.store(decay + place, -rate * (tl.maximum(step, 0.0) + rest), mask=inside)
    tl.store(beta + place, 1.0 / (1.0 + tl.exp(-gate)), mask=inside)


@triton.jit
def _few_rows(
    q,
    k,
    v,
    decay,
    beta,
    states,
    out,
    parts,
    q_stride,
    k_stride,
    v_stride,
    heads,
    group,
    dk,
    dv,
    scale,
    most,
    DEPENDENT: tl.constexpr,
    DK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Program (columns, head, part of at most `most` rows): the recurrent form."""
    wait_for_launch(DEPENDENT)
    head = tl.program_id(1)
    first, end, source, target = _part_of(parts, tl.program_id(2))
    if (end > first) & (end - first <= most):
        i = tl.arange(0, DK)
        j = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        mask = (i < dk)[:, None] & (j < dv)[None, :]
        piece = i[:, None] * dv + j[None, :]
        size = dk * dv
        before = states + (source.to(tl.int64) * heads + head) * size + piece
        kept = (i < tl.where(source < 0, 0, dk))[:, None] & (j < dv)[None, :]
        state = tl.load(before, mask=kept, other=0.0)
        at = (head // group) * dk + i
        for n in range(end - first):
            line = first.to(tl.int64) + n
            key = tl.load(k + line * k_stride + at, mask=i < dk, other=0.0).to(tl.float32)
            query = tl.load(q + line * q_stride + at, mask=i < dk, other=0.0).to(tl.float32)
            value = tl.load(v + line * v_stride + head * dv + j, mask=j < dv, other=0.0)
            fade = tl.exp(tl.load(decay + line * heads + head))
            strength = tl.load(beta + line * heads + head)
            key *= tl.rsqrt(tl.sum(key * key, 0) + _EPS)
            query *= tl.rsqrt(tl.sum(query * query, 0) + _EPS) * scale
            # Both products with the state before it: none waits for the other.
            by_key = tl.sum(state * key[:, None], 0)
            by_query = tl.sum(state * query[:, None], 0)
            change = strength * (value.to(tl.float32) - fade * by_key)
            state = fade * state + key[:, None] * change[None, :]
            result = fade * by_query + tl.sum(key * query, 0) * change
            to = out + (line * heads + head) * dv + j
            tl.store(to, result.to(out.dtype.element_ty), mask=j < dv)
        after = states + (target.to(tl.int64) * heads + head) * size + piece
        tl.store(after, state, mask=mask)


@triton.jit
def _joined(inverse, lower, i, j, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """The inverses of blocks of `SIZE` rows on the diagonal of 1 + lower become those of blocks of
    twice as many: [[A, 0], [C, B]] has the inverse [[A', 0], [-B' C A', B']]."""
    below = (i // (2 * SIZE) == j // (2 * SIZE)) & (i // SIZE > j // SIZE)
    left = tl.dot(inverse, tl.where(below, lower, 0.0), input_precision=PRECISION)
    return inverse - tl.dot(left, inverse, input_precision=PRECISION)


@triton.jit
def _within_chunks(
    q,
    k,
    decay,
    beta,
    parts,
    chunks,
    solutions,
    weights,
    factors,
    q_stride,
    k_stride,
    heads,
    group,
    dk,
    scale,
    DEPENDENT: tl.constexpr,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,
    DK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (chunk, head). Rows that a chunk lacks change nothing: key and strength are 0."""
    wait_for_launch(DEPENDENT)
    chunk, head = tl.program_id(0), tl.program_id(1)
    first, end, _, _ = _part_of(parts, tl.load(chunks + chunk * 2))
    i, d = tl.arange(0, CHUNK), tl.arange(0, DK)
    row = tl.load(chunks + chunk * 2 + 1) + i
    inside = (row >= first) & (row < end)
    line = row.to(tl.int64)
    mask = inside[:, None] & (d < dk)[None, :]
    at = (head // group) * dk + d[None, :]
    keys = tl.load(k + line[:, None] * k_stride + at, mask=mask, other=0.0)
    queries = tl.load(q + line[:, None] * q_stride + at, mask=mask, other=0.0)
    total = tl.cumsum(tl.load(decay + line * heads + head, mask=inside, other=0.0), 0)
    strength = tl.load(beta + line * heads + head, mask=inside, other=0.0)
    wide = keys.to(tl.float32)
    of_key = tl.rsqrt(tl.sum(wide * wide, 1) + _EPS)
    wide = queries.to(tl.float32)
    of_query = tl.rsqrt(tl.sum(wide * wide, 1) + _EPS) * scale
    i, j = i[:, None], i[None, :]
    # Hidden before the power: what is later could overflow.
    fades = tl.exp(tl.where(i < j, float("-inf"), total[:, None] - total[None, :]))
    fades *= of_key[None, :]
    piece = (chunk.to(tl.int64) * heads + head) * CHUNK
    to = (piece + i) * CHUNK + j
    seen = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * fades * of_query[:, None]
    tl.store(weights + to, seen.to(weights.dtype.element_ty))
    lower = tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
    lower = tl.where(i > j, lower * fades * (of_key * strength)[:, None], 0.0)
    inverse = tl.where(i == j, 1.0, 0.0) - tl.where(i // 2 == j // 2, lower, 0.0)
    for level in tl.static_range(1, LEVELS):
        inverse = _joined(inverse, lower, i, j, 1 << level, PRECISION)
    solution = inverse * strength[None, :]
    tl.store(solutions + to, solution.to(solutions.dtype.element_ty))
    last = tl.sum(tl.where(tl.arange(0, CHUNK) == CHUNK - 1, total, 0.0), 0)
    power, to = tl.exp(total), factors + piece * 4 + tl.arange(0, CHUNK)
    tl.store(to, power * of_key)
    tl.store(to + CHUNK, power * of_query)
    tl.store(to + 2 * CHUNK, tl.exp(last - total) * of_key)
    tl.store(to + 3 * CHUNK, tl.exp(last + tl.zeros([CHUNK], tl.float32)))


@triton.jit
def _over_chunks(
    q,
    k,
    v,
    states,
    out,
    parts,
    chunks,
    scans,
    solutions,
    weights,
    factors,
    q_stride,
    k_stride,
    v_stride,
    heads,
    group,
    dk,
    dv,
    DEPENDENT: tl.constexpr,
    CHUNK: tl.constexpr,
    DK: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (columns, head, part of many rows)."""
    wait_for_launch(DEPENDENT)
    head, scan = tl.program_id(1), scans + tl.program_id(2) * 3
    first, end, source, target = _part_of(parts, tl.load(scan))
    chunk, num_chunks = tl.load(scan + 1), tl.load(scan + 2)
    base = tl.load(chunks + chunk * 2 + 1)
    i, d = tl.arange(0, CHUNK), tl.arange(0, DK)
    j = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    in_key, in_value = (d < dk)[None, :], (j < dv)[None, :]
    mask = (d < dk)[:, None] & in_value
    piece = d[:, None] * dv + j[None, :]
    before = states + (source.to(tl.int64) * heads + head) * (dk * dv) + piece
    kept = (d < tl.where(source < 0, 0, dk))[:, None] & in_value
    state = tl.load(before, mask=kept, other=0.0)
    kind: tl.constexpr = v.dtype.element_ty
    # Places in a chunk: the loop adds where it begins.
    line, at = i[:, None].to(tl.int64), (head // group) * dk + d[None, :]
    of_keys, of_queries = k + line * k_stride + at, q + line * q_stride + at
    of_values = v + line * v_stride + head * dv + j[None, :]
    of_out = out + (line * heads + head) * dv + j[None, :]
    square = i[:, None] * CHUNK + i[None, :]
    for n in tl.range(0, num_chunks, num_stages=STAGES):
        row = base + n * CHUNK
        inside = ((row + i >= first) & (row + i < end))[:, None]
        row = row.to(tl.int64)
        keys = tl.load(of_keys + row * k_stride, mask=inside & in_key, other=0.0)
        queries = tl.load(of_queries + row * q_stride, mask=inside & in_key, other=0.0)
        values = tl.load(of_values + row * v_stride, mask=inside & in_value, other=0.0)
        place = ((chunk + n).to(tl.int64) * heads + head) * CHUNK
        solution = tl.load(solutions + place * CHUNK + square)
        weight = tl.load(weights + place * CHUNK + square)
        factor = factors + place * 4 + i
        of_read, of_seen = tl.load(factor), tl.load(factor + CHUNK)
        of_change, fade = tl.load(factor + 2 * CHUNK), tl.load(factors + place * 4 + 3 * CHUNK)
        held = state.to(kind)
        read = tl.dot(keys, held, input_precision=PRECISION)
        right = values.to(tl.float32) - of_read[:, None] * read
        change = tl.dot(solution, right.to(kind), input_precision=PRECISION)
        result = of_seen[:, None] * tl.dot(queries, held, input_precision=PRECISION)
        result += tl.dot(weight, change.to(kind), input_precision=PRECISION)
        tl.store(of_out + row * (heads * dv), result.to(kind), mask=inside & in_value)
        change *= of_change[:, None]
        added = tl.dot(tl.trans(keys), change.to(kind), input_precision=PRECISION)
        state = fade * state + added
    after = states + (target.to(tl.int64) * heads + head) * (dk * dv) + piece
    tl.store(after, state, mask=mask)


@triton.jit
def _gated_norm(
    x,
    z,
    weight,
    out,
    heads,
    size,
    eps,
    x_stride,
    z_stride,
    DEPENDENT: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row, block of heads)."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    i = tl.arange(0, BLOCK)
    at = head[:, None] * size + i[None, :]
    mask = (head < heads)[:, None] & (i < size)[None, :]
    scale = tl.load(weight + i, mask=i < size, other=0.0).to(tl.float32)
    wait_for_launch(DEPENDENT)
    value = tl.load(x + row * x_stride + at, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(z + row * z_stride + at, mask=mask, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value, 1) / size + eps)
    value = value * inverse[:, None] * scale[None, :] * (gate / (1.0 + tl.exp(-gate)))
    tl.store(out + row * heads * size + at, value.to(out.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class TritonDelta(DeltaOps):
    """`DeltaOps` in kernels. Products of 16-bit rows have factors of 16 bits.

    Args:
        deterministic: a row's bits depend on its inputs and on the rows before it alone. So all
            parts are taken row by row.
    """

    name: str = "triton"
    deterministic: bool = False

    def causal_conv(self, x: Tensor, weight: Tensor, states: Tensor, rows: PartRows) -> Tensor:
        """See `DeltaOps`."""
        check_conv(x, weight, states)
        out = rows.memory(x)
        pieces, keep = len(rows.parts) + len(rows.chunks), weight.shape[1] - 1
        if keep > FEW_ROWS:
            raise UnsupportedError(
                f"a convolution over {keep + 1} rows, expected at most {FEW_ROWS + 1}"
            )
        if pieces:
            count, block, warps = _CONV[len(rows.chunks) > 0]
            _causal_conv[(pieces, cdiv(x.shape[1], block))](
                x,
                weight.t().contiguous(),
                states,
                out,
                rows.parts,
                rows.chunks,
                len(rows.parts),
                x.stride(0),
                x.shape[1],
                KEEP=keep,
                CHUNK=CHUNK,
                KEPT=power_of_2(keep),
                ROWS=count,
                BLOCK=block,
                num_warps=warps,
                **dependent_launch(x.device),
            )
        return out

    def gates(self, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
        """See `DeltaOps`."""
        decay, beta = torch.empty(2, *a.shape, dtype=torch.float32, device=a.device)
        if a.numel():
            _gates[(cdiv(a.numel(), _GATE_BLOCK),)](
                a, b, a_log, dt_bias, decay, beta, *a.shape, a.stride(0), b.stride(0),
                BLOCK=_GATE_BLOCK, num_warps=4, **dependent_launch(a.device),
            )  # fmt: skip
        return decay, beta

    def delta_rule(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        beta: Tensor,
        states: Tensor,
        rows: PartRows,
    ) -> Tensor:
        """See `DeltaOps`."""
        check_delta(q, k, v, decay, beta, states)
        _, heads, dk, dv = states.shape
        if dk > 256:
            raise UnsupportedError(f"heads of {dk} in keys, expected at most 256 on a GPU")
        out = rows.memory(v)
        strides = q.stride(0), k.stride(0), v.stride(0)
        sizes = heads, heads // k.shape[1], dk, dv
        scale, options = dk**-0.5, dependent_launch(v.device)
        # A product has 16 rows, columns and steps at least.
        block = max(16, power_of_2(dk))
        if self.deterministic or len(rows.scans) < len(rows.parts):
            columns = min(_FEW_COLUMNS * 128 // max(block, 128), power_of_2(dv))
            _few_rows[(cdiv(dv, columns), heads, len(rows.parts))](
                q,
                k,
                v,
                decay,
                beta,
                states,
                out,
                rows.parts,
                *strides,
                *sizes,
                scale,
                _ANY_ROWS if self.deterministic else FEW_ROWS,
                DK=block,
                COLUMNS=columns,
                num_warps=_FEW_WARPS,
                maxnreg=_FEW_REGISTERS,
                **options,
            )
        if len(rows.chunks) and not self.deterministic:
            # Of products with float32 factors: of rows, or of inverses alone.
            wide = v.dtype == torch.float32
            precision = "tf32x3" if wide else "tf32"
            shape = (len(rows.chunks), heads, CHUNK, CHUNK)
            solutions, weights = torch.empty(2, *shape, dtype=v.dtype, device=v.device)
            factors = torch.empty(*shape[:2], 4, CHUNK, dtype=torch.float32, device=v.device)
            _within_chunks[shape[:2]](
                q,
                k,
                decay,
                beta,
                rows.parts,
                rows.chunks,
                solutions,
                weights,
                factors,
                *strides[:2],
                *sizes[:3],
                scale,
                CHUNK=CHUNK,
                LEVELS=CHUNK.bit_length() - 1,
                DK=block,
                PRECISION=precision,
                num_warps=_WARPS,
                **options,
            )
            columns = _scan_columns(len(rows.scans) * heads, dv, v.device)
            _over_chunks[(cdiv(dv, columns), heads, len(rows.scans))](
                q,
                k,
                v,
                states,
                out,
                rows.parts,
                rows.chunks,
                rows.scans,
                solutions,
                weights,
                factors,
                *strides,
                *sizes,
                CHUNK=CHUNK,
                DK=block,
                COLUMNS=columns,
                STAGES=1 if wide else _SCAN_STAGES if block <= 128 else 2,
                PRECISION=precision,
                num_warps=_WARPS,
                **options,
            )
        return out

    def gated_norm(self, x: Tensor, weight: Tensor, z: Tensor, eps: float) -> Tensor:
        """See `DeltaOps`."""
        check_norm(x, weight, z)
        rows, heads, size = x.shape
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if rows:
            block = _NORM_HEADS[rows > 1024 and not self.deterministic]
            _gated_norm[(rows, cdiv(heads, block))](
                x,
                z,
                weight,
                out,
                heads,
                size,
                eps,
                x.stride(0),
                z.stride(0),
                HEADS=block,
                BLOCK=power_of_2(size),
                num_warps=4,
                **dependent_launch(x.device),
            )
        return out


def _scan_columns(states: int, dv: int, device: torch.device) -> int:
    """The widest pieces of states that keep most multiprocessors busy, or else the narrowest."""
    sms = 1
    if device.type == "cuda":
        sms = torch.cuda.get_device_properties(device).multi_processor_count
    sizes = [size for size in _SCAN_COLUMNS if size <= max(16, power_of_2(dv))]
    return next((x for x in sizes if states * cdiv(dv, x) >= 0.75 * sms), sizes[-1])
