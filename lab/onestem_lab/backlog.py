"""A backlog of interactive requests in random order, over more prefixes than KV memory holds.

    python -m onestem_lab.backlog [--model SHAPE] [--requests 2000] [--prefixes 100] [--prefix 1000]
        [--own 50] [--output 16] [--kept 20] [--out lab/results/backlog.json]

All wait at once, and each that ends lets others in. Once first come, first served
(`max_passed` 0), once as the engine does it. `planned` is what a plan of the whole backlog computes
(`plan_job`). A time to first token is the seconds until then and, whatever the machine did beside,
the rows that the engine computed until then. SHAPE is one of onestem/shapes, with random
weights, or `embedded`; `nothing` has hardly a model, and shows the order alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onestem.engine.engine import Engine
from onestem.llm import LLM
from onestem.models.config import ModelConfig
from onestem.models.find import find_model
from onestem.options import EMBEDDED, MAX_PASSED
from onestem.planner import plan_job
from onestem.request import Request, SamplingParams
from onestem.shapes import find_shape
from onestem_lab.results import machine, write

DTYPE = "bfloat16"


def main() -> None:
    options = parse()
    config = ModelConfig.from_directory(path_of(options.model))
    prompts = backlog(options, config.vocab_size)
    planned = plan_job(prompts, output_lengths=options.output).report.processed_tokens_all_levels
    rows = []
    for max_passed in (0, MAX_PASSED):
        rows.append(answer(options, prompts, config, max_passed))
        rows[-1]["computed_of_planned"] = rows[-1]["computed_tokens"] / planned
        print(json.dumps(rows[-1]), flush=True)
    before, after = rows
    result = {
        "command": f"python -m onestem_lab.backlog {' '.join(sys.argv[1:])}".strip(),
        "machine": machine(),
        "model": options.model,
        "dtype": DTYPE,
        "planned_tokens": planned,
        "rows": rows,
        "mean_first_token_of_before": {
            unit: after["first_token"][unit]["mean"] / before["first_token"][unit]["mean"]
            for unit in ("rows", "seconds")
        },
    }
    if options.out is not None:
        write(options.out, result)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="nothing")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--prefixes", type=int, default=100)
    parser.add_argument("--prefix", type=int, default=1000, help="tokens of each")
    parser.add_argument("--own", type=int, default=50, help="tokens of each request")
    parser.add_argument("--output", type=int, default=16, help="tokens of each answer")
    parser.add_argument("--kept", type=int, default=20, help="prefixes that KV memory holds")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def path_of(model: str) -> Path:
    return find_model(EMBEDDED) if model == EMBEDDED else find_shape(model)


def backlog(options: argparse.Namespace, vocab_size: int) -> list[list[int]]:
    """Prompts in random order, equally many behind each prefix."""
    rng = np.random.default_rng(0)
    heads = rng.integers(8, vocab_size, (options.prefixes, options.prefix))
    own = rng.integers(8, vocab_size, (options.requests, options.own))
    which = rng.permutation(np.arange(options.requests) % options.prefixes)
    return np.concatenate([heads[which], own], axis=1).tolist()


def answer(
    options: argparse.Namespace, prompts: list[list[int]], config: ModelConfig, max_passed: int
) -> dict[str, Any]:
    """Answer a backlog: what was computed, when first tokens came, and who passed whom."""
    kv_bytes = options.kept * options.prefix * config.kv_values_per_token * 2
    with load(options.model, kv_memory=kv_bytes, max_passed=max_passed) as llm:
        order: list[int] = []
        llm.engine.requests.on_begin = lambda names: order.extend(map(int, names))
        began = time.perf_counter()
        first, rows = first_tokens(llm.engine, prompts, options.output, [0] * len(prompts))
        seconds = time.perf_counter() - began
        computed = llm.engine.stats.processed_prompt_tokens
    return {
        "max_passed": max_passed,
        "computed_tokens": computed,
        "rows": rows,
        "seconds": seconds,
        "first_token": {
            "rows": spread([at for at, _ in first]),
            "seconds": spread([when - began for _, when in first]),
        },
        "most_passed": most_passed(order),
    }


def load(model: str, **options: Any) -> LLM:
    return LLM(
        path_of(model), device="cpu", dtype=DTYPE, random_weights=model != EMBEDDED, **options
    )


def first_tokens(
    engine: Engine, prompts: list[list[int]], output: int, arrivals: list[int]
) -> tuple[list[tuple[int, float]], int]:
    """When the first token of each prompt's answer came, in rows and by the clock; and all rows.

    Args:
        arrivals: rows after which each request comes, in rising order. Where nobody is there the
            rows until the next arrival pass at once.
    """
    params = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True)
    first: dict[str, tuple[int, float]] = {}
    computed = passed = 0
    coming = deque(enumerate(arrivals))
    while coming or engine.has_unfinished():
        if not engine.has_unfinished():
            passed = max(passed, coming[0][1] - computed)
        while coming and coming[0][1] <= computed + passed:
            i, _ = coming.popleft()
            engine.add_request(
                Request(request_id=str(i), prompt_token_ids=prompts[i], params=params, stream=True)
            )
        outputs, going_on = engine.step_news()
        computed += len(engine.batch_rows.inputs.positions)
        now = computed + passed, time.perf_counter()
        for name in [o.request_id for o in outputs] + [s.request.request_id for s in going_on]:
            first.setdefault(name, now)
    return [first[str(i)] for i in range(len(prompts))], computed


def spread(values: Sequence[float] | np.ndarray) -> dict[str, float]:
    return {
        "mean": float(np.mean(values)),
        "p50": float(np.percentile(values, 50)),
        "p99": float(np.percentile(values, 99)),
    }


def most_passed(order: list[int]) -> int:
    """By how many later ones anybody was passed, of arrivals in the order in which they began."""
    taken = np.array(order)
    return max(int((taken[:at] > one).sum()) for at, one in enumerate(order))


if __name__ == "__main__":
    main()
