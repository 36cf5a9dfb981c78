r"""Attention's time over 40 decode steps, most of them behind shared prefixes, on a GPU.

    python -m onestem_lab.attention_steps --out steps.json [--heads 32/8,16/1] [--head-dim 128]

To compare two versions, run each in turns, in processes of their own. Then the medians of the files
of the earlier one stand beside those of the other (`before_ms`):

    python -m onestem_lab.attention_steps --out both.json --merge now1.json now2.json \
        --before old1.json old2.json

Milliseconds of a CUDA graph with a flushed L2 cache. Results are compared with those of the same
kernel without sharing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from onestem.cost.timing import graph_ms
from onestem.ops.triton import TritonAttention
from onestem_lab.attention.cases import Heads, decode_step, make_tensors, tree_levels
from onestem_lab.cli.attention import head_counts
from onestem_lab.results import write

HEADS = "32/8,64/8,16/1,40/40,8/1"

# `counts_lengths` of the levels of a tree, as in `onestem_lab.attention_trees`.
STEPS = (
    "1,8_1024,128", "1,16_2048,64", "1,24_1024,128", "1,32_4096,128", "1,48_2048,256",
    "1,64_1024,64", "1,64_2048,128", "1,64_8192,128", "1,96_2048,128", "1,128_512,128",
    "1,128_1024,64", "1,128_2048,256", "1,128_4096,128", "1,200_2048,128", "1,256_512,128",
    "1,256_1024,128", "1,256_1024,512", "1,256_2048,64", "1,256_4096,134", "1,256_8192,128",
    "1,256_16384,128", "1,384_1024,128", "1,512_512,256", "1,512_1024,64", "1,512_2048,128",
    "1,1024_512,128", "1,1024_1024,256", "4,64_2048,128", "8,256_1024,128", "16,256_2048,256",
    "32,256_1024,64", "85,255_1568,128", "64_256", "128_64", "256_256", "512_128", "1024_64",
    "1024_256", "1,8,256_2048,512,128", "1,4,64_1024,512,64",
)  # fmt: skip
ALIKE = 0.03  # maximum difference between results with and without sharing, of bf16 values near 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", default=HEADS)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=4, help="timings whose median counts")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--merge", type=Path, nargs="+", help="files of runs: nothing is run")
    parser.add_argument("--before", type=Path, nargs="+", help="... of a version before, if merged")
    options = parser.parse_args()
    if options.merge and options.before:
        now, before = (
            [json.loads(file.read_text()) for file in files]
            for files in (options.merge, options.before)
        )
        write(options.out, merge(now, before))
        return
    if options.merge or options.before:
        parser.error("--merge and --before belong together")
    cases = []
    for pair in head_counts(options.heads):
        heads = Heads(*pair, options.head_dim, torch.bfloat16)
        for step in STEPS:
            cases.append(
                {"case": step, "heads": heads.label, "ms": _ms(step, heads, options.repeat)}
            )
            print(f"{step} {heads.label}: {cases[-1]['ms']:.4f} ms", file=sys.stderr)
    command = "python -m onestem_lab.attention_steps " + " ".join(sys.argv[1:])
    facts = {"command": command, "device": torch.cuda.get_device_name()}
    write(options.out, {**facts, "cases": cases})


def merge(now: list[dict[str, Any]], before: list[dict[str, Any]]) -> dict[str, Any]:
    """The medians of several runs, and of runs before (`before_ms`)."""
    cases = [
        {
            **case,
            "ms": statistics.median(run["cases"][i]["ms"] for run in now),
            "before_ms": statistics.median(run["cases"][i]["ms"] for run in before),
        }
        for i, case in enumerate(now[0]["cases"])
    ]
    return {**now[0], "cases": cases}


def _ms(name: str, heads: Heads, repeat: int) -> float:
    torch.cuda.empty_cache()
    step = decode_step(*tree_levels(name), page_size=heads.page_size)
    q, k, v = make_tensors(step, heads, torch.device("cuda"))
    shared, alone = (TritonAttention().prepare(step.plan, share=share) for share in (True, False))
    apart = (shared.attend(q, k, v).out.float() - alone.attend(q, k, v).out.float()).abs().max()
    if not apart < ALIKE:
        raise SystemExit(
            f"{name} {heads.label}: results with and without sharing differ by {apart}"
        )
    return graph_ms(lambda: shared.attend(q, k, v).out, repeat=repeat)


if __name__ == "__main__":
    main()
