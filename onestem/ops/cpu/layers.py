"""Fused elementwise operations of a step in C++."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onestem.errors import ConfigError, UnsupportedError
from onestem.ops.cpu.extension import DTYPES, checked_isa, chosen_isa, native
from onestem.ops.kv import page_strides
from onestem.ops.layers import Angles, Heads, TorchLayers, check_halves

__all__ = ["CpuLayers"]


@dataclass(frozen=True)
class CpuLayers:
    """C++ implementation of `LayerOps`, with as many threads as torch uses. PyTorch has the
    GELU, sinks, and norms whose weights are float32 beside 16-bit rows.

    Args:
        isa: instruction set, by default the one in use.
    """

    name: str = "cpu"
    isa: str | None = None

    def add_rms_norm(
        self, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float
    ) -> Tensor:
        """See `LayerOps`."""
        if _is_wider(weight, hidden):
            return TorchLayers().add_rms_norm(hidden, delta, weight, eps)
        rows, width = hidden.shape
        out = torch.empty_like(hidden)
        _check_same(hidden, out if delta is None else delta, hidden.shape)
        _check_same(hidden, weight, (width,))
        native().add_rms_norm(
            self._isa(),
            DTYPES[hidden.dtype],
            hidden.data_ptr(),
            0 if delta is None else delta.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            rows,
            width,
            eps,
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
    ) -> Tensor:
        """See `LayerOps`."""
        rows, head_dim = len(qkv), heads.head_dim
        if heads.q_norm is not None and _is_wider(heads.q_norm, qkv):
            return TorchLayers().rope_write(qkv, heads, angles, slots, k_pages, v_pages)
        _check_rope(qkv, heads, angles, slots, k_pages, v_pages)
        q = torch.empty(rows, heads.num_q_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
        written = native().rope_write(
            self._isa(),
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
            head_dim,
            heads.eps,
            k_pages.shape[1],
            k_pages.shape[0] * k_pages.shape[1],
            torch.get_num_threads(),
        )
        if not written:
            raise ConfigError(f"a slot is not in the {len(k_pages)} KV pages")
        return q

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See `LayerOps`."""
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        check_halves("the width of gate and up", gate_up.shape[1])
        _check_same(gate_up, gate_up, (rows, 2 * width))
        out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
        native().silu_mul(
            self._isa(),
            DTYPES[gate_up.dtype],
            gate_up.data_ptr(),
            out.data_ptr(),
            rows,
            width,
            torch.get_num_threads(),
        )
        return out

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """See `LayerOps`."""
        return TorchLayers().gelu_mul(gate_up)

    def share_sinks(self, out: Tensor, lse: Tensor, sinks: Tensor) -> None:
        """See `LayerOps`."""
        TorchLayers().share_sinks(out, lse, sinks)

    def _isa(self) -> str:
        return chosen_isa() if self.isa is None else checked_isa(self.isa)


def _is_wider(weight: Tensor, rows: Tensor) -> bool:
    return weight.dtype == torch.float32 and rows.dtype != torch.float32


def _check_same(x: Tensor, other: Tensor, shape: tuple[int, ...]) -> None:
    """What the C++ code relies on: type, place and shape, and rows without gaps."""
    _check_kind(x, other)
    if other.shape != shape or not (x.is_contiguous() and other.is_contiguous()):
        raise ConfigError(f"got a tensor {tuple(other.shape)}, expected {tuple(shape)}, contiguous")


def _check_kind(x: Tensor, other: Tensor) -> None:
    on_cpu = x.device.type == other.device.type == "cpu"
    if x.dtype not in DTYPES or x.dtype != other.dtype or not on_cpu:
        raise UnsupportedError(
            f"layer operations 'cpu' got {x.dtype} on {x.device} and {other.dtype} on "
            f"{other.device}, expected one of float32, bfloat16 and float16, on the CPU"
        )


def _check_rope(
    qkv: Tensor, heads: Heads, angles: Angles, slots: Tensor, k_pages: Tensor, v_pages: Tensor
) -> None:
    num_heads = heads.num_q_heads + 2 * heads.num_kv_heads
    check_halves("head_dim", heads.head_dim)
    _check_same(qkv, qkv, (len(qkv), num_heads * heads.head_dim))
    page_shape = (*k_pages.shape[:2], heads.num_kv_heads, heads.head_dim)
    for pages in (k_pages, v_pages):
        _check_kind(qkv, pages)
        if pages.shape != page_shape:
            raise ConfigError(f"got KV pages {tuple(pages.shape)}, expected {page_shape}")
    for norm in (heads.q_norm, heads.k_norm):
        if norm is not None:
            _check_same(qkv, norm, (heads.head_dim,))
    for name, values in (("cosines", angles.cos), ("sines", angles.sin)):
        _check_values(name, values, torch.float32, (len(qkv), heads.head_dim // 2))
    _check_values("slots", slots, torch.int64, (len(qkv),))


def _check_values(name: str, values: Tensor, kind: torch.dtype, shape: tuple[int, ...]) -> None:
    here = values.device.type == "cpu" and values.is_contiguous()
    if values.dtype != kind or values.shape != shape or not here:
        raise ConfigError(
            f"{name} are {values.dtype} {tuple(values.shape)} on {values.device}, expected {kind} "
            f"{shape}, contiguous, on the CPU"
        )
