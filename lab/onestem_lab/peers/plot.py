"""Seconds of every engine in every case, with the floor, as a picture.

    python -m onestem_lab.peers.plot [RESULT.json ...] [--out docs/peers.png]

Without arguments, of all lab/results/peers-*.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

from onestem_lab.plots import save
from onestem_lab.results import RESULTS, ROOT

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

COLOURS = {
    "onestem": "#2a7f62",
    "vllm": "#8a8f98",
    "transformers": "#b9a27c",
    "llama_cpp": "#6f86a8",
}
COLUMNS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", nargs="*", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "peers.png")
    options = parser.parse_args()
    plot_results(options.out, options.results)


def plot_results(out: Path, paths: Sequence[Path] = ()) -> None:
    """Draw results, by default all that there are."""
    paths = paths or sorted(RESULTS.glob("peers-*.json"))
    draw([json.loads(path.read_text()) for path in paths], out)


def draw(results: list[dict[str, Any]], out: Path) -> None:
    rows = -(-len(results) // COLUMNS)
    columns = min(len(results), COLUMNS)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(3.2 * columns, 2.2 * rows), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(results) :]:
        axis.set_axis_off()
    for axis, result in zip(axes.flat, results):
        _panel(axis, result)
    save(figure, out)


def _panel(axis: Axes, result: dict[str, Any]) -> None:
    medians: dict[str, float] = result["median_seconds"]
    engines = [engine for engine in COLOURS if engine in medians][::-1]
    low, high = (
        [abs(medians[e] - result["spread_seconds"][e][side]) for e in engines] for side in (0, 1)
    )
    bars = axis.barh(
        [engine.replace("_", ".") for engine in engines],
        [medians[engine] for engine in engines],
        xerr=[low, high],
        color=[COLOURS[engine] for engine in engines],
        error_kw={"lw": 0.8},
    )
    axis.bar_label(bars, fmt="%.1f", padding=3, fontsize=8)
    axis.axvline(result["floor"]["seconds"]["floor"], ls="--", lw=1, color="black")
    axis.margins(x=0.18)
    axis.set_title(f"{result['case']}, {result['dtype']}", fontsize=9)
    axis.set_xlabel("seconds (dashed: floor)", fontsize=8)
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
