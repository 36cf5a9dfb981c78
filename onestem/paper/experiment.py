"""A table or figure: settings and published numbers as data, and the code that measures it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from onestem.paper.bench import Bench

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
    """Measures all cells of an experiment, in steps that a progress bar counts."""

    def steps(self, bench: Bench) -> list[Step]: ...


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A table or figure.

    Attributes:
        name: as on the command line.
        source: paper, and number of the table or figure there.
        title: one line.
        claim: the paper's claim, in our words.
        machine: the paper's machine; "": nothing ran.
        unit: of the values.
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
    claim: str
    machine: str
    unit: str
    measure: Measure
    published: tuple[Cell, ...] = ()
    theirs: Mapping[str, str] = field(default_factory=dict)
    ratio: tuple[str, str] | None = None
    better: Literal["less", "more"] = "more"
    across: str = ""
    assumed: str = ""
    plot_ratio: bool = False

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


def place(at: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """A place as a key, independent of the order of its names."""
    return tuple(sorted(at.items()))


def ratio_name(own: str, other: str) -> str:
    """The series of a ratio of two."""
    return f"{own} : {other}"


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
