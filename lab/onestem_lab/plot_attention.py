"""Plot attention's time against its floors, per case: lab/notes/gpu-attention.svg.

    python -m onestem_lab.plot_attention [--result FILE] [--out FILE]

Reads what `onestem bench attention --json` wrote.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

from onestem_lab.plots import save
from onestem_lab.results import LAB, RESULTS

matplotlib.use("svg")
import matplotlib.pyplot as plt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--result", type=Path, default=RESULTS / "attention-h100.json")
    parser.add_argument("--out", type=Path, default=LAB / "notes" / "gpu-attention.svg")
    options = parser.parse_args()
    figure = plot(json.loads(options.result.read_text()))
    save(figure, options.out)


def plot(result: dict) -> plt.Figure:
    """Bars: our time; marks: the two floors and the fastest other."""
    cases = result["cases"]
    figure, axes = plt.subplots(figsize=(8.5, 0.42 * len(cases) + 1.4))
    place = range(len(cases))
    axes.barh(place, [case["ms"] for case in cases], color="#4878a8", height=0.6, label="onestem")
    marks = (
        ("byte_floor_ms", "byte floor", "|", "#d04020"),
        ("flop_floor_ms", "FLOP floor", "|", "#20a060"),
    )
    for key, label, marker, color in marks:
        axes.scatter(
            [case[key] for case in cases],
            place,
            marker=marker,
            s=160,
            linewidths=3,
            color=color,
            label=label,
            zorder=3,
        )
    fastest = [
        (min(case["others_ms"].values()), i) for i, case in enumerate(cases) if case["others_ms"]
    ]
    if fastest:
        axes.scatter(
            *zip(*fastest, strict=True),
            marker="D",
            s=26,
            color="#303030",
            label="fastest other",
            zorder=3,
        )
    axes.set_xscale("log")
    axes.set_xlim(left=min(case["ms"] for case in cases) / 8)
    axes.set_yticks(list(place), [case["case"] for case in cases])
    axes.invert_yaxis()
    axes.set_xlabel(f"milliseconds, {result['device']}")
    axes.legend(loc="lower right", fontsize=8)
    axes.grid(axis="x", alpha=0.3)
    figure.tight_layout()
    return figure


if __name__ == "__main__":
    main()
