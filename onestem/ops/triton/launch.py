"""Launching the two kernels over a packed work list."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from onestem.errors import ConfigError, UnsupportedError
from onestem.ops.kv import page_strides
from onestem.ops.plan import AttentionPlan
from onestem.ops.scores import PLAIN, Scores
from onestem.ops.triton.config import KernelConfig, load_config
from onestem.ops.triton.grid import fold_kernel, grid_config, grid_kernel
from onestem.ops.triton.kernels import attend_kernel, merge_kernel
from onestem.ops.triton.sizes import power_of_2
from onestem.ops.triton.words import Form, HopperForm
from onestem.ops.work import CostModel, WorkList, make_work
from onestem.ops.work.grid import grid_work
from onestem.ops.work.lists import KeptChoice

MERGING = 32  # programs of one warp that a multiprocessor holds
MAX_HEAD_DIM, MAX_HOPPER_HEAD_DIM = 512, 256
MAX_GROUP = 128  # query heads of a KV head: a row's are in one tile
MAX_TILE = 128 * 256  # elements of its queries
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, eq=False)
class States:
    """Memory for partial states, on the device; workspaces that run in turn may share it.

    out: float32 `[max_states, num_q_heads, head_dim]`; lse: float32 `[max_states, num_q_heads]`, in
    powers of two. On the grid `out` is not normalised, `lse` the maximum, and `weights` the sum.
    """

    out: Tensor
    lse: Tensor
    weights: Tensor

    @staticmethod
    def empty(max_states: int, num_q_heads: int, head_dim: int, device: torch.device) -> States:
        """Memory for `max_states`, not initialised."""
        out = torch.empty(max_states, num_q_heads, head_dim, dtype=torch.float32, device=device)
        two = torch.empty(2, max_states, num_q_heads, dtype=torch.float32, device=device)
        return States(out, *two)

    def of_size(self, head_dim: int) -> States:
        """The same number of states of smaller heads, in the same memory."""
        shape = (*self.lse.shape, head_dim)
        return replace(self, out=self.out.flatten()[: math.prod(shape)].view(shape))

    def __len__(self) -> int:
        return len(self.lse)


@dataclass(frozen=True)
class Kernels:
    """The kernels for one shape of heads and pages.

    Attributes:
        config: tile shapes.
        num_sms: multiprocessors; grids are proportional to them.
        windowed: whether plans have a window.
        hopper: whether items run in `sm90.attend_hopper` (on the grid, the widest in `grid_rows`),
            on a device with Hopper's units.
        dependent: whether a launch may begin before the one that it waits for has ended.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    config: KernelConfig
    num_sms: int
    windowed: bool
    hopper: bool
    dependent: bool

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
        deterministic: bool = False,
    ) -> Kernels:
        """The kernels, by default with the device's tuned configuration or the default rule.
        `deterministic`: those on a grid of positions (`ops.triton.grid`)."""
        _check(num_q_heads, num_kv_heads, head_dim, dtype, device)
        group = num_q_heads // num_kv_heads
        name, num_sms, has_hopper = _device(device)
        hopper = takes_hopper(device, dtype, num_kv_heads, head_dim, page_size)
        shape = (num_q_heads, num_kv_heads, head_dim, page_size)
        if deterministic:
            hopper = has_hopper and head_dim in (64, 128)
            few = has_hopper or device.type == "cpu"
            config = config or grid_config(dtype, head_dim, group, few, hopper)
            hopper = hopper and len(config.tiles) > 2
            return GridKernels(*shape, config, num_sms, windowed, hopper, has_hopper)
        if config is None:
            config, _ = load_config(name, dtype, head_dim, group, hopper, _memory_rate(device))
        elif config.hopper_registers is not None and not hopper:
            raise ConfigError(
                f"the configuration is one of the kernel for Hopper, which does not run on {name} "
                f"in {dtype} with {num_kv_heads} KV heads of {head_dim} and pages of {page_size}: "
                "give one without hopper_registers"
            )
        hopper = hopper and config.hopper_registers is not None
        return Kernels(*shape, config, num_sms, windowed, hopper, has_hopper)

    def most_queries(self, num_rows: int, wide: bool) -> int:
        """Queries of the largest tile that a step of `num_rows` rows may need; `wide`: whether its
        work list has items of the widest tiles. `attend_hopper` is compiled for it: with less code
        a launch begins sooner."""
        sizes = [tile.block_m for tile in self.config.tiles]
        if not wide:
            sizes = sizes[:-1] or sizes
        return next((size for size in sizes if size >= num_rows * self.group), sizes[-1])

    def may_be_wide(self, num_rows: int) -> bool:
        """Whether a step of `num_rows` rows may have items of the widest tiles."""
        tiles = self.config.tiles
        return len(tiles) == 1 or num_rows * self.group > tiles[-2].block_m

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_q_heads // self.num_kv_heads

    @cached_property
    def cost(self) -> CostModel:
        """The cost model that decides about sharing and cuts."""
        return self.config.cost(self.num_sms)

    def listed(
        self, plan: AttentionPlan, choice: KeptChoice, *, share: bool, **limits: int | None
    ) -> WorkList:
        """The work list of a plan (`make_work`), made with the choice of those before it.

        Raises:
            ConfigError: the plan has a window and the kernels have not, or the reverse.
        """
        if (plan.window is not None) != self.windowed:
            raise ConfigError(
                f"the plan's window is {plan.window}, the kernels have windowed={self.windowed}"
            )
        return self._make_list(plan, choice, share=share, **limits)

    def _make_list(
        self, plan: AttentionPlan, choice: KeptChoice, *, share: bool, **limits: int | None
    ) -> WorkList:
        work = make_work(
            plan,
            self.cost,
            num_kv_heads=self.num_kv_heads,
            group=self.group,
            share=share,
            choice=choice.next(),
            **limits,
        )
        choice.keep(work)
        return work

    def launch(
        self,
        control: Tensor,
        states: States,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        out: Tensor,
        lse: Tensor,
        scores: Scores = PLAIN,
        num_merges: int | None = None,
        wide: bool = True,
    ) -> None:
        """Launch all kernels on the current stream; see `Workspace.launch`.

        `wide`: whether the work list may have items of the widest tiles. `num_merges`: rows that it
        merges; 0: there is no second launch. None: all rows, as needed for a launch that a graph
        replays for other plans.
        """
        tensors = (control, q, k_pages, v_pages, out, lse, states.out, states.lse)
        self._attend_items(tensors, states, scores, wide)
        self.merge(control, states, out, lse, num_merges)

    def _attend_items(
        self, tensors: tuple[Tensor, ...], states: States, scores: Scores, wide: bool
    ) -> None:
        if self.hopper:
            self._attend_hopper(tensors, scores, self.most_queries(len(tensors[1]), wide))
            return
        if wide and self.may_be_wide(len(tensors[1])):
            self._attend(1, tensors, scores)
        self._attend(0, tensors, scores)

    def _attend_hopper(self, tensors: tuple[Tensor, ...], scores: Scores, most: int) -> None:
        from onestem.ops.triton.sm90 import attend_hopper, descriptors

        control, q, k_pages, v_pages, *results = tensors
        block_n = self.config.tiles[-1].block_n
        assert self.config.hopper_registers is not None
        registers, copy_registers = self.config.hopper_registers
        box = min(self.page_size, block_n)
        attend_hopper[(self.num_sms,)](
            control,
            q,
            *descriptors(k_pages, v_pages, box),
            *results,
            *self._score_arguments(tensors, scores),
            len(control),
            FORM=HopperForm(
                **self._form(scores),
                block_n=block_n,
                stages=self.config.stages[-1],
                box=box,
                columns=self.config.tiles[0].block_m if len(self.config.tiles) > 2 else 0,
                most=most,
            ),
            REGISTERS=registers,
            COPY_REGISTERS=copy_registers,
            num_warps=4,
        )

    def _attend(self, wide: int, tensors: tuple[Tensor, ...], scores: Scores) -> None:
        config = self.config
        attend_kernel[(config.programs_per_sm[wide] * self.num_sms,)](
            *tensors,
            *self._score_arguments(tensors, scores),
            **self._tile_arguments(wide),
            WIDE=wide,
            HEAD_MAJOR=page_strides(*tensors[2:4])[2] != self.head_dim,
            FORM=Form(**self._form(scores)),
            DEPENDENT=self.dependent and not wide,
            num_warps=config.num_warps[wide],
        )

    def _score_arguments(
        self, tensors: tuple[Tensor, ...], scores: Scores
    ) -> tuple[Tensor, float, float]:
        """slopes, scale, softcap; unused ones are placeholders of the right type."""
        scale = float(scores.factor(self.head_dim))
        if not scale > 0:
            raise ConfigError(f"scale is {scale}, expected a positive number")
        slopes = tensors[5] if scores.alibi_slopes is None else scores.alibi_slopes.contiguous()
        return slopes, scale, float(scores.softcap or 0.0)

    def _form(self, scores: Scores) -> dict[str, Any]:
        """The fields of a `Form`."""
        return {
            "num_kv_heads": self.num_kv_heads,
            "group": self.group,
            "head_dim": self.head_dim,
            "block_d": max(16, power_of_2(self.head_dim)),
            "page_size": self.page_size,
            "windowed": self.windowed,
            "alibi": scores.alibi_slopes is not None,
            "softcap": scores.softcap is not None,
        }

    def _tile_arguments(self, wide: int) -> dict[str, int]:
        arguments = {}
        for i, number in enumerate((2, 2) if wide else (0, 1)):
            tile = self.config.tiles[number]
            arguments[f"M{i}"], arguments[f"N{i}"] = tile.block_m, tile.block_n
            arguments[f"STAGES{i}"] = self.config.stages[number]
        return arguments

    def merge(
        self,
        control: Tensor,
        states: States,
        out: Tensor,
        lse: Tensor,
        num_merges: int | None = None,
    ) -> None:
        """Launch the second kernel alone; see `launch`."""
        works = (len(out) if num_merges is None else num_merges) * self.num_q_heads  # a warp each
        if works:
            self._merge(min(works, MERGING * self.num_sms), control, states, out, lse)

    def _merge(
        self, programs: int, control: Tensor, states: States, out: Tensor, lse: Tensor
    ) -> None:
        few = len(out) * self.num_q_heads <= 4 * self.num_sms
        merge_kernel[(programs,)](
            control, out, lse, states.out, states.lse,
            # More states at a time, or more programs.
            UNROLL=8 if not few else 16 if self.head_dim > 256 else 32,
            **self._merge_arguments(),
        )  # fmt: skip

    def _merge_arguments(self) -> dict[str, Any]:
        return {
            "NUM_HEADS": self.num_q_heads,
            "HEAD_DIM": self.head_dim,
            "BLOCK_D": power_of_2(self.head_dim),
            "DEPENDENT": self.dependent,
            "num_warps": 1,
            **({"launch_pdl": True} if self.dependent else {}),
        }


@dataclass(frozen=True)
class GridKernels(Kernels):
    """The kernels of `ops.triton.grid`: items cut on a grid of positions."""

    def may_be_wide(self, num_rows: int) -> bool:
        """See `Kernels`. Without room for states, a row's segments are an item of the widest."""
        return len(self.config.tiles) > 1

    def _make_list(
        self, plan: AttentionPlan, choice: KeptChoice, *, share: bool, **limits: int | None
    ) -> WorkList:
        tiles = self.config.tiles
        return grid_work(
            plan,
            block_n=tiles[0].block_n,
            tile_rows=tuple(tile.block_m // self.group for tile in tiles),
            num_kv_heads=self.num_kv_heads,
            programs=tuple(self.num_sms * n for n in self.config.programs_per_sm[: len(tiles)]),
            share=share,
            **limits,
        )

    def _attend_items(
        self, tensors: tuple[Tensor, ...], states: States, scores: Scores, wide: bool
    ) -> None:
        queries, tiles = len(tensors[1]) * self.group, self.config.tiles
        most = sum(i == 1 or queries > tiles[i - 1].block_m for i in range(1, len(tiles))) * wide
        plain = scores.softcap is None and scores.alibi_slopes is None
        for form in range(most, -1, -1):
            if form == 2 and self.hopper and plain:
                self._attend_rows(tensors, states, scores)
                continue
            beside = self.dependent and form < most
            grid_kernel[(self.config.programs_per_sm[form] * self.num_sms,)](
                *tensors,
                states.weights,
                *self._score_arguments(tensors, scores),
                BLOCK_M=self.config.tiles[form].block_m,
                BLOCK_N=self.config.tiles[form].block_n,
                STAGES=self.config.stages[form],
                KIND=form,
                FEW=len(self.config.tiles) > 1 and not form,
                BESIDE=beside,
                HEAD_MAJOR=page_strides(*tensors[2:4])[2] != self.head_dim,
                DEPENDENT=self.dependent,
                FORM=Form(**self._form(scores)),
                num_warps=self.config.num_warps[form],
                enable_fp_fusion=False,
                **({"launch_pdl": True} if beside else {}),
            )

    def _attend_rows(self, tensors: tuple[Tensor, ...], states: States, scores: Scores) -> None:
        from onestem.ops.triton.sm90 import grid_rows

        grid_rows[(self.num_sms,)](
            *tensors,
            states.weights,
            *self._score_arguments(tensors, scores),
            HEAD_MAJOR=page_strides(*tensors[2:4])[2] != self.head_dim,
            FORM=Form(**self._form(scores)),
            num_warps=4,
            enable_fp_fusion=False,
        )

    def _merge(
        self, programs: int, control: Tensor, states: States, out: Tensor, lse: Tensor
    ) -> None:
        fold_kernel[(programs,)](
            control, out, lse, states.out, states.lse, states.weights,
            UNROLL=4, **self._merge_arguments(), enable_fp_fusion=False,
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
        raise ConfigError(f"{num_q_heads} query heads are no multiple of {num_kv_heads} KV heads")
    if not takes_heads(head_dim, num_q_heads // num_kv_heads):
        raise UnsupportedError(
            f"head_dim {head_dim} with {num_q_heads // num_kv_heads} query heads per KV head: the "
            f"Triton kernel takes at most {MAX_HEAD_DIM} and {MAX_GROUP}, and "
            f"{MAX_TILE // MAX_HEAD_DIM} of heads above {MAX_TILE // MAX_GROUP}: use the torch "
            "implementation"
        )


def takes_heads(head_dim: int, group: int) -> bool:
    """Whether the kernels take heads of this size with `group` query heads per KV head."""
    wide = MAX_TILE // MAX_HEAD_DIM if head_dim > MAX_TILE // MAX_GROUP else MAX_GROUP
    return head_dim <= MAX_HEAD_DIM and group <= wide


def takes_hopper(
    device: torch.device, dtype: torch.dtype, num_kv_heads: int, head_dim: int, page_size: int
) -> bool:
    """Whether the kernel for Hopper runs on a device with these heads and pages."""
    _, num_sms, has_hopper = _device(device)
    # Rows of a head begin at multiples of 16 bytes, and pages are copied whole.
    suits = head_dim % 8 == 0 and 64 <= head_dim <= MAX_HOPPER_HEAD_DIM
    whole = page_size >= 8 and page_size & (page_size - 1) == 0
    # Each KV head needs programs of both roles.
    return has_hopper and dtype.itemsize == 2 and suits and whole and 2 * num_kv_heads <= num_sms


@cache
def _device(device: torch.device) -> tuple[str, int, bool]:
    """Name, multiprocessors (few for the interpreter, which runs programs in turn), and whether the
    device has Hopper's units."""
    if device.type != "cuda":
        return "cpu", 2, False
    properties = torch.cuda.get_device_properties(device)
    return properties.name, properties.multi_processor_count, properties.major == 9


@cache
def _memory_rate(device: torch.device) -> float | None:
    """Bytes/s that a copy is likely to reach: 0.88 of what clock and bus allow (measured: 0.90 on
    an H100, 0.87 on an H200). None if PyTorch does not report them."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    kilohertz = getattr(properties, "memory_clock_rate", 0)
    bits = getattr(properties, "memory_bus_width", 0)
    return 0.88 * 2e3 * kilohertz * bits / 8 or None
