"""Products of a decoder layer's packed weights on a CPU: whole, and in pieces of rows.

    python -m onestem_lab.linear [--shape 0.5b] [--dtype bfloat16] [--rows 512,1024,2048]

Where pieces are faster, `onestem.models.linear` makes them. Random weights of several layers in
turn, so that they come from memory as a model's do; variants take turns; medians. Written to
lab/results/linear-SHAPE-DTYPE.json, with `--suffix` before `.json`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from onestem.models.linear import Layout, Linear
from onestem.shapes import find_shape
from onestem_lab.peers.layer_products import layer_products
from onestem_lab.results import RESULTS, machine, write
from onestem_lab.timing import cpu_ms

PIECES = (128, 256, 512, 1024)
LAYERS, REPEATS = 6, 9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="0.5b", help="a name of docs/reference/shapes.md")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--rows", default="256,512,1024,1536,2048")
    parser.add_argument("--suffix", default="", help="appended to the result file's name")
    options = parser.parse_args()
    config = json.loads((find_shape(options.shape) / "config.json").read_text())
    cases = [
        measure(name, width, out, rows, getattr(torch, options.dtype))
        for name, (width, out) in layer_products(config).items()
        for rows in map(int, options.rows.split(","))
    ]
    result = {
        "command": f"python -m onestem_lab.linear --shape {options.shape} --dtype {options.dtype} "
        f"--rows {options.rows} --suffix={options.suffix}",
        "machine": machine(),
        "threads": torch.get_num_threads(),
        "cases": cases,
    }
    path = RESULTS / f"linear-{options.shape}-{options.dtype}{options.suffix}.json"
    write(path, result)


@torch.inference_mode()
def measure(name: str, width: int, out: int, rows: int, dtype: torch.dtype) -> dict[str, Any]:
    layers = cycle([_layer(width, out, dtype) for _ in range(LAYERS)])
    x = torch.randn(rows, width).to(dtype)
    calls: dict[str, Callable[[], object]] = {"whole": lambda: next(layers)(x)}
    for piece in PIECES:
        if piece < rows:
            calls[str(piece)] = lambda piece=piece: _in_pieces(next(layers), x, piece)  # type: ignore[misc]
    ms = cpu_ms(calls, cold=False, repeat=REPEATS)
    print(f"{name} {width} x {out}, {rows} rows:", {k: round(v, 2) for k, v in ms.items()}, "ms")
    return {"product": name, "in": width, "out": out, "rows": rows, "ms": ms}


def _layer(width: int, out: int, dtype: torch.dtype) -> Linear:
    """Packed, and multiplied as it is asked for: not in the pieces that it would make itself."""
    layer = Linear((torch.randn(out, width) / width**0.5).to(dtype), layout=Layout.PACKED)
    layer.amx = False
    return layer


def _in_pieces(layer: Linear, x: Tensor, rows: int) -> Tensor:
    return torch.cat([layer(piece) for piece in x.split(rows)])


if __name__ == "__main__":
    main()
