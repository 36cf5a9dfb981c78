"""What the host does in a step of decodes: Python calls, and seconds but for the device's.

    python -m onestem_lab.step [--device cuda] [--shape nothing] [--against FOLDER] [--repeats 3]

Calls are counted with `sys.setprofile`, on a model of nothing, in steps that change nothing but
lengths: at several numbers of rows that nobody watches, and with some of them streamed. Seconds are
those of `Engine.step` less what is waited for the device: on a GPU in `Event.synchronize`, on a CPU
in the forward pass and in sampling. `--against` runs another version in turns (see
`onestem_lab.checkout`).
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from onestem.engine.engine import Engine
from onestem.llm import LLM
from onestem.models.config import GenerationDefaults
from onestem.models.decoder import Decoder
from onestem.options import EngineOptions
from onestem.request import Request, SamplingParams
from onestem_lab.checkout import in_turns
from onestem_lab.results import RESULTS, ROOT, hardware, write

ROWS = (1, 256, 1000)
PREFIX = 64
FIRST, STEPS = 10, 64  # that are left out, and that count


def main() -> None:
    options = _options()
    if options.child:
        print(json.dumps(measure(options)))
        return
    turns: dict[str, list[dict[str, Any]]] = {"now": [], "before": []}
    child = ["--child", "--device", options.device, "--shape", options.shape]
    for side, told in in_turns("onestem_lab.step", child, options.against, options.repeats):
        turns[side].append(told)
    result: dict[str, Any] = {
        "command": " ".join(["python -m onestem_lab.step", *sys.argv[1:]]),
        "machine": hardware(options.device),
        "calls": turns["now"][0]["calls"],
    }
    for side, found in turns.items():
        if found:
            result[side] = _medians([one["host_ms"] for one in found])
            print(side, result[side], flush=True)
    if turns["before"]:
        result["calls_before"] = turns["before"][0]["calls"]
        pairs = [
            {rows: now["host_ms"][rows] / before["host_ms"][rows] for rows in now["host_ms"]}
            for now, before in zip(turns["now"], turns["before"], strict=True)
        ]
        result["ratio"] = _medians(pairs)
        print("now / before", {n: round(r, 3) for n, r in result["ratio"].items()}, flush=True)
    print("calls", result["calls"], flush=True)
    write(options.out, result)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", default="nothing")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--against", type=Path, help="folder of another version")
    parser.add_argument("--out", type=Path, default=RESULTS / "step.json")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _medians(found: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(one[name] for one in found) for name in found[0]}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_grad_enabled(False)
    shape = ROOT / "onestem" / "shapes" / options.shape  # of this checkout
    llm = LLM(
        shape, device=options.device, dtype="bfloat16", random_weights=True, kv_memory="64MiB"
    )
    decoder = llm.decoder
    host = {str(rows): host_ms(decoder, rows) for rows in ROWS}
    calls: dict[str, float] = {}
    if options.device == "cuda":
        return {"host_ms": host, "calls": calls}
    for rows, streamed in ((8, 0), (64, 0), (512, 0), (512, 8), (512, 16), (512, 32)):
        calls[f"{rows} rows, {streamed} streamed"] = python_calls(decoder, rows, streamed)
    return {"host_ms": host, "calls": calls}


def decoding(decoder: Decoder, rows: int, streamed: int = 0) -> Iterator[Engine]:
    """An engine before each step of its rows' decodes."""
    engine = _engine(decoder, num_pages=rows * 16 + 64)
    params = SamplingParams(max_tokens=FIRST + STEPS + 40, temperature=0, ignore_eos=True)
    head = list(range(PREFIX))
    for i in range(rows):
        one = Request(request_id=str(i), prompt_token_ids=[*head, 100 + i, i], params=params)
        engine.add_request(replace(one, stream=i < streamed))
    before, seen = -1, 0
    while engine.has_unfinished() and seen < FIRST + STEPS:
        decodes = engine.num_running == rows and engine.num_waiting == 0
        seen += decodes and engine.stats.processed_prompt_tokens == before
        before = engine.stats.processed_prompt_tokens
        if seen > FIRST:
            yield engine
        else:
            engine.step()
    for i in range(rows):
        engine.abort(str(i))
    engine.close()
    del engine
    gc.collect()


def _engine(decoder: Decoder, num_pages: int) -> Engine:
    """Also one of versions whose engines took no record of options."""
    options: dict[str, Any] = {"max_step_tokens": 8192}
    if "options" in inspect.signature(Engine).parameters:
        return Engine(
            decoder, None, GenerationDefaults(), EngineOptions(**options), num_pages=num_pages
        )
    return Engine(decoder, None, GenerationDefaults(), num_pages=num_pages, **options)


def host_ms(decoder: Decoder, rows: int) -> float:
    """Median milliseconds of a step, less those of the device."""
    waited = [0.0]
    found: list[float] = []
    for engine in decoding(decoder, rows):
        if not found:
            waited = time_waits(engine, decoder.device)
        waited[0] = 0.0
        started = time.perf_counter()
        engine.step()
        found.append(time.perf_counter() - started - waited[0])
    return 1e3 * statistics.median(found)


def time_waits(engine: Any, device: torch.device) -> list[float]:
    """One number, to which seconds are added that the device takes. Also of engines as they were
    before."""
    waited = [0.0]

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                waited[0] += time.perf_counter() - started

        return run

    if device.type == "cuda":
        if not hasattr(torch.cuda.Event, "unwatched"):
            torch.cuda.Event.unwatched = torch.cuda.Event.synchronize  # type: ignore[attr-defined]
        torch.cuda.Event.synchronize = timed(torch.cuda.Event.unwatched)  # type: ignore
        return waited
    runner = engine.launcher.runner if hasattr(engine, "launcher") else engine._runner
    runner = getattr(runner, "_runner", runner)  # of rank 0
    runner._forward = timed(runner._forward)
    sampler = getattr(engine.launcher, "_sampler", None) or engine.launcher.sampler
    sampler.launch = timed(sampler.launch)
    return waited


def python_calls(decoder: Decoder, rows: int, streamed: int) -> float:
    """Median number of Python functions that a step calls."""
    counts: list[int] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        counts[-1] += event == "call"

    for engine in decoding(decoder, rows, streamed):
        counts.append(0)
        sys.setprofile(note)
        engine.step()
        sys.setprofile(None)
    return statistics.median(counts)


if __name__ == "__main__":
    main()
