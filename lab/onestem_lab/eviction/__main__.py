"""Which runs to evict: prompt tokens computed by several policies, on traces.

    python -m onestem_lab.eviction [--traces agents,documents] [--seed 0]

The scheduler and the cache are the engine's. There is no model: a step takes what a cost model
says.

whole_runs: least recently used, a run at a time.
lru: the same, a few pages at a time.
kinds: what several sequences continued is kept longer, as far as it was used more.
saved: as `onestem.cache.idle` has it.
oracle: what is wanted last goes first.
cached_first: as `saved`; of the requests that wait, who has least to compute is admitted first.

Written to lab/results/eviction.json.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from onestem.cache import PagePool
from onestem.cache.idle import IdleRuns
from onestem_lab.eviction.policies import Kinds, LeastRecentlyUsed, WholeRuns, run_oracle
from onestem_lab.eviction.simulate import CachedFirst, Result, Simulation
from onestem_lab.eviction.traces import TRACES, Ask
from onestem_lab.results import RESULTS, write

POLICIES: dict[str, Callable[[PagePool], IdleRuns]] = {
    "whole_runs": WholeRuns,
    "lru": LeastRecentlyUsed,
    "kinds": Kinds,
    "saved": IdleRuns,
}


def main() -> None:
    options = _options()
    names = options.traces.split(",")
    if unknown := [name for name in names if name not in TRACES]:
        raise SystemExit(f"there is no trace {unknown[0]!r}: choose of {', '.join(TRACES)}")
    rows = [row for name in names for row in measure(name, options.seed)]
    result = {
        "command": " ".join(["python -m onestem_lab.eviction", *sys.argv[1:]]),
        "rows": rows,
    }
    if names == list(TRACES):
        write(RESULTS / "eviction.json", result)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", default=",".join(TRACES))
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def measure(name: str, seed: int) -> list[dict[str, Any]]:
    """A trace with each of its memories."""
    rows = []
    for memory in TRACES[name].memories:
        asks = TRACES[name].make(np.random.default_rng(seed))
        results = compare(asks, memory)
        first = results["whole_runs"]
        row: dict[str, Any] = {"trace": name, "memory": memory, "requests": len(asks)}
        row |= {"prompt_tokens": first.prompt_tokens, "prompt_seconds": first.prompt_seconds}
        for policy, found in results.items():
            row[policy] = {
                "computed": found.computed,
                "seconds": found.seconds,
                "preempted": found.preempted,
                "longest_wait": found.longest_wait,
                "computed_ratio": found.computed / first.computed,
                "seconds_ratio": found.seconds / first.seconds,
            }
        ratios = [f"{policy} {row[policy]['computed_ratio']:.3f}" for policy in results]
        share = first.computed / first.prompt_tokens
        print(f"{name}, {memory} tokens: {share:.1%} computed;", *ratios, flush=True)
        rows.append(row)
    return rows


def compare(asks: list[Ask], memory: int) -> dict[str, Result]:
    """What each policy computes of a trace."""
    results = {name: Simulation(asks, memory, idle).run() for name, idle in POLICIES.items()}
    return results | {
        "oracle": run_oracle(asks, memory, results["whole_runs"].admitted),
        "cached_first": CachedFirst(asks, memory, IdleRuns).run(),
    }


if __name__ == "__main__":
    main()
