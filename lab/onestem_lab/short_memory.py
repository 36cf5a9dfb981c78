"""Jobs whose answers do not fit in KV memory all at once, beside another version in turns.

    python -m onestem_lab.short_memory [--device cuda] [--against FOLDER] [--turns 2] [--scale 1]

Hydragen's figure 7 (3 problems with 128 answers each, as two levels and as one), rollouts (n
answers to each of 16 prompts), and few rows of a large model. All answers have the length that is
asked. Each version of each model is one process; ratios are of medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from onestem.llm import LLM
from onestem.request import SamplingParams
from onestem_lab.checkout import in_turns
from onestem_lab.results import RESULTS, hardware, write

# Of each model: bytes of a token's KV and tokens of KV memory; then jobs: problems, answers to
# each, tokens of the common prefix, of a problem, of each request's own, and of an answer; and
# whether answers are `n` of one request.
JOBS: dict[str, tuple[int, int, dict[str, tuple[int, int, int, int, int, int, bool]]]] = {
    "codellama-7b": (
        2 * 32 * 4096 * 2,
        112_000,
        {
            "two levels": (3, 128, 2000, 391, 1, 512, False),
            "one level": (384, 1, 2000, 0, 391, 512, False),
        },
    ),
    "llama3.2-1b": (2 * 16 * 512 * 2, 150_000, {"rollouts": (16, 64, 0, 900, 0, 250, True)}),
    "llama3.1-8b": (2 * 32 * 1024 * 2, 36_000, {"few rows": (1, 160, 512, 0, 200, 400, False)}),
}


def main() -> None:
    options = _options()
    if options.child:
        print(json.dumps(measure(options)))
        return
    each: dict[str, dict[str, list[Any]]] = {}
    for model in JOBS:
        child = ["--child", model, "--device", options.device, "--scale", str(options.scale)]
        turns = in_turns("onestem_lab.short_memory", child, options.against, options.turns)
        for side, told in turns:
            for name, figures in told.items():
                each.setdefault(f"{model}, {name}", {}).setdefault(side, []).append(figures)
            _write(options, each)


def _write(options: argparse.Namespace, each: dict[str, dict[str, list[Any]]]) -> None:
    jobs = {}
    for name, found in each.items():
        seconds = {
            side: statistics.median(r["seconds"] for r in runs) for side, runs in found.items()
        }
        ratio = {"ratio": seconds["before"] / seconds["now"]} if len(seconds) == 2 else {}
        jobs[name] = {"seconds": seconds, **ratio, "each": found}
    result = {
        "command": " ".join(["python -m onestem_lab.short_memory", *sys.argv[1:]]),
        "machine": hardware(options.device),
        "jobs": jobs,
    }
    write(options.out, result)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--against", type=Path, metavar="FOLDER")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--scale", type=float, default=1.0, help="of all tokens")
    parser.add_argument("--out", type=Path, default=RESULTS / "short-memory.json")
    parser.add_argument("--child", metavar="MODEL", help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Figures of each job of one model."""
    token_bytes, kv_tokens, jobs = JOBS[options.child]
    memory = int(kv_tokens * options.scale) * token_bytes
    found = {}
    llm = LLM(f"shape:{options.child}", device=options.device, dtype="bfloat16", kv_memory=memory)
    llm.generate([{"prompt_token_ids": [1] * 600}] * 4, SamplingParams(max_tokens=4))  # warms up
    for name, job in jobs.items():
        problems, answers, *sizes, is_n = job
        common, problem, own, output = (int(size * options.scale + 0.5) for size in sizes)
        rng = np.random.default_rng(0)

        def draw(count: int, rng: np.random.Generator = rng) -> list[int]:
            return rng.integers(0, llm.config.vocab_size, count).tolist()

        prefix = draw(common)
        heads = [prefix + draw(problem) for _ in range(problems)]
        prompts = heads if is_n else [head + draw(own) for head in heads for _ in range(answers)]
        params = SamplingParams(
            n=answers if is_n else 1, temperature=1.0, seed=1, max_tokens=output, ignore_eos=True
        )
        stats = llm.engine.stats
        before = stats.num_preempted, stats.steps
        began = time.perf_counter()
        llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
        found[name] = {
            "seconds": time.perf_counter() - began,
            "preempted": stats.num_preempted - before[0],
            "steps": stats.steps - before[1],
            "answers": problems * answers,
        }
        print(name, found[name], file=sys.stderr, flush=True)
        llm.engine.cache.clear()
    return found


if __name__ == "__main__":
    main()
