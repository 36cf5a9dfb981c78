"""Collectives of two GPUs: memory that each writes to (`ops.triton.peers`) against NCCL.

    python -m onestem_lab.collectives --out FILE

Values are compared, then both are timed inside CUDA graphs. Of a gather, which no graph holds, the
host's time of a call stands beside. Microseconds.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from onestem.models.ranks import Ranks
from onestem.parallel.group import join
from onestem_lab.results import write

SUMS = ((1, 4096), (256, 4096), (1024, 4096), (256, 8192), (1024, 8192), (2048, 8192))
GATHERS = ((1, 64128), (256, 64128))  # of the halves of logits
CALLS, REPEATS = 32, 5
SECONDS = 120


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        measure(int(options.child[0]), Path(options.child[1]), options.out)
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "onestem_lab.collectives", "--out", str(options.out)]
        ranks = [subprocess.Popen([*command, "--child", str(rank), folder]) for rank in range(2)]
        for rank in ranks:
            rank.wait(SECONDS)


def measure(rank: int, folder: Path, out: Path) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    ranks = join(folder, rank, 2, device)
    if ranks.peers is None:
        raise SystemExit("these GPUs cannot write to each other's memory")
    found = {f"sum {n}x{width}": one_sum(ranks, device, n, width) for n, width in SUMS}
    found |= {f"gather {n}x{width}": one_gather(ranks, device, n, width) for n, width in GATHERS}
    if rank:
        return
    facts = {
        "command": " ".join(["python -m onestem_lab.collectives", *sys.argv[1:-3]]),
        "gpu": f"two {torch.cuda.get_device_name()}",
        "torch": torch.__version__,
    }
    write(out, facts | {"us": found})
    for name, figures in found.items():
        print(name, figures, flush=True)


def one_sum(ranks: Ranks, device: torch.device, rows: int, width: int) -> dict[str, object]:
    generator = torch.Generator().manual_seed(rows)
    parts = [torch.randn(rows, width, generator=generator).bfloat16() for _ in range(ranks.size)]
    x, peers, nccl = parts[ranks.rank].to(device), ranks.peers, replace(ranks, peers=None)
    assert peers is not None
    peers.sum(x)
    return {
        "equal": torch.equal(x.cpu(), (parts[0].float() + parts[1].float()).bfloat16()),
        "nccl": in_graph(nccl, lambda: nccl.sum(x)),
        "peers": in_graph(nccl, lambda: peers.sum(x)),
    }


def one_gather(ranks: Ranks, device: torch.device, rows: int, width: int) -> dict[str, object]:
    x, peers, nccl = (
        torch.randn(rows, width, device=device),
        ranks.peers,
        replace(ranks, peers=None),
    )
    assert peers is not None
    return {
        "equal": torch.equal(peers.gather(x), nccl.gather(x)),
        "nccl": in_graph(nccl, lambda: nccl.gather(x)),
        "peers": in_graph(nccl, lambda: peers.gather(x)),
        "host nccl": on_host(lambda: nccl.gather(x)),
        "host peers": on_host(lambda: peers.gather(x)),
    }


def in_graph(nccl: Ranks, call: Callable[[], object]) -> float:
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(CALLS):
            call()
    graph.replay()
    nccl.sum(torch.zeros(1, device="cuda"))  # both begin together
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / CALLS)
    return round(statistics.median(times), 1)


def on_host(call: Callable[[], object]) -> float:
    call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(CALLS):
        call()
    return round(1e6 * (time.perf_counter() - began) / CALLS, 1)


if __name__ == "__main__":
    main()
