"""Each table and figure of the papers: what they claim, and what came out here: docs/papers.md.

    python -m benchmarks.papers

Reads what `onestem bench paper NAME --out benchmarks/results/paper` wrote.
"""

from __future__ import annotations

import json
import shlex
from itertools import pairwise
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
numbers of requests and of points. With `--share off` the gains of `full` and `planned` are gone:
every number of ours is measured or counted in the run. (`cache-fig6` keeps 1.3: cached modules do
not see each other, so they attend to less.) `--against vllm` runs the jobs on vLLM too, as given
and sorted, if it is installed or `ONESTEM_VLLM_PYTHON` names a Python that has it. `--repeat 3`
runs all series in turns, and medians count. `--tensor-parallel-size 2` holds a model on two
devices. This page is made of `benchmarks/results/paper/*.json` by `python -m benchmarks.papers`.

| series of ours | what runs |
|---|---|
| `full`, `planned` | prefixes stored once and read once for all; `planned`: a job that is planned |
| `storage`, `input order`, `sorted` | stored once and read by each sequence; in the order named |
| `off`, `unshared` | nothing shared; `unshared`: attention reads a shared prefix for each row |
| `copies`, `lru` | each row reads a copy of the prefix; an LRU cache in place of a plan |
| `no-attention` | the ceiling: all but attention |
| `device`, `host`, `cached` | modules in KV memory, in host memory, where the tier leaves them |
| `one`, `all`, `heuristic`, `none` | `--levels` of the plan |
| `vllm`, `vllm, sorted` | vLLM with prefix caching; prompts as given, and sorted by their tokens |
"""
NOT_RUN = "not run here yet"
REMARKS = {
    "relay-fig7": "A system prompt of 64 tokens is the floor: `full` keeps 93% of its rate at "
    "2,048",
    "relay-fig8": "A system prompt of 64 tokens is the floor: `full` keeps 95% of its rate at "
    "2,048",
    "relay-table3": "`full` came first, beside stalls of the machine; in turns (`--repeat 2`) it "
    "takes 14.17 s at one shot, `storage` 14.31",
    "hydragen-fig6": "256 questions take half the time of 64 without sharing; above 256, attention "
    "takes what its FLOPs need at 60% of the matrix rate",
    "batch-fig6a": "320 requests leave nothing to evict. vLLM: 1.02 to 1.34 times its rate with "
    "sorted prompts, 1.03 to 1.46 as given. The best rate of the run is 37,400 rows/s, prompts and "
    "decodes. At that rate no engine could reach more than 1.45 and 1.58; ours are 92 to 100% of "
    "what it allows",
    "batch-fig7": "KV memory holds 4 of the 16 prefixes of 16,000. With room for all: 1.43 times",
    "batch-table1": "1,200 requests fit KV memory: nothing is evicted in any order",
    "batch-table4": "`planned` came first, beside stalls of the machine; in turns (`--repeat 2`) "
    "it takes 13.62 s, capped 14.03: 1.03 times, as in the paper",
    "batch-fig10": "35% of the steps are valleys, all of them after the last prompt; capped 58% "
    "(figure 2), throughout the job",
}
"""What a reader should know of a result besides its numbers."""


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
    if result is not None and experiment.name in REMARKS:
        holds += f". {REMARKS[experiment.name]}"
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
    scale += "".join(f", {option}" for option in _engine_options(result["command"]))
    return f"{'; '.join(told)} ({experiment.unit}; {result['device']}{scale})"


def _engine_options(command: str) -> list[str]:
    """The options of a command that choose another model or memory than the default."""
    words = shlex.split(command)
    pairs = pairwise(words)
    return [f"`{name} {value}`" for name, value in pairs if name in ("--model", "--kv-memory")]


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
