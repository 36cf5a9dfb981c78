"""Which tile shapes run where: tuned configurations are data, an unknown GPU gets a stated rule.

`configs/DEVICE.json` holds a list of objects: `dtype`, `head_dim`, `group` (up to which query heads
per KV head it was tuned) and the fields of `KernelConfig`. The first that fits is taken: same
dtype, the smallest head_dim and group that are not below the ones asked for.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from onestem.ops.work import CostModel, Tile

__all__ = ["KernelConfig", "config_file", "default_config", "load_config"]

DIRECTORY = Path(__file__).parent / "configs"


@dataclass(frozen=True)
class KernelConfig:
    """How the attention kernel is compiled and launched, and what its items cost.

    Attributes:
        tiles: three shapes, narrow to wide.
        stages: software pipeline depth of each (Triton's `num_stages`).
        num_warps: warps of a program.
        programs_per_sm: programs of the grid, per multiprocessor.
        merge_heads: query heads that a program of the merge kernel takes at a time.
        merge_tokens, min_tokens: see `CostModel`.
    """

    tiles: tuple[Tile, Tile, Tile]
    stages: tuple[int, int, int]
    num_warps: int = 4
    programs_per_sm: int = 2
    merge_heads: int = 4
    merge_tokens: int = 16
    min_tokens: int = 128

    def cost(self, num_programs: int) -> CostModel:
        return CostModel(
            self.tiles,
            num_programs,
            merge_tokens=self.merge_tokens,
            min_tokens=self.min_tokens,
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(fields: dict[str, Any]) -> KernelConfig:
        tiles = tuple(Tile(**tile) for tile in fields["tiles"])
        rest = {key: value for key, value in fields.items() if key != "tiles"}
        return KernelConfig(**{**rest, "tiles": tiles, "stages": tuple(fields["stages"])})


def config_file(device_name: str) -> Path:
    """Where the configurations of a GPU of this name stand."""
    return DIRECTORY / (re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-") + ".json")


@cache
def _stored(device_name: str) -> list[dict[str, Any]]:
    path = config_file(device_name)
    return json.loads(path.read_text()) if path.exists() else []


def load_config(
    device_name: str, dtype: torch.dtype, head_dim: int, group: int
) -> tuple[KernelConfig, bool]:
    """The configuration to use, and whether it was tuned (else it is `default_config`'s)."""
    name = str(dtype).removeprefix("torch.")
    fitting = [
        entry
        for entry in _stored(device_name)
        if entry["dtype"] == name and entry["head_dim"] >= head_dim and entry["group"] >= group
    ]
    if not fitting:
        return default_config(dtype, head_dim), False
    best = min(fitting, key=lambda entry: (entry["head_dim"], entry["group"]))
    fields = {k: v for k, v in best.items() if k not in ("dtype", "head_dim", "group")}
    return KernelConfig.from_json(fields), True


def default_config(dtype: torch.dtype, head_dim: int) -> KernelConfig:
    """The rule for a GPU without tuned configurations.

    16-bit: the widest tile has 128 rows up to head_dim 128 and 64 beyond, so that a program's
    accumulators stay within its registers, and two programs fit on a multiprocessor with 96 KiB of
    shared memory each. float32 has no tensor cores here (TF32 is not float32): small tiles.
    """
    if dtype == torch.float32:
        block_n = 32 if head_dim <= 128 else 16
        tiles = (Tile(16, block_n), Tile(32, block_n), Tile(32, block_n))
        return KernelConfig(tiles, (2, 2, 2))
    if head_dim > 128:
        return KernelConfig((Tile(16, 32), Tile(64, 32), Tile(64, 32)), (3, 2, 2))
    return KernelConfig((Tile(16, 64), Tile(64, 64), Tile(128, 64)), (3, 3, 3))
