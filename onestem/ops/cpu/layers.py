"""Fused elementwise operations of a step in C++."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from onestem.errors import ConfigError, UnsupportedError
from onestem.ops.cpu.extension import DTYPES, checked_isa, native
from onestem.ops.kv import page_strides
from onestem.ops.layers import Angles, Heads, LayerOps, Queries, check_halves


@dataclass(frozen=True)
class CpuLayers(LayerOps):
    """`LayerOps` in C++, with as many threads as torch uses. GELU and sinks are in PyTorch.

    Args:
        isa: instruction set, by default the one in use.
        deterministic: a row's bits do not depend on other rows. PyTorch's GELU and sigmoid compute
            what fills no vector at the end of a thread's part with other last bits; what they are
            made of here has none.
    """

    name: str = "cpu"
    isa: str | None = None
    deterministic: bool = False

    def add_rms_norm(
        self, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float
    ) -> Tensor:
        """See `LayerOps`."""
        rows, width = hidden.shape
        out = torch.empty_like(hidden)
        _check_same(hidden, out if delta is None else delta, hidden.shape)
        _check_weight(hidden, weight, width)
        native().add_rms_norm(
            checked_isa(self.isa),
            DTYPES[hidden.dtype],
            hidden.data_ptr(),
            0 if delta is None else delta.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            rows,
            width,
            eps,
            weight.dtype == torch.float32,
            torch.get_num_threads(),
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
        *,
        queries: Queries | None = None,
    ) -> Tensor:
        """See `LayerOps`."""
        rows, head_dim = qkv.shape[0], heads.head_dim
        _check_rope(qkv, heads, angles, slots, k_pages, v_pages)
        q = qkv.new_empty(rows, heads.num_q_heads, head_dim)
        written = native().rope_write(
            checked_isa(self.isa),
            DTYPES[qkv.dtype],
            qkv.data_ptr(),
            0 if heads.q_norm is None else heads.q_norm.data_ptr(),
            0 if heads.k_norm is None else heads.k_norm.data_ptr(),
            angles.cos.data_ptr(),
            angles.sin.data_ptr(),
            slots.data_ptr(),
            q.data_ptr(),
            k_pages.data_ptr(),
            v_pages.data_ptr(),
            page_strides(k_pages, v_pages),
            rows,
            heads.num_q_heads,
            heads.num_kv_heads,
            heads.num_value_heads,
            head_dim,
            heads.eps,
            k_pages.shape[1],
            k_pages.shape[0] * k_pages.shape[1],
            heads.q_norm is not None and heads.q_norm.dtype == torch.float32,
            heads.v_norm,
            torch.get_num_threads(),
        )
        if not written:
            raise ConfigError(f"a slot is not in the {len(k_pages)} KV pages")
        return q if queries is None else self._asked(qkv, heads, queries, k_pages, v_pages)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See `LayerOps`."""
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        check_halves("the width of gate and up", gate_up.shape[1])
        _check_same(gate_up, gate_up, (rows, 2 * width))
        out = gate_up.new_empty(rows, width)
        native().silu_mul(
            checked_isa(self.isa),
            DTYPES[gate_up.dtype],
            gate_up.data_ptr(),
            out.data_ptr(),
            rows,
            width,
            torch.get_num_threads(),
        )
        return out

    def gelu(self, x: Tensor, approximate: str) -> Tensor:
        """See `LayerOps`."""
        if not self.deterministic:
            return super().gelu(x, approximate)
        values = x.float()
        if approximate == "tanh":
            inner = (values * values).mul_(0.044715).add_(1).mul_(values)
            curve = inner.mul_(math.sqrt(2 / math.pi)).tanh_()
        else:
            curve = (values * math.sqrt(0.5)).erf_()
        return curve.add_(1).mul_(values).mul_(0.5).to(x.dtype)

    def sigmoid(self, x: Tensor) -> Tensor:
        """See `LayerOps`."""
        if not self.deterministic:
            return super().sigmoid(x)
        return sigmoid(x).to(x.dtype)


def sigmoid(x: Tensor) -> Tensor:
    """In float32, by what computes each value alike wherever it is."""
    return (-x.float()).exp_().add_(1).reciprocal_()


def _check_weight(x: Tensor, weight: Tensor, size: int) -> None:
    """Check the weight of a norm of rows x: x's dtype or float32."""
    _check_same(weight if weight.dtype == torch.float32 else x, weight, (size,))


def _check_same(x: Tensor, other: Tensor, shape: tuple[int, ...]) -> None:
    """Check what the C++ code relies on: dtype, device and shape, and rows without gaps."""
    _check_kind(x, other)
    if other.shape != shape or not (x.is_contiguous() and other.is_contiguous()):
        raise ConfigError(f"got a tensor {tuple(other.shape)}, expected {tuple(shape)}, contiguous")


def _check_kind(x: Tensor, other: Tensor) -> None:
    if x.dtype not in DTYPES or x.dtype != other.dtype or not (x.is_cpu and other.is_cpu):
        raise UnsupportedError(
            f"layer operations 'cpu' got {x.dtype} on {x.device} and {other.dtype} on "
            f"{other.device}, expected one of float32, bfloat16 and float16, on the CPU"
        )


def _check_rope(
    qkv: Tensor, heads: Heads, angles: Angles, slots: Tensor, k_pages: Tensor, v_pages: Tensor
) -> None:
    check_halves("head_dim", heads.head_dim)
    rows = qkv.shape[0]
    _check_same(qkv, qkv, (rows, heads.num_projected * heads.head_dim))
    page_shape = (*k_pages.shape[:2], heads.num_kv_heads, heads.head_dim)
    for pages in (k_pages, v_pages):
        _check_kind(qkv, pages)
        if heads.num_kv_heads and pages.shape != page_shape:
            raise ConfigError(f"got KV pages {tuple(pages.shape)}, expected {page_shape}")
    norms = [norm for norm in (heads.q_norm, heads.k_norm) if norm is not None]
    for norm in norms:
        _check_weight(qkv, norm, heads.head_dim)
        if norm.dtype != norms[0].dtype:
            raise ConfigError(f"norms over heads are {norms[0].dtype} and {norm.dtype}, not alike")
    for name, values in (("cosines", angles.cos), ("sines", angles.sin)):
        _check_values(name, values, torch.float32, (rows, heads.head_dim // 2))
    _check_values("slots", slots, torch.int64, (rows,))


def _check_values(name: str, values: Tensor, kind: torch.dtype, shape: tuple[int, ...]) -> None:
    here = values.is_cpu and values.is_contiguous()
    if values.dtype != kind or values.shape != shape or not here:
        raise ConfigError(
            f"{name} are {values.dtype} {tuple(values.shape)} on {values.device}, expected {kind} "
            f"{shape}, contiguous, on the CPU"
        )
