"""What a job beside them costs interactive requests, and what it gets.

    python -m onestem_lab.serve.jobs [--rate R] [--repeats 5] [--duration 30]
        [--shape 0.1b|embedded]

The same arrivals are driven with a posted batch running and without one, in turn. Asked: with the
job, the 99th percentile of the time per token is at most 1.25 times as long, and that to the first
token at most one step longer: one of those that streams see (the 99th percentile of the time
between two chunks), or the longest that the job takes while it has the engine to itself, which a
request that comes then waits for. Both are in the result. The job's own speed is noted beside
traffic and alone.
Without --rate, half of what the server sustains (searched first, 10% apart). Written to
lab/results/serve-jobs.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2

from onestem_lab.load.client import Target, open_client
from onestem_lab.load.run import Bench, model_name
from onestem_lab.load.search import RateSearch
from onestem_lab.load.workload import Workload
from onestem_lab.results import RESULTS, ROOT, machine, write
from onestem_lab.serve.model import servable
from onestem_lab.serve.servers import Setting, running
from onestem_lab.serve.service import at_rest, post_job, state

# More than any run can finish: the job is cancelled at its end.
JOB_LINES = 4000
# The server tells of the last ten seconds.
LOOK_SECONDS = 5.0


def main() -> None:
    options = _options()
    embedded = options.shape == "embedded"
    setting = Setting(
        model=Path("embedded")
        if embedded
        else servable(options.work, options.shape, options.dtype),
        dtype=options.dtype,
        device=options.device,
        kv_gib=options.kv_gib,
        threads=options.threads,
        peers=options.work,
        logs=options.work,
    )
    load = Workload(
        seed=options.seed,
        system_tokens=options.system_tokens,
        scale=options.scale,
        vocab_size=2560 if embedded else 32000,
    )
    with running("full", setting) as url:
        bench = Bench(url, Target(model_name(url)), load, duration=options.duration)
        bench.warm_up()
        rate = options.rate or _half_of_sustainable(bench)
        found = asyncio.run(_measure(bench, rate, options.repeats))
    result = {
        "command": "python -m onestem_lab.serve.jobs " + " ".join(sys.argv[1:]),
        "machine": machine(),
        "shape": options.shape,
        "case": bench.describe(),
        "rate": rate,
        **found,
    }
    path = RESULTS / f"serve-jobs{options.suffix}.json"
    write(path, result)
    shown = {key: value for key, value in result.items() if key not in ("pairs", "case")}
    print(json.dumps(shown, indent=1))
    sys.exit(not result["good"])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="0.1b", help="0.1b, 0.5b, llama3.1-8b or embedded")
    parser.add_argument("--rate", type=float, help="requests per second")
    parser.add_argument("--repeats", type=int, default=5, help="pairs of runs")
    parser.add_argument("--duration", type=float, default=30.0, help="seconds of arrivals of a run")
    parser.add_argument("--scale", type=float, default=0.25, help="of question and answer lengths")
    parser.add_argument("--system-tokens", type=int, default=512)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kv-gib", type=float, default=4.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "serve")
    parser.add_argument("--suffix", default="", help="appended to the result file's name")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    return options


def _half_of_sustainable(bench: Bench) -> float:
    search = RateSearch(2.0, resolution=0.1)
    while bench.step(search) is not None:
        pass
    if search.best is None:
        raise SystemExit("the server sustains no rate at all: give --rate")
    return search.best / 2


async def _measure(bench: Bench, rate: float, repeats: int) -> dict[str, Any]:
    pairs = []
    # Other lengths and words than the traffic's, behind a system prompt of its own.
    job = replace(bench.workload, seed=bench.workload.seed + 1000)
    async with open_client(bench.base_url, None, 600.0) as client:
        for repeat in range(repeats):
            pair: dict[str, Any] = {}
            for beside in (False, True) if repeat % 2 == 0 else (True, False):
                name = "with_job" if beside else "alone"
                pair[name] = await _run(client, bench, job if beside else None, rate, repeat)
                print(f"{repeat + 1}/{repeats} {name}: {_short(pair[name])}", file=sys.stderr)
            pairs.append(pair)
        job_alone = await _job_alone(client, bench.target, job, bench.duration, repeats)
    return _verdict(pairs, job_alone) | {"pairs": pairs}


async def _run(
    client: httpx2.AsyncClient, bench: Bench, job: Workload | None, rate: float, repeat: int
) -> dict[str, Any]:
    """One run of traffic, with a job posted just before it or without."""
    if job is None:
        return await asyncio.to_thread(bench.measure, rate)
    job_id = await _post(client, bench.target, job, repeat)
    began, before = time.monotonic(), await _done(client, job_id)
    measuring = asyncio.create_task(asyncio.to_thread(bench.measure, rate))
    longest = await _longest_job_step(client, measuring)
    run = await measuring
    done, seconds = await _done(client, job_id) - before, time.monotonic() - began
    await _cancel(client, job_id)
    return run | {"job_requests_per_s": done / seconds, "job_step_max_s": longest}


async def _longest_job_step(client: httpx2.AsyncClient, until: asyncio.Task[Any]) -> float:
    """Of steps in which the job had the engine to itself, while something else goes on."""
    longest = 0.0
    while not until.done():
        await asyncio.wait([until], timeout=LOOK_SECONDS)
        longest = max(longest, (await state(client))["engine"]["job_step_seconds"])
    return longest


async def _job_alone(
    client: httpx2.AsyncClient, target: Target, job: Workload, seconds: float, repeat: int
) -> float:
    job_id = await _post(client, target, job, repeat)
    began, before = time.monotonic(), await _done(client, job_id)
    await asyncio.sleep(seconds)
    done = await _done(client, job_id) - before
    seconds = time.monotonic() - began
    await _cancel(client, job_id)
    return done / seconds


async def _post(client: httpx2.AsyncClient, target: Target, job: Workload, repeat: int) -> str:
    """Post the job and wait until its first answers are there: it runs."""
    lines = []
    for i in range(JOB_LINES):
        body = target.body(job.ask(i, run=repeat))
        for streamed in ("stream", "stream_options", "return_token_ids"):
            body.pop(streamed, None)
        lines.append(
            {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body}
        )
    job_id = await post_job(client, lines)
    while not await _done(client, job_id):
        await asyncio.sleep(0.2)
    return job_id


async def _done(client: httpx2.AsyncClient, job_id: str) -> int:
    found = await client.get(f"/v1/batches/{job_id}")
    found.raise_for_status()
    batch = found.json()
    if batch["status"] in ("failed", "completed"):
        raise RuntimeError(f"the job ended during a run: {batch}")
    return int(batch["request_counts"]["completed"])


async def _cancel(client: httpx2.AsyncClient, job_id: str) -> None:
    (await client.post(f"/v1/batches/{job_id}/cancel")).raise_for_status()
    with suppress(asyncio.TimeoutError):
        await at_rest(client)


def _verdict(pairs: list[dict[str, Any]], job_alone: float) -> dict[str, Any]:
    def ratios(name: str) -> list[float]:
        return [pair["with_job"][name]["p99"] / pair["alone"][name]["p99"] for pair in pairs]

    later = [pair["with_job"]["ttft"]["p99"] - pair["alone"]["ttft"]["p99"] for pair in pairs]
    step = statistics.median(pair["with_job"]["between_chunks"]["p99"] for pair in pairs)
    alone = statistics.median(pair["with_job"]["job_step_max_s"] for pair in pairs)
    beside = statistics.median(pair["with_job"]["job_requests_per_s"] for pair in pairs)
    per_token, gaps = ratios("per_token"), ratios("between_chunks")
    failed = sum(run["failed"] + run["torn"] for pair in pairs for run in pair.values())
    return {
        "per_token_p99_ratio": _spread(per_token),
        "between_chunks_p99_ratio": _spread(gaps),
        "ttft_p99_later_s": _spread(later),
        "step_p99_s": step,
        "job_step_max_s": alone,
        "job_requests_per_s": {"beside_traffic": beside, "alone": job_alone},
        "failed_or_torn": failed,
        "good": statistics.median(per_token) <= 1.25
        and statistics.median(later) <= max(step, alone)
        and failed == 0,
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _short(run: dict[str, Any]) -> str:
    return (
        f"per token p99 {run['per_token']['p99'] * 1000:.1f} ms, "
        f"first token p99 {run['ttft']['p99'] * 1000:.0f} ms"
    )


if __name__ == "__main__":
    main()
