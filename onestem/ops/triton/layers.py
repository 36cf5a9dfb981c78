"""`LayerOps` in Triton: each operation reads its rows once and writes its results once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from onestem.ops.kv import page_strides
from onestem.ops.layers import Angles, Heads, LayerOps, Queries, check_halves
from onestem.ops.rounding import LARGEST, BothRows, RoundedRows
from onestem.ops.triton.dependent import dependent_launch, wait_for_launch
from onestem.ops.triton.rounding import empty_rows, round_codes
from onestem.ops.triton.sizes import cdiv, power_of_2

# Heads that one program rotates: few, so that a single row still uses several multiprocessors.
_HEADS_PER_PROGRAM = 8
_GATE_BLOCK = 1024


@triton.jit
def _store_row(
    value, out, scales, at, inside, size, largest, dtype: tl.constexpr, ROUNDS: tl.constexpr
):
    """Store a program's row in `dtype`, or rounded from `dtype` to 8 bits."""
    row = tl.program_id(0).to(tl.int64)
    value = value.to(dtype)
    if ROUNDS:
        is_int: tl.constexpr = out.dtype.element_ty == tl.int8
        value, scale = round_codes(value.to(tl.float32), largest, is_int)
        tl.store(scales + row, scale)
    tl.store(out + row * size + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add_rms_norm(
    hidden,
    delta,
    weight,
    out,
    scales,
    plain,
    size,
    eps,
    largest,
    HAS_DELTA: tl.constexpr,
    ROUNDS: tl.constexpr,
    PLAIN: tl.constexpr,
    DEPENDENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * size
    at = tl.arange(0, BLOCK)
    inside = at < size
    scale = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    wait_for_launch(DEPENDENT)
    x = tl.load(hidden + row + at, mask=inside, other=0.0)
    if HAS_DELTA:
        x += tl.load(delta + row + at, mask=inside, other=0.0)
        tl.store(hidden + row + at, x, mask=inside)
    value = x.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value, 0) / size + eps)
    dtype: tl.constexpr = hidden.dtype.element_ty
    value = value * inverse * scale
    if PLAIN:
        tl.store(plain + row + at, value.to(dtype), mask=inside)
    _store_row(value, out, scales, at, inside, size, largest, dtype, ROUNDS)


@triton.jit
def _load_halves(x, at, inside, weight, half, HALF: tl.constexpr, NORM: tl.constexpr, eps):
    """Both halves of some heads, float32 [heads, HALF] each, normed with NORM."""
    i = tl.arange(0, HALF)
    where = at[:, None] + i[None, :]
    mask = inside[:, None] & (i < half)[None, :]
    first = tl.load(x + where, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x + where + half, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        total = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        inverse = tl.rsqrt(total / (2 * half) + eps)[:, None]
        in_half = i < half
        w1 = tl.load(weight + i, mask=in_half, other=0.0).to(tl.float32)
        w2 = tl.load(weight + half + i, mask=in_half, other=0.0).to(tl.float32)
        # The norm's result is rounded to the model's dtype before the rotation.
        first = (first * inverse * w1[None, :]).to(x.dtype.element_ty).to(tl.float32)
        second = (second * inverse * w2[None, :]).to(x.dtype.element_ty).to(tl.float32)
    return first, second, mask, i


@triton.jit
def _rope_write(
    qkv,
    q_norm,
    k_norm,
    cos,
    sin,
    slots,
    sources,
    query_cos,
    query_sin,
    q_out,
    k_pages,
    v_pages,
    eps,
    num_rows,
    num_queries,
    num_q_heads,
    num_kv_heads,
    half,
    page_size,
    page_stride,
    token_stride,
    head_stride,
    NORM: tl.constexpr,
    VALUE_NORM: tl.constexpr,
    VALUE_IS_KEY: tl.constexpr,
    MOVED: tl.constexpr,
    DEPENDENT: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """Program (row, block): `HEADS` heads of q, or of k and v. MOVED: of the row's query, which is
    that of row `sources[row]`."""
    wait_for_launch(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    head_dim = 2 * half
    kinds: tl.constexpr = 1 if VALUE_IS_KEY else 2
    width = (num_q_heads + kinds * num_kv_heads) * head_dim
    i = tl.arange(0, HALF)
    turn = row * half + i
    q_blocks = tl.cdiv(num_q_heads, HEADS)
    if block < q_blocks:
        asks = row < num_queries
        source = tl.load(sources + row, mask=asks, other=0) if MOVED else row
        reach = tl.where(asks, half, 0)
        c = tl.load(query_cos + turn, mask=i < reach, other=0.0)[None, :]
        s = tl.load(query_sin + turn, mask=i < reach, other=0.0)[None, :]
        head = block * HEADS + tl.arange(0, HEADS)
        inside = head < tl.where(asks, num_q_heads, 0)
        at = head.to(tl.int64) * head_dim
        line = source * width
        first, second, mask, _ = _load_halves(qkv + line, at, inside, q_norm, half, HALF, NORM, eps)
        to = q_out + row * num_q_heads * head_dim + at[:, None] + i[None, :]
        tl.store(to, (first * c - second * s).to(q_out.dtype.element_ty), mask=mask)
        tl.store(to + half, (second * c + first * s).to(q_out.dtype.element_ty), mask=mask)
    else:
        there = row < num_rows
        reach = tl.where(there, half, 0)
        c = tl.load(cos + turn, mask=i < reach, other=0.0)[None, :]
        s = tl.load(sin + turn, mask=i < reach, other=0.0)[None, :]
        head = (block - q_blocks) * HEADS + tl.arange(0, HEADS)
        inside = head < tl.where(there, num_kv_heads, 0)
        at = head.to(tl.int64) * head_dim
        slot = tl.load(slots + row, mask=there, other=0)
        page = slot // page_size * page_stride + slot % page_size * token_stride
        place = (page + head.to(tl.int64) * head_stride)[:, None] + i[None, :]
        keys = qkv + row * width + num_q_heads * head_dim
        first, second, mask, _ = _load_halves(keys, at, inside, k_norm, half, HALF, NORM, eps)
        to = k_pages + place
        tl.store(to, (first * c - second * s).to(k_pages.dtype.element_ty), mask=mask)
        tl.store(to + half, (second * c + first * s).to(k_pages.dtype.element_ty), mask=mask)
        values = keys + (kinds - 1) * num_kv_heads * head_dim + at[:, None] + i[None, :]
        first = tl.load(values, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(values + half, mask=mask, other=0.0).to(tl.float32)
        if VALUE_NORM:
            total = tl.sum(first * first, 1) + tl.sum(second * second, 1)
            inverse = tl.rsqrt(total / head_dim + eps)[:, None]
            first, second = first * inverse, second * inverse
        to = v_pages + place
        tl.store(to, first.to(v_pages.dtype.element_ty), mask=mask)
        tl.store(to + half, second.to(v_pages.dtype.element_ty), mask=mask)


@triton.jit
def gate_value(gate, GELU: tl.constexpr):
    """SiLU of float32, or GELU (tanh approximation)."""
    if GELU:
        # (1 + tanh(x)) / 2 == 1 / (1 + exp(-2x)), with x as in the approximation
        twice = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        power = tl.exp(tl.minimum(-twice, 80.0))  # beyond it the quotient is 0 in any type
    else:
        power = tl.exp(-gate)
    return gate / (1.0 + power)


@triton.jit
def _gate_mul(
    gate_up,
    out,
    scales,
    size,
    largest,
    GELU: tl.constexpr,
    ROUNDS: tl.constexpr,
    DEPENDENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row, block); with ROUNDS, a program per row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    wait_for_launch(DEPENDENT)
    gate = tl.load(gate_up + row * 2 * size + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (row * 2 + 1) * size + at, mask=inside, other=0.0).to(tl.float32)
    value = gate_value(gate, GELU) * up
    dtype: tl.constexpr = gate_up.dtype.element_ty
    _store_row(value, out, scales, at, inside, size, largest, dtype, ROUNDS)


@triton.jit
def _share_sinks(out, lse, sinks, num_heads, head_dim, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_heads * head_dim
    head = at // head_dim
    less = tl.load(sinks + head, mask=inside, other=0.0)
    less -= tl.load(lse + row * num_heads + head, mask=inside, other=0.0)
    to = out + row * num_heads * head_dim + at
    value = tl.load(to, mask=inside, other=0.0).to(tl.float32) / (1.0 + tl.exp(less))
    tl.store(to, value.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class TritonLayers(LayerOps):
    """`LayerOps` with one kernel each."""

    name: str = "triton"

    def add_rms_norm(
        self, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float
    ) -> Tensor:
        out = torch.empty_like(hidden)
        _norm(hidden, delta, weight, eps, out, None)
        return out

    def rounded_rms_norm(
        self, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
    ) -> RoundedRows:
        rounded = empty_rows(len(hidden), hidden.shape[1], dtype, hidden.device)
        _norm(hidden, delta, weight, eps, *rounded)
        return rounded

    def both_rms_norm(
        self, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
    ) -> BothRows:
        rounded = empty_rows(len(hidden), hidden.shape[1], dtype, hidden.device)
        plain = torch.empty_like(hidden)
        _norm(hidden, delta, weight, eps, *rounded, plain)
        return BothRows(plain, rounded)

    def rope_write(
        self,
        qkv: Tensor,
        heads: Heads,
        angles: Angles,
        slots: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        *,
        queries: Queries | None = None,
    ) -> Tensor:
        check_halves("head_dim", heads.head_dim)
        rows, half = len(qkv), heads.head_dim // 2
        sources, turned = (slots, angles) if queries is None else queries
        q = qkv.new_empty(len(sources), heads.num_q_heads, heads.head_dim)
        blocks = sum(
            cdiv(count, _HEADS_PER_PROGRAM) for count in (heads.num_q_heads, heads.num_kv_heads)
        )
        norm = heads.q_norm is not None
        if rows:
            _rope_write[(max(rows, len(sources)), blocks)](
                qkv,
                heads.q_norm if norm else qkv,
                qkv if heads.k_norm is None else heads.k_norm,
                *angles,
                slots,
                sources,
                *turned,
                q,
                k_pages,
                v_pages,
                heads.eps,
                rows,
                len(sources),
                heads.num_q_heads,
                heads.num_kv_heads,
                half,
                k_pages.shape[1],
                *page_strides(k_pages, v_pages),
                NORM=norm,
                VALUE_NORM=heads.v_norm,
                VALUE_IS_KEY=heads.value_is_key,
                MOVED=queries is not None,
                HEADS=_HEADS_PER_PROGRAM,
                HALF=power_of_2(half),
                num_warps=4,
                **dependent_launch(qkv.device),
            )
        return q

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return _gated(gate_up, gelu=False)

    def rounded_silu_mul(self, gate_up: Tensor, dtype: torch.dtype) -> RoundedRows:
        check_halves("the width of gate and up", gate_up.shape[1])
        size = gate_up.shape[1] // 2
        rounded = empty_rows(len(gate_up), size, dtype, gate_up.device)
        _gate(gate_up, *rounded, gelu=False, block=power_of_2(size))
        return rounded

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        return _gated(gate_up, gelu=True)

    def share_sinks(self, out: Tensor, lse: Tensor, sinks: Tensor) -> None:
        rows, num_heads, head_dim = out.shape
        if rows:
            blocks = cdiv(num_heads * head_dim, _GATE_BLOCK)
            _share_sinks[(rows, blocks)](
                out, lse, sinks, num_heads, head_dim, BLOCK=_GATE_BLOCK, num_warps=4
            )


def _norm(
    hidden: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    out: Tensor,
    scales: Tensor | None,
    plain: Tensor | None = None,
) -> None:
    """RMSNorm into `out`, whose rows are rounded to 8 bits if there are `scales`, and into `plain`,
    as it is."""
    rows, size = hidden.shape
    if rows:
        _add_rms_norm[(rows,)](
            hidden,
            hidden if delta is None else delta,
            weight,
            out,
            hidden if scales is None else scales,
            hidden if plain is None else plain,
            size,
            eps,
            LARGEST.get(out.dtype, 1.0),
            HAS_DELTA=delta is not None,
            ROUNDS=scales is not None,
            PLAIN=plain is not None,
            BLOCK=power_of_2(size),
            num_warps=8 if size > 2048 else 4,
            **dependent_launch(hidden.device),
        )


def _gated(gate_up: Tensor, *, gelu: bool) -> Tensor:
    check_halves("the width of gate and up", gate_up.shape[1])
    shape = len(gate_up), gate_up.shape[1] // 2
    out = torch.empty(shape, dtype=gate_up.dtype, device=gate_up.device)
    _gate(gate_up, out, None, gelu=gelu, block=_GATE_BLOCK)
    return out


def _gate(gate_up: Tensor, out: Tensor, scales: Tensor | None, *, gelu: bool, block: int) -> None:
    """Gate into `out`, likewise; a row in one block is divided among more warps."""
    rows, size = out.shape
    if rows:
        _gate_mul[(rows, cdiv(size, block))](
            gate_up,
            out,
            gate_up if scales is None else scales,
            size,
            LARGEST.get(out.dtype, 1.0),
            GELU=gelu,
            ROUNDS=scales is not None,
            BLOCK=block,
            num_warps=min(16, max(4, block // 512)),
            **dependent_launch(gate_up.device),
        )
