"""Mean normalised latency over request rate, as RelayAttention's figure 8.

    python -m onestem_lab.serve.plot RESULT.json ... [--out docs/serving.svg]

RESULT.json: of `onestem_lab.serve.compare`, or lines of `onestem bench serve --json`. One panel for
each length of system prompt, one line for each server or mode; the dashed line is the limit.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

from onestem_lab.plots import save
from onestem_lab.results import ROOT

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

COLOURS = {
    "full": "#2a7f62",
    "storage": "#c2701c",
    "off": "#4b6cb7",
    "vllm": "#8a8f98",
    "vllm-eager": "#b9bec6",
}

# system tokens -> server -> [(rate, mean normalised latency)]
Curves = dict[int, dict[str, list[tuple[float, float]]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "serving.svg")
    options = parser.parse_args()
    entries = [entry for path in options.results for entry in read(path)]
    draw(curves(entries), max(entry["limit"] for entry in entries), options.out)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Entries {server, system_tokens, limit, runs} of a result file, or of JSON lines."""
    text = path.read_text()
    try:
        results = [json.loads(text)]
    except ValueError:
        results = [json.loads(line) for line in text.splitlines() if line.strip()]
    for result in results:
        if "searches" in result:
            yield from ({"limit": result["limit"], **search} for search in result["searches"])
            continue
        server = result["server"]
        yield {
            "server": server.get("share") or server["base_url"],
            "system_tokens": result["case"]["system_tokens"],
            "limit": result["case"]["limit"],
            "runs": result["runs"],
        }


def curves(entries: list[dict[str, Any]]) -> Curves:
    """Points in order of the rate. A run that was cut off has no latency: it is left out."""
    found: Curves = {}
    for entry in entries:
        points = found.setdefault(entry["system_tokens"], {}).setdefault(entry["server"], [])
        points += [
            (run["rate"], run["normalised"]["mean"])
            for run in entry["runs"]
            if run["normalised"] and not run["given_up"]
        ]
    for servers in found.values():
        for points in servers.values():
            points.sort()
    return found


def draw(found: Curves, limit: float, out: Path) -> None:
    figure, axes = pyplot.subplots(
        1, len(found), figsize=(4.2 * len(found), 3.2), squeeze=False, layout="constrained"
    )
    for axis, (system_tokens, servers) in zip(axes[0], sorted(found.items())):
        _panel(axis, servers, limit)
        axis.set_title(f"system prompt of {system_tokens} tokens", fontsize=9)
    axes[0][0].set_ylabel("mean normalised latency, s per token", fontsize=8)
    axes[0][-1].legend(fontsize=8, frameon=False)
    save(figure, out)
    pyplot.close(figure)


def _panel(axis: Axes, servers: dict[str, list[tuple[float, float]]], limit: float) -> None:
    for server, points in servers.items():
        rates, latencies = zip(*points) if points else ((), ())
        axis.plot(rates, latencies, "o-", ms=3, lw=1.2, label=server, color=COLOURS.get(server))
    axis.axhline(limit, ls="--", lw=0.8, color="black")
    axis.set_yscale("log")
    axis.set_xlim(left=0)
    axis.set_xlabel("requests per second", fontsize=8)
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
