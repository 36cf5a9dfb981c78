"""Attention on the trees on which PAT and FastTree were measured: decodes, one row per leaf.

    python -m onestem_lab.attention_trees --device cuda --out lab/results/attention-trees.json

Prints a table and writes what `onestem bench attention --json` gives, and for each case what is
asked of it: 1.3 times the fastest other where the bytes alone take more than 15 us, else as fast.
The file is written again after each case, so that a run that is stopped keeps what it measured. The
shapes of heads come in the order given.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from onestem_lab.attention.cases import TREES, Case, Heads, decode_step, tree_levels
from onestem_lab.attention.measure import bench_attention
from onestem_lab.cli.attention import check_heads, dtype_of, head_counts
from onestem_lab.results import write

HEADS = "32/32,16/8,32/8,64/8,16/1"
PEERS = {"cuda": "flashinfer,flash_attn3,sdpa", "cpu": "sdpa"}
LONG_MS, ASKED_LONG, ASKED_SHORT = 0.015, 1.3, 1.0


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--trees", nargs="+", choices=TREES, default=TREES, help="whose")
    parser.add_argument("--heads", default=HEADS)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--against", help="default: " + "; ".join(PEERS.values()))
    parser.add_argument("--scale", type=float, default=1.0, help="of all counts and lengths")
    parser.add_argument("--repeat", type=int, default=5, help="timings whose median counts")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    against = PEERS[options.device] if options.against is None else options.against
    heads = tuple(
        Heads(*pair, options.head_dim, dtype_of(options.dtype))
        for pair in head_counts(options.heads)
    )
    for each in heads:
        check_heads(each, options.device)
    facts = {
        "command": "python -m onestem_lab.attention_trees "
        + " ".join(sys.argv[1:] if arguments is None else arguments),
        "scale": options.scale,
    }

    def keep(found: dict[str, Any]) -> dict[str, Any]:
        found["cases"] = [{**entry, **asked(entry)} for entry in found["cases"]]
        write(options.out, {**facts, **found})
        return found

    def progress(found: dict[str, Any]) -> None:
        entry = keep(found)["cases"][-1]
        print(f"{entry['case']} {entry['heads']}: {entry['ms']:.4f} ms", file=sys.stderr)

    found = bench_attention(
        {name: scaled(name, options.scale) for of in options.trees for name in TREES[of]},
        heads,
        torch.device(options.device),
        tuple(name for name in against.split(",") if name),
        progress=progress,
        repeat=options.repeat,
    )
    keep(found)
    print("\n".join([*map(row, found["cases"]), *map(str, found["summary"])]))


def scaled(name: str, scale: float) -> Case:
    """The tree `SET COUNTS_LENGTHS` with so much of its nodes and tokens, at least one of each."""
    levels = tree_levels(name.split()[1])
    return Case(partial(decode_step, *(tuple(max(1, round(n * scale)) for n in x) for x in levels)))


def asked(entry: dict[str, Any]) -> dict[str, Any]:
    """How many times the fastest other is asked, and whether that is reached."""
    least = ASKED_LONG if entry["byte_floor_ms"] > LONG_MS else ASKED_SHORT
    return {"asked": least, "reached": entry["speedup"] >= least} if "speedup" in entry else {}


def row(entry: dict[str, Any]) -> str:
    """Markdown: tree, heads, our time, the floors, without sharing, the fastest other, its time
    over ours."""
    floors = max(entry["flop_floor_ms"], entry["byte_floor_ms"])
    cells = [entry["case"], entry["heads"], f"{entry['ms']:.4f}", f"{floors:.4f}"]
    cells.append(f"{entry['unshared_ms']:.4f}")
    if "speedup" in entry:
        name = entry["fastest_other"]
        cells += [f"{entry['others_ms'][name]:.4f} {name}", f"{entry['speedup']:.2f}"]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
