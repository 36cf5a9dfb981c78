"""Jobs dealt to replicas, simulated with the cost model: groups kept whole against other ways.

    python -m onestem_lab.replicas [--out FILE]

BatchLLM's jobs are planned, and the steps of each of 8 replicas simulated: Llama-3.1-8B in bf16 on
H200s. `onestem_lab.plan_stream` has larger jobs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np

from onestem.bench import BatchCase
from onestem.cost import Work
from onestem.forecasts import Dealt, Target
from onestem.models.config import ModelConfig
from onestem.models.find import find_model
from onestem.options import EngineOptions
from onestem.planner import plan_job
from onestem_lab.papers.batchllm import EXPERIMENTS
from onestem_lab.papers.jobs import JobRuns
from onestem_lab.results import write

MODEL, DEVICE = "shape:llama3.1-8b", "h200"
VOCABULARY = 32_000
PAPER_REPLICAS = 8


def paper_jobs() -> Iterator[tuple[str, BatchCase]]:
    """Those of section 4, each once; of figure 6 those of 6,400 requests and equal lengths, without
    the shorter prefixes."""
    seen = set()
    for experiment in EXPERIMENTS:
        if isinstance(experiment.measure, JobRuns):
            for setting in experiment.measure.settings:
                case = setting.job
                if (
                    case not in seen
                    and case.prefixes[0] != 1000
                    and experiment.name[-1] not in "cde"
                ):
                    seen.add(case)
                    at = ", ".join(f"{name} {value}" for name, value in setting.at.items())
                    yield f"{experiment.source.partition(', ')[2]}: {at}", case


def dealt_paper_job(target: Target, case: BatchCase) -> dict[str, Any]:
    """Each way to deal it: seconds until the last replica ends, prompt tokens computed."""
    requests = case.requests(VOCABULARY)
    prompts = [np.array(ids, np.int32) for ids, _ in requests]
    outputs = np.array([tokens for _, tokens in requests])
    del requests
    plan = plan_job(prompts, output_lengths=outputs, kv_budget_tokens=target.kv_tokens)
    work = Work.of(plan, outputs)
    found = {
        how: target.forecast_dealt(plan, work, "full", PAPER_REPLICAS, how).whole
        for how in get_args(Dealt)
    }
    return {
        "requests": len(prompts),
        "num_groups": plan.report.groups,
        "prompt_tokens": plan.report.logical_prompt_tokens,
        **{
            how: {
                "seconds": one.seconds,
                "computed_prompt_tokens": one.computed_prompt_tokens,
                "peak_kv_tokens": one.peak_kv_tokens,
            }
            for how, one in found.items()
        },
        "round_robin_to_groups": {
            "seconds": found["round-robin"].seconds / found["groups"].seconds,
            "computed_prompt_tokens": found["round-robin"].computed_prompt_tokens
            / found["groups"].computed_prompt_tokens,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    options = EngineOptions(model=MODEL, device=DEVICE)
    config = ModelConfig.from_directory(find_model(MODEL))
    target = Target.of(options, config, predicts=True)
    found: dict[str, Any] = {"model": MODEL, "device": DEVICE, "papers": {}}
    for name, case in paper_jobs():
        found["papers"][name] = dealt_paper_job(target, case)
        print(name, json.dumps(found["papers"][name]), flush=True)
    if given.out is not None:
        write(given.out, found)


if __name__ == "__main__":
    main()
