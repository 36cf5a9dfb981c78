"""Each table and figure of the papers: what they claim, and what came out here: docs/papers.md.

    python -m benchmarks.papers

Reads what `onestem bench paper NAME --out benchmarks/results/paper` wrote.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

from onestem.paper.experiment import THEORY, Experiment, place, ratio_name
from onestem.paper.registry import EXPERIMENTS
from onestem.paper.table import number

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "paper"
PAGE = ROOT / "docs" / "papers.md"
HEAD = """# The papers' tables and figures

`onestem bench paper NAME` runs each of them with this engine and prints the paper's numbers
beside; `onestem bench paper` lists the names. Weights are random, of the papers' shapes; prompts
are token ids of the published lengths. `--scale 0.1` makes all of it smaller, `--part 0.1` only the
numbers of requests and of points. With `--share off` the gains are gone: every number of ours is
measured or counted in the run. (`cache-fig6` keeps 1.3: cached modules do not see each other, so
they attend to less.) `--against vllm` runs the jobs on vLLM too, as given and sorted, if
it is installed or `ONESTEM_VLLM_PYTHON` names a Python that has it. This page is made of
`benchmarks/results/paper/*.json` by `python -m benchmarks.papers`.

| series of ours | what runs |
|---|---|
| `full`, `planned` | prefixes stored once and read once for all; `planned`: a job that is planned |
| `storage`, `input order`, `sorted` | stored once and read by each sequence; in the order named |
| `off`, `unshared` | nothing shared; `unshared`: attention reads a shared prefix for each row |
| `no-attention` | the ceiling: all but attention |
| `device`, `host`, `cached` | modules in KV memory, in host memory, where the tier leaves them |
| `one`, `all`, `heuristic`, `none` | `--levels` of the plan |
| `vllm`, `vllm, sorted` | vLLM with prefix caching; prompts as given, and sorted by their tokens |
"""
NOT_RUN = "not run here yet"


def main() -> None:
    PAGE.write_text(page())


def page() -> str:
    """The page of all results that there are."""
    parts = [HEAD]
    for paper in dict.fromkeys(_paper(each) for each in EXPERIMENTS.values()):
        parts.append(f"## {paper}\n")
        parts.append("| name | the paper's claim | ours | does it hold |\n|---|---|---|---|")
        parts += [_line(each) for each in EXPERIMENTS.values() if _paper(each) == paper]
        parts.append("")
    return "\n".join(parts)


def _paper(experiment: Experiment) -> str:
    return experiment.source.partition(",")[0]


def _line(experiment: Experiment) -> str:
    file = RESULTS / f"{experiment.name}.json"
    result = json.loads(file.read_text()) if file.exists() else None
    ours, holds = (
        ("", NOT_RUN) if result is None else (_ours(experiment, result), _holds(experiment, result))
    )
    what = experiment.source.partition(", ")[2]
    return f"| `{experiment.name}` ({what}) | {experiment.claim} | {ours} | {holds} |"


def _ours(experiment: Experiment, result: dict[str, Any]) -> str:
    """Of each series its least and its largest number."""
    told = []
    for series in dict.fromkeys(cell["series"] for cell in result["cells"]):
        values = [
            c["value"] for c in result["cells"] if c["series"] == series and c["value"] is not None
        ]
        if values:
            span = dict.fromkeys(map(number, (min(values), max(values))))
            told.append(f"{series} {' to '.join(span)}")
    scale = "" if result["scale"] == 1 else f", {result['scale']:g} of the sizes"
    part = result.get("part", 1)
    scale += "" if part == 1 else f", {part:g} of the requests and points"
    return f"{'; '.join(told)} ({experiment.unit}; {result['device']}{scale})"


def _holds(experiment: Experiment, result: dict[str, Any]) -> str:
    """In how many places ours is at least as good as the paper's."""
    if result["scale"] != 1:
        return "not at the paper's sizes: its numbers do not compare"
    theirs = dict(experiment.theirs)
    if experiment.ratio is not None and experiment.published_ratio is not None:
        theirs[ratio_name(*experiment.ratio)] = ratio_name(*experiment.published_ratio)
    published = {(place(c["at"]), c["series"]): c["value"] for c in result["published"]}
    found = [
        (cell, published.get((place(cell["at"]), theirs.get(cell["series"]))))
        for cell in result["cells"]
        if cell["value"] is not None
    ]
    known = [(cell, other) for cell, other in found if other is not None]
    if not known:
        return _against_theory(experiment, result) or "the paper has no number to compare with"
    good = sum(_as_good(experiment, cell, other) for cell, other in known)
    verdict = "yes" if good == len(known) else "in part" if good else "no"
    return f"{verdict}: as good as the paper in {good} of {len(known)} places, to its digits"


def _against_theory(experiment: Experiment, result: dict[str, Any]) -> str:
    """Which part of the predicted speed-up was measured; "": nothing was predicted."""
    found = {(place(cell["at"]), cell["series"]): cell["value"] for cell in result["cells"]}
    series = ratio_name(*experiment.ratio) if experiment.ratio is not None else ""
    parts = [
        found[where, series] / predicted
        for (where, name), predicted in found.items()
        if name == THEORY
    ]
    if not parts:
        return ""
    spread = f"{number(min(parts))} to {number(max(parts))}, median {number(median(parts))}"
    return f"of the predicted speed-up {spread} times was measured"


def _as_good(experiment: Experiment, cell: dict[str, Any], other: float) -> bool:
    """A ratio says how many times better; of other numbers the experiment says what is better."""
    digit = 10.0 ** -len(str(other).partition(".")[2])
    if experiment.better == "less" and " : " not in cell["series"]:
        return bool(cell["value"] < other + digit)
    return bool(cell["value"] > other - digit)


if __name__ == "__main__":
    main()
