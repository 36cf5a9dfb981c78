"""Launching the two kernels over a packed work list."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor

from onestem.errors import ConfigError, UnsupportedError
from onestem.ops.triton.config import KernelConfig, load_config
from onestem.ops.triton.kernels import attend_kernel, merge_kernel
from onestem.ops.work import CostModel

__all__ = ["Kernels", "Scores", "States"]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Scores:
    """What is done to scores: see `ops.attention`. `alibi_slopes`: float32 `[num_q_heads]`."""

    scale: float
    softcap: float | None = None
    alibi_slopes: Tensor | None = None

    def __post_init__(self) -> None:
        if not self.scale > 0:
            raise ConfigError(f"scale is {self.scale}, expected a positive number")


@dataclass(frozen=True, eq=False)
class States:
    """Room for partial states, on the device; workspaces that run in turn may share it.

    out: float32 `[max_states, num_q_heads, head_dim]`; lse: float32 `[max_states, num_q_heads]`, in
    powers of two.
    """

    out: Tensor
    lse: Tensor

    @staticmethod
    def empty(max_states: int, num_q_heads: int, head_dim: int, device: torch.device) -> States:
        out = torch.empty(
            max_states, num_q_heads, head_dim, dtype=torch.float32, device=device
        )
        return States(out, torch.empty(out.shape[:2], dtype=torch.float32, device=device))

    def __len__(self) -> int:
        return len(self.lse)


@dataclass(frozen=True)
class Kernels:
    """The kernels for one shape of heads and pages.

    Attributes:
        config: tile shapes.
        num_programs: size of the attention kernel's grid.
        windowed: whether plans have a window.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    config: KernelConfig
    num_sms: int
    num_programs: int
    windowed: bool

    @staticmethod
    def make(
        *,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        windowed: bool,
        config: KernelConfig | None = None,
        num_programs: int | None = None,
    ) -> Kernels:
        """With the device's tuned configuration (or the rule for unknown GPUs) by default."""
        _check(num_q_heads, num_kv_heads, head_dim, dtype, device)
        name, num_sms = _device(device)
        if config is None:
            config, _ = load_config(name, dtype, head_dim, num_q_heads // num_kv_heads)
        return Kernels(
            num_q_heads, num_kv_heads, head_dim, page_size, config, num_sms,
            num_programs or config.programs_per_sm * num_sms, windowed,
        )  # fmt: skip

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def cost(self) -> CostModel:
        """What decides about sharing and cuts."""
        return self.config.cost(self.num_programs)

    def launch(
        self,
        control: Tensor,
        states: States,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        out: Tensor,
        lse: Tensor,
        scores: Scores | None = None,
    ) -> None:
        """Both kernels, on the current stream; see `Workspace.launch`."""
        scores = scores or Scores(1 / math.sqrt(self.head_dim))
        self._attend(control, states, q, k_pages, v_pages, out, lse, scores)
        self.merge(control, states, out, lse)

    def _attend(
        self,
        control: Tensor,
        states: States,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        scores: Scores,
    ) -> None:
        slopes, softcap = scores.alibi_slopes, scores.softcap
        attend_kernel[(self.num_programs,)](
            control, q, k, v, out, lse, states.out, states.lse,
            lse if slopes is None else slopes,
            float(scores.scale),
            0.0 if softcap is None else float(softcap),
            NUM_KV_HEADS=self.num_kv_heads,
            GROUP=self.group,
            HEAD_DIM=self.head_dim,
            PAGE_SIZE=self.page_size,
            BLOCK_D=max(16, triton.next_power_of_2(self.head_dim)),
            WINDOWED=self.windowed,
            ALIBI=slopes is not None,
            SOFTCAP=softcap is not None,
            num_warps=self.config.num_warps,
            **self._tile_arguments(),
        )  # fmt: skip

    def _tile_arguments(self) -> dict[str, int]:
        arguments = {}
        for i, tile in enumerate(self.config.tiles):
            arguments[f"M{i}"], arguments[f"N{i}"] = tile.block_m, tile.block_n
            arguments[f"STAGES{i}"] = self.config.stages[i]
        return arguments

    def merge(self, control: Tensor, states: States, out: Tensor, lse: Tensor) -> None:
        """The second kernel alone."""
        merge_kernel[(4 * self.num_sms,)](
            control, out, lse, states.out, states.lse,
            NUM_HEADS=self.num_q_heads,
            HEAD_DIM=self.head_dim,
            BLOCK_H=self.config.merge_heads,
            BLOCK_D=triton.next_power_of_2(self.head_dim),
            UNROLL=4,
            num_warps=4,
        )  # fmt: skip


def _check(
    num_q_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    if dtype not in DTYPES:
        raise UnsupportedError(
            f"attention in {dtype} has no Triton kernel: use bfloat16, float16 or float32"
        )
    if device.type == "cpu" and dtype == torch.bfloat16:
        raise UnsupportedError(
            "Triton's interpreter does not multiply bfloat16: use float16 or float32 on a CPU"
        )
    if num_q_heads % num_kv_heads != 0:
        raise ConfigError(
            f"{num_q_heads} query heads are no multiple of {num_kv_heads} KV heads"
        )
    if num_q_heads // num_kv_heads > 16 or head_dim > 256:
        raise UnsupportedError(
            f"head_dim {head_dim} with {num_q_heads // num_kv_heads} query heads per KV head: the "
            "Triton kernel takes at most 256 and 16, use the torch implementation"
        )


@cache
def _device(device: torch.device) -> tuple[str, int]:
    """Name and multiprocessors; the interpreter runs programs in turn and gets few."""
    if device.type != "cuda":
        return "cpu", 2
    return (
        torch.cuda.get_device_name(device),
        torch.cuda.get_device_properties(device).multi_processor_count,
    )
