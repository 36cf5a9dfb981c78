"""Tuning: the constants of the kernels' configuration that are fastest on this GPU."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from onestem.cost.timing import graph_ms
from onestem.errors import ConfigError
from onestem.ops.triton import KernelConfig, TritonAttention, load_config
from onestem.ops.triton.config import config_file, memory_ns
from onestem.ops.triton.launch import takes_hopper
from onestem_lab.attention.cases import CASES, Heads, Step, make_tensors
from onestem_lab.attention.rates import measure_rates

__all__ = ["check_file", "store", "tune"]

# The timed cases: each is bound by something else.
STEPS = (
    "1x1 2048/128", "1x32 2048/128", "1x256 2048/256", "1x256 16384/256", "16x16 2048/256",
    "85x3 1568/128", "1x1024 8192/128", "1x8x32 2048+512/128", "mixed",
)  # fmt: skip
LEAST_GAIN = 0.004  # smaller differences are noise

Change = Callable[[KernelConfig], KernelConfig]


def _tile(place: int, **fields: Any) -> Change:
    """A change of the tile at a place, counted from the widest (1), if there is one."""

    def change(config: KernelConfig) -> KernelConfig:
        tiles = list(config.tiles)
        if place <= len(tiles):
            tiles[-place] = replace(tiles[-place], **fields)
        return replace(config, tiles=tuple(tiles))

    return change


def _field(**fields: Any) -> Change:
    return lambda config: replace(config, **fields)


# Tried one after the other, each on the best so far.
HOPPER: tuple[Change, ...] = (
    *(_tile(3, item_ns=item, token_ns=token) for item, token in ((1000, 9.0), (1800, 10.0))),
    *(_tile(2, item_ns=ns) for ns in (2900, 4400)),
    *(_tile(1, item_ns=ns) for ns in (3000, 6000)),
    *(_tile(1, token_ns=ns) for ns in (14.5, 17.0)),
    *(_field(merge_tokens=tokens) for tokens in (8, 32)),
    *(_field(cut_ns=ns) for ns in (3000, 12000)),
    *(_field(hopper_registers=count) for count in ((208, 88), (224, 56))),
)
TWIN: tuple[Change, ...] = (
    *(_field(min_tokens=tokens) for tokens in (64, 192)),
    *(_field(stages=stages) for stages in ((2, 2, 2), (4, 3, 3))),
    *(_field(programs_per_sm=programs) for programs in ((1, 1), (3, 1))),
    *(_field(num_warps=warps) for warps in ((2, 8), (8, 8))),
)


def tune(heads: Heads, device: torch.device) -> dict[str, Any]:
    """An entry for the GPU's file of configurations, of the kernel that runs these heads there."""
    if device.type != "cuda":
        raise ConfigError("onestem bench tune needs a GPU: attention on a CPU has nothing to tune")
    name, group = torch.cuda.get_device_name(device), heads.num_q_heads // heads.num_kv_heads
    shape = (heads.num_kv_heads, heads.head_dim, heads.page_size)
    hopper = takes_hopper(device, heads.dtype, *shape)
    start, _ = load_config(name, heads.dtype, heads.head_dim, group, hopper)
    rate = measure_rates(device, heads.dtype).bytes
    start = replace(start, memory_ns=memory_ns(heads.dtype, heads.head_dim, rate))
    best = _best(start, HOPPER if hopper else TWIN, STEPS, heads, device)
    dtype = str(heads.dtype).removeprefix("torch.")
    return {"dtype": dtype, "head_dim": heads.head_dim, "group": group, **best.to_json()}


def _best(
    start: KernelConfig,
    changes: tuple[Change, ...],
    names: tuple[str, ...],
    heads: Heads,
    device: torch.device,
) -> KernelConfig:
    """The best configuration: keeps each change that lowers the geometric mean of steps' times."""
    best, least = start, _mean_log_ms(start, names, heads, device)
    for change in changes:
        config = change(best)
        try:
            mean = _mean_log_ms(config, names, heads, device)
        except RuntimeError:  # too few registers or too little shared memory
            continue
        if mean < least - LEAST_GAIN:
            best, least = config, mean
    return best


def _mean_log_ms(
    config: KernelConfig, names: tuple[str, ...], heads: Heads, device: torch.device
) -> float:
    times = (_ms(config, *_step(name, heads), device) for name in names)
    return sum(map(math.log, times)) / len(names)


def _step(name: str, heads: Heads) -> tuple[Step, Heads]:
    return CASES[name].step(heads)


def _ms(config: KernelConfig, step: Step, heads: Heads, device: torch.device) -> float:
    q, k, v = make_tensors(step, heads, device)
    prepared = TritonAttention(config=config).prepare(step.plan)
    return graph_ms(lambda: prepared.attend(q, k, v), repeat=5)


def store(entry: dict[str, Any], device_name: str, path: Path | None = None) -> Path:
    """Write an entry to the GPU's file (default: the package's own). It replaces the one of the
    same shape and kernel; others stay."""
    path = config_file(device_name) if path is None else path
    new = {_key(each): each for each in [*_stored(path), entry]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([new[key] for key in sorted(new)], indent=1) + "\n")
    return path


def check_file(device_name: str, path: Path | None = None) -> None:
    """Raise `ConfigError` if `store` could not read or write the file."""
    path = config_file(device_name) if path is None else path
    _stored(path)
    there = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if (there != path and not there.is_dir()) or not os.access(there, os.W_OK):
        raise ConfigError(f"{path} cannot be written: choose another file with --out")


def _stored(path: Path) -> list[dict[str, Any]]:
    """Entries of a file; none if there is no file."""
    try:
        entries = json.loads(path.read_text()) if path.exists() else []
        for entry in entries:
            _key(entry)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(
            f"{path} is not a file of configurations: choose another with --out"
        ) from None
    return entries


def _key(entry: dict[str, Any]) -> tuple[str, int, int, bool]:
    hopper = entry.get("hopper_registers") is not None
    return entry["dtype"], entry["head_dim"], entry["group"], hopper
