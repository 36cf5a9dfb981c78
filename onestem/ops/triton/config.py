"""Tile shapes of each GPU: tuned configurations are data; an unknown GPU gets a fixed rule.

`configs/DEVICE.json` holds a list of objects: `dtype`, `head_dim`, `group` (the shape it was tuned
for) and the fields of `KernelConfig`. Among those of the same dtype, head_dim and kernel (Hopper's
or its twin), the one with the nearest group is used. `onestem bench tune` writes such a file;
nothing is tuned at start.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from onestem.ops.work import CostModel, Tile

DIRECTORY = Path(__file__).parent / "configs"
MERGED_HEADS = 4  # of the default configurations; with fewer, a state costs no less


@dataclass(frozen=True)
class KernelConfig:
    """Parameters that compile and launch the attention kernels, and costs of their items.

    Pairs are for items of narrower tiles, which read, and for those of the widest, which multiply;
    on the grid each tile has its own.

    Attributes:
        tiles: one to three shapes, narrow to wide. On Hopper all have the same `block_n`; the
            narrowest of three is for items whose queries are columns. With one of 128 tokens, the
            second warpgroup takes a row's queries from 64 on as columns, 16 at most.
        stages: software pipeline depth of each (Triton's `num_stages`); on Hopper, tiles in the
            ring of shared memory (an even number).
        num_warps: warps of a program.
        programs_per_sm: programs of a grid, per multiprocessor; on Hopper, those that work at a
            time.
        hopper_registers: registers of a multiplying and of a copying thread of
            `sm90.attend_hopper`; None: `kernels.attend_kernel` is used.
        merge_tokens, min_tokens, cut_ns, memory_ns, cached_share: see `CostModel`.
    """

    tiles: tuple[Tile, ...]
    stages: tuple[int, ...]
    num_warps: tuple[int, ...] = (4, 8)
    programs_per_sm: tuple[int, ...] = (2, 1)
    hopper_registers: tuple[int, int] | None = None
    merge_tokens: int = 16
    min_tokens: int = 128
    cut_ns: float = 6000.0
    memory_ns: float = 0.17
    cached_share: float = 0.54

    def cost(self, num_sms: int) -> CostModel:
        """The cost model of items on a GPU with `num_sms` multiprocessors."""
        return CostModel(
            self.tiles,
            (self.programs_per_sm[0] * num_sms, self.programs_per_sm[1] * num_sms),
            together=self.hopper_registers is not None,
            merge_tokens=self.merge_tokens,
            min_tokens=self.min_tokens,
            cut_ns=self.cut_ns,
            memory_ns=self.memory_ns,
            cached_share=self.cached_share,
        )

    def to_json(self) -> dict[str, Any]:
        """The fields, as `configs/DEVICE.json` has them."""
        return asdict(self)

    @staticmethod
    def from_json(fields: dict[str, Any]) -> KernelConfig:
        """The configuration of which `to_json` gave the fields."""
        tiles = tuple(Tile(**tile) for tile in fields["tiles"])
        rest: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in fields.items()
        }
        return KernelConfig(**{**rest, "tiles": tiles})


def config_file(device_name: str) -> Path:
    """The file of configurations of a GPU of this name."""
    return DIRECTORY / (re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-") + ".json")


@cache
def _stored(device_name: str) -> list[dict[str, Any]]:
    path = config_file(device_name)
    return json.loads(path.read_text()) if path.exists() else []


def load_config(
    device_name: str,
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    hopper: bool = False,
    memory_rate: float | None = None,
) -> tuple[KernelConfig, bool]:
    """The configuration to use, and whether it was tuned (else it is `default_config`'s).
    `hopper`: for the kernel for Hopper; `memory_rate`: the GPU's, in bytes/s."""
    name = str(dtype).removeprefix("torch.")
    fitting = [
        entry
        for entry in _stored(device_name)
        if (entry["dtype"], entry["head_dim"]) == (name, head_dim)
        and (entry.get("hopper_registers") is not None) == hopper
        and (not hopper or _divided(head_dim, entry["group"]) == _divided(head_dim, group))
    ]
    if not fitting:
        config = default_config(dtype, head_dim, hopper, memory_rate)
        return _for_group(config, head_dim, group), False
    best = min(fitting, key=lambda entry: abs(entry["group"] - group))
    fields = {k: v for k, v in best.items() if k not in ("dtype", "head_dim", "group")}
    return _for_group(KernelConfig.from_json(fields), head_dim, group, best["group"]), True


def _divided(head_dim: int, group: int) -> bool:
    """Whether Hopper's warpgroups divide a row's queries: 64, and a few as columns."""
    return head_dim <= 64 and 64 < group <= 80


def _for_group(
    config: KernelConfig, head_dim: int, group: int, tuned: int = MERGED_HEADS
) -> KernelConfig:
    """The configuration with tiles that all hold the queries of a row. A state's size, and so
    `merge_tokens`, is proportional to the query heads of a KV head."""
    merge_tokens = config.merge_tokens * max(group, MERGED_HEADS) // max(tuned, MERGED_HEADS)
    config = replace(config, merge_tokens=merge_tokens)
    narrow, *wider = config.tiles
    if narrow.block_m >= group:
        return config
    if config.hopper_registers is not None:
        if _divided(head_dim, group):
            return replace(config, tiles=(Tile(128, 128, 4000, 10),), stages=(6,))
        # The form for few queries takes up to 16; beyond, items are walked by rows alone.
        few = (replace(narrow, block_m=16),) if len(wider) > 1 and group <= 16 else ()
        tiles = (*few, *(tile for tile in wider if tile.block_m >= group))
        return replace(config, tiles=tiles, stages=config.stages[-len(tiles) :])
    least = max(16, 1 << (group - 1).bit_length())
    tiles = tuple(replace(tile, block_m=max(least, tile.block_m)) for tile in config.tiles)
    return replace(config, tiles=tiles)


def default_config(
    dtype: torch.dtype, head_dim: int, hopper: bool = False, memory_rate: float | None = None
) -> KernelConfig:
    """The rule for a GPU without tuned configurations.

    16-bit: tiles of 16 (8 on Hopper, none of them for heads of 256), 64 and 128 rows.
    float32 has small tiles, without tensor cores (TF32 is not float32).
    """
    config = _default_tiles(dtype, 1 << (head_dim - 1).bit_length(), hopper)
    if memory_rate is None:
        return config
    return replace(config, memory_ns=memory_ns(dtype, head_dim, memory_rate))


def memory_ns(dtype: torch.dtype, head_dim: int, memory_rate: float) -> float:
    """Nanoseconds to read a token's keys and values of one KV head at `memory_rate` bytes/s."""
    return round(1e9 * 2 * head_dim * dtype.itemsize / memory_rate, 3)


def _default_tiles(dtype: torch.dtype, block_d: int, hopper: bool) -> KernelConfig:
    """The default tiles. `block_d`: the size of heads, rounded up to a power of 2."""
    if block_d > 256:
        # Half the rows and tokens of heads of 256: the same registers and shared memory.
        if dtype == torch.float32:
            return KernelConfig((Tile(16, 16), Tile(16, 16), Tile(32, 16)), (1, 1, 1))
        narrow, middle = Tile(16, 16, 2500, 45), Tile(32, 16, 2500, 45)
        return KernelConfig((narrow, middle, Tile(64, 16, 3000, 20)), (3, 3, 3))
    if dtype == torch.float32:
        block_n = 32 if block_d <= 128 else 16
        return KernelConfig((Tile(16, block_n), Tile(32, block_n), Tile(64, block_n)), (2, 2, 2))
    block_n = 64 if block_d <= 128 else 32
    if hopper:
        # Tokens are rows of a product, at least 64.
        few = (Tile(8, block_n, 1400, 9.5),) if block_n == 64 else ()
        tiles = (*few, Tile(64, block_n, 3600, 14), Tile(128, block_n, 4000, 14.75))
        stages = {64: 10, 128: 6}.get(block_d, 4)  # the even number that shared memory holds
        return KernelConfig(tiles, (stages,) * len(tiles), hopper_registers=(216, 72))
    narrow, middle = Tile(16, block_n, 2500, 45), Tile(64, 32, 2500, 45)
    return KernelConfig((narrow, middle, Tile(128, block_n, 3000, 20)), (3, 3, 3))
