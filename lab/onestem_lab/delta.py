"""Gated delta rules: a prompt in chunks, decodes against what their states' bytes allow.

    python -m onestem_lab.delta [--tokens 8192] [--rows 64,256] [--sweep] [--out FILE]

`prompt`: milliseconds of the whole operation for one prompt, with 2 key and 8 value heads and with
16 and 32, of 128 each, in bf16, from a state. Beside it, where they are installed, the kernels of
flash-linear-attention. `decode`: one row of each sequence; the floor is a multiplication in place
of the same states in the same run, which reads and writes each byte once. `around`: the
convolution, the gates and the norm. On a GPU within a graph, with a cold L2 cache; medians.

`--sweep`: with other constants of the kernels.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from triton.runtime.errors import OutOfResources

from onestem.cost.timing import graph_ms
from onestem.ops import PartRows, StateRows, resolve_delta
from onestem_lab.results import RESULTS, machine, write
from onestem_lab.timing import cpu_ms

HEADS, SIZE = ((2, 8), (16, 32)), 128
KERNELS = "onestem.ops.triton.delta"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", default="8192")
    parser.add_argument("--rows", default="64,256")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS / "delta.json")
    options = parser.parse_args()
    device = torch.device(options.device)
    result: dict[str, Any] = {
        "command": f"python -m onestem_lab.delta --tokens {options.tokens} --rows {options.rows}",
        "machine": machine(),
        "gpu": torch.cuda.get_device_name() if device.type == "cuda" else None,
        "threads": torch.get_num_threads(),
        "cases": [],
    }
    for case in cases(device, options):
        print(case, flush=True)
        result["cases"].append(case)
        write(options.out, result)


# Other constants of the kernels: pieces of states and stages; pieces, warps and registers.
OF_PROMPTS = [
    {"_SCAN_COLUMNS": (columns,), "_SCAN_STAGES": stages}
    for columns, stages in product((16, 32, 64), (2, 3))
]
OF_DECODES = [
    {"_FEW_COLUMNS": columns, "_FEW_WARPS": warps, "_FEW_REGISTERS": registers}
    for columns, warps, registers in (
        (32, 4, None),
        (32, 4, 96),
        (16, 2, 96),
        (16, 1, None),
        (8, 1, 80),
    )
]


@torch.inference_mode()
def cases(device: torch.device, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Each case with its milliseconds."""
    tokens, rows = (list(map(int, x.split(","))) for x in (options.tokens, options.rows))
    for count in rows:
        yield decode(device, count)
    for heads, count in product(HEADS, tokens):
        yield prompt(device, heads, count)
    for count in (*rows, *tokens):
        yield around(device, count)
    if options.sweep:
        for own, heads, count in product(OF_PROMPTS, HEADS, tokens):
            yield with_constants(own, partial(prompt, device, heads, count, alone=True))
        for own, count in product(OF_DECODES, rows):
            yield with_constants(own, partial(decode, device, count))


def prompt(
    device: torch.device, heads: tuple[int, int], tokens: int, *, alone: bool = False
) -> dict[str, Any]:
    """One prompt that continues a state."""
    rows = parts_of(np.array([tokens]), device)
    inputs, states = drawn(tokens, heads, device), zeros(1, heads, device)
    ops = resolve_delta(device)
    calls = {"onestem": lambda: ops.delta_rule(*inputs, states, rows)}
    if not alone and device.type == "cuda" and find_spec("fla"):
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        q, k, v, decay, beta = (x.contiguous()[None] for x in inputs)
        flags = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
        calls["flash-linear-attention"] = lambda: chunk_gated_delta_rule(
            q, k, v, g=decay, beta=beta, initial_state=states, **flags
        )
        want = calls["flash-linear-attention"]()[0][0].float()
        error = (calls["onestem"]().float() - want).abs().max() / want.abs().max()
        print("differs from flash-linear-attention by", float(error), "of the largest")
    found = {"prompt": tokens, "heads": heads, "ms": timed(calls, device)}
    return {**found, "kernels": kernels(calls["onestem"])} if device.type == "cuda" else found


def kernels(call: Callable[[], object]) -> dict[str, float]:
    """Milliseconds of each kernel of a call, with warm caches."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    return {event.key: event.device_time / 1e3 for event in seen.key_averages()}


def decode(device: torch.device, rows: int) -> dict[str, Any]:
    """One row of each of some sequences."""
    heads = HEADS[-1]
    table = parts_of(np.ones(rows, np.int64), device)
    inputs, states = drawn(rows, heads, device), zeros(rows, heads, device)
    ops = resolve_delta(device)
    calls = {
        "onestem": lambda: ops.delta_rule(*inputs, states, table),
        "floor": lambda: states.mul_(1.0),
    }
    ms = timed(calls, device)
    share = round(ms["floor"] / ms["onestem"], 3)
    rate = 2 * states.nbytes / ms["floor"] / 1e6
    return {"decode": rows, "heads": heads, "ms": ms, "of the floor": share, "floor GB/s": rate}


def around(device: torch.device, rows: int) -> dict[str, Any]:
    """What else a layer does, for rows of one prompt or, below 1,000, for decodes."""
    key_heads, heads = HEADS[-1]
    channels = (2 * key_heads + heads) * SIZE
    one = rows >= 1000
    table = parts_of(np.array([rows]) if one else np.ones(rows, np.int64), device)
    x, z = (torch.randn(rows, channels, device=device).bfloat16() for _ in range(2))
    weight = torch.randn(channels, 4, device=device).bfloat16()
    states = torch.zeros(len(table.parts), 3, channels, device=device).bfloat16()
    a, b = torch.randn(rows, 2 * heads, device=device).bfloat16().split(heads, 1)
    a_log, dt_bias = torch.randn(2, heads, device=device)
    out, gate = (y[:, : heads * SIZE].unflatten(1, (heads, SIZE)) for y in (x, z))
    norm, ops = torch.ones(SIZE, device=device), resolve_delta(device)
    calls = {
        "convolution": lambda: ops.causal_conv(x, weight, states, table),
        "gates": lambda: ops.gates(a, b, a_log, dt_bias),
        "norm": lambda: ops.gated_norm(out, norm, gate, 1e-6),
    }
    return {"around": rows, "ms": timed(calls, device)}


def parts_of(count: np.ndarray, device: torch.device) -> PartRows:
    """Parts of as many rows, each with a slot of its own."""
    count = count.astype(np.int32)
    slots, first = np.arange(len(count), dtype=np.int32), np.cumsum(count) - count
    return PartRows.of(StateRows(first, count, np.zeros_like(count), slots, slots), device)


def drawn(rows: int, heads: tuple[int, int], device: torch.device) -> tuple[Tensor, ...]:
    """q, k and v as parts of one row, decays and strengths."""
    key_heads, value_heads = heads
    sizes = [count * SIZE for count in (key_heads, key_heads, value_heads)]
    qkv = torch.randn(rows, sum(sizes), device=device).bfloat16().split(sizes, 1)
    decay = -torch.rand(rows, value_heads, device=device)
    beta = torch.rand(rows, value_heads, device=device)
    return (*(x.unflatten(1, (-1, SIZE)) for x in qkv), decay, beta)


def zeros(slots: int, heads: tuple[int, int], device: torch.device) -> Tensor:
    return torch.zeros(slots, heads[1], SIZE, SIZE, device=device)


def timed(calls: dict[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    if device.type == "cpu":
        return cpu_ms(calls, cold=True)
    return {name: graph_ms(call) for name, call in calls.items()}


def with_constants(own: dict[str, Any], case: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A case of kernels with other constants; their error, where they need more than there is."""
    with ExitStack() as stack:
        for name, value in own.items():
            stack.enter_context(patch(f"{KERNELS}.{name}", value))
        try:
            return own | case()
        except OutOfResources as error:
            return own | {"error": str(error)}


if __name__ == "__main__":
    main()
