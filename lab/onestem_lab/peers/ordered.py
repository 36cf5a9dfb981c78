"""What a plan gives an engine that runs lines as they come: the job as given beside the same job
in the order of `onestem plan --write`, in turns.

    python -m onestem_lab.peers.ordered [CASE] --environments DIRECTORY [--engine vllm]
        [--repeats N]

CASE is one of `onestem_lab.peers.cases`; the default asks every question of all documents in turn
and has KV memory for a tenth of them. Each run is a process of its own; loading, compiling and a
warm-up are outside its clock, and so is the plan, whose seconds the result has. Results go to
lab/results/ordered-CASE.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import signal
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from onestem.jobs import plan_file
from onestem.options import EngineOptions
from onestem_lab.peers.cases import CASES
from onestem_lab.peers.engines import Bench
from onestem_lab.peers.run import add_sizes, check_sizes, sized
from onestem_lab.peers.runners.job import Group, Job
from onestem_lab.peers.settings import ENGINES, default
from onestem_lab.peers.weights import model_directory
from onestem_lab.results import RESULTS, processor, write

GIVEN, ORDERED = "as given", "ordered"


def main() -> None:
    options = parse()
    # So that a run that is stopped stops its engine.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    case = sized(CASES[options.case], options)
    model = model_directory(options.work, case.shape, options.dtype)
    job = case.job(
        model=model, dtype=options.dtype, threads=options.threads, outputs=options.work / "outputs"
    )
    order, plan = planned(job, options.work)
    settings = default(options.engine, options.dtype) | json.loads(options.settings)
    runs = measured({GIVEN: job, ORDERED: reordered(job, order)}, order, settings, options)
    seconds = {name: [run["seconds"] for run in runs[name]] for name in runs}
    pairs = [given / ordered for given, ordered in zip(*seconds.values(), strict=True)]
    result = {
        "case": options.case,
        "command": f"python -m onestem_lab.peers.ordered {shlex.join(sys.argv[1:])}",
        "machine": processor(options.threads),
        "sizes": dataclasses.asdict(case),
        "dtype": options.dtype,
        "requests": len(job.prompts),
        "kv_tokens": job.kv_tokens,
        "plan": plan,
        "engine": options.engine,
        "settings": settings,
        "median_seconds": {name: statistics.median(each) for name, each in seconds.items()},
        "ordered_against_given": {
            "median": statistics.median(pairs), "min": min(pairs), "max": max(pairs),
        },
        "runs": runs,
    }  # fmt: skip
    path = RESULTS / f"ordered-{options.case}{options.suffix}.json"
    write(path, result)
    print(json.dumps({name: result[name] for name in ("median_seconds", "ordered_against_given")}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", nargs="?", default="0.1b-60x8", choices=CASES, metavar="CASE")
    parser.add_argument("--engine", default="vllm", choices=ENGINES)
    parser.add_argument("--settings", default="{}", help="of the engine, JSON")
    add_sizes(parser)
    options = parser.parse_args()
    check_sizes(parser, options)
    return options


def planned(job: Job, work: Path) -> tuple[list[int], dict[str, Any]]:
    """The order in which `onestem plan --write` puts a job's prompts, and what is told of it."""
    source, target = (work.resolve() / f"{name}.jsonl" for name in ("given", "ordered"))
    with open(source, "w") as file:
        for number, ids in enumerate(job.prompts):
            body = {"prompt": ids, "max_tokens": job.output_tokens}
            line = {"custom_id": str(number), "method": "POST", "url": "/v1/completions"}
            file.write(json.dumps(line | {"body": body}) + "\n")
    began = time.perf_counter()
    report = plan_file(
        source,
        work,
        options=EngineOptions(job.model, device="cpu", dtype=job.dtype, kv_memory=job.kv_bytes),
        predicts=False,
        advises=False,
        write=target,
        force=True,
    )
    told = {name: report[name] for name in ("groups", "logical_prompt_tokens", "processed_tokens")}
    order = [int(json.loads(line)["custom_id"]) for line in target.read_text().splitlines()]
    return order, {"seconds": time.perf_counter() - began, **told}


def reordered(job: Job, order: list[int]) -> Job:
    place = {index: at for at, index in enumerate(order)}
    return dataclasses.replace(
        job,
        prompts=[job.prompts[index] for index in order],
        groups=[
            Group(group.prefix_tokens, tuple(sorted(place[index] for index in group.members)))
            for group in job.groups
        ],
    )


def measured(
    jobs: dict[str, Job], order: list[int], settings: dict[str, Any], options: argparse.Namespace
) -> dict[str, list[dict[str, Any]]]:
    """Runs of both, in turns, each time in the other order. Each run's answers are compared with
    the first to the job as given."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in jobs}
    with ExitStack() as stack:
        benches = {
            name: stack.enter_context(
                Bench(job, options.environments, options.work / _folder(name), options.timeout)
            )
            for name, job in jobs.items()
        }
        for repeat in range(options.repeats):
            for name in list(benches)[:: 1 if repeat % 2 == 0 else -1]:
                run = benches[name].run(options.engine, settings, keep=True)
                if "error" in run:
                    sys.exit(f"{options.engine}, {name}: {run['error']}")
                runs[name].append(run)
                if (first := benches[GIVEN].first_answers) is not None:
                    benches[ORDERED].first_answers = [first[index] for index in order]
    return runs


def _folder(name: str) -> str:
    """Without blanks: a compiler's command line with them fails."""
    return name.replace(" ", "-")


if __name__ == "__main__":
    main()
