"""`LayerOps` in Triton: each reads its rows once and writes its results once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from onestem.ops.kv import page_strides
from onestem.ops.layers import Angles, Heads, check_halves

__all__ = ["TritonLayers"]

# Heads that one program turns: few, so that a single row still occupies several multiprocessors.
_HEADS_PER_PROGRAM = 8
_GATE_BLOCK = 1024


@triton.jit
def _add_rms_norm(
    hidden, delta, weight, out, size, eps, HAS_DELTA: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * size
    at = tl.arange(0, BLOCK)
    inside = at < size
    x = tl.load(hidden + row + at, mask=inside, other=0.0)
    if HAS_DELTA:
        x += tl.load(delta + row + at, mask=inside, other=0.0)
        tl.store(hidden + row + at, x, mask=inside)
    value = x.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value, 0) / size + eps)
    scale = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + at, (value * inverse * scale).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _load_halves(x, at, inside, weight, half, HALF: tl.constexpr, NORM: tl.constexpr, eps):
    """Both halves of some heads, float32 [heads, HALF] each, normed if asked."""
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
        # The norm's result is a tensor of the model's dtype before it is turned.
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
    q_out,
    k_pages,
    v_pages,
    eps,
    num_q_heads,
    num_kv_heads,
    half,
    page_size,
    page_stride,
    token_stride,
    head_stride,
    NORM: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """Program (row, block): `HEADS` heads of q, or of k and v."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    head_dim = 2 * half
    line = row * (num_q_heads + 2 * num_kv_heads) * head_dim
    i = tl.arange(0, HALF)
    c = tl.load(cos + row * half + i, mask=i < half, other=0.0)[None, :]
    s = tl.load(sin + row * half + i, mask=i < half, other=0.0)[None, :]
    q_blocks = tl.cdiv(num_q_heads, HEADS)
    if block < q_blocks:
        head = block * HEADS + tl.arange(0, HEADS)
        inside = head < num_q_heads
        at = head.to(tl.int64) * head_dim
        first, second, mask, _ = _load_halves(qkv + line, at, inside, q_norm, half, HALF, NORM, eps)
        to = q_out + row * num_q_heads * head_dim + at[:, None] + i[None, :]
        tl.store(to, (first * c - second * s).to(q_out.dtype.element_ty), mask=mask)
        tl.store(to + half, (second * c + first * s).to(q_out.dtype.element_ty), mask=mask)
    else:
        head = (block - q_blocks) * HEADS + tl.arange(0, HEADS)
        inside = head < num_kv_heads
        at = head.to(tl.int64) * head_dim
        slot = tl.load(slots + row)
        page = slot // page_size * page_stride + slot % page_size * token_stride
        place = (page + head.to(tl.int64) * head_stride)[:, None] + i[None, :]
        keys = qkv + line + num_q_heads * head_dim
        first, second, mask, _ = _load_halves(keys, at, inside, k_norm, half, HALF, NORM, eps)
        to = k_pages + place
        tl.store(to, (first * c - second * s).to(k_pages.dtype.element_ty), mask=mask)
        tl.store(to + half, (second * c + first * s).to(k_pages.dtype.element_ty), mask=mask)
        values = keys + num_kv_heads * head_dim + at[:, None] + i[None, :]
        to = v_pages + place
        tl.store(to, tl.load(values, mask=mask, other=0.0), mask=mask)
        tl.store(to + half, tl.load(values + half, mask=mask, other=0.0), mask=mask)


@triton.jit
def _gate_mul(gate_up, out, size, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(gate_up + row * 2 * size + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (row * 2 + 1) * size + at, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        # (1 + tanh(x)) / 2 == 1 / (1 + exp(-2x)), with x as in the approximation
        twice = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        power = tl.exp(tl.minimum(-twice, 80.0))  # behind, the quotient is 0 in any type
    else:
        power = tl.exp(-gate)
    value = gate / (1.0 + power) * up
    tl.store(out + row * size + at, value.to(out.dtype.element_ty), mask=inside)


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
class TritonLayers:
    """`LayerOps` with one kernel each."""

    name: str = "triton"

    def add_rms_norm(
        self, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float
    ) -> Tensor:
        rows, size = hidden.shape
        out = torch.empty_like(hidden)
        if rows:
            _add_rms_norm[(rows,)](
                hidden,
                hidden if delta is None else delta,
                weight,
                out,
                size,
                eps,
                HAS_DELTA=delta is not None,
                BLOCK=triton.next_power_of_2(size),
                num_warps=8 if size > 2048 else 4,
            )
        return out

    def rope_write(
        self,
        qkv: Tensor,
        heads: Heads,
        angles: Angles,
        slots: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
    ) -> Tensor:
        check_halves("head_dim", heads.head_dim)
        rows, half = len(qkv), heads.head_dim // 2
        q = torch.empty(rows, heads.num_q_heads, heads.head_dim, dtype=qkv.dtype, device=qkv.device)
        blocks = sum(
            triton.cdiv(count, _HEADS_PER_PROGRAM)
            for count in (heads.num_q_heads, heads.num_kv_heads)
        )
        norm = heads.q_norm is not None
        if rows:
            _rope_write[(rows, blocks)](
                qkv,
                heads.q_norm if norm else qkv,
                heads.k_norm if norm else qkv,
                angles.cos,
                angles.sin,
                slots,
                q,
                k_pages,
                v_pages,
                heads.eps,
                heads.num_q_heads,
                heads.num_kv_heads,
                half,
                k_pages.shape[1],
                *page_strides(k_pages, v_pages),
                NORM=norm,
                HEADS=_HEADS_PER_PROGRAM,
                HALF=triton.next_power_of_2(half),
                num_warps=4,
            )
        return q

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return _gated(gate_up, gelu=False)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        return _gated(gate_up, gelu=True)

    def share_sinks(self, out: Tensor, lse: Tensor, sinks: Tensor) -> None:
        rows, num_heads, head_dim = out.shape
        if rows:
            blocks = triton.cdiv(num_heads * head_dim, _GATE_BLOCK)
            _share_sinks[(rows, blocks)](
                out, lse, sinks, num_heads, head_dim, BLOCK=_GATE_BLOCK, num_warps=4
            )


def _gated(gate_up: Tensor, *, gelu: bool) -> Tensor:
    check_halves("the width of gate and up", gate_up.shape[1])
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        _gate_mul[(rows, triton.cdiv(size, _GATE_BLOCK))](
            gate_up, out, size, GELU=gelu, BLOCK=_GATE_BLOCK, num_warps=4
        )
    return out
