"""Jobs dealt to replicas, simulated with the cost model: groups kept whole against other ways.

    python -m benchmarks.replicas [--prompts 10000000] [--out FILE]

BatchLLM's jobs are planned, and the steps of each of 8 replicas simulated. The large job is made of
group sizes alone: its costs add up, and no prompt is made. Llama-3.1-8B in bf16 on H200s.
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
from onestem.forecasts import STEAL_REQUESTS, Dealt, Target
from onestem.models.config import ModelConfig
from onestem.models.find import find_model
from onestem.options import EngineOptions
from onestem.paper.batchllm import EXPERIMENTS
from onestem.paper.jobs import JobRuns
from onestem.planner import Deal, plan_job
from onestem.planner.deal import Costs, simulate
from onestem.planner.sort import IntArray

MODEL, DEVICE = "shape:llama3.1-8b", "h200"
VOCABULARY = 32_000
PAPER_REPLICAS = 8
REPLICAS = (1, 8, 64, 1024)
PREFIX, OWN, OUTPUT = 2000, 200, 100  # tokens of the large job, means of Poisson distributions
LARGEST = 20_000  # members of its largest groups
ATOM = 64  # members that are dealt together


def paper_jobs() -> Iterator[tuple[str, BatchCase]]:
    """Those of section 4, each once, without the shorter prefixes of figure 6."""
    seen = set()
    for experiment in EXPERIMENTS:
        if isinstance(experiment.measure, JobRuns):
            for setting in experiment.measure.settings:
                case = setting.job
                if case not in seen and case.prefixes[0] != 1000 and experiment.name[-1] != "e":
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


class LargeJob:
    """Groups of so many prompts in all: how many members, and tokens of prefixes and of members.

    Group sizes are Pareto (1.1) from 2 to `LARGEST`: many small groups, a few very large.
    """

    def __init__(self, prompts: int, target: Target) -> None:
        rng = np.random.default_rng(0)
        sizes = np.minimum(2 * (1 + rng.pareto(1.1, prompts // 4)), LARGEST).astype(np.int64)
        self.members = sizes[: int(np.searchsorted(np.cumsum(sizes), prompts)) + 1]
        self.members[-1] -= self.members.sum() - prompts
        groups = len(self.members)
        self.prefix = rng.poisson(PREFIX, groups)
        self.own = rng.poisson(OWN * self.members)
        self.output = rng.poisson(OUTPUT * self.members)
        one, root = np.ones(len(self.members), np.int64), np.zeros(1, np.int64)
        typical = Work(OWN * one, OUTPUT * one, one, 0 * one, root, root)
        self.weights = target.weights(typical, "full")

    def member_seconds(self) -> np.ndarray:
        """`[num_groups]` of all members, without the prefix."""
        weights, each = self.weights, self.own / self.members
        return weights.prompt * self.own + self.output * (weights.sampled + weights.context * each)

    def costs(self) -> Costs:
        """Items are members of a group, up to `ATOM` together."""
        atoms = -(-self.members // ATOM)
        group = np.repeat(np.arange(len(atoms)), atoms)
        starts = np.cumsum(atoms) - atoms
        within = np.arange(len(group)) - starts[group]
        count = np.minimum(ATOM, self.members[group] - ATOM * within)
        prefix = self.weights.prompt * self.prefix[group]
        cost = self.member_seconds()[group] * count / self.members[group]
        return Costs(cost + prefix * (within == 0), prefix * (within > 0), starts)

    def otherwise(self, how: Dealt, replicas: int) -> tuple[np.ndarray, int]:
        """`[replicas]` seconds, and prefix tokens computed, of a way that is not by groups."""
        rng = np.random.default_rng(1)
        seconds = self.weights.prompt * self.prefix
        if how == "prefix-hash":
            owner = rng.integers(0, replicas, len(self.members))
            load = np.bincount(owner, self.member_seconds() + seconds, replicas)
            return load, int(self.prefix.sum())
        group = np.repeat(np.arange(len(self.members)), self.members)
        if how == "random":
            owner = rng.integers(0, replicas, len(group))
        else:
            owner = rng.permutation(len(group)) % replicas  # the input is shuffled
        pairs = np.unique(group * replicas + owner)
        each = self.member_seconds() / self.members
        load = np.bincount(owner, each[group], replicas)
        load += np.bincount(pairs % replicas, seconds[pairs // replicas], replicas)
        return load, int(self.prefix[pairs // replicas].sum())


def dealt_large_job(job: LargeJob, replicas: int) -> dict[str, Any]:
    """Seconds until the last replica ends, and prompt tokens computed, in each way."""
    own, prefix = int(job.own.sum()), int(job.prefix.sum())
    deal = Deal(job.costs(), np.ones(replicas))
    ends = simulate(deal, deal.speeds, STEAL_REQUESTS)
    again = round(deal.cost_again / job.weights.prompt)
    found: dict[str, Any] = {
        "replicas": replicas,
        "groups": {
            "seconds": float(ends.max()),
            "first_ends": float(ends.min()),
            "computed_prompt_tokens": own + prefix + again,
            "computed_again_tokens": again,
            "num_cuts": deal.num_cuts,
        },
    }
    for how in get_args(Dealt)[1:]:
        load, tokens = job.otherwise(how, replicas)
        found[how] = {"seconds": float(load.max()), "computed_prompt_tokens": own + tokens}
    return found


def members_of(job: LargeJob) -> IntArray:
    """Of its groups: percentiles 50, 99, and the most."""
    return np.percentile(job.members, [50, 99, 100]).astype(np.int64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=10_000_000)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    options = EngineOptions(model=MODEL, device=DEVICE)
    config = ModelConfig.from_directory(find_model(MODEL))
    target = Target.of(options, config, predicts=True)
    found: dict[str, Any] = {"model": MODEL, "device": DEVICE, "papers": {}, "large": []}
    for name, case in paper_jobs():
        found["papers"][name] = dealt_paper_job(target, case)
        print(name, json.dumps(found["papers"][name]), flush=True)
    job = LargeJob(given.prompts, target)
    found["large_job"] = {
        "prompts": given.prompts,
        "groups": len(job.members),
        "prompt_tokens": int((job.members * job.prefix + job.own).sum()),
        "members": dict(zip(("median", "p99", "most"), members_of(job).tolist(), strict=True)),
        "weights": vars(job.weights),
    }
    for replicas in REPLICAS:
        found["large"].append(dealt_large_job(job, replicas))
        print(json.dumps(found["large"][-1]), flush=True)
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
