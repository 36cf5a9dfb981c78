"""What a job's order gains when lengths of answers are learnt while it runs: simulated steps.

    python -m onestem_lab.learnt_lengths [--seeds 8] [--kv-tokens 20000,40000] [--out FILE]

The job of BatchLLM's table 2: groups of 16 requests, 2,000 + 200 prompt tokens, answers of
Pareto(1.5) in 10..512 and `max_tokens` 512 for all; 20 groups as there, or `--groups`. The real
scheduler runs it without a model, in steps of 2,048 tokens. Groups are ordered by R (eq. 2, 3) of

* `max_tokens`: what is asked for, once;
* `learnt`: what is asked for and then learnt, as `onestem batch` does (`planner.RunningOrder`);
* `known`: the mean length of each group, which nobody has: all that could be learnt;
* `each`: the lengths themselves, which order the requests of a group as well.

Cases say what lengths depend on:

* `kinds-K`: prefixes begin with one of K instructions of 100 tokens, and answers to one instruction
  are alike within 20% (fig. 5);
* `groups`: answers in a group are alike within 20%, and nothing tells before one has ended;
* `nothing`: each answer is drawn by itself; prefixes begin with one of 4 instructions.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from onestem.engine.schedule.queue import PlannedQueue
from onestem.engine.sequence import Sequence
from onestem.planner import JobPlan, RunningOrder, plan_job
from onestem.request import Request, SamplingParams
from onestem_lab.results import RESULTS, write
from tests.engine.simulation import Simulation

DEGREE, PREFIX, DISTINCT, HEADER, MOST = 16, 2000, 200, 100, 512
CASES = {"kinds-4": 4, "kinds-10": 10, "groups": 0, "nothing": 4}
ORDERS = ("max_tokens", "learnt", "known", "each")


class Job:
    """Prompts in random order, and how long each answer will be."""

    def __init__(self, case: str, num_groups: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        kinds = CASES[case]

        def draw(count: int) -> list[int]:
            return [int(token) for token in rng.integers(0, 30_000, count)]

        headers = [draw(HEADER) for _ in range(kinds)]
        heads = [headers[g % kinds] if kinds else [] for g in range(num_groups)]
        prefixes = [head + draw(PREFIX - len(head)) for head in heads]
        self._group = group = rng.permutation(np.repeat(np.arange(num_groups), DEGREE))
        self.prompts = [prefixes[g] + draw(DISTINCT) for g in group]
        if case == "nothing":
            self.lengths = _pareto(rng, len(group))
        else:
            of_kind = _pareto(rng, kinds or num_groups)[group % (kinds or num_groups)]
            spread = of_kind * rng.uniform(0.8, 1.2, len(group))
            self.lengths = np.clip(spread.astype(np.int64), 10, MOST)

    def asked(self, by: str) -> np.ndarray | int:
        """Lengths that the plan gets."""
        if by == "each":
            return self.lengths
        mean = np.bincount(self._group, self.lengths) / DEGREE
        return mean.astype(np.int64)[self._group] if by == "known" else MOST


def _pareto(rng: np.random.Generator, count: int) -> np.ndarray:
    return np.clip((10 * (1 - rng.random(count)) ** (-1 / 1.5)).astype(np.int64), 10, MOST)


class Run(Simulation):
    """A job whose answers end as they will, and tell how long they were."""

    def __init__(self, job: Job, by: str, kv_tokens: int) -> None:
        plan = plan_job(job.prompts, output_lengths=job.asked(by), kv_budget_tokens=kv_tokens)
        order = RunningOrder(plan)
        requests = _requests(job, plan, plan.order.tolist() if by == "max_tokens" else order)
        super().__init__(PlannedQueue(requests), kv_tokens=kv_tokens)
        self._lengths = job.lengths.tolist()
        self._note: Callable[[int, int], None] | None = order.note if by == "learnt" else None

    def is_done(self, sequence: Sequence) -> bool:
        number = int(sequence.state.request.request_id)
        done: bool = sequence.num_output == self._lengths[number]
        if done and self._note is not None:
            self._note(number, sequence.num_output)
        return done


def _requests(job: Job, plan: JobPlan, order: Iterable[int]) -> Iterator[Request]:
    for index in order:
        group = int(plan.group_of[index])
        yield Request(
            request_id=str(index),
            prompt_token_ids=job.prompts[index],
            params=SamplingParams(max_tokens=MOST),
            group=group,
            group_prefix_tokens=plan.groups[group].prefix_tokens,
        )


def measure(case: str, num_groups: int, kv_tokens: int, seeds: int) -> dict[str, Any]:
    """Means over seeds; gains are of the steps that `max_tokens` takes."""
    steps: dict[str, list[int]] = {by: [] for by in ORDERS}
    rows: dict[str, list[float]] = {by: [] for by in ORDERS}
    prompt_tokens: dict[str, list[int]] = {by: [] for by in ORDERS}
    for seed in range(seeds):
        job = Job(case, num_groups, seed)
        for by in ORDERS:
            run = Run(job, by, kv_tokens)
            run.run()
            steps[by].append(run.steps)
            rows[by].append(statistics.mean(run.rows))
            prompt_tokens[by].append(run.processed)
    mean = {by: statistics.mean(steps[by]) for by in ORDERS}
    gains = {by: 1 - mean[by] / mean["max_tokens"] for by in ORDERS}
    return {
        "case": case,
        "groups": num_groups,
        "kv_tokens": kv_tokens,
        "seeds": seeds,
        "steps": mean,
        "tokens_per_step": {by: statistics.mean(rows[by]) for by in ORDERS},
        "prompt_tokens": {by: statistics.mean(prompt_tokens[by]) for by in ORDERS},
        "gain": gains,
        "share_of_known": gains["learnt"] / gains["known"],
        "worst_seed": max(a / b for a, b in zip(steps["learnt"], steps["max_tokens"], strict=True)),
        "steps_of_seeds": steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--groups", type=int, default=20)
    parser.add_argument("--kv-tokens", default="20000,40000")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--out", type=Path, default=RESULTS / "learnt-lengths.json")
    options = parser.parse_args()
    results = []
    for kv_tokens in map(int, options.kv_tokens.split(",")):
        for case in options.cases.split(","):
            results.append(measure(case, options.groups, kv_tokens, options.seeds))
            shown = ("case", "kv_tokens", "steps", "gain", "share_of_known", "prompt_tokens")
            print({name: results[-1][name] for name in shown}, flush=True)
    write(options.out, results)


if __name__ == "__main__":
    main()
