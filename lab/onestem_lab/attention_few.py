"""Hopper's kernel against its twin in plain Triton, in steps of few rows, in turns.

    python -m onestem_lab.attention_few --out lab/results/attention-few.json

Cases are decodes of `rows` sequences, unshared or behind one prefix. The result has microseconds of
both kernels and of the bytes alone at the rate of a copy (lab/notes/gpu-attention.md).
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch

from onestem.cost.timing import graph_ms
from onestem.ops.triton import TritonAttention, load_config
from onestem_lab.attention.cases import Heads, Step, decode_step, make_tensors
from onestem_lab.attention.measure import device_facts
from onestem_lab.attention.rates import measure_rates
from onestem_lab.cli.attention import head_counts
from onestem_lab.results import write

ROWS = (8, 16, 32, 64, 128, 256)
OWN = (64, 256, 1024)
PREFIX, BEHIND = 1024, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", default="16/1,32/8,32/32")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--own", type=int, nargs="+", default=OWN, help="tokens of each sequence")
    parser.add_argument("--repeat", type=int, default=3, help="timings whose median counts")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    device, found = torch.device("cuda"), []
    rate = measure_rates(device, torch.bfloat16).bytes
    for pair in head_counts(options.heads):
        heads = Heads(*pair, 128, torch.bfloat16)
        for rows in options.rows:
            for own in options.own:
                step = decode_step((rows,), (own,))
                found.append(measure(f"{rows}x1 0/{own}", step, heads, rate, options.repeat))
            step = decode_step((1, rows), (PREFIX, BEHIND))
            name = f"1x{rows} {PREFIX}/{BEHIND}"
            found.append(measure(name, step, heads, rate, options.repeat))
    result = {
        "command": "python -m onestem_lab.attention_few",
        **device_facts(device),
        "bytes_per_s": rate,
        "cases": found,
    }
    write(options.out, result)


def measure(name: str, step: Step, heads: Heads, rate: float, repeat: int) -> dict[str, Any]:
    device = torch.device("cuda")
    group = heads.num_q_heads // heads.num_kv_heads
    tensors = make_tensors(step, heads, device)
    us = {}
    for kernel in ("hopper", "twin"):
        config, _ = load_config(
            torch.cuda.get_device_name(device), heads.dtype, heads.head_dim, group,
            hopper=kernel == "hopper",
        )  # fmt: skip
        attend = TritonAttention(config=config).prepare(step.plan).attend
        us[kernel] = 1e3 * graph_ms(partial(attend, *tensors), repeat=repeat)
    floor = 1e6 * step.bytes(heads) / rate
    print(f"{heads.label} {name}: {us['hopper']:.1f}, twin {us['twin']:.1f}, bytes {floor:.1f} us")
    return {"heads": heads.label, "case": name, "us": us, "bytes_us": floor}


if __name__ == "__main__":
    main()
