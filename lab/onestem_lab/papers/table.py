"""A result as the paper's table, with our numbers and the paper's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from onestem_lab.papers.claims import Claim, Finding, Gain
from onestem_lab.papers.experiment import Experiment, place, ratio_name

__all__ = [
    "Table",
    "figures_of",
    "found_in",
    "number",
    "rank",
    "span",
    "stated_in",
    "table_of",
    "text_of",
]

NOTHING = "-"
# Baselines that are like today's engines, those that share nothing, and ceilings.
BASELINES = (
    ("storage", "vllm", "vllm, sorted", "sorted", "input order", "lru"),
    ("off", "copies", "unshared"),
    ("no-attention",),
)


@dataclass(frozen=True)
class Table:
    header: list[str]
    rows: list[list[str]]
    notes: list[str]


def table_of(experiment: Experiment, result: Mapping[str, Any]) -> Table:
    """Table of a result. Cells are `ours / the paper's`, or the one of the two that there is.

    A series of ours shares a column with the paper's series that it is compared with. Other series
    of the paper have their own.
    """
    found = _Found(experiment, result)
    if experiment.across:
        header, rows = found.across(experiment.across)
    else:
        header, rows = found.down()
    return Table(header, rows, _notes(experiment, result))


def text_of(table: Table) -> str:
    """The table as text, with aligned columns."""
    lines = [table.header, *table.rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(table.header))]
    made = [
        "  ".join(part.ljust(width) for part, width in zip(line, widths)).rstrip() for line in lines
    ]
    rule = "  ".join("-" * width for width in widths)
    return "\n".join([made[0], rule, *made[1:], "", *table.notes])


def figures_of(
    experiment: Experiment, result: Mapping[str, Any]
) -> tuple[str, list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """(unit, our cells, the paper's). Seconds of a job become milliseconds of a request, since a
    part of the job may have run."""
    ours, published = result["cells"], result["published"]
    if not experiment.requests:
        return experiment.unit, ours, published

    def each(cells: Iterable[Mapping[str, Any]], count: int = 0) -> list[Mapping[str, Any]]:
        return [
            cell
            if " : " in cell["series"] or cell["value"] is None
            else {**cell, "value": 1000 * cell["value"] / (count or cell["ran"]["requests"])}
            for cell in cells
        ]

    return "ms a request", each(ours), each(published, experiment.requests)


def rank(series: str) -> int:
    """Order in which series are shown: 0 has no baselines; those like today's engines come before
    those that share nothing."""
    if " : " in series:
        return 1 + len(BASELINES)
    return next((i for i, names in enumerate(BASELINES, 1) if series in names), 0)


def found_in(finding: Finding) -> str:
    """The numbers of a run, shortly: the least and the largest."""
    return span([point.found for point in finding.points])


def stated_in(claim: Claim, finding: Finding) -> str:
    """The numbers of the paper, shortly: at the places that ran, or else at all."""
    ran = [point for point in finding.points if point.found is not None]
    numbers = span([point.stated for point in ran or finding.points])
    return f"at most {numbers}" if claim.bound == "most" else numbers


def span(values: Iterable[float | None]) -> str:
    """The least and the largest, with three digits."""
    there = [value for value in values if value is not None]
    ends = dict.fromkeys(f"{value:.3g}" for value in (min(there), max(there))) if there else {}
    return " to ".join(ends) or NOTHING


def number(value: float | None) -> str:
    """A number with about three digits."""
    if value is None:
        return NOTHING
    if value and abs(value) < 0.1:
        return f"{value:.2g}"
    return f"{value:.2f}".rstrip("0").rstrip(".") if abs(value) < 100 else f"{value:,.0f}"


class _Found:
    """Our numbers and the paper's, by place and series.

    Attributes:
        places: of all cells, sorted; a place's names keep their order.
        columns: label -> (our series, the paper's series) in it.
    """

    def __init__(self, experiment: Experiment, result: Mapping[str, Any]) -> None:
        _, ours, published = figures_of(experiment, result)
        self.ours, self.paper = _by_place(ours), _by_place(published)
        cells = [*ours, *published]
        self.places = _sorted(list({place(cell["at"]): cell["at"] for cell in cells}.values()))
        theirs: dict[str, str | None] = {
            name: experiment.theirs.get(name) for name in sorted(_series(ours), key=rank)
        }
        if experiment.ratio is not None and ratio_name(*experiment.ratio) in theirs:
            pair = experiment.published_ratio
            theirs[ratio_name(*experiment.ratio)] = None if pair is None else ratio_name(*pair)
        alone = [name for name in _series(published) if name not in theirs.values()]
        self.columns: dict[str, tuple[str | None, str | None]] = {
            **{_label(name, other): (name, other) for name, other in theirs.items()},
            **{f"paper: {name}": (None, name) for name in alone},
        }

    def down(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows with series as columns."""
        names = list(dict.fromkeys(name for at in self.places for name in at))
        rows = [
            [
                *(_plain(at.get(name)) for name in names),
                *(self._cell(at, *pair) for pair in self.columns.values()),
            ]
            for at in self.places
        ]
        return [*names, *self.columns], rows

    def across(self, name: str) -> tuple[list[str], list[list[str]]]:
        """Header and rows with the values of a setting as columns, and series as rows."""
        columns = sorted({at[name] for at in self.places})
        without = [{k: v for k, v in at.items() if k != name} for at in self.places]
        rests = list({place(at): at for at in without}.values())
        names = list(dict.fromkeys(key for rest in rests for key in rest))
        rows = []
        for rest in rests:
            for label, pair in self.columns.items():
                cells = [self._cell({**rest, name: column}, *pair) for column in columns]
                if set(cells) != {NOTHING}:
                    rows.append([*(_plain(rest.get(key)) for key in names), label, *cells])
        return [*names, "series", *(f"{name} {_plain(column)}" for column in columns)], rows

    def _cell(self, at: Mapping[str, Any], own: str | None, theirs: str | None) -> str:
        values = [
            number(found.get(place(at), {}).get(series))
            for found, series in ((self.ours, own), (self.paper, theirs))
            if series is not None
        ]
        return NOTHING if set(values) == {NOTHING} else " / ".join(values)


def _sorted(places: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Places sorted by their numbers; then names, by first appearance."""
    seen: dict[Any, int] = {}
    for at in places:
        for name, value in at.items():
            seen.setdefault((name, value), len(seen))

    def rank(at: Mapping[str, Any]) -> list[tuple[bool, float]]:
        return [
            (False, value) if isinstance(value, (int, float)) else (True, seen[name, value])
            for name, value in at.items()
        ]

    return sorted(places, key=rank)


def _label(own: str, theirs: str | None) -> str:
    return own if theirs is None else f"{own} / {theirs}"


def _by_place(cells: Iterable[Mapping[str, Any]]) -> dict[Any, dict[str, float | None]]:
    found: dict[Any, dict[str, float | None]] = {}
    for cell in cells:
        found.setdefault(place(cell["at"]), {})[cell["series"]] = cell["value"]
    return found


def _series(cells: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(cell["series"] for cell in cells))


def _plain(value: Any) -> str:
    return NOTHING if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _notes(experiment: Experiment, result: Mapping[str, Any]) -> list[str]:
    unit, *_ = figures_of(experiment, result)
    notes = [f"In {unit}; cells are ours / the paper's."]
    scale = "" if result["scale"] == 1 else f" at {result['scale']:g} of its sizes"
    if result.get("part", 1) < 1:
        scale += f", with {result['part']:g} of its requests and points"
    if result.get("discarded"):
        scale += ", its first job run once before, not counted"
    if result.get("repeat", 1) > 1:
        scale += f" (medians of {result['repeat']} turns)"
    if experiment.machine:
        notes.append(f"The paper ran it on {experiment.machine}; we on {result['device']}{scale}.")
    elif scale:
        notes.append(f"Ours: {scale.strip(' ,')}.")
    if result.get("model") is not None:
        notes.append(f"Ours ran {result['model']} in place of the paper's models.")
    if result.get("share", "full") != "full":
        notes.append(f"Ours that would share as `full` ran with --share {result['share']}.")
    if experiment.assumed:
        notes.append(f"Ours to choose: {experiment.assumed}.")
    noted = [cell for cell in result["cells"] if cell["note"]]
    told = dict.fromkeys(("" if c["value"] is None else c["series"], c["note"]) for c in noted)
    notes += [f"{series or 'No number'}: {note}." for series, note in told]
    notes += [f"Left out: {peer}: {why}." for peer, why in result["refused"].items()]
    return notes + [_said(experiment, claim, result) for claim in experiment.claims]


def _said(experiment: Experiment, claim: Claim, result: Mapping[str, Any]) -> str:
    run = experiment.run(result)
    finding = claim.finding(run)
    over = f" over {claim.number.other(run)}" if isinstance(claim.number, Gain) else ""
    numbers = f"stated {stated_in(claim, finding)}, here{over} {found_in(finding)}"
    return f"{finding.verdict}: {claim.text} ({claim.refused(run) or numbers})"
