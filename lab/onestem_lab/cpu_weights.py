"""Weights of 8 and 4 bits on a CPU: steps of whole models against llama.cpp, in turns.

    python -m onestem_lab.cpu_weights --peer DIR,... --models FOLDER
        [--shapes qwen2.5-0.5b,qwen3-4b] [--formats int8,int4] [--files MODEL.gguf,...]
        [--against SOURCES] [--steps 'decode 1'] [--own-first]

DIR is an environment that `lab/onestem_lab/peers/install llama_cpp DIR` made (of several builds the
fastest counts, of each kind of step), FOLDER takes the files that it multiplies (random weights of
the shapes, written once). `--formats q8_0,q4_k_m,q4_0` and `--files` (MODEL.KIND.gguf) give both
engines the same file, whose blocks stay as they are; beside them int8 or int4 of the same shape is
timed (`own`, which reads `own_bytes`), and the same file by other SOURCES of Onestem (`against`).
Steps are of the engine here and of `llama_decode` there: 512 tokens of one prompt, 1 and 64 rows
that decode behind 16 tokens. Beside each its floor: bytes of the weights at the memory's rate, or
multiply-adds at that of int8 products (with AMX of groups: bfloat16), whichever is longer, all
measured in the same run. `own_most` is the ratio to our own format if nothing but the floors
differed.

llama.cpp runs with flash attention and without, its weights repacked and as they are; the fastest
counts, of each kind of step. `--threads 1` and seconds of the process's processor (`cpu`) tell
products apart on a machine that others use; with more threads the wall's count. Written to
lab/results/cpu-weights.json.

A machine with AMX measures as one without by `ONESTEM_CPU_ISA=avx512_bf16` and
`ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16` here, and a llama.cpp that is built with
`CFLAGS="-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"`, `CXXFLAGS` alike.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from onestem.engine.engine import Engine
from onestem.llm import LLM
from onestem.models.config import GenerationDefaults
from onestem.models.formats.tables import PackedTable
from onestem.ops.cpu import chosen_isa, status
from onestem.options import EngineOptions
from onestem.request import Request, SamplingParams
from onestem.shapes import find_shape
from onestem_lab.attention.rates import Rates, measure_rates, reading_rate
from onestem_lab.results import RESULTS, bare, machine, write
from onestem_lab.timing import least_seconds

PEERS = {"int8": "q8_0", "int4": "q4_k_m"}
# What a file's format is measured beside.
OWN = {"q8_0": "int8", "q4_k_m": "int4", "q4_0": "int4", "q4_1": "int4"}
STEPS = ("prefill 512", "decode 1", "decode 64")
# Of a prompt: on a machine with AMX, and on one without.
PREFILL, PREFILL_PLAIN = 3.0, 1.5
CONTEXT = 16
CLOCKS = ("wall", "cpu")
RATIOS = {"ratio": "", "own_ratio": "own_ms", "against_ratio": "against_ms"}
Turn = dict[str, list[float]]  # seconds by each clock, of each side
RUNNERS = Path(__file__).parent / "peers" / "runners"


class Ours:
    """Steps of an engine, one at a time.

    Args:
        model: `shape:NAME`, or a GGUF file.
        form: that weights are rounded to; None: they stay as they are.
    """

    def __init__(self, model: str, form: str | None, threads: int) -> None:
        llm = LLM(model, device="cpu", dtype="bfloat16", quantization=form,
                  threads=threads, kv_memory="0.5GB")  # fmt: skip
        self.decoder, self.number = llm.decoder, 0
        self.random = np.random.default_rng(0)
        self.engine = Engine(
            llm.decoder,
            None,
            GenerationDefaults(),
            EngineOptions(max_step_tokens=2048),
            num_pages=512,
        )

    def take(self, step: str) -> list[float]:
        kind, count = step.split()
        return self._prefill(int(count)) if kind == "prefill" else self._decode(int(count))

    def _add(self, tokens: int, answer: int) -> None:
        self.number += 1
        ids = self.random.integers(0, self.decoder.config.vocab_size, tokens).tolist()
        params = SamplingParams(max_tokens=answer, temperature=0, ignore_eos=True)
        self.engine.add_request(
            Request(request_id=str(self.number), prompt_token_ids=ids, params=params)
        )

    def _prefill(self, tokens: int) -> list[float]:
        self._add(tokens, 1)
        seconds = self._step()
        self._finish()
        return seconds

    def _decode(self, rows: int) -> list[float]:
        for _ in range(rows):
            self._add(CONTEXT, 6)
        found = []
        while self.engine.has_unfinished():
            seconds = self._step()
            if len(self.engine.batch_rows) == rows and not self.engine.batch_rows.chunks:
                found.append(seconds)
        self._finish()
        return [min(values) for values in zip(*found, strict=True)]

    def _step(self) -> list[float]:
        wall, cpu = time.perf_counter(), time.process_time()
        self.engine.step()
        return [time.perf_counter() - wall, time.process_time() - cpu]

    def _finish(self) -> None:
        while self.engine.has_unfinished():
            self.engine.step()
        self.engine.cache.clear()


class Peer:
    """Steps in a process of its own: those of llama.cpp, or of other sources of Onestem."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.system = json.loads(self._line())

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.process.args!r} ended with status {self.process.wait()}")
        return line

    def take(self, step: str) -> list[float]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{step}\n")
        self.process.stdin.flush()
        return [float(value) for value in json.loads(self._line())]


@contextmanager
def peer(*command: object, sources: Path | None = None) -> Iterator[Peer]:
    """`sources`: of Onestem."""
    lab = Path(__file__).parents[1]
    found = os.environ.get("PYTHONPATH", "")
    environment = {} if sources is None else {"PYTHONPATH": f"{sources.resolve()}:{lab}:{found}"}
    with subprocess.Popen(
        [str(part) for part in command],
        cwd=RUNNERS,
        env=os.environ | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            yield Peer(process)
        finally:
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", required=True)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--shapes", default="qwen2.5-0.5b,qwen3-4b")
    parser.add_argument("--formats", default="int8,int4")
    parser.add_argument("--files", default="", help="GGUF files, in place of shapes")
    parser.add_argument("--steps", default=",".join(STEPS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    help_ = "in a virtual machine who is loaded first may get memory of another speed"
    parser.add_argument("--own-first", action="store_true", help=help_)
    parser.add_argument("--settings", default="00,01,10,11", help="flash attention, repacked")
    parser.add_argument("--out", type=Path, default=RESULTS / "cpu-weights.json")
    options = parser.parse_args()
    clock = "cpu" if options.threads == 1 else "wall"
    # Links stay: an environment is found by the name of its Python.
    pythons = [Path(one).absolute() / "bin" / "python" for one in options.peer.split(",")]
    models = options.models.resolve()
    models.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    entries: list[dict[str, Any]] = []
    files = [path for path in options.files.split(",") if path]
    options.steps = options.steps.split(",")
    result = {
        "command": "python -m onestem_lab.cpu_weights --peer DIR --models FOLDER "
        f"--shapes {options.shapes} --formats {options.formats} "
        + (f"--files {','.join(Path(one).name for one in files)} " if files else "")
        + (f"--against {options.against.name} " if options.against else "")
        + ("--own-first " if options.own_first else "")
        + f"--steps '{','.join(options.steps)}' "
        + f"--threads {options.threads} --turns {options.turns} "
        f"--settings {options.settings}",
        "machine": machine(),
        "extension": bare(status()),
        "asked": asked(),
    }
    pairs = product(options.shapes.split(","), options.formats.split(","))
    for shape, form in [(None, path) for path in files] or pairs:
        if shape is None:
            model = Path(form)
            form = model.stem.rpartition(".")[2].lower()
        else:
            model = _written(pythons[0], shape, models, PEERS.get(form, form), options.threads)
        for setting in options.settings.split(","):
            entry: dict[str, Any] = {}
            entries.append(entry)
            for found in _compared(pythons, model, shape, form, setting, options):
                entry.update(found)
                write(options.out, result | {"entries": entries})
            for name in RATIOS:
                known = {step: entry[step] for step in options.steps}
                shown = {step: one[name][clock] for step, one in known.items() if name in one}
                rounded = {step: round(one, 2) for step, one in shown.items()}
                print(shape, form, setting, name, rounded, flush=True)


def asked() -> dict[str, float]:
    """Ratios to llama.cpp that are the goal with the instruction set that is used."""
    prefill = PREFILL if chosen_isa().startswith("amx") else PREFILL_PLAIN
    return dict(zip(STEPS, (prefill, 0.95, 2.5), strict=True))


def _written(python: Path, shape: str, models: Path, kind: str, threads: int) -> Path:
    code = (
        "import sys; from pathlib import Path; from gguf_random import quantised_model; "
        "config, work, kind, threads = sys.argv[1:]; "
        "print(quantised_model(Path(config), Path(work), kind, int(threads)))"
    )
    config = find_shape(shape) / "config.json"
    command = [str(one) for one in (python, "-c", code, config, models, kind, threads)]
    found = subprocess.run(command, cwd=RUNNERS, check=True, capture_output=True, text=True)
    return Path(found.stdout.split()[-1])


def _compared(
    pythons: list[Path],
    model: Path,
    shape: str | None,
    form: str,
    setting: str,
    options: argparse.Namespace,
) -> Iterator[dict[str, Any]]:
    """After each turn what was found until then."""
    with ExitStack() as stack:
        flash, extra = map(int, setting)
        script = ("step_llama_cpp.py", model, options.threads, CONTEXT, flash, extra)
        theirs = {
            python.parts[-3]: stack.enter_context(peer(python, *script)) for python in pythons
        }
        weights = str(model) if shape is None else f"shape:{shape}"
        if form in PEERS:
            ours, own = Ours(weights, form, options.threads), None
        else:
            own = Ours(weights, OWN[form], options.threads) if options.own_first else None
            ours = Ours(str(model), None, options.threads)
            own = own or Ours(weights, OWN[form], options.threads)
        rates = measure_rates(torch.device("cpu"), torch.bfloat16)
        bytes_flops = max(rates.flops, _byte_rate())
        sides: dict[str, Ours | Peer] = {"ms": ours}
        sides |= {f"peer {name}": one for name, one in theirs.items()}
        if own is not None:
            sides["own_ms"] = own
            if options.against is not None:
                told = (sys.executable, "step_onestem.py", model, options.threads)
                sides["against_ms"] = stack.enter_context(peer(*told, sources=options.against))
        held: dict[str, Any] = {
            "shape": shape,
            "format": form,
            "weight_bytes": _read_bytes(ours),
            "own_bytes": None if own is None else _read_bytes(own),
            "peer_bytes": model.stat().st_size,
            "peer": {
                "type": model.stem,
                "flash_attention": flash,
                "repacked": extra,
                "system": {name: one.system for name, one in theirs.items()},
            },
        }
        turns: dict[str, list[Turn]] = {step: [] for step in options.steps}
        for turn in range(options.turns):
            for step in options.steps:
                turns[step].append({name: side.take(step) for name, side in sides.items()})
            rates = rates.better(Rates(0.0, reading_rate()))
            entry = held | {
                "turns": turn + 1,
                "memory_bytes_per_s": rates.bytes,
                "bfloat16_flops_per_s": rates.flops,
                "int8_flops_per_s": bytes_flops,
            }
            for step in options.steps:
                entry[step] = _summed(turns[step])
                floor = entry[step]["floor_ms"] = 1e3 * _floor(step, form, entry, ours)
                if own is not None:
                    more = floor - 1e3 * _floor(step, OWN[form], entry, own)
                    taken = entry[step]["own_ms"]["wall"]["median"]
                    entry[step]["own_most"] = taken / (taken + max(0.0, more))
            yield entry


def _summed(turns: list[Turn]) -> dict[str, Any]:
    """Of one kind of step: milliseconds of each side, and ratios of the turns."""
    found: dict[str, Any] = {
        name: {
            clock: {
                "median": 1e3 * statistics.median(turn[name][i] for turn in turns),
                "least": 1e3 * min(turn[name][i] for turn in turns),
            }
            for i, clock in enumerate(CLOCKS)
        }
        for name in turns[0]
    }
    peers = {name: found[name]["wall"]["median"] for name in turns[0] if name.startswith("peer")}
    for name, other in {**RATIOS, "ratio": min(peers, key=peers.__getitem__)}.items():
        if other in turns[0]:
            found[name] = {
                clock: statistics.median(turn[other][i] / turn["ms"][i] for turn in turns)
                for i, clock in enumerate(CLOCKS)
            }
    return found


def _read_bytes(ours: Ours) -> int:
    """Of weights that a step reads: all but the embedding, of which it reads some rows."""
    decoder = ours.decoder
    table = decoder.embedding
    if isinstance(table, PackedTable):
        is_head = getattr(decoder.head, "codes", None) is table.packed
        held = [] if is_head else table.packed.tensors()
    else:
        held = [table]
    return decoder.weight_bytes - sum(tensor.nbytes for tensor in held)


def _byte_rate() -> float:
    """FLOP/s of products of int8."""
    best = 0.0
    for size in (512, 1024, 2048, 4096):
        a, b = (torch.randint(-128, 128, (size, size), dtype=torch.int8) for _ in range(2))
        seconds = least_seconds(lambda a=a, b=b: torch._int_mm(a, b))  # type: ignore[misc]
        best = max(best, 2 * size**3 / seconds)
        if seconds > 0.2:
            break
    return best


def _floor(step: str, form: str, entry: dict[str, Any], ours: Ours) -> float:
    """Seconds of the weights of a form, which `ours` has."""
    kind, count = step.split()
    config = ours.decoder.config
    head = config.vocab_size * config.hidden_size
    layers = ours.decoder.num_parameters - head
    in_bytes = form == "int8" or chosen_isa() == "avx512_bf16"
    rate = entry["int8_flops_per_s" if in_bytes else "bfloat16_flops_per_s"]
    flops = 2.0 * int(count) * layers + 2.0 * head * (1 if kind == "prefill" else int(count))
    size = entry["weight_bytes" if form == entry["format"] else "own_bytes"]
    return max(size / entry["memory_bytes_per_s"], flops / rate)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
