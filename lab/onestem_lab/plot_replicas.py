"""Plot what ways to deal a large job cost, by the number of replicas: lab/notes/replicas.svg.

    python -m onestem_lab.plot_replicas [--result FILE] [--out FILE]

Reads what `onestem_lab.plan_stream` wrote; the largest job is shown.
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

WAYS = {
    "groups": ("groups kept whole", "#4878a8", "o"),
    "prefix-hash": ("by the prefix's hash", "#20a060", "s"),
    "round-robin": ("requests in turn", "#e0a030", "^"),
    "random": ("requests at random", "#d04020", "x"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--result", type=Path, default=RESULTS / "plan-stream.json")
    parser.add_argument("--out", type=Path, default=LAB / "notes" / "replicas.svg")
    options = parser.parse_args()
    jobs = json.loads(options.result.read_text())["jobs"]
    figure = plot(max(jobs, key=lambda job: job["prompts"]))
    save(figure, options.out)


def plot(job: dict) -> plt.Figure:
    """Left: seconds as a multiple of one replica's, divided by the replicas; right: prompt tokens
    computed, as a multiple of one replica's."""
    one = job["one_replica"]
    figure, (times, tokens) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    counts = [1, *(dealt["replicas"] for dealt in job["dealt"])]
    for way, (label, color, marker) in WAYS.items():
        style = {"color": color, "marker": marker, "label": label}
        found = [dealt[way] for dealt in job["dealt"]]
        seconds = [
            dealt["replicas"] * dealt[way]["seconds"] / one["seconds"] for dealt in job["dealt"]
        ]
        times.plot(counts, [1.0, *seconds], **style)
        computed = [
            each["computed_prompt_tokens"] / one["computed_prompt_tokens"] for each in found
        ]
        tokens.plot(counts, [1.0, *computed], **style)
    for axes, title in ((times, "seconds x replicas"), (tokens, "prompt tokens computed")):
        axes.set(xscale="log", xlabel="replicas", title=f"{title}, one replica's = 1")
        axes.set_xticks(counts, [f"{count:,}" for count in counts])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.set_ylim(bottom=0)
    times.legend(fontsize=8)
    figure.suptitle(f"{job['prompts']:,} prompts")
    return figure


if __name__ == "__main__":
    main()
