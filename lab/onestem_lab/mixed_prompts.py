"""Short prompts beside long ones: when first tokens come.

    python -m onestem_lab.mixed_prompts [--load 0.5,0.8] [--short 200] [--long 8000] [--every 50]
        [--out lab/results/mixed-prompts.json]

Interactive requests come at random times, one in `every` with a long prompt. Time is counted in the
rows that the engine computes, so that figures depend on the schedule alone; the model has hardly
any layers (shape:nothing). A load of 1 is one row asked for each that is computed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from onestem_lab.backlog import first_tokens, load, spread
from onestem_lab.results import write

MODEL = "nothing"
OUTPUT = 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--load", default="0.5,0.8")
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--short", type=int, default=200, help="tokens of a prompt")
    parser.add_argument("--long", type=int, default=8000, help="tokens of a prompt")
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = [measure(options, float(share)) for share in options.load.split(",")]
    for row in rows:
        print(json.dumps(row))
    command = f"python -m onestem_lab.mixed_prompts {' '.join(sys.argv[1:])}".strip()
    if options.out is not None:
        result = {"command": command, "rows": rows}
        write(options.out, result)


def measure(options: argparse.Namespace, share: float) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    is_long = np.arange(options.requests) % options.every == options.every // 2
    lengths = np.where(is_long, options.long, options.short)
    gaps = rng.exponential((lengths + OUTPUT).mean() / share, options.requests)
    arrivals = gaps.cumsum().astype(int)
    prompts = [rng.integers(8, 2048, length).tolist() for length in lengths]
    with load(MODEL, kv_memory="64MiB", max_step_tokens=1024) as llm:
        first, _ = first_tokens(llm.engine, prompts, OUTPUT, arrivals.tolist())
    waited = np.array([at for at, _ in first]) - arrivals
    return {
        "load": share,
        "all": spread(waited),
        "short": spread(waited[~is_long]),
        "long": spread(waited[is_long]),
    }


if __name__ == "__main__":
    main()
