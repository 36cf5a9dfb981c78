"""A table or figure: settings and published numbers as data, and the code that measures it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, Protocol

from onestem_lab.papers.claims import SHARES, Claim, Run, Value, place, ratio_name

if TYPE_CHECKING:
    from onestem_lab.papers.bench import Bench

__all__ = [
    "THEORY",
    "Cell",
    "Experiment",
    "Measure",
    "Step",
    "grid",
    "place",
    "points",
    "ratio_name",
]


@dataclass(frozen=True)
class Cell:
    """One number of a table or figure.

    Attributes:
        at: its place, in the paper's sizes: {"batch": 32, "prefix": 1024}.
        series: a mode of ours, a peer, or the paper's name of a method.
        value: in the experiment's unit; None: there is none, and `note` says why.
        ran: the sizes that really ran.
        counts: counts of the run: tokens computed, keys read.
        turns: the values whose median `value` is, if the experiment ran several times.
    """

    at: Mapping[str, Any]
    series: str
    value: float | None
    ran: Mapping[str, Any] = field(default_factory=dict)
    counts: Mapping[str, float] = field(default_factory=dict)
    note: str = ""
    turns: list[float] = field(default_factory=list)

    @staticmethod
    def of_turns(cells: Sequence[Cell]) -> Cell:
        """The first of the same cell's turns, with the median of their values."""
        values = [cell.value for cell in cells if cell.value is not None]
        if len(cells) == 1 or not values:
            return cells[0]
        return replace(cells[0], value=median(values), turns=values)


THEORY = "eq. 10"
"""The series of RelayAttention's prediction: a ratio that is not measured."""

Step = Callable[[], Iterable[Cell]]


class Measure(Protocol):
    """Measures all cells of an experiment, in steps that a progress bar counts. `places`: of all
    cells at the paper's size."""

    def steps(self, bench: Bench) -> list[Step]: ...

    def places(self) -> Sequence[Mapping[str, Any]]: ...


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A table or figure.

    Attributes:
        name: as on the command line.
        source: paper, and number of the table or figure there.
        title: one line.
        machine: the paper's machine; "": nothing ran.
        unit: of the values.
        claims: what the paper says of it. None are about absolute numbers.
        also: other names: tables and figures of the same run.
        requests: of the paper's whole job, if `unit` is "seconds" of a job: a part's are given per
            request.
        stand_in: what runs in place of the paper's model or data; "": nothing does.
        published: the paper's numbers, at the same places as ours.
        theirs: our series -> the paper's series to compare it with.
        ratio: two series of ours, whose speed-up becomes a series too: the second's time by the
            first's, or the first's rate by the second's. None: nothing is compared.
        better: whether less of the unit is better (times), or more (rates).
        across: the setting in the table's columns; "": the series are.
        assumed: what the paper leaves open and we chose.
        plot_ratio: draw the ratio instead of the values.
    """

    name: str
    source: str
    title: str
    machine: str
    unit: str
    measure: Measure
    claims: tuple[Claim, ...] = ()
    also: tuple[str, ...] = ()
    requests: int = 0
    stand_in: str = ""
    published: tuple[Cell, ...] = ()
    theirs: Mapping[str, str] = field(default_factory=dict)
    ratio: tuple[str, str] | None = None
    better: Literal["less", "more"] = "more"
    across: str = ""
    assumed: str = ""
    plot_ratio: bool = False

    def __post_init__(self) -> None:
        for claim in self.claims:
            share = any("%" in text for text in (self.unit, *map(str, claim.at.values())))
            number = claim.number
            if isinstance(number, Value) and not (number.count in SHARES or share):
                raise ValueError(
                    f"{self.name}: a claim about {self.unit}, which machines differ in"
                )

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.also)

    def run(self, result: Mapping[str, Any] | None) -> Run:
        """The numbers of a result, for claims; None: it did not run."""
        cells = [] if result is None else result["cells"]
        counts: dict[str, dict[Any, float]] = {}
        for cell in cells:
            for name, count in cell["counts"].items():
                counts.setdefault(name, {})[place(cell["at"]), cell["series"]] = count
        return Run(
            places=self.measure.places(),
            ours={
                (place(cell["at"]), cell["series"]): cell["value"]
                for cell in cells
                if cell["value"] is not None and " : " not in cell["series"]
            },
            paper={
                (place(cell.at), cell.series): cell.value
                for cell in self.published
                if cell.value is not None
            },
            theirs=self.theirs,
            counts=counts,
            less=self.better == "less",
            refused=self._refused(result),
            part=1.0 if result is None else result.get("part", 1.0),
        )

    def _refused(self, result: Mapping[str, Any] | None) -> str:
        if result is None:
            return "no result"
        if self.stand_in:
            return f"{self.stand_in} in place of the paper's"
        if result["scale"] != 1:
            return f"{result['scale']:g} of the paper's sizes"
        if result["assumed"] != self.assumed:
            return "run under earlier assumptions"
        if result["model"] is not None:
            return f"{result['model']} in place of the paper's model"
        return "" if result["share"] == "full" else f"ran with --share {result['share']}"

    @property
    def published_ratio(self) -> tuple[str, str] | None:
        """The paper's series that correspond to those of `ratio`."""
        if self.ratio is None or not set(self.ratio) <= set(self.theirs):
            return None
        own, other = self.ratio
        return self.theirs[own], self.theirs[other]

    def with_ratios(self, cells: Sequence[Cell], pair: tuple[str, str] | None) -> list[Cell]:
        """`cells`, and cells of the ratio where both series have a number."""
        if pair is None:
            return list(cells)
        found = {(place(cell.at), cell.series): cell.value for cell in cells}
        others = (found.get((place(cell.at), pair[1])) for cell in cells)
        ratios = [
            Cell(cell.at, ratio_name(*pair), self._ratio(cell.value, other))
            for cell, other in zip(cells, others, strict=True)
            if cell.series == pair[0] and cell.value and other
        ]
        return [*cells, *ratios]

    def _ratio(self, value: float, other: float) -> float:
        return value / other if self.better == "more" else other / value


def grid(
    series: str, down: str, across: str, columns: Sequence[Any], rows: Mapping[Any, Sequence[Any]]
) -> tuple[Cell, ...]:
    """Published numbers of a method over two settings; None where the paper has none."""
    return tuple(
        Cell({down: row, across: column}, series, value)
        for row, values in rows.items()
        for column, value in zip(columns, values, strict=True)
    )


def points(at: str, rows: Mapping[Any, Mapping[str, float | None]]) -> tuple[Cell, ...]:
    """Published numbers over one setting. `rows`: value of the setting -> method -> number."""
    return tuple(
        Cell({at: where}, series, value)
        for where, values in rows.items()
        for series, value in values.items()
    )
