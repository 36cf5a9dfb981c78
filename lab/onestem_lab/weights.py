"""Weights on their way: from a checkpoint to the device, and over those that are there.

    python -m onestem_lab.weights [--parts loading,update] [--model shape:llama3.1-8b]
        [--device cuda] [--folder DIR] [--repeats 5] [--out FILE]

`loading`: a checkpoint of random tensors in shards of 4 GiB, whose pages are in memory since it was
just written. Seconds until the decoder stands, beside two ways to copy the mapped files' bytes to
the device and do nothing else: each tensor as it is mapped, and through two pinned buffers. The
better of them is the floor. On a CPU the copy is one to other memory.

`update`: `LLM.update_weights` with all tensors on the device, beside copying as many bytes there,
by tensors of the same sizes. Then a step: how long the first one after an update takes, beside
ordinary ones: 64 prompts, whose keys and values are computed anew, and decodes after that.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import onestem
from onestem.build import pick_device
from onestem.llm import LLM
from onestem.models.config import ModelConfig
from onestem.models.find import find_model
from onestem.models.tensors import Tensors
from onestem.models.weights import load_decoder
from onestem.request import Request, SamplingParams
from onestem_lab.batch import machine
from onestem_lab.results import device_name, write

SHARD_BYTES = 4 << 30
BUFFER_BYTES = 256 << 20
DECODES = 20  # steps


def main() -> None:
    options = parse()
    device = pick_device(options.device)
    result: dict[str, Any] = {
        "command": f"python -m onestem_lab.weights {' '.join(sys.argv[1:])}".strip(),
        "machine": machine(),
        "device": device_name(device),
        "onestem": onestem.__version__,
        "model": options.model,
    }
    parts = {"loading": loading, "update": update}
    for name in options.parts.split(","):
        result[name], line = parts[name](options, device)
        print(f"{name}: {line}", flush=True)
        if options.out is not None:
            write(options.out, result)


# ----------------------------------------------------------------------------- loading


def loading(options: argparse.Namespace, device: torch.device) -> tuple[dict[str, Any], str]:
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="onestem-weights-") as folder:
        files = write_checkpoint(Path(folder), options.model, device)
        num_bytes = sum(file.stat().st_size for file in files)

        def load() -> None:
            load_decoder(folder, dtype=torch.bfloat16, device=device)

        ways = {
            "load": load,
            "copy of mapped tensors": lambda: copy_mapped(files, device),
            "copy through pinned buffers": lambda: copy_pinned(files, device),
        }
        seconds = in_turns(ways, device, options.repeats)
    floor = min(seconds[name] for name in ways if name != "load")
    ratio = seconds["load"] / floor
    line = f"{num_bytes / 1e9:.1f} GB in {seconds['load']:.2f} s, copying {floor:.2f}: {ratio:.2f}x"
    return {"bytes": num_bytes, "seconds": seconds, "against_copy": ratio}, line


def write_checkpoint(folder: Path, model: str, device: torch.device) -> list[Path]:
    """Shards of random tensors."""
    path = find_model(model)
    (folder / "config.json").write_text((path / "config.json").read_text())
    shards: list[dict[str, Tensor]] = [{}]
    for name, shape in Tensors(ModelConfig.from_directory(path)).shapes.items():
        if sum(tensor.nbytes for tensor in shards[-1].values()) >= SHARD_BYTES:
            shards.append({})
        made = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, 0.02)
        shards[-1][name] = made.cpu()
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    where = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, folder / name, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return [folder / name for name in names]


def mapped(files: list[Path]) -> Iterator[Tensor]:
    for file in files:
        with safe_open(file, framework="pt", device="cpu") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                yield opened.get_tensor(name)


def copy_mapped(files: list[Path], device: torch.device) -> None:
    held = [tensor.to(device, copy=True) for tensor in mapped(files)]
    del held


def copy_pinned(files: list[Path], device: torch.device) -> None:
    """Through two buffers: one is filled while the other is on its way."""
    pinned = device.type == "cuda"
    buffers = [torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
    copied = [torch.cuda.Event() for _ in buffers] if pinned else []
    turn, held = 0, []
    for file in files:
        source = torch.from_file(str(file), size=file.stat().st_size, dtype=torch.uint8)
        there = torch.empty_like(source, device=device)
        for at in range(0, len(source), BUFFER_BYTES):
            part, turn = source[at : at + BUFFER_BYTES], 1 - turn
            if pinned:
                copied[turn].synchronize()
            buffers[turn][: len(part)].copy_(part)
            there[at : at + len(part)].copy_(buffers[turn][: len(part)], non_blocking=True)
            if pinned:
                copied[turn].record()
        held.append(there)


# ----------------------------------------------------------------------------- update


def update(options: argparse.Namespace, device: torch.device) -> tuple[dict[str, Any], str]:
    with LLM(
        options.model, device=str(device), dtype="bfloat16", kv_memory=options.kv_memory,
        max_model_len=2048, seed=0,
    ) as llm:  # fmt: skip
        generator = torch.Generator(device).manual_seed(1)
        given = {
            name: torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(
                0, 0.02, generator=generator
            )
            for name, shape in Tensors(llm.config).shapes.items()
        }
        largest = max(given.values(), key=Tensor.numel)
        into = torch.empty_like(largest).flatten()  # one for all: as many bytes are written

        def copy() -> None:
            for tensor in given.values():
                into[: tensor.numel()].copy_(tensor.flatten())

        ways = {"update": lambda: llm.update_weights(given.items()), "copy": copy}
        seconds = in_turns(ways, device, options.repeats)
        steps = {"before": [], "after": []}
        for _ in range(options.repeats):
            steps["before"].append(first_steps(llm, device))
            steps["after"].append(
                first_steps(llm, device, lambda: llm.update_weights(given.items()))
            )
    found = {
        name: {kind: statistics.median(one[kind] for one in runs) for kind in ("prompts", "decode")}
        for name, runs in steps.items()
    }
    num_bytes = sum(tensor.nbytes for tensor in given.values())
    ratio = seconds["update"] / seconds["copy"]
    step = {kind: found["after"][kind] / found["before"][kind] for kind in ("prompts", "decode")}
    line = f"{num_bytes / 1e9:.1f} GB in {1e3 * seconds['update']:.1f} ms, copying "
    line += f"{1e3 * seconds['copy']:.1f}: {ratio:.2f}x; the first step after it "
    line += f"{step['prompts']:.2f} ordinary ones (decodes {step['decode']:.2f})"
    return {
        "bytes": num_bytes,
        "seconds": seconds,
        "against_copy": ratio,
        "step_ms": found,
        "first_step_against_ordinary": step,
    }, line


def first_steps(
    llm: LLM, device: torch.device, between: Callable[[], object] = lambda: None
) -> dict[str, float]:
    """Milliseconds of the first step of 64 prompts, and the median of those that decode."""
    engine, rng = llm.engine, np.random.default_rng(0)
    between()
    engine.cache.clear()
    params = SamplingParams(max_tokens=DECODES + 8, temperature=0, ignore_eos=True)
    for i in range(64):
        ids = rng.integers(0, llm.config.vocab_size, 64).tolist()
        engine.add_request(Request(request_id=str(i), prompt_token_ids=ids, params=params))
    took = []
    while engine.has_unfinished():
        wait(device)
        began = time.perf_counter()
        engine.step()
        wait(device)
        took.append(1e3 * (time.perf_counter() - began))
    return {"prompts": took[0], "decode": statistics.median(took[2 : 2 + DECODES])}


# ----------------------------------------------------------------------------- both


def in_turns(
    ways: dict[str, Callable[[], object]], device: torch.device, repeats: int
) -> dict[str, float]:
    """Median seconds of each; the first turn does not count."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, call in ways.items():
            wait(device)
            began = time.perf_counter()
            call()
            wait(device)
            if repeat > 0:
                times[name].append(time.perf_counter() - began)
    return {name: statistics.median(each) for name, each in times.items()}


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="loading,update")
    parser.add_argument("--model", default="shape:llama3.1-8b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--kv-memory", default="8GiB")
    parser.add_argument("--folder", help="for the checkpoint; default: where temporary files are")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
