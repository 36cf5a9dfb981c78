"""Jobs of a model whose layers keep states, in several modes of sharing.

    python -m onestem_lab.hybrids [--shape qwen3.5-9b] [--modes full,storage,off] [--out FILE]

Random weights and tokens. Each mode has an engine of its own, which takes all cases; each figure is
of one run, after full steps outside the clock. `computed`: prompt tokens over the distinct ones.
"""

from __future__ import annotations

import argparse
import re
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
    parser.add_argument("--out", type=Path, default=RESULTS / "hybrids.json")
    options = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    result = {
        "command": f"python -m onestem_lab.hybrids --shape {options.shape} --modes {options.modes}",
        "machine": hardware(options.device),
        "cases": found,
    }
    for mode in options.modes.split(","):
        with LLM(
            f"shape:{options.shape}",
            device=options.device,
            quantization=options.quantization,
            share=mode,
        ) as llm:
            for name in options.cases.split(";"):
                figures = run_batch(llm, BatchCase(*arguments(name)))
                one = {key: figures[key] for key in KEPT}
                distinct = figures["drawn"]["prefix_tokens"] + figures["drawn"]["distinct_tokens"]
                one["computed"] = figures["processed_prompt_tokens"] / distinct
                found.setdefault(name, {})[mode] = one
                print(name, mode, one, flush=True)
                write(options.out, result)


def arguments(name: str) -> tuple[Any, ...]:
    """Of a case `GROUPSxPROMPTS PREFIX/OWN/SAMPLED`."""
    groups, degree, prefix, distinct, output = map(int, re.findall(r"\d+", name))
    return groups, (degree,), (prefix,), distinct, output, "shuffled", 0


if __name__ == "__main__":
    main()
