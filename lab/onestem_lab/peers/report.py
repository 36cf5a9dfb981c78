"""The result of a case as one JSON value, and as lines to read."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import Any

from onestem_lab.peers.cases import Case
from onestem_lab.peers.floors import Floor, Rates
from onestem_lab.peers.runners.job import Job
from onestem_lab.results import processor

__all__ = ["show", "summary"]


Runs = dict[str, list[dict[str, Any]]]


def summary(
    *,
    name: str,
    command: str,
    case: Case,
    job: Job,
    busy: int,
    rates: list[Rates],
    floor: Floor,
    sweep: Runs,
    settings: dict[str, dict[str, Any]],
    runs: Runs,
) -> dict[str, Any]:
    """`rates` were measured before and after; a floor is at the better of each. `busy`: processes
    that took processor time beside the runs."""
    best = Rates(max(r.flops for r in rates), max(r.bytes for r in rates))
    at_least = floor.seconds(best)
    ran = {engine: seconds for engine in runs if (seconds := _seconds(runs[engine]))}
    medians = {engine: statistics.median(seconds) for engine, seconds in ran.items()}
    return {
        "case": name,
        "command": command,
        "machine": processor(job.threads),
        "sizes": asdict(case),
        "dtype": job.dtype,
        "busy": busy,
        "requests": len(job.prompts),
        "kv_tokens": job.kv_tokens,
        "rates": [asdict(r) for r in rates],
        "floor": {**asdict(floor), "seconds": at_least},
        "settings": settings,
        "median_seconds": medians,
        "spread_seconds": {engine: [min(s), max(s)] for engine, s in ran.items()},
        "share_of_floor": {engine: at_least["floor"] / s for engine, s in medians.items()},
        "onestem_against": _ratios(ran),
        "agreement": {engine: runs[engine][0]["agreement"] for engine in ran},
        "errors": {e: run["error"] for e, rs in runs.items() for run in rs if "error" in run},
        "sweep": sweep,
        "runs": runs,
    }


def _seconds(runs: list[dict[str, Any]]) -> list[float]:
    return [run["seconds"] for run in runs if "seconds" in run]


def _ratios(ran: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """How many times as fast as each peer Onestem was, pair by pair."""
    out = {}
    for engine in ran:
        if engine == "onestem" or "onestem" not in ran:
            continue
        pairs = [peer / ours for peer, ours in zip(ran[engine], ran["onestem"])]
        out[engine] = {"median": statistics.median(pairs), "min": min(pairs), "max": max(pairs)}
    return out


def show(result: dict[str, Any]) -> None:
    floor = result["floor"]["seconds"]["floor"]
    print(f"{result['case']} {result['dtype']}: at least {floor:.2f} s here")
    for engine, seconds in result["median_seconds"].items():
        low, high = result["spread_seconds"][engine]
        ratio = result["onestem_against"].get(engine)
        against = f"  onestem {ratio['median']:.2f}x as fast" if ratio else ""
        same = result["agreement"][engine]["tokens"]
        print(
            f"  {engine:13} {seconds:8.2f} s ({low:.2f} to {high:.2f})"
            f"  {100 * result['share_of_floor'][engine]:3.0f}% of the floor"
            f"  {100 * same:3.0f}% same tokens{against}"
        )
    for engine, error in result["errors"].items():
        print(f"  {engine:13} {error}")
