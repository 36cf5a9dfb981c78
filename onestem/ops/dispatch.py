"""Attention over plans, and the choice of what computes it and other operations."""

from __future__ import annotations

import os
from collections.abc import Collection
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from onestem.errors import ConfigError, UnsupportedError
from onestem.ops.cpu import (
    CpuAttention,
    CpuDelta,
    CpuLayers,
    CpuSampling,
    is_built,
    native,
    takes_size,
)
from onestem.ops.delta import DeltaOps
from onestem.ops.layers import LayerOps
from onestem.ops.plan import AttentionPlan
from onestem.ops.reference import ReferenceAttention
from onestem.ops.rounding import RoundRows, rounded_rows
from onestem.ops.sampling import Sampling
from onestem.ops.scores import PLAIN, Scores
from onestem.ops.state import State
from onestem.ops.torch_impl import TorchAttention


class PreparedAttention(Protocol):
    """A plan made ready for one device; serves all layers of a step."""

    def attend(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, scores: Scores = PLAIN) -> State:
        """Attention of each query row over the tokens that the plan shows it.

        Args:
            q: `[num_queries, num_q_heads, head_dim]`: of all rows, then of moved ones.
            k_pages, v_pages: `[num_pages, page_size, num_kv_heads, head_dim]`, q's dtype, as
                `allocate_pages` makes them; query head h reads KV head
                `h // (num_q_heads / num_kv_heads)`.

        Returns:
            `State(out, lse)` of all rows: out in q's dtype (float64 from the reference), lse
            natural log.
        """
        ...


class AttentionImpl(Protocol):
    """An implementation of attention over plans."""

    @property
    def name(self) -> str: ...

    @property
    def deterministic(self) -> bool:
        """Whether a row's bits depend on what it sees alone, not on the plan's other rows, its runs
        or sharing. What a row sees must be at positions without a gap."""
        ...

    @property
    def takes_parts(self) -> bool:
        """Whether a plan may, and had better, have parts of the pages as its pages where tokens of
        modules are hidden. A page's parts follow each other unless it is `head_major`."""
        ...

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
    deterministic: bool = False,
) -> AttentionImpl:
    """The implementation of a name. `auto` is the fastest that runs on the device and takes all of
    `heads`: (size, query heads per KV head) each. A named one that cannot run, or that is not
    `deterministic` where it has to be, raises `UnsupportedError`."""
    if deterministic:
        return _deterministic(name, torch.device(device).type, heads)
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


def _deterministic(
    name: str, device_type: str, heads: Collection[tuple[int, int]]
) -> AttentionImpl:
    impl = _fastest(device_type, heads) if name == "auto" else resolve(name)
    if isinstance(impl, CpuAttention):
        return CpuAttention(deterministic=True)
    if impl.name == "triton":
        from onestem.ops.triton.attention import TritonAttention

        return TritonAttention(deterministic=True)
    raise UnsupportedError(
        f"attention implementation {impl.name!r} is not deterministic, 'cpu' is (heads of a "
        "multiple of 8, on a CPU, with the compiled extension), and 'triton': leave deterministic "
        "out"
    )


def _triton() -> AttentionImpl | None:
    """The Triton implementation if it can run: on a GPU, or under Triton's interpreter."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if find_spec("triton") is None or not (interpreted or torch.cuda.is_available()):
        return None
    from onestem.ops.triton.attention import TritonAttention

    return TritonAttention()


def resolve_layers(device: torch.device | str = "cpu", *, deterministic: bool = False) -> LayerOps:
    """The operations between a layer's products on a device: its kernels, or else PyTorch.
    `deterministic`: as of `resolve`, where a CPU has kernels."""
    device = torch.device(device)
    if _on_triton(device):
        from onestem.ops.triton.layers import TritonLayers

        return TritonLayers()
    here = device.type == "cpu" and is_built()
    return CpuLayers(deterministic=deterministic) if here else LayerOps()


def resolve_delta(device: torch.device | str = "cpu", *, deterministic: bool = False) -> DeltaOps:
    """The operations of layers with a gated delta rule on a device, as `resolve_layers`."""
    device = torch.device(device)
    if _on_triton(device):
        from onestem.ops.triton.delta import TritonDelta

        return TritonDelta(deterministic=deterministic)
    return CpuDelta() if device.type == "cpu" and is_built() else DeltaOps()


def resolve_sampling(device: torch.device | str = "cpu") -> Sampling:
    """The sampler of a device: its kernels, or else PyTorch."""
    device = torch.device(device)
    if _on_triton(device):
        from onestem.ops.triton.sampling import TritonSampling

        return TritonSampling()
    return CpuSampling() if device.type == "cpu" and is_built() else Sampling()


def resolve_rounding(device: torch.device) -> RoundRows:
    """The function that rounds rows to 8 bits on a device: its kernel, or else PyTorch."""
    if _on_triton(device):
        from onestem.ops.triton.rounding import rounded_rows as by_kernel

        return by_kernel
    return rounded_rows


def _on_triton(device: torch.device) -> bool:
    return device.type == "cuda" and find_spec("triton") is not None
