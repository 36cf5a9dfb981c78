"""How long planning takes, and what memory: prompts of random token ids behind shared prefixes.

    python -m onestem_lab.planner [--requests 8000] [--degree 16] [--prefix 2000] [--own 200]
        [--kind list|file] [--repeats 3] [--out FILE]

`list`: prompts as Python lists, as `LLM.generate` gets them. `file`: in a file, as `onestem batch`
keeps those of a job.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from onestem.planner import plan_job
from onestem_lab.results import write


class FilePrompts:
    """Prompts of one length in a file of int32."""

    def __init__(self, path: Path, tokens: int) -> None:
        self._ids = np.memmap(path, np.int32, "r").reshape(-1, tokens)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, i: int, /) -> np.ndarray:
        return self._ids[i]


def write_prompts(path: Path, options: argparse.Namespace) -> None:
    """The prefixes in turn: question-major."""
    rng = np.random.default_rng(0)
    groups = -(-options.requests // options.degree)
    with path.open("wb") as file:
        for request in range(options.requests):
            prefix = np.random.default_rng((1, request % groups))
            for source, count in ((prefix, options.prefix), (rng, options.own)):
                source.integers(0, 32000, count, dtype=np.int32).tofile(file)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "ids"
        write_prompts(path, options)
        prompts: Any = FilePrompts(path, options.prefix + options.own)
        if options.kind == "list":
            prompts = [prompts[i].tolist() for i in range(len(prompts))]
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        plans, processor = [], []
        for _ in range(options.repeats):
            started = time.process_time()
            plans.append(plan_job(prompts).report)
            processor.append(time.process_time() - started)
        return {
            "requests": options.requests,
            "tokens": options.prefix + options.own,
            "degree": options.degree,
            "kind": options.kind,
            "planning_seconds": statistics.median(plan.planning_seconds for plan in plans),
            "processor_seconds": statistics.median(processor),
            "more_peak_rss_bytes": 1024
            * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before),
            "report": {**asdict(plans[0]), "largest_groups": len(plans[0].largest_groups)},
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=8000)
    parser.add_argument("--degree", type=int, default=16)
    parser.add_argument("--prefix", type=int, default=2000)
    parser.add_argument("--own", type=int, default=200)
    parser.add_argument("--kind", choices=("list", "file"), default="list")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result = measure(options)
    print(json.dumps(result))
    if options.out is not None:
        write(options.out, result)


if __name__ == "__main__":
    main()
