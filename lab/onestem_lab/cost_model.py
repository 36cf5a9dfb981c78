"""Predicted and measured seconds of ten mixed jobs (docs/cost-model.md).

    python -m onestem_lab.cost_model                  # CPU: models of 0.1B and the embedded one
    python -m onestem_lab.cost_model --jobs window --out FILE     # CPU: layers with sliding windows
    python -m onestem_lab.cost_model --device cuda    # a GPU: the shape of Llama-3.1-8B
    python -m onestem_lab.cost_model --device cuda --store h200   # and name the rates

Rates are measured before each round of jobs, so that a noisy machine hits both alike. Of jobs the
fastest run counts, of each rate the fastest too. Planning is not counted. Random weights; every
token is sampled at temperature 1 and none ends a sequence. `--store` writes the rates into the
package, where `onestem plan --device NAME` finds them.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from onestem.cost import Curve, Limits, ModelShape, Rates, StepCost, Work, forecast
from onestem.cost.measure import measure
from onestem.cost.rates import CURVES, DEVICES
from onestem.llm import LLM
from onestem.models.config import ModelConfig
from onestem.models.find import find_model
from onestem.options import EMBEDDED
from onestem.planner import JobPlan, RunningOrder, planned
from onestem.request import Request, SamplingParams
from onestem.shapes import find_shape
from onestem_lab.results import RESULTS, machine, write


@dataclass(frozen=True)
class Job:
    """A job of `groups` prefixes.

    Attributes:
        degrees, prefixes: branches below each level of prefixes, and tokens of a level.
        own, outputs: tokens of each prompt's own and of each answer, drawn from these ranges.
        n: answers to each prompt.
        kv_tokens: what KV memory holds.
        model: a shape, the embedded model, or a shape with a sliding window in each layer, as
            `0.1b window 128`.
    """

    name: str
    groups: int
    degrees: tuple[int, ...]
    prefixes: tuple[int, ...]
    own: tuple[int, int]
    outputs: tuple[int, int]
    n: int = 1
    model: str = "llama3.1-8b"
    dtype: str = "bfloat16"
    kv_tokens: int = 100_000


CPU_JOBS = (
    Job("one prefix", 1, (32,), (400,), (16, 16), (24, 24), model="0.1b"),
    Job("four prefixes", 4, (8,), (150,), (10, 40), (8, 24), model="0.1b"),
    Job("prompts only", 8, (8,), (100,), (20, 20), (1, 1), model="0.1b"),
    Job("two levels", 2, (3, 4), (150, 60), (10, 30), (5, 30), model="0.1b"),
    Job("long decodes", 1, (8,), (200,), (20, 20), (30, 90), model="0.1b"),
    Job("no sharing", 12, (1,), (0,), (64, 192), (16, 16), model="0.1b", dtype="float32"),
    Job("two prefixes", 2, (8,), (250,), (30, 30), (16, 16), model="0.1b", dtype="float32"),
    Job("one prefix", 1, (128,), (1000,), (20, 80), (20, 60), model=EMBEDDED),
    Job("16 answers", 8, (1,), (0,), (300, 300), (40, 40), n=16, model=EMBEDDED, dtype="float32"),
    Job("little memory", 8, (8,), (200,), (20, 60), (60, 120), model=EMBEDDED, dtype="float32",
        kv_tokens=6_000),
)  # fmt: skip

CLOCKS = {"wall": time.perf_counter, "process": time.process_time}

WINDOW_JOBS = tuple(
    replace(job, model="0.1b window 128")
    for job in (
        Job("window, one prefix", 1, (32,), (3000,), (16, 16), (24, 24)),
        Job("window, no sharing", 6, (1,), (0,), (1500, 1500), (60, 60)),
        Job("window, long decodes", 1, (8,), (2000,), (200, 200), (200, 200)),
    )
)
GPU_JOBS = (
    Job("40x16", 40, (16,), (2000,), (200, 200), (100, 100)),
    Job("long prefixes", 10, (16,), (16000,), (200, 200), (100, 100)),
    Job("few each", 200, (3,), (1570,), (30, 30), (50, 50)),
    Job("one prefix", 1, (256,), (8000,), (64, 64), (128, 128)),
    Job("two levels", 8, (8, 8), (1000, 500), (50, 150), (50, 250)),
    Job("prompts only", 64, (8,), (1000,), (200, 400), (1, 1)),
    Job("16 answers", 64, (1,), (0,), (512, 512), (256, 256), n=16),
    Job("no sharing", 256, (1,), (0,), (200, 1800), (50, 150)),
    Job("long decodes", 1, (64,), (500,), (50, 50), (200, 1500)),
    Job("little memory", 32, (8,), (500,), (50, 150), (200, 600), kv_tokens=60_000),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--jobs", default="", help="only those whose names begin so")
    parser.add_argument("--store", metavar="NAME", help="write the rates into the package")
    parser.add_argument(
        "--clock",
        default="wall",
        choices=CLOCKS,
        help="process: processor time, for one thread on a machine that others use too",
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    gpu = options.device.startswith("cuda")
    there = GPU_JOBS if gpu else WINDOW_JOBS if options.jobs.startswith("window") else CPU_JOBS
    jobs = [job for job in there if job.name.startswith(options.jobs)]
    out = options.out or RESULTS / f"cost-model-{'gpu' if gpu else 'cpu'}.json"
    result = measured(jobs, options.device, options.repeats, CLOCKS[options.clock])
    if options.store:
        for rates in result["rates"].values():
            (DEVICES / f"{options.store}.json").write_text(json.dumps(rates, indent=1) + "\n")
    result = {
        "command": f"python -m onestem_lab.cost_model --device {options.device} "
        f"--repeats {options.repeats} --clock {options.clock}"
        + (f" --jobs {options.jobs}" if options.jobs else ""),
        "clock": options.clock,
        "threads": torch.get_num_threads(),
        "machine": machine(),
        **result,
    }
    write(out, result)


def measured(
    jobs: list[Job], device: str, repeats: int, clock: Callable[[], float]
) -> dict[str, Any]:
    """Each job's prediction beside what was measured, and the rates."""
    rates: dict[tuple[str, str], Rates] = {}
    runs: dict[int, list[dict[str, float]]] = {i: [] for i in range(len(jobs))}
    works: dict[int, Work] = {}
    for key in sorted({(job.model, job.dtype) for job in jobs}):
        mine = [i for i, job in enumerate(jobs) if (job.model, job.dtype) == key]
        for _ in range(repeats):
            found = rates_of(*key, device, clock)
            rates[key] = fastest(rates[key], found) if key in rates else found
            for i in mine:
                run, works[i] = run_job(jobs[i], device, clock)
                runs[i].append(run)
                print(jobs[i].name, *key, {k: round(v, 3) for k, v in run.items()}, flush=True)
    reports = []
    for i, job in enumerate(jobs):
        report = compared(job, works[i], runs[i], rates[job.model, job.dtype])
        reports.append(report)
        print(
            f"{job.name}, {job.model} {job.dtype}: predicted {report['predicted']['seconds']:.2f} "
            f"s, measured {report['seconds']:.2f} s, error {100 * report['error']:+.1f}%",
            flush=True,
        )
    return {
        "largest_error": max(abs(report["error"]) for report in reports),
        "jobs": reports,
        "rates": {" ".join(key): asdict(one) for key, one in rates.items()},
    }


@cache
def path_of(model: str) -> Path:
    if model == EMBEDDED:
        return find_model(EMBEDDED)
    shape, _, window = model.partition(" window ")
    if not window:
        return find_shape(shape)
    config = json.loads((find_shape(shape) / "config.json").read_text())
    config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    made = TemporaryDirectory()
    atexit.register(made.cleanup)
    folder = Path(made.name)
    (folder / "config.json").write_text(json.dumps(config | {"sliding_window": int(window)}))
    return folder


def rates_of(model: str, dtype: str, device: str, clock: Callable[[], float]) -> Rates:
    config = ModelConfig.from_directory(path_of(model))
    found = measure(config, getattr(torch, dtype), torch.device(device), clock=clock)
    gc.collect()
    return found


def fastest(one: Rates, other: Rates) -> Rates:
    """Of both the better of each."""

    def joined(a: Curve, b: Curve) -> Curve:
        rows = a.rows if len(a.rows) < len(b.rows) else b.rows
        pairs = zip(a.flops, b.flops, strict=False)
        return Curve(rows, tuple(max(pair) for pair in pairs), max(a.bytes, b.bytes))

    times = {
        name: min(value, getattr(other, name))
        for name, value in asdict(one).items()
        if name.endswith("_seconds")
    }
    return replace(
        one,
        **{name: joined(getattr(one, name), getattr(other, name)) for name in CURVES},
        **times,
    )


def prompts_of(job: Job, vocab_size: int, rng: np.random.Generator) -> Iterator[list[int]]:
    """Token ids, shuffled."""

    def draw(count: int) -> list[int]:
        return [int(token) for token in rng.integers(0, vocab_size, count)]

    level = [draw(job.prefixes[0]) for _ in range(job.groups)]
    for degree, size in zip(job.degrees[:-1], job.prefixes[1:], strict=True):
        level = [parent + draw(size) for parent in level for _ in range(degree)]
    low, high = job.own
    for i in rng.permutation(len(level) * job.degrees[-1]).tolist():
        yield level[i % len(level)] + draw(int(rng.integers(low, high + 1)))


def run_job(job: Job, device: str, clock: Callable[[], float]) -> tuple[dict[str, float], Work]:
    """What a run took and computed, and the work that it was."""
    path = path_of(job.model)
    config = ModelConfig.from_directory(path)
    token = config.kv_values_per_token * getattr(torch, job.dtype).itemsize
    llm = LLM(
        path, device=device, dtype=job.dtype, random_weights=True, kv_memory=job.kv_tokens * token
    )
    rng = np.random.default_rng(0)
    prompts = list(prompts_of(job, config.vocab_size, rng))
    low, high = job.outputs
    params = [
        SamplingParams(n=job.n, max_tokens=int(rng.integers(low, high + 1)), ignore_eos=True)
        for _ in prompts
    ]
    warm_up(llm, config.vocab_size)
    plan: JobPlan = llm.plan(prompts, params)
    requests = [
        Request(request_id=str(i), prompt_token_ids=ids, params=one)
        for i, (ids, one) in enumerate(zip(prompts, params, strict=True))
    ]
    began = clock()
    for _ in llm.engine.run(planned(requests, RunningOrder(plan))):
        pass
    seconds = clock() - began
    stats = llm.engine.stats
    run = {
        "seconds": seconds,
        "steps": stats.steps,
        "computed_prompt_tokens": stats.processed_prompt_tokens,
        "output_tokens": stats.output_tokens,
        "peak_kv_tokens": stats.peak_kv_tokens,
        "num_preempted": stats.num_preempted,
        "model_seconds": stats.model_seconds,
        "step_tokens": llm.engine.limits.step_tokens,
    }
    llm.close()
    n = np.full(len(prompts), job.n)
    return run, Work.of(plan, n * np.array([one.max_tokens for one in params]), n)


def warm_up(llm: LLM, vocab_size: int) -> None:
    """Kernels are chosen and memory is touched before the clock starts."""
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    rng = np.random.default_rng(1)
    llm.generate([rng.integers(0, vocab_size, 200).tolist() for _ in range(8)], params)
    llm.engine.cache.clear()
    llm.engine.reset_stats()


def compared(job: Job, work: Work, runs: list[dict[str, float]], rates: Rates) -> dict[str, Any]:
    best = min(runs, key=lambda run: run["seconds"])
    config = ModelConfig.from_directory(path_of(job.model))
    shape = ModelShape.of(config, getattr(torch, job.dtype).itemsize)
    limits = Limits(int(best["step_tokens"]), job.kv_tokens)
    predicted = forecast(StepCost(shape, rates), work, limits)
    return {
        **asdict(job),
        **best,
        "all_seconds": [run["seconds"] for run in runs],
        "predicted": asdict(predicted),
        "error": predicted.seconds / best["seconds"] - 1,
    }


if __name__ == "__main__":
    main()
