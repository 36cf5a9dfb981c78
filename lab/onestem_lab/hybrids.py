"""Jobs of a model whose layers keep states, in several modes of sharing.

    python -m onestem_lab.hybrids [--shape qwen3.5-9b] [--modes full,storage,off] [--turns 3]
        [--kv-memory 20GiB] [--out FILE]

Random weights and tokens. Each mode has an engine of its own, and they take the cases in turns,
each turn with tokens of its own. A first turn, in which kernels are compiled, does not count;
figures are those of the turn whose time is the median. `computed`: prompt tokens over the distinct
ones. `speeds`: the first mode's over another's.
"""

from __future__ import annotations

import argparse
import re
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from onestem.bench import BatchCase, run_batch
from onestem.llm import LLM
from onestem_lab.results import RESULTS, hardware, write

CASES = "40x16 2000/200/100;1x256 8000/64/128"
KEPT = (
    "seconds",
    "requests_per_s",
    "processed_prompt_tokens",
    "logical_prompt_tokens",
    "kv_tokens",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="qwen3.5-9b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--modes", default="full,storage,off")
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--kv-memory", default="20GiB")
    parser.add_argument("--out", type=Path, default=RESULTS / "hybrids.json")
    options = parser.parse_args()
    cases: dict[str, dict[str, Any]] = {}
    result = {
        "command": " ".join(["python -m onestem_lab.hybrids", *sys.argv[1:]]),
        "machine": hardware(options.device),
        "cases": cases,
    }
    modes = options.modes.split(",")
    with ExitStack() as opened:
        engines = {
            mode: opened.enter_context(
                LLM(
                    f"shape:{options.shape}",
                    device=options.device,
                    quantization=options.quantization,
                    share=mode,
                    kv_memory=options.kv_memory,
                )
            )
            for mode in modes
        }
        for name in options.cases.split(";"):
            runs: dict[str, list[dict[str, Any]]] = {mode: [] for mode in modes}
            for turn in range(options.turns + 1):
                for mode, llm in engines.items():
                    figures = run_batch(llm, BatchCase(*arguments(name), turn))
                    if turn:
                        runs[mode].append(figures)
            cases[name] = of = {mode: middle(runs[mode]) for mode in modes}
            seconds = {mode: of[mode]["seconds"] for mode in modes}
            of["speeds"] = {mode: seconds[mode] / seconds[modes[0]] for mode in modes[1:]}
            print(name, of, flush=True)
            write(options.out, result)


def middle(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """What is kept of the run whose time is the median, and all times."""
    runs = sorted(runs, key=lambda figures: figures["seconds"])
    figures = runs[len(runs) // 2]
    distinct = figures["drawn"]["prefix_tokens"] + figures["drawn"]["distinct_tokens"]
    return {
        **{key: figures[key] for key in KEPT},
        "computed": figures["processed_prompt_tokens"] / distinct,
        "all_seconds": [one["seconds"] for one in runs],
    }


def arguments(name: str) -> tuple[Any, ...]:
    """Of a case `GROUPSxPROMPTS PREFIX/OWN/SAMPLED`, all but its seed."""
    groups, degree, prefix, distinct, output = map(int, re.findall(r"\d+", name))
    return groups, (degree,), (prefix,), distinct, output, "shuffled"


if __name__ == "__main__":
    main()
