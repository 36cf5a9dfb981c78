"""Timing of attention: on a GPU as an engine sees it, on a CPU with warm and with cold caches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = ["Rates", "cpu_ms", "graph_ms", "measure_rates"]

FLUSH_BYTES = 192 << 20  # more than a GPU's L2 cache and most CPUs' L3 hold
GRAPH_MS = 12.0  # about how long one replay takes: long enough to hide its start
FEWEST_CALLS, MOST_CALLS = 3, 12  # of a replay


@dataclass(frozen=True)
class Rates:
    """What a device reached in this run: products in FLOP/s; bytes/s of a copy, read and written
    (GPU), or of reading (CPU)."""

    flops: float
    bytes: float


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """The rate of a square product (8192 on a GPU, 2048 on a CPU) and of memory."""
    if device.type == "cuda":
        return _gpu_rates(device, dtype)
    native = dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    a = torch.randn(2048, 2048).to(dtype if native else torch.float32)
    memory = torch.ones(1 << 26)
    product = min(_seconds(lambda: a @ a) for _ in range(7))
    reading = min(_seconds(lambda: memory.sum()) for _ in range(7))
    return Rates(2 * 2048**3 / product, memory.nbytes / reading)


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _gpu_rates(
    device: torch.device, dtype: torch.dtype, size: int = 8192, copy_bytes: int = 2 << 30
) -> Rates:
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    source = torch.empty(copy_bytes, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    for _ in range(3):
        torch.mm(a, b, out=out)
        target.copy_(source)
    product = statistics.median(_events_ms(lambda: torch.mm(a, b, out=out), 15))
    copy = statistics.median(_events_ms(lambda: target.copy_(source), 15))
    return Rates(2 * size**3 / product * 1e3, 2 * copy_bytes / copy * 1e3)


def _events_ms(call: Callable[[], object], repeat: int) -> list[float]:
    pairs = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(repeat)
    ]
    for start, stop in pairs:
        start.record()
        call()
        stop.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(stop) for start, stop in pairs]


def _captured(call: Callable[[], object], times: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            call()
    graph.replay()
    return graph


def graph_ms(call: Callable[[], object], *, repeat: int = 7) -> float:
    """Median milliseconds of `call` inside a graph, with the L2 cache flushed before each: that of
    a graph of flushes and calls, less that of one of flushes alone, replayed in turn."""
    call()
    torch.cuda.synchronize()
    times = int(min(MOST_CALLS, max(FEWEST_CALLS, GRAPH_MS / min(_events_ms(call, 2)))))
    scratch = torch.zeros(FLUSH_BYTES // 4, dtype=torch.float32, device="cuda")
    total = torch.zeros((), dtype=torch.float32, device="cuda")

    def flush() -> None:
        # Reading evicts without leaving lines to be written back.
        torch.sum(scratch, dim=0, out=total)

    def both() -> None:
        flush()
        call()

    flush()
    with_call, without = _captured(both, times), _captured(flush, times)
    whole, empty = [], []
    for _ in range(repeat):
        whole += _events_ms(with_call.replay, 1)
        empty += _events_ms(without.replay, 1)
    return (statistics.median(whole) - statistics.median(empty)) / times


def cpu_ms(
    calls: dict[str, Callable[[], object]], *, cold: bool, repeat: int = 7
) -> dict[str, float]:
    """Median milliseconds of each call, the calls taken in turn; `cold`: the caches hold something
    else before each."""
    scratch = torch.zeros(FLUSH_BYTES // 4 if cold else 0)
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
