"""How fast a GGUF file is loaded on a CPU, and what it takes in memory, beside repacking alone.

    python -m onestem_lab.gguf_loading MODEL.KIND.gguf [...] [--turns 2]

Each turn runs in a process of its own, after the file was read once (warm pages). Repacking is what
each matrix of blocks takes alone: read, unpacked, packed for products, and dropped; `kept`: and
held until all are done, the faster of two times, since pages that a process gets are cleared first,
which nothing that keeps a model goes without. Loading makes the decoder. Memory is what the process
holds of its own (anonymous pages) more than before. Results lie in lab/results/gguf-loading.json,
in which each file replaces its own.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from onestem.garbage import give_holes_back
from onestem.models.formats.products import packed_groups
from onestem.models.gguf.blocks import pieces_of
from onestem.models.gguf.file import BLOCKS, RawTensor, open_gguf
from onestem.models.weights import load_decoder
from onestem.ops.cpu import CpuCodes, status
from onestem_lab.results import RESULTS, bare, machine, write

LEAST, MOST = 0.85, 1.15  # asked: of the repacking rate, and memory as part of the file


def own_bytes() -> int:
    """Anonymous pages of this process."""
    (kilobytes,) = re.findall(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    return int(kilobytes) << 10


def peak_bytes() -> int:
    (kilobytes,) = re.findall(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    return int(kilobytes) << 10


def measured(path: Path) -> dict[str, float]:
    """One turn, in this process."""
    with open(path, "rb") as file:
        while file.read(1 << 24):
            pass
    file_tensors = open_gguf(path).tensors.values()
    blocks = [raw for raw in file_tensors if raw.kind in BLOCKS]
    repacking = repacked(blocks, None)
    kept = min(repacked(blocks, []), repacked(blocks, []))
    gc.collect()
    give_holes_back()
    before, began = own_bytes(), time.perf_counter()
    decoder = load_decoder(path, dtype=torch.bfloat16, device="cpu")
    loading = time.perf_counter() - began
    gc.collect()
    return {
        "block bytes": sum(raw.num_bytes for raw in blocks),
        "repacking": repacking,
        "kept": kept,
        "loading": loading,
        "memory": own_bytes() - before,
        "weights": decoder.weight_bytes,
        "peak": peak_bytes(),
    }


def repacked(blocks: Sequence[RawTensor], held: list[CpuCodes] | None) -> float:
    """Seconds in which matrices are packed, and held where there is a list for them."""
    give_holes_back()
    began = time.perf_counter()
    for raw in blocks:
        packed = packed_groups(pieces_of(raw))
        if held is not None:
            held.append(packed)
    return time.perf_counter() - began


def summary(path: Path, turns: list[dict[str, float]]) -> dict[str, Any]:
    size = path.stat().st_size
    rates = [turn["block bytes"] / turn["repacking"] for turn in turns]
    parts = [turn["repacking"] / turn["loading"] for turn in turns]
    floors = [turn["kept"] / turn["loading"] for turn in turns]
    return {
        "file bytes": size,
        "repacking, bytes per second": statistics.median(rates),
        "loading, seconds": statistics.median(turn["loading"] for turn in turns),
        "of the repacking rate": statistics.median(parts),
        "of that rate into new memory": statistics.median(floors),
        "memory, of the file": max(turn["memory"] for turn in turns) / size,
        "weights, of the file": turns[0]["weights"] / size,
        "turns": turns,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--alone", action="store_true", help="one turn here, printed")
    parser.add_argument("--out", type=Path, default=RESULTS / "gguf-loading.json")
    options = parser.parse_args()
    if options.alone:
        torch.set_num_threads(options.threads)
        print(json.dumps(measured(options.models[0])))
        return
    files = json.loads(options.out.read_text())["files"] if options.out.exists() else {}
    for path in options.models:
        command = [sys.executable, "-m", __spec__.name, str(path), "--alone"]
        command += ["--threads", str(options.threads)]
        turns = [
            json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
            for _ in range(options.turns)
        ]
        files[path.name] = summary(path, turns)
        print(path.name, json.dumps(files[path.name]), flush=True)
        result = {
            "command": f"python -m onestem_lab.gguf_loading MODEL.gguf --turns {options.turns}",
            "machine": machine(),
            "extension": bare(status()),
            "asked": {"of the repacking rate": LEAST, "memory, of the file": MOST},
            "files": files,
        }
        write(options.out, result)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
