"""Whether company changes a bit: random traffic in small models of several families, each answer
against the same request alone and cold.

    python -m onestem_lab.bits_traffic [--positions 1000000] [--families llama,qwen3,gemma3]
        [--dtypes bfloat16,float32,float16] [--device cpu] [--processes 1] [--threads 1]
        [--scored 4] [--seed 0] [--seconds S] [--out FILE]

Requests share beginnings of all lengths, are greedy or sampled, have several answers and scores,
and run in engines with pages and steps of random sizes, with ample and with little KV memory, twice
each (`tests.engine.test_deterministic`). A position is a whole row of log-probabilities; one prompt
in `--scored` has some of its own. Ends when
so many were compared or the time is over, with exit code 1 if a bit differs. Written to
lab/results/bits-traffic.json.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from itertools import count, islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from onestem.engine.step import graphs
from onestem.models.weights import load_decoder
from onestem_lab.results import RESULTS, machine, processor, write
from tests.engine.test_deterministic import traffic
from tests.models.tiny import make_tiny

COUNTED = ("compared", "differing", "hits", "splits", "preempted", "forks")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--positions", type=int, default=1_000_000)
    parser.add_argument("--families", default="llama,qwen3,gemma3")
    parser.add_argument("--dtypes", default="bfloat16,float32,float16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="of a process")
    parser.add_argument("--scored", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0, help="the first; runs of others add up")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--out", type=Path, default=RESULTS / "bits-traffic.json")
    options = parser.parse_args()
    result: dict[str, Any] = {
        "command": " ".join(["python -m onestem_lab.bits_traffic", *sys.argv[1:]]),
        **machine(),
        **processor(options.threads),
    }
    if options.device == "cuda":
        result["gpu"] = torch.cuda.get_device_name()
    rows: dict[str, dict[str, int]] = {}
    total = dict.fromkeys(COUNTED, 0)
    end = time.monotonic() + options.seconds
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(
            options.processes, get_context("spawn"), prepare, (options.threads,)
        ) as pool,
    ):
        paths = {name: make_tiny(name, Path(folder) / name) for name in options.families.split(",")}
        jobs = (
            pool.submit(compared, options.device, seed, family, path, dtype, options.scored)
            for seed in count(options.seed)
            for family, path in paths.items()
            for dtype in options.dtypes.split(",")
        )
        running = set(islice(jobs, options.processes))
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for name, found in (one.result() for one in done):
                of_model = rows.setdefault(name, dict.fromkeys(COUNTED, 0))
                for what in COUNTED:
                    of_model[what] += found[what]
                    total[what] += found[what]
            print(time.strftime("%H:%M:%S"), total, flush=True)
            write(options.out, {**result, "total": total, "models": rows})
            if total["compared"] < options.positions and time.monotonic() < end:
                running.update(islice(jobs, len(done)))
    sys.exit(total["differing"] > 0)


def prepare(threads: int) -> None:
    """In each process. Engines on a GPU are made sooner with few graphs."""
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    graphs.BATCH_SIZES = (1, 2, 8, 32, 64)


def compared(
    device: str, seed: int, family: str, path: Path, dtype: str, scored: int
) -> tuple[str, dict[str, int]]:
    """Of one seed in one model: its name, and what was counted."""
    decoder = load_decoder(path, dtype=getattr(torch, dtype), device=device, deterministic=True)
    made = traffic(decoder, seed, scored=scored)
    return f"{family}, {dtype}", {name: getattr(made, name) for name in COUNTED}


if __name__ == "__main__":
    main()
