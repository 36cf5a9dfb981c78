"""`attention`: one call for every shape of sharing, and the choice of its implementation."""

from __future__ import annotations

import os
from collections.abc import Collection
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from onestem.errors import ConfigError, UnsupportedError
from onestem.ops.checks import check_scores, check_shapes
from onestem.ops.cpu import CpuAttention, CpuLayers, CpuSampling, is_built, native, takes_size
from onestem.ops.layers import LayerOps, TorchLayers
from onestem.ops.plan import AttentionPlan
from onestem.ops.reference import ReferenceAttention
from onestem.ops.rounding import RoundRows, rounded_rows
from onestem.ops.sampling import Sampling, TorchSampling
from onestem.ops.state import State
from onestem.ops.torch_impl import TorchAttention

__all__ = [
    "AttentionImpl",
    "PreparedAttention",
    "attention",
    "available",
    "resolve",
    "resolve_layers",
    "resolve_sampling",
]


class PreparedAttention(Protocol):
    """A plan made ready for one device; serves all layers of a step."""

    def attend(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        *,
        scale: float | None = None,
        alibi_slopes: Tensor | None = None,
        softcap: float | None = None,
    ) -> State: ...


class AttentionImpl(Protocol):
    """An implementation of attention over plans."""

    @property
    def name(self) -> str: ...

    def head_major(self, head_dim: int, dtype: torch.dtype) -> bool:
        """The page layout with which it is fastest, see `allocate_pages`."""
        ...

    def prepare(self, plan: AttentionPlan, *, share: bool = True) -> PreparedAttention:
        """Turn a plan into work items. `share=False` reads a shared run once for each sequence's
        rows, as an engine with a prefix cache but without shared attention does."""
        ...


_IMPLS: dict[str, AttentionImpl] = {"reference": ReferenceAttention(), "torch": TorchAttention()}


def available() -> tuple[str, ...]:
    """Names of the implementations that can run here."""
    cpu = ["cpu"] if is_built() else []
    return (*_IMPLS, *cpu, *(["triton"] if _triton() is not None else []))


def resolve(
    name: str = "auto",
    device: torch.device | str = "cpu",
    *,
    heads: Collection[tuple[int, int]] = ((64, 1),),
) -> AttentionImpl:
    """The implementation of a name. `auto` is the fastest that runs on the device and takes all of
    `heads`: (size, query heads per KV head) each. A named one that cannot run raises
    `UnsupportedError`."""
    if name == "auto":
        return _fastest(torch.device(device).type, heads)
    if name == "triton":
        triton = _triton()
        if triton is not None:
            return triton
        raise UnsupportedError(
            "attention implementation 'triton' needs the package triton and an NVIDIA GPU (or "
            f"TRITON_INTERPRET=1), use one of: {', '.join(available())}"
        )
    if name == "cpu":
        native()  # raises if it is not built
        return CpuAttention()
    if name not in _IMPLS:
        raise ConfigError(
            f"attention implementation is {name!r}, expected auto or one of: "
            f"{', '.join(available())}"
        )
    return _IMPLS[name]


def _fastest(device_type: str, heads: Collection[tuple[int, int]]) -> AttentionImpl:
    if device_type == "cuda" and (triton := _triton()) is not None:
        from onestem.ops.triton.launch import takes_heads

        return triton if all(takes_heads(*pair) for pair in heads) else _IMPLS["torch"]
    if device_type == "cpu" and is_built() and all(takes_size(size) for size, _ in heads):
        return CpuAttention()
    return _IMPLS["torch"]


def _triton() -> AttentionImpl | None:
    """The Triton implementation if it can run: on a GPU, or under Triton's interpreter."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if find_spec("triton") is None or not (interpreted or torch.cuda.is_available()):
        return None
    from onestem.ops.triton.attention import TritonAttention

    return TritonAttention()


def resolve_layers(device: torch.device | str = "cpu") -> LayerOps:
    """The operations between a layer's products on a device: its kernels, or else PyTorch."""
    if torch.device(device).type == "cuda" and find_spec("triton") is not None:
        from onestem.ops.triton.layers import TritonLayers

        return TritonLayers()
    if torch.device(device).type == "cpu" and is_built():
        return CpuLayers()
    return TorchLayers()


def resolve_sampling(device: torch.device | str = "cpu") -> Sampling:
    """The sampler of a device: its kernels, or else PyTorch."""
    if torch.device(device).type == "cuda" and find_spec("triton") is not None:
        from onestem.ops.triton.sampling import TritonSampling

        return TritonSampling()
    if torch.device(device).type == "cpu" and is_built():
        return CpuSampling()
    return TorchSampling()


def resolve_rounding(device: torch.device) -> RoundRows:
    """The function that rounds rows to 8 bits on a device: its kernel, or else PyTorch."""
    if device.type == "cuda" and find_spec("triton") is not None:
        from onestem.ops.triton.rounding import rounded_rows as by_kernel

        return by_kernel
    return rounded_rows


def attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    plan: AttentionPlan,
    *,
    scale: float | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    impl: str = "auto",
) -> State:
    """Attention of each query row over the tokens that the plan shows it.

    Args:
        q: `[num_rows, num_q_heads, head_dim]`.
        k_pages, v_pages: `[num_pages, page_size, num_kv_heads, head_dim]`, q's dtype, as
            `allocate_pages` makes them; query head h reads KV head
            `h // (num_q_heads / num_kv_heads)`.
        plan: the rows' spans.
        scale: factor on the scores, default `1 / sqrt(head_dim)`; above 0 for `triton`.
        alibi_slopes: float32 `[num_q_heads]` on q's device; adds `slope * (p_key - p_row)` to the
            scores.
        softcap: above 0; scores become `softcap * tanh(score / softcap)` before ALiBi.
        impl: `auto`, or the name of an implementation.

    Returns:
        `State(out, lse)`: out in q's dtype (float64 from the reference), lse natural log.

    Raises:
        ConfigError: tensors, plan and options do not fit together.
        UnsupportedError: the named implementation does not take this.
    """
    check_shapes(q, k_pages, v_pages, plan)
    check_scores(q, scale, alibi_slopes, softcap)
    heads = [(q.shape[2], q.shape[1] // k_pages.shape[2])]
    prepared = resolve(impl, q.device, heads=heads).prepare(plan)
    return prepared.attend(
        q, k_pages, v_pages, scale=scale, alibi_slopes=alibi_slopes, softcap=softcap
    )
