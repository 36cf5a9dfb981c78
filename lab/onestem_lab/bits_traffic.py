"""Whether company changes a bit: random traffic in small models of several families, each answer
against the same request alone and cold.

    python -m onestem_lab.bits_traffic [--positions 1000000] [--families llama,qwen3,gemma3]
        [--dtypes bfloat16,float32,float16] [--threads 1] [--out FILE]

Requests share beginnings of all lengths, are greedy or sampled, have several answers and scores,
and run in engines with pages and steps of random sizes, with ample and with little KV memory, twice
each (`tests.engine.test_deterministic`). A position is a whole row of log-probabilities. Ends when
so many were compared, with exit code 1 if a bit differs. Written to lab/results/bits-traffic.json.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from itertools import count
from pathlib import Path
from typing import Any

import torch

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
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / "bits-traffic.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    result: dict[str, Any] = {
        "command": " ".join(["python -m onestem_lab.bits_traffic", *sys.argv[1:]]),
        **machine(),
        **processor(options.threads),
    }
    rows: dict[str, dict[str, int]] = {}
    total = dict.fromkeys(COUNTED, 0)
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: make_tiny(name, Path(folder) / name) for name in options.families.split(",")}
        for seed in count(0):
            for family, path in paths.items():
                for dtype in options.dtypes.split(","):
                    found = compared(path, dtype, seed)
                    for name in COUNTED:
                        of_model = rows.setdefault(f"{family}, {dtype}", dict.fromkeys(COUNTED, 0))
                        of_model[name] += found[name]
                        total[name] += found[name]
            print(time.strftime("%H:%M:%S"), total, flush=True)
            write(options.out, {**result, "seeds": seed + 1, "total": total, "models": rows})
            if total["compared"] >= options.positions:
                break
    sys.exit(total["differing"] > 0)


def compared(path: Path, dtype: str, seed: int) -> dict[str, int]:
    decoder = load_decoder(path, dtype=getattr(torch, dtype), device="cpu", deterministic=True)
    made = traffic(decoder, seed)
    return {name: getattr(made, name) for name in COUNTED}


if __name__ == "__main__":
    main()
