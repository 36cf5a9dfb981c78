"""Timing on a CPU, with warm and with cold caches; on a GPU see `onestem.cost.timing`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from onestem.cost import timing

__all__ = ["cpu_ms", "least_seconds"]


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def least_seconds(call: Callable[[], object], repeat: int = 7) -> float:
    """Seconds of the fastest of `repeat` calls, after one that is not counted."""
    call()
    return min(_seconds(call) for _ in range(repeat))


def cpu_ms(
    calls: dict[str, Callable[[], object]], *, cold: bool, repeat: int = 7
) -> dict[str, float]:
    """Median milliseconds of each call, taken in turn; `cold`: the caches hold something else
    before each."""
    scratch = torch.zeros(timing.FLUSH_BYTES // 4 if cold else 0)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeat + 1):
        for name, call in calls.items():
            scratch.add_(1)
            if not cold:
                call()
            seconds = _seconds(call)
            if turn:
                times[name].append(1e3 * seconds)
    return {name: statistics.median(values) for name, values in times.items()}
