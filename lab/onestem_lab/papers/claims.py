"""What a run says of a paper's claims: each holds, holds partly, does not hold, or did not run.

A claim is a number without a unit: how many times better, a growth, a share. Two machines can have
such a number in common. Seconds, rates and bytes they cannot, so no claim is about those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

__all__ = [
    "SHARES",
    "VERDICTS",
    "Added",
    "Claim",
    "Finding",
    "Gain",
    "Growth",
    "Numbers",
    "Point",
    "Run",
    "Value",
    "Verdict",
    "place",
    "ratio_name",
    "three",
]

Place = Mapping[str, Any]
Numbers = Mapping[tuple[tuple[tuple[str, Any], ...], str], float]
"""(place, series) -> number."""
Verdict = Literal["holds", "partly", "does not", "not run"]
VERDICTS: tuple[Verdict, ...] = ("holds", "partly", "does not", "not run")
SHARES = ("saving", "num_preempted", "planning_share")
"""Counts of a run that have no unit of a machine."""


def place(at: Place) -> tuple[tuple[str, Any], ...]:
    """A place as a key, independent of the order of its names."""
    return tuple(sorted(at.items()))


def ratio_name(own: str, other: str) -> str:
    """The series of a ratio of two."""
    return f"{own} : {other}"


def three(value: float) -> float:
    """A number with three digits, which is how claims are shown and compared."""
    return float(f"{value:.3g}")


@dataclass(frozen=True, kw_only=True)
class Run:
    """The numbers of a run and of the paper.

    Attributes:
        places: all places of the experiment, whether they ran or not.
        ours: our numbers; `counts`: name -> what the run counted.
        paper: the paper's numbers.
        theirs: our series -> the paper's.
        less: whether less of the unit is better.
        refused: why the run cannot be compared with the paper; "": it can.
        part: of the paper's requests and places.
    """

    places: Sequence[Place]
    ours: Numbers
    paper: Numbers
    theirs: Mapping[str, str]
    counts: Mapping[str, Numbers] = field(default_factory=dict)
    less: bool = False
    refused: str = ""
    part: float = 1.0

    def times(
        self, numbers: Numbers, own: tuple[Place, str], other: tuple[Place, str]
    ) -> float | None:
        """How many times better the first number is than the second; None: one is not there."""
        stated = numbers.get((place(own[0]), ratio_name(own[1], other[1])))
        if stated is not None and place(own[0]) == place(other[0]):
            return stated
        first, second = (numbers.get((place(at), series)) for at, series in (own, other))
        if not first or not second:
            return None
        return second / first if self.less else first / second


@dataclass(frozen=True)
class Gain:
    """How many times better `own` is than the first of `others` that ran, at the same place.

    Attributes:
        other_at: where the other one is at another place: what replaces the place's values.
        of: a series of predicted gains, by which the measured one is divided.
    """

    own: str
    others: tuple[str, ...]
    other_at: Place = field(default_factory=dict)
    of: str = ""

    def other(self, run: Run) -> str:
        """The series that `own` is compared with."""
        ran = {series for _, series in run.ours}
        return next((name for name in self.others if name in ran), self.others[0])

    def found(self, run: Run, at: Place) -> float | None:
        gain = run.times(run.ours, (at, self.own), ({**at, **self.other_at}, self.other(run)))
        predicted = run.ours.get((place(at), self.of)) if self.of else 1.0
        return gain / predicted if gain and predicted else None

    def stated(self, run: Run, at: Place) -> float | None:
        """The same ratio of the paper's own numbers."""
        named = [run.theirs[name] for name in self.others if name in run.theirs]
        if self.own not in run.theirs or not named:
            return None
        return run.times(run.paper, (at, run.theirs[self.own]), (at, named[0]))


@dataclass(frozen=True)
class Growth:
    """What a series has at a place, divided by what it has where `since` replaces the place's
    values."""

    series: str
    since: Place

    def found(self, run: Run, at: Place) -> float | None:
        now, before = (run.ours.get((place(it), self.series)) for it in (at, {**at, **self.since}))
        return now / before if now and before else None

    def stated(self, run: Run, at: Place) -> float | None:
        return None


@dataclass(frozen=True)
class Added:
    """What `other` has more than where `since` replaces the place's values, divided by what `own`
    has more."""

    own: str
    other: str
    since: Place

    def found(self, run: Run, at: Place) -> float | None:
        own, other = (self._more(run, at, series) for series in (self.own, self.other))
        return other / own if own and other else None

    def _more(self, run: Run, at: Place, series: str) -> float | None:
        now, before = (run.ours.get((place(it), series)) for it in (at, {**at, **self.since}))
        return None if now is None or before is None else now - before

    def stated(self, run: Run, at: Place) -> float | None:
        return None


@dataclass(frozen=True)
class Value:
    """A share that a series has at a place, or one of the `SHARES` that its run counted."""

    series: str
    count: str = ""

    def found(self, run: Run, at: Place) -> float | None:
        numbers = run.counts.get(self.count, {}) if self.count else run.ours
        return numbers.get((place(at), self.series))

    def stated(self, run: Run, at: Place) -> float | None:
        return run.paper.get((place(at), run.theirs.get(self.series, "")))


@dataclass(frozen=True)
class Point:
    """A number of a run (None: it did not run) beside the paper's."""

    at: str
    found: float | None
    stated: float


@dataclass(frozen=True)
class Finding:
    """What a run says of a claim.

    Attributes:
        met: how many of the points reach what is stated.
        places: how many places the claim has, of which `missing` did not run.
    """

    verdict: Verdict
    points: tuple[Point, ...]
    met: int
    places: int
    missing: int


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A sentence of a paper in our words, and its number.

    Attributes:
        number: how the number is computed from a run.
        at: the places that it is about: all with these values, or one of them where it is a tuple.
        stated: the paper's number. Two: the least and the largest over all places. None: at each
            place, that of the paper's own table.
        bound: whether a number must be at least or at most what is stated.
        best: whether the best place alone counts ("up to").
        along: a setting: the claim is about a number divided by that at the setting's value before.
        whole: whether it is about a whole job, so that a part of it says nothing.
        theirs: what the paper compares with.
        remark: what differs between the two comparisons, in words alone: numbers come from files.
    """

    text: str
    number: Gain | Growth | Added | Value
    at: Place = field(default_factory=dict)
    stated: float | tuple[float, float] | None = None
    bound: Literal["least", "most"] = "least"
    best: bool = False
    along: str = ""
    whole: bool = False
    theirs: str = ""
    remark: str = ""

    def __post_init__(self) -> None:
        if any(letter.isdigit() for letter in self.remark):
            raise ValueError(f"remark {self.remark!r} has a number: numbers come from result files")

    def refused(self, run: Run) -> str:
        """Why the run says nothing of it; "": it does."""
        return run.refused or ("a part of the job" if self.whole and run.part < 1 else "")

    def finding(self, run: Run) -> Finding:
        """The verdict, and the numbers that it comes from.

        It holds if every place of the claim ran and reaches what is stated, compared to three
        digits. It holds partly if some do, or if all that ran do and others did not run.
        """
        places = [at for at in run.places if _within(at, self.at)] or [self.at]
        if self.stated is None:
            places = [at for at in places if self.number.stated(run, at) is not None]
        numbers = [(at, self.number.found(run, at)) for at in places]
        if self.refused(run):
            numbers = [(at, None) for at, _ in numbers]
        points = self._points(run, numbers)
        found = [point for point in points if point.found is not None]
        met = sum(map(self._reached, found))
        missing = sum(number is None for _, number in numbers)
        whole = met == len(points) and (self.best or not missing)
        verdict: Verdict = (
            "not run" if not found else "holds" if whole else "partly" if met else "does not"
        )
        return Finding(verdict, tuple(points), met, len(places), missing)

    def _points(self, run: Run, numbers: list[tuple[Place, float | None]]) -> list[Point]:
        there = [number for _, number in numbers if number is not None]
        if isinstance(self.stated, tuple):
            ends = zip(("least", "most"), (min, max), self.stated, strict=True)
            return [Point(name, end(there, default=None), stated) for name, end, stated in ends]
        if self.best:
            assert self.stated is not None
            end = max if self.bound == "least" else min
            return [Point("best", end(there, default=None), self.stated)]
        if self.along:
            assert self.stated is not None
            steps = _steps(numbers, self.along)
            return [Point(name, number, self.stated) for name, number in steps]
        return [Point(_label(at), number, self._stated(run, at)) for at, number in numbers]

    def _stated(self, run: Run, at: Place) -> float:
        assert not isinstance(self.stated, tuple)
        stated = self.number.stated(run, at) if self.stated is None else self.stated
        assert stated is not None
        return stated

    def _reached(self, point: Point) -> bool:
        assert point.found is not None
        found, stated = three(point.found), three(point.stated)
        return found >= stated if self.bound == "least" else found <= stated


def _within(at: Place, wanted: Place) -> bool:
    return all(
        at.get(name) in (value if isinstance(value, tuple) else (value,))
        for name, value in wanted.items()
    )


def _label(at: Place) -> str:
    return ", ".join(f"{name} {value}" for name, value in at.items())


def _steps(numbers: list[tuple[Place, float | None]], along: str) -> list[tuple[str, float | None]]:
    """Each number divided by that at the setting's value before; places that did not run are left
    out."""
    lines: dict[Any, list[tuple[Any, float]]] = {}
    for at, number in numbers:
        rest = {name: value for name, value in at.items() if name != along}
        line = lines.setdefault(place(rest), [])
        if number is not None:
            line.append((at[along], number))
    steps = [step for line in lines.values() for step in pairwise(sorted(line))]
    made: list[tuple[str, float | None]] = [
        (f"{along} {low} to {high}", after / before) for (low, before), (high, after) in steps
    ]
    return made or [(along, None)]
