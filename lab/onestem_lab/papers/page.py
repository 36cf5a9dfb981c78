"""The papers' claims, and what our runs say of each: lab/notes/papers.md.

    python -m onestem_lab.papers.page

Reads what `onestem bench paper NAME --out lab/results/paper` wrote.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from onestem_lab.papers.claims import VERDICTS, Claim, Finding, Gain, Run, place
from onestem_lab.papers.experiment import THEORY, Experiment
from onestem_lab.papers.registry import EXPERIMENTS
from onestem_lab.papers.table import figures_of, found_in, number, rank, span, stated_in
from onestem_lab.results import LAB, UNKNOWN
from onestem_lab.results import RESULTS as ALL_RESULTS

RESULTS = ALL_RESULTS / "paper"
PAGE = LAB / "notes" / "papers.md"
HEAD = """# The papers' claims

What four papers claim of their methods, and what this engine measures.

    onestem bench paper                  # all names
    onestem bench paper relay-table3     # run one: its numbers, the paper's beside them, verdicts

`python -m onestem_lab.papers.page` makes this page of the claims in `lab/onestem_lab/papers` and of
`lab/results/paper/*.json`. No number of ours is typed.

A **claim** is a number that machines can have in common: how many times better, a growth, a share.
Seconds, rates and bytes get no verdict; they stand under *Figures*, with both machines.

| verdict | what it means |
|---|---|
| holds | every place of the claim ran, and reaches the paper's number to three digits |
| partly | some places do; or all that ran do, and others did not run |
| does not | no place does |
| not run | no result, or one of another model, other data, sizes or assumptions |

Of "A to B" the two ends count in place of the places: the least of ours against A, the largest
against B. Of "up to" the best place that ran counts.

The paper's baseline is an engine of its time. Ours is another series of this engine, or a newer
vLLM. *Compared with* names both.

| series of ours | what runs |
|---|---|
| `full`, `planned` | prefixes stored once and read once for all; `planned`: a job that is planned |
| `storage`, `input order`, `sorted` | stored once and read by each sequence; in the order named |
| `vllm`, `vllm, sorted` | vLLM with prefix caching; prompts as given, and sorted by their tokens |
| `off` | nothing shared |
| `unshared` | attention reads a prefix for each row, from the same pages, which a cache may hold |
| `copies`, `lru` | each row reads a copy of the prefix; an LRU cache in place of a plan |
| `no-attention` | the ceiling: all but attention |
| `device`, `host`, `cached` | modules in KV memory, in host memory, where the tier leaves them |
| `one`, `all`, `heuristic`, `none` | `--levels` of the plan |

Where nothing else is said, weights are random, of the papers' shapes, and prompts are token ids of
the published lengths.

| option | what it does |
|---|---|
| `--part 0.1` | fewer requests and points of a sweep; a cache may hold all of so few |
| `--scale 0.1` | all of it smaller: no verdicts |
| `--share off` | the control: the gains of `full` and `planned` are gone |
| `--against vllm` | jobs on vLLM too; `ONESTEM_VLLM_PYTHON` names a Python that has it |
| `--repeat 3` | all series in turns; medians count |
| `--tensor-parallel-size 2` | a model on two devices |

The first job of a process is slower, so jobs run one before that does not count. `ONESTEM_COMMIT`
names the commit of sources that were copied without git.
"""
CLAIMS = """### Claims

*Stated* and *here* are the least and the largest number over the places that ran.

| name | the paper says | compared with | stated | here | verdict |
|---|---|---|---|---|---|"""
FIGURES = """### Figures, on two machines

Least to most over the places that ran; the paper's at the same places.

| name | unit | ours | the paper's | gain |
|---|---|---|---|---|"""
RUNS = """### Runs

Turns: how often all series ran; in brackets, how many first jobs were left out.

| name | what | places run | part | turns | machine | date | commit |
|---|---|---|---|---|---|---|---|"""
Result = Mapping[str, Any]
DIFFERS = {"unshared": "theirs reads a copy of the prefix for each row"}
"""Baselines of ours that are easier or harder to beat than the paper's, and why."""


def main() -> None:
    PAGE.write_text(page(results()))


def results() -> dict[str, Result]:
    """Name -> content of its file, of all that there are."""
    files = {name: RESULTS / f"{name}.json" for name in EXPERIMENTS}
    return {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}


def page(found: Mapping[str, Result]) -> str:
    papers: dict[str, list[Experiment]] = {}
    for each in EXPERIMENTS.values():
        papers.setdefault(each.source.partition(",")[0], []).append(each)
    parts = [HEAD, *_summary(papers, found)]
    for paper, experiments in papers.items():
        ran = [(each, found[each.name]) for each in experiments if each.name in found]
        parts += [f"## {paper}\n", CLAIMS]
        parts += [line for each in experiments for line in _claims(each, found.get(each.name))]
        parts += ["", FIGURES, *(_figures(*each) for each in ran)]
        parts += ["", RUNS, *(_run_line(each, found.get(each.name)) for each in experiments), ""]
        parts += [note for each in ran for note in _notes(*each)]
        parts.append("")
    return "\n".join(parts).rstrip() + "\n"


def _summary(
    papers: Mapping[str, Sequence[Experiment]], found: Mapping[str, Result]
) -> Iterator[str]:
    yield _row("paper", "claims", *VERDICTS)
    yield "|---" * (2 + len(VERDICTS)) + "|"
    for paper, experiments in papers.items():
        verdicts = [
            claim.finding(each.run(found.get(each.name))).verdict
            for each in experiments
            for claim in each.claims
        ]
        counts = Counter(verdicts)
        yield _row(paper, len(verdicts), *(counts[verdict] for verdict in VERDICTS))
    yield ""


def _claims(experiment: Experiment, result: Result | None) -> Iterator[str]:
    run = experiment.run(result)
    for claim in experiment.claims:
        finding = claim.finding(run)
        yield _row(
            f"`{experiment.name}`",
            claim.text,
            _compared(claim, finding, run, result),
            stated_in(claim, finding),
            _here(claim, finding, run),
            finding.verdict,
        )


def _here(claim: Claim, finding: Finding, run: Run) -> str:
    """The numbers of a run, and how many places they are of."""
    if finding.verdict == "not run":
        return claim.refused(run) or "no such number in the run"
    ran, parts = sum(point.found is not None for point in finding.points), []
    if ran > 1 and finding.met < ran:
        ends = " ends" if isinstance(claim.stated, tuple) else ""
        parts.append(f"{finding.met} of {ran}{ends} reach it")
    if finding.missing:
        parts.append(f"{finding.missing} of {finding.places} places did not run")
    return found_in(finding) + (f" ({'; '.join(parts)})" if parts else "")


def _compared(claim: Claim, finding: Finding, run: Run, result: Result | None) -> str:
    """The paper's baseline; ours; what differs."""
    parts = [claim.theirs] if claim.theirs else []
    if isinstance(claim.number, Gain) and finding.verdict != "not run":
        other = claim.number.other(run)
        parts += [f"here {_named(other, result)}", *([DIFFERS[other]] if other in DIFFERS else [])]
    if claim.remark:
        parts.append(claim.remark)
    return "; ".join(parts)


def _named(series: str, result: Result | None) -> str:
    """A series; a peer's with its version."""
    version = ""
    if series.startswith("vllm"):
        versions = {} if result is None else result["versions"]
        version = f" ({versions.get('vllm', f'version {UNKNOWN}')})"
    return f"`{series}`{version}"


def _figures(experiment: Experiment, result: Result) -> str:
    unit, ours, published = figures_of(experiment, result)
    names = set(ours[0]["at"])  # cells with other names have another unit
    mine = [cell for cell in ours if set(cell["at"]) == names and _measured(cell)]
    places = {place(cell["at"]) for cell in mine}
    theirs = [cell for cell in published if place(cell["at"]) in places and _measured(cell)]
    machine = f" ({experiment.machine})" if experiment.machine and theirs else ""
    return _row(
        f"`{experiment.name}`",
        unit,
        f"{_spans(mine)} ({result['device']})",
        f"{_spans(theirs)}{machine}" if theirs else f"({experiment.machine or 'nothing ran'})",
        _gains(experiment, result, mine),
    )


def _measured(cell: Mapping[str, Any]) -> bool:
    return cell["value"] is not None and " : " not in cell["series"] and cell["series"] != THEORY


def _spans(cells: Iterable[Mapping[str, Any]]) -> str:
    """Of each series its least and its largest number."""
    values: dict[str, list[float]] = {}
    for cell in cells:
        values.setdefault(cell["series"], []).append(cell["value"])
    return "; ".join(f"{name} {_span(values[name])}" for name in sorted(values, key=rank))


def _span(values: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys(map(number, (min(values), max(values)))))


def _gains(experiment: Experiment, result: Result, cells: Sequence[Mapping[str, Any]]) -> str:
    """How many times better the experiment's own series is than each baseline."""
    if experiment.ratio is None:
        return ""
    run, (own, other) = experiment.run(result), experiment.ratio
    places = [cell["at"] for cell in cells if cell["series"] == own]
    told = []
    for series in sorted(dict.fromkeys(cell["series"] for cell in cells), key=rank):
        found = [run.times(run.ours, (at, own), (at, series)) for at in places]
        gains = [gain for gain in found if gain is not None]
        if (series == other or rank(series)) and series != own and gains:
            told.append(f"over {_named(series, result)} {span(gains)}")
    return f"`{own}`: {'; '.join(told)}" if told else ""


def _run_line(experiment: Experiment, result: Result | None) -> str:
    names, places = ", ".join(f"`{name}`" for name in experiment.names), experiment.measure.places()
    if result is None:
        return _row(names, experiment.title, f"0 of {len(places)}", *"-----")
    first = result["cells"][0]["series"]
    ran = {
        place(cell["at"])
        for cell in result["cells"]
        if cell["series"] == first and cell["value"] is not None
    }
    return _row(
        names,
        "; ".join([result["title"], *_options(result["command"])]),
        f"{len(ran & set(map(place, places)))} of {len(places)}" if places else "other data",
        f"{result.get('part', 1):g}",
        f"{result.get('repeat', 1)} ({result.get('discarded', 0)})",
        result["device"],
        result["date"],
        _commit(result),
    )


def _options(command: str) -> list[str]:
    """The options of a command that choose another model or memory than the default."""
    told = ("--model", "--kv-memory", "--share")
    return [f"`{name} {value}`" for name, value in pairwise(shlex.split(command)) if name in told]


def _commit(result: Result) -> str:
    named = re.search(r"\+g([0-9a-f]+)", result["versions"].get("onestem", ""))
    commit: str = result.get("commit") or (named[1] if named else UNKNOWN)
    return commit


def _notes(experiment: Experiment, result: Result) -> Iterator[str]:
    """What else a reader needs: what we chose, numbers that are missing or other than asked, and
    peers that were left out."""
    parts = [f"Ours to choose: {result['assumed']}."] if result["assumed"] else []
    if experiment.stand_in:
        parts.append(f"Ran: {experiment.stand_in}.")
    elif why := experiment.run(result).refused:
        parts.append(f"Its figures have no verdict: {why}.")
    parts += [f"Its series answer differently at {at}." for at in _answered_apart(result)]
    noted = Counter((cell["series"], cell["note"]) for cell in result["cells"] if cell["note"])
    parts += [
        f"`{series}` at {count} {'place' if count == 1 else 'places'}: {note}."
        for (series, note), count in noted.items()
    ]
    parts += [f"Left out: {peer}: {why}." for peer, why in result["refused"].items()]
    if parts:
        yield f"* `{experiment.name}`: {' '.join(parts)}"


def _answered_apart(result: Result) -> Iterator[str]:
    """The places where series gave different answers: one that is sooner may be wrong."""
    answers: dict[str, set[str]] = {}
    for cell in result["cells"]:
        if "answer" in cell["ran"]:
            at = ", ".join(f"{name} {value}" for name, value in cell["at"].items())
            answers.setdefault(at, set()).add(cell["ran"]["answer"])
    return (at for at, given in answers.items() if len(given) > 1)


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    main()
