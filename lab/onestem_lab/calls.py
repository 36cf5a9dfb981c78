"""Tokens per second of `LLM.generate` in every mode that a user can switch on.

    python -m onestem_lab.calls [--device cuda] [--shape llama3.1-8b] [--against FOLDER] [--busy]

Greedy and sampled, with log-probabilities, and with one neighbour that is sampled with penalties:
many rows behind one prefix, fewer, groups, a tree, one row, and rows that share nothing. Each call
is made `--repeats` times after a first one, in one process; `--against` does the same with another
version in turns (`onestem_lab.checkout`). Ratios are of medians over all calls, and of the best.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from onestem.llm import LLM
from onestem.request import SamplingParams
from onestem_lab.checkout import busy_cores, in_turns
from onestem_lab.results import RESULTS, hardware, write

GREEDY = {"temperature": 0.0, "ignore_eos": True}
SAMPLED = {"temperature": 1.0, "seed": 1, "ignore_eos": True}
# Nodes of each level of a tree of prompts and tokens of each, for --scale 1.
TREES = {
    "256 behind 2048": ((1, 256), (2048, 32)),
    "64 behind 1024": ((1, 64), (1024, 48)),
    "24 behind 1024": ((1, 24), (1024, 32)),
    "16x16 behind 1024": ((16, 256), (1024, 32)),
    "tree 1,8,256": ((1, 8, 256), (512, 256, 32)),
    "one": ((1,), (1024,)),
    "64 apart": ((64,), (200,)),
    "3 apart": ((3,), (100,)),
    "5 apart": ((5,), (100,)),
}
MODES = ("sampled", "logprobs", "odd neighbour")  # besides greedy
IN_ALL_MODES = ("256 behind 2048", "64 behind 1024", "5 apart")


def main() -> None:
    options = _options()
    if options.child:
        print(json.dumps(measure(options)))
        return
    found: dict[str, dict[str, list[float]]] = {}
    child = ["--child", "--device", options.device, "--shape", options.shape, "--only"]
    child += [options.only, "--tokens", str(options.tokens), "--scale", str(options.scale)]
    child += ["--repeats", str(options.repeats), "--form", options.form]
    with busy_cores() if options.busy else nullcontext():
        for side, told in in_turns("onestem_lab.calls", child, options.against, options.turns):
            for name, rates in told.items():
                found.setdefault(side, {}).setdefault(name, []).extend(rates)
    table = {}
    for name, rates in found["now"].items():
        row: dict[str, Any] = {"tokens_per_s": statistics.median(rates), "best": max(rates)}
        if "before" in found:
            before = found["before"][name]
            row["before"] = statistics.median(before)
            row["ratio"] = row["tokens_per_s"] / row["before"]
            row["ratio_of_best"] = max(rates) / max(before)
        table[name] = row
        print(name, {key: round(value, 3) for key, value in row.items()}, flush=True)
    result = {
        "command": " ".join(["python -m onestem_lab.calls", *sys.argv[1:]]),
        "machine": hardware(options.device),
        "calls": table,
        "each": found,
    }
    write(options.out, result)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", default="llama3.1-8b", help="or a GGUF file")
    parser.add_argument("--form", default="", help="of weights: int8, int4")
    parser.add_argument("--tokens", type=int, default=192, help="of each answer")
    parser.add_argument("--scale", type=float, default=1.0, help="part of the rows of each tree")
    parser.add_argument("--repeats", type=int, default=4, help="calls of each kind that count")
    parser.add_argument("--turns", type=int, default=2, help="processes of each version")
    parser.add_argument("--only", default="", help="kinds whose name has this")
    parser.add_argument("--against", type=Path, help="folder of another version")
    parser.add_argument("--busy", action="store_true", help="beside a busy process for each core")
    parser.add_argument("--out", type=Path, default=RESULTS / "calls.json")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    """Tokens per second of each call, by kind."""
    model = options.shape if Path(options.shape).exists() else f"shape:{options.shape}"
    llm = LLM(model, device=options.device, dtype="bfloat16", quantization=options.form or None)
    random = np.random.default_rng(0)
    rates = {}
    for name, prompts, params in kinds(random, llm.config.vocab_size, options):
        if options.only not in name:
            continue
        seconds = []
        for _ in range(options.repeats + 1):
            began = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            seconds.append(time.perf_counter() - began)
        rates[name] = [options.tokens * len(prompts) / one for one in seconds[1:]]
        print(name, f"{statistics.median(rates[name]):.0f} tokens/s", file=sys.stderr, flush=True)
    return rates


def kinds(
    random: np.random.Generator, vocab_size: int, options: argparse.Namespace
) -> list[tuple[str, list[list[int]], list[SamplingParams]]]:
    """Name, prompts and parameters of each kind of call."""
    found = []
    for name, (counts, lengths) in TREES.items():
        prompts: list[list[int]] = [[]]
        for count, length in zip(counts, lengths, strict=True):
            each = max(1, round(count * options.scale)) // len(prompts) or 1
            prompts = [
                prompt + random.integers(vocab_size, size=length).tolist()
                for prompt in prompts
                for _ in range(each)
            ]
        for mode in ("greedy", *(MODES if name in IN_ALL_MODES else ())):
            found.append((f"{name} {mode}", prompts, params_of(mode, len(prompts), options.tokens)))
    return found


def params_of(mode: str, count: int, tokens: int) -> list[SamplingParams]:
    kind = SAMPLED if mode == "sampled" else GREEDY
    more = {"logprobs": 5} if mode == "logprobs" else {}
    params = [SamplingParams(max_tokens=tokens, **kind, **more)] * count
    if mode == "odd neighbour":
        odd = {"frequency_penalty": 0.5, "top_p": 0.9}
        params[count // 2] = SamplingParams(max_tokens=tokens, **SAMPLED, **odd)
    return params


if __name__ == "__main__":
    main()
