"""Timing on a GPU as an engine sees it."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

FLUSH_BYTES = 192 << 20  # more than a GPU's L2 cache and most CPUs' L3 hold
GRAPH_MS = 12.0  # approximate time of a replay: long enough to hide its start
FEWEST_CALLS, MOST_CALLS = 3, 12  # of a replay


def events_ms(call: Callable[[], object], repeat: int) -> list[float]:
    """Milliseconds of each of `repeat` successive calls on a GPU."""
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
    """Median milliseconds of `call` inside a graph, with the L2 cache flushed before each call. It
    is the time of a graph of flushes and calls, less that of flushes alone, replayed in turn."""
    call()
    torch.cuda.synchronize()
    times = int(min(MOST_CALLS, max(FEWEST_CALLS, GRAPH_MS / min(events_ms(call, 2)))))
    scratch = torch.zeros(FLUSH_BYTES // 4, dtype=torch.float32, device="cuda")
    total = torch.zeros((), dtype=torch.float32, device="cuda")

    def flush() -> None:
        # Reading evicts without leaving lines to write back.
        torch.sum(scratch, dim=0, out=total)

    def both() -> None:
        flush()
        call()

    flush()
    with_call, without = _captured(both, times), _captured(flush, times)
    whole, empty = [], []
    for _ in range(repeat):
        whole += events_ms(with_call.replay, 1)
        empty += events_ms(without.replay, 1)
    return (statistics.median(whole) - statistics.median(empty)) / times
