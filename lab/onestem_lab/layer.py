"""The products of one decoder layer in each weight format, against their floors.

    python -m onestem_lab.layer --device cuda --shape llama3.1-8b --out lab/results/layer-8b-h200.json
    python -m onestem_lab.layer --device cuda --shape qwen3-30b-a3b --formats 16bit
    python -m onestem_lab.layer --shape 0.5b --formats 16bit,int8,int4 --rows 1,64,512       # a CPU
    python -m onestem_lab.layer --device cuda --sweep --formats int4 --rows 1,16,64

Random weights; medians of microseconds, on a GPU inside a CUDA graph. Layers take turns, so that
weights come from memory. `layer` is all products with the gate between them; rows that a format
rounds are given rounded to those that stand behind a norm, as a decoder gives them. `step` is that
with both norms. The floor of a number of rows is the slower of FLOPs (those of 16 bits, or
of 8 where rows are rounded too) and bytes of the weights that are read, of experts those that some
row takes, at the rates measured in the same run. `launches` are those of `layer`, and `launch_us`
is what one takes that waits for the one before it, and adds one to a number. `reading_us` is what
reading a layer's weights takes, with a launch for each product that waits for the one before.

`--sweep` tries tiles of Triton's products for each product of the shape,
beside what stands, and checks each against float64 (`lab/onestem_lab/layer_tiles.py`).
"""  # noqa: E501

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from onestem.cost.timing import graph_ms
from onestem.models.config import ModelConfig
from onestem.models.decoder import Decoder, Layer
from onestem.models.linear import held_tensors
from onestem.models.mlp import ExpertLayer, Mlp
from onestem.models.weights import random_decoder
from onestem.ops.dispatch import resolve_rounding
from onestem.ops.rounding import BothRows, RoundedRows, Rows
from onestem.options import Quantize
from onestem.shapes import find_shape
from onestem_lab.attention.measure import device_facts
from onestem_lab.attention.rates import Rates, measure_rates
from onestem_lab.results import machine, write
from onestem_lab.timing import cpu_ms

LAYERS, REPEATS, DTYPE = 4, 5, torch.bfloat16
PLAIN = "16bit"
FORMATS = (PLAIN, *get_args(Quantize))
# Of a number; int4 has a scale of 16 bits for 128.
BYTES = {PLAIN: 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5 + 2 / 128}
# Rows of these are rounded like the weights, and multiplied at twice the rate.
ROUND_ROWS = ("fp8", "int8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", default="llama3.1-8b", help="a name of docs/reference/shapes.md")
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--rows", default="1,16,64,256,8192")
    parser.add_argument("--sweep", action="store_true", help="try tiles of Triton's products")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    config = ModelConfig.from_directory(find_shape(options.shape)).first_layers(LAYERS)
    config = replace(config, vocab_size=1024)
    rates = measure_rates(device, DTYPE)
    rows_of = [int(rows) for rows in options.rows.split(",")]
    entries: list[dict[str, Any]] = []
    for form in options.formats.split(","):
        if form not in FORMATS:
            parser.error(f"--formats has {form!r}, expected some of {', '.join(FORMATS)}")
        if options.sweep:
            from onestem_lab.layer_tiles import swept

            entries += swept(form, config, rows_of, device, rates) if form != PLAIN else []
            continue
        entries += timed(form, config, rows_of, device, rates)
    result = {
        "command": f"python -m onestem_lab.layer --device {options.device} --shape {options.shape} "
        f"--formats {options.formats} --rows {options.rows}" + " --sweep" * options.sweep,
        "machine": machine(),
        **device_facts(device),
        "matrix_flops_per_s": rates.flops,
        "bytes_per_s": rates.bytes,
        "entries": entries,
    }
    if options.out is not None:
        write(options.out, result)


def timed(
    form: str,
    config: ModelConfig,
    rows_of: Sequence[int],
    device: torch.device,
    rates: Rates,
) -> Iterator[dict[str, Any]]:
    quantization = None if form == PLAIN else form
    decoder = random_decoder(config, dtype=DTYPE, device=device, quantization=quantization)
    launch = launch_us(decoder.device) if decoder.device.type == "cuda" else 0.0
    for rows in rows_of:
        entry = {"format": form, "rows": rows}
        entry |= measured(decoder, rows, form, rates)
        shown = ", ".join(f"{k} {v:.1f}" for k, v in entry["us"].items())
        share = entry["floor_us"] / entry["us"]["layer"]
        line = f"{form} {rows}: {shown}; floor {entry['floor_us']:.1f} ({share:.0%})"
        if entry["launches"] is not None:
            waiting = entry["launches"] * launch
            share = (entry["floor_us"] + waiting) / entry["us"]["layer"]
            line += f", with {entry['launches']} launches {waiting:.1f} more ({share:.0%})"
            entry["launch_us"] = launch
            if form == "int4" and rows == 1:
                entry["reading_us"] = reading(decoder.layers)
                line += f"; reading {entry['reading_us']:.1f}"
        print(line, flush=True)
        yield entry


@torch.inference_mode()
def measured(decoder: Decoder, rows: int, form: str, rates: Rates) -> dict[str, Any]:
    """Microseconds of each product and of all, and their floor."""
    config, layers = decoder.config, decoder.layers
    given = torch.randn(rows, config.hidden_size, device=decoder.device).to(decoder.dtype)
    before, behind = (rounded(given, one.rounds) for one in (layers[0].qkv, layers[0].mlp))
    both = isinstance(layers[0].mlp, ExpertLayer)
    if both and isinstance(behind, RoundedRows):
        behind = BothRows(given, behind)
    attended = torch.randn(rows, config.num_q_heads * config.head_dim, device=decoder.device)
    attended = attended.to(decoder.dtype)

    def whole(layer: Layer) -> None:
        layer.qkv(before)
        layer.output(attended)
        decoder.mlp(layer, behind, given)

    def step(layer: Layer) -> None:
        layer.qkv(decoder.normed(given, attended_delta, layer.input_norm, layer.qkv.rounds))
        delta = layer.output(attended)
        rounds = layer.mlp.rounds
        normed = decoder.normed(given, delta, layer.post_norm, rounds, both=both)
        decoder.mlp(layer, normed, given)

    calls: dict[str, Callable[[Layer], object]] = {
        "qkv": lambda layer: layer.qkv(before),
        "output": lambda layer: layer.output(attended),
        "mlp": lambda layer: decoder.mlp(layer, behind, given),
        "layer": whole,
        "step": step,
    }
    attended_delta = torch.zeros_like(given)
    found = {name: microseconds(call, layers, decoder.device) for name, call in calls.items()}
    read, flops = work(layers, given, config, form)
    speed = rates.flops * (2 if form in ROUND_ROWS else 1)
    floor = 1e6 * max(read / rates.bytes, flops / speed)
    launches = num_launches(lambda: whole(layers[0])) if decoder.device.type == "cuda" else None
    return {
        "us": found,
        "floor_us": floor,
        "bytes": read,
        "flops": flops,
        "launches": launches,
    }


def launch_us(device: torch.device, number: int = 32) -> float:
    """Of launches of a graph that wait for each other: each adds one to a number."""
    one = torch.zeros(1, device=device)
    return 1e3 * graph_ms(lambda: [one.add_(1) for _ in range(number)], repeat=REPEATS) / number


def reading(layers: Sequence[Layer]) -> float:
    from onestem_lab.layer_reads import reading_us

    weights = []
    for layer in layers:
        assert isinstance(layer.mlp, Mlp)
        products = (layer.qkv, layer.output, layer.mlp.up, layer.mlp.down)
        weights.append([torch.cat(words([*held_tensors(product)])) for product in products])
    return reading_us(weights)


def words(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Of 32 bits, flat."""
    return [tensor.reshape(-1).view(torch.int32) for tensor in tensors]


def num_launches(call: Callable[[], object]) -> int:
    """Kernels that a call runs on a GPU."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


def rounded(x: Tensor, rounds: torch.dtype | None) -> Rows:
    return x if rounds is None else resolve_rounding(x.device)(x, rounds)


def microseconds(
    call: Callable[[Layer], object], layers: Sequence[Layer], device: torch.device
) -> float:
    if device.type == "cuda":
        ms = graph_ms(lambda: [call(layer) for layer in layers], repeat=REPEATS)
        return 1e3 * ms / len(layers)
    turn = cycle(layers)
    return 1e3 * cpu_ms({"": lambda: call(next(turn))}, cold=True, repeat=REPEATS)[""]


def work(layers: Sequence[Layer], x: Tensor, config: ModelConfig, form: str) -> tuple[float, float]:
    """Bytes of the weights that rows read, and FLOPs, of a layer."""
    heads = config.num_q_heads + 2 * config.num_kv_heads
    attention = (heads + config.num_q_heads) * config.head_dim * config.hidden_size
    wide = (3 if config.gated else 2) * config.hidden_size
    mlp = wide * config.without_experts().intermediate_size
    flops = 2.0 * len(x) * (attention + mlp)
    if config.experts is None:
        return BYTES[form] * (attention + mlp), flops
    shared = wide * config.experts.shared_size
    routed = statistics.mean(expert_bytes(layer, x) for layer in layers)
    return BYTES[form] * (attention + shared) + routed, flops


def expert_bytes(layer: Layer, x: Tensor) -> float:
    """Of those that some row takes."""
    experts = layer.mlp
    assert isinstance(experts, ExpertLayer)
    _, chosen = experts.route(experts.router(x), experts.experts, experts.correction)
    held = sum(tensor.numel() * tensor.dtype.itemsize for tensor in held_tensors(experts.products))
    return held * len(chosen.unique()) / experts.experts.num


if __name__ == "__main__":
    main()
