"""What is said of a claim follows from the run's ratios alone."""

from __future__ import annotations

import re
from typing import Any

import pytest

from onestem_lab.papers.claims import Added, Claim, Gain, Growth, Value, three
from onestem_lab.papers.experiment import Cell, Experiment
from onestem_lab.papers.page import page
from onestem_lab.papers.registry import EXPERIMENTS
from onestem_lab.papers.table import figures_of


class Places:
    """A measure of places that never runs."""

    def __init__(self, *places: dict[str, Any]) -> None:
        self._places = list(places)

    def places(self) -> list[dict[str, Any]]:
        return self._places

    def steps(self, bench: object) -> list[Any]:
        raise NotImplementedError


BATCHES = (1, 2, 4)
GAIN = Gain("full", ("vllm", "off"))


def experiment(claim: Claim, **more: Any) -> Experiment:
    settings = {
        "name": "x",
        "source": "A paper, figure 1",
        "title": "",
        "machine": "an A100",
        "unit": "requests/s",
        "measure": Places(*({"batch": batch} for batch in BATCHES)),
        "theirs": {"full": "theirs", "off": "baseline"},
        "ratio": ("full", "off"),
    }
    return Experiment(**settings | more, claims=(claim,))


def result(series: dict[str, dict[int, float | None]], **more: Any) -> dict[str, Any]:
    """A result file's content. `series`: batch -> number."""
    cells = [
        {"at": {"batch": at}, "series": name, "value": value, "ran": {}, "counts": {}, "note": ""}
        for name, values in series.items()
        for at, value in values.items()
    ]
    facts = {
        "title": "a job",
        "assumed": "",
        "scale": 1.0,
        "part": 1.0,
        "share": "full",
        "model": None,
        "refused": {},
    }
    written = {"command": "onestem bench paper x", "device": "a CPU", "date": "2026-11-28"}
    versions: dict[str, Any] = {"versions": {}, "commit": "abc"}
    return {**facts, **written, **versions, "cells": cells, "published": [], **more}


def verdict(claim: Claim, found: dict[str, Any] | None, **more: Any) -> str:
    made = experiment(claim, **more)
    return claim.finding(made.run(found)).verdict


def rates(*gains: float | None) -> dict[str, dict[int, float | None]]:
    """`full` so many times better than `off` at each batch."""
    own = {batch: None if gain is None else 7 * gain for batch, gain in zip(BATCHES, gains)}
    return {"full": own, "off": dict.fromkeys(BATCHES, 7.0)}


TWICE = Claim(text="Twice.", number=GAIN, stated=2.0)


@pytest.mark.parametrize(
    ("gains", "said"),
    [
        ((2.0, 3.0, 2.5), "holds"),
        ((1.996, 2.0, 2.0), "holds"),  # 2.00 to three digits
        ((1.994, 2.0, 2.0), "partly"),
        ((1.5, 2.5, 3.0), "partly"),
        ((2.5, 2.5, None), "partly"),
        ((1.5, 1.5, 1.5), "does not"),
        ((1.5, None, None), "does not"),
        ((None, None, None), "not run"),
    ],
)
def test_each_place_counts(gains, said):
    assert verdict(TWICE, result(rates(*gains))) == said


def test_without_a_result_nothing_ran():
    assert verdict(TWICE, None) == "not run"


@pytest.mark.parametrize(
    ("facts", "more"),
    [
        ({"scale": 0.1}, {}),
        ({"share": "off"}, {}),
        ({"model": "shape:0.5b"}, {}),
        ({"assumed": "shorter answers"}, {}),
        ({}, {"stand_in": "a small model"}),
    ],
)
def test_what_is_not_the_papers_has_no_verdict(facts, more):
    assert verdict(TWICE, result(rates(3, 3, 3), **facts), **more) == "not run"


@pytest.mark.parametrize("gains", [(2.5, 2.5, 2.5), (1.5, 2.5, 2.5), (1.5, 1.5, 1.5)])
@pytest.mark.parametrize("factor", [0.02, 1, 1000])
@pytest.mark.parametrize("part", [0.02, 1])
def test_neither_the_part_nor_the_machine_changes_a_verdict(gains, factor, part):
    found = rates(*gains)
    scaled = {
        name: {at: value * factor for at, value in values.items()} for name, values in found.items()
    }
    assert verdict(TWICE, result(scaled, part=part)) == verdict(TWICE, result(found))


def test_seconds_are_better_where_they_are_fewer():
    found = result({"full": dict.fromkeys(BATCHES, 3.0), "off": dict.fromkeys(BATCHES, 6.0)})
    assert verdict(TWICE, found, better="less") == "holds"
    assert verdict(TWICE, found) == "does not"


def test_a_peer_comes_before_our_own_baseline():
    found = rates(2.5, 2.5, 2.5)
    assert verdict(TWICE, result(found)) == "holds"
    peer = {"vllm": dict.fromkeys(BATCHES, 14.0)}
    assert verdict(TWICE, result(found | peer)) == "does not"


PUBLISHED = (
    Cell({"batch": 1}, "theirs", 30.0),
    Cell({"batch": 1}, "baseline", 20.0),
    Cell({"batch": 4}, "theirs : baseline", 2.5),
)


@pytest.mark.parametrize(
    ("gains", "said"),
    [
        ((1.5, 9, 2.5), "holds"),
        ((1.5, 0, 2.0), "partly"),
        ((1.4, 9, 2.4), "does not"),
        ((1.5, 9, None), "partly"),
        ((None, 9, None), "not run"),
    ],
)
def test_the_papers_table_states_the_number_of_each_place(gains, said):
    claim = Claim(text="As in the table.", number=GAIN)
    assert verdict(claim, result(rates(*gains)), published=PUBLISHED) == said


@pytest.mark.parametrize(
    ("gains", "said"),
    [
        ((1.4, 2.0, 3.0), "holds"),
        ((1.4, 2.0, 2.9), "partly"),
        ((1.3, 2.0, 3.0), "partly"),
        ((1.4, None, 3.0), "partly"),
        ((1.3, 1.3, 1.3), "does not"),
    ],
)
def test_a_span_states_its_ends(gains, said):
    assert verdict(Claim(text="", number=GAIN, stated=(1.4, 3.0)), result(rates(*gains))) == said


@pytest.mark.parametrize(("most", "said"), [(2.0, "holds"), (1.9, "does not")])
def test_up_to_means_the_best_place(most, said):
    claim = Claim(text="Up to 2.", number=GAIN, stated=2.0, best=True)
    assert verdict(claim, result(rates(1.0, most, None))) == said


@pytest.mark.parametrize(
    ("gains", "said"),
    [
        ((1, 2, 3), "holds"),
        ((1, 2, 1.5), "partly"),
        ((3, 2, 1), "does not"),
        ((1, None, 3), "partly"),
        ((1, None, None), "not run"),
    ],
)
def test_growth_is_judged_from_place_to_place(gains, said):
    claim = Claim(text="It grows.", number=GAIN, stated=1.0, along="batch")
    assert verdict(claim, result(rates(*gains))) == said


@pytest.mark.parametrize(("last", "said"), [(86.0, "holds"), (84.0, "does not")])
def test_what_is_left_at_another_place(last, said):
    claim = Claim(
        text="15% lost.", number=Growth("full", {"batch": 1}), at={"batch": 4}, stated=0.85
    )
    assert verdict(claim, result({"full": {1: 100.0, 4: last}})) == said


@pytest.mark.parametrize(("time", "said"), [(5.0, "holds"), (5.1, "does not")])
def test_a_bound_may_be_an_upper_one(time, said):
    claim = Claim(
        text="", number=Growth("full", {"batch": 1}), at={"batch": 4}, stated=5.0, bound="most"
    )
    assert verdict(claim, result({"full": {1: 1.0, 4: time}})) == said


def test_a_baseline_may_stand_at_another_place():
    claim = Claim(text="", number=Gain("full", ("off",), {"batch": 1}), at={"batch": 4}, stated=1.0)
    found = {"full": {4: 5.0}, "off": {1: 6.0, 4: 1.0}}
    assert verdict(claim, result(found), better="less") == "holds"
    assert verdict(claim, result(found)) == "does not"


def test_a_measured_gain_is_part_of_a_predicted_one():
    claim = Claim(text="", number=Gain("full", ("off",), of="theory"), at={"batch": 4}, stated=0.8)
    found = {"full": {4: 8.0}, "off": {4: 1.0}, "theory": {4: 10.0}}
    assert verdict(claim, result(found)) == "holds"
    assert verdict(claim, result(found | {"theory": {4: 11.0}})) == "does not"


def test_what_a_change_adds_is_compared():
    claim = Claim(text="", number=Added("full", "off", {"batch": 1}), at={"batch": 4}, stated=3.0)
    assert verdict(claim, result({"full": {1: 2, 4: 3}, "off": {1: 10, 4: 13}})) == "holds"
    assert verdict(claim, result({"full": {1: 2, 4: 4}, "off": {1: 10, 4: 13}})) == "does not"


def test_shares_and_counts():
    share = Claim(text="", number=Value("full"), at={"batch": 4}, stated=39.7)
    found = result({"full": {4: 39.69}})
    assert verdict(share, found, unit="% saved") == "holds"
    count = Claim(
        text="", number=Value("full", "num_preempted"), at={"batch": 4}, stated=0.0, bound="most"
    )
    for preempted, said in ((0, "holds"), (3, "does not")):
        found["cells"][0]["counts"] = {"num_preempted": preempted}
        assert verdict(count, found) == said


def test_a_part_says_nothing_of_a_whole_job():
    claim = Claim(text="", number=GAIN, stated=2.0, whole=True)
    assert verdict(claim, result(rates(3, 3, 3))) == "holds"
    assert verdict(claim, result(rates(3, 3, 3), part=0.5)) == "not run"


@pytest.mark.parametrize("unit", ["seconds", "requests/s", "MiB", "ms"])
def test_no_absolute_number_gets_a_verdict(unit):
    claim = Claim(text="Fast.", number=Value("full"), stated=17.0)
    with pytest.raises(ValueError, match=f"a claim about {unit}, which machines differ in"):
        experiment(claim, unit=unit)


def test_a_remark_has_no_number():
    with pytest.raises(ValueError, match="numbers come from result files"):
        Claim(text="", number=GAIN, stated=1.0, remark="in turns it takes 14.17 s")


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_each_claim_of_a_paper_states_its_number(name):
    """Where the table states it, the table has it; and a run with the paper's numbers holds."""
    one = EXPERIMENTS[name]
    ours = {theirs: own for own, theirs in one.theirs.items()}
    cells = [
        {"at": cell.at, "series": ours[cell.series], "value": cell.value, "counts": {}, "note": ""}
        for cell in one.published
        if cell.series in ours
    ]
    same = one.run({**result({}), "cells": cells})
    for claim in one.claims:
        finding = claim.finding(same)
        assert claim.text.endswith(".")
        if isinstance(claim.stated, tuple):  # ends alone: two places' numbers are judged apart
            assert re.search(r"\d to \d", claim.text)
        assert claim.stated is not None or finding.points or one.stand_in
        if claim.stated is None and isinstance(claim.number, Gain) and not one.stand_in:
            reached = [p for p in finding.points if p.found is not None]
            assert all(three(p.found) == three(p.stated) for p in reached)


def test_seconds_of_a_part_are_those_of_a_request():
    one = experiment(TWICE, unit="seconds", requests=1000)
    found = result({"full": {1: 5.0}}, published=[{"at": {}, "series": "theirs", "value": 50.0}])
    found["cells"][0]["ran"] = {"requests": 100}
    unit, (ours,), (theirs,) = figures_of(one, found)
    assert (unit, ours["value"], theirs["value"]) == ("ms a request", 50.0, 50.0)


def test_the_page_says_all(monkeypatch):
    one = experiment(TWICE, assumed="the lengths")
    monkeypatch.setattr("onestem_lab.papers.page.EXPERIMENTS", {"x": one})
    found = result(rates(1.5, 2.5, None), part=0.1, repeat=3, discarded=1, assumed="the lengths")
    found["cells"][2] |= {"note": "does not fit KV memory"}
    lines = page({"x": found}).splitlines()
    here = "1.5 to 2.5 (1 of 2 reach it; 1 of 3 places did not run)"
    assert f"| `x` | Twice. | here `off` | 2 | {here} | partly |" in lines
    assert "| `x` | a job | 2 of 3 | 0.1 | 3 (1) | a CPU | 2026-11-28 | abc |" in lines
    assert "| A paper | 1 | 0 | 1 | 0 | 0 |" in lines
    notes = "* `x`: Ours to choose: the lengths. `full` at 1 place: does not fit KV memory."
    assert notes in lines
    assert "| `x` | Twice. |  | 2 | no result | not run |" in page({}).splitlines()


def test_the_page_says_where_figures_are_not_the_papers_or_answers_differ(monkeypatch):
    span = Claim(text="1 to 2 times.", number=GAIN, stated=(1.0, 2.0))
    monkeypatch.setattr(
        "onestem_lab.papers.page.EXPERIMENTS", {"x": experiment(span, assumed="all")}
    )
    found = result(rates(1.5, 1.6, 1.7), assumed="all")
    assert "| 1 to 2 | 1.5 to 1.7 (1 of 2 ends reach it) | partly |" in page({"x": found})
    for cell, answer in zip(found["cells"], ("a", "b", "c", "a", "x", "c"), strict=True):
        cell["ran"] = {"answer": answer}
    notes = "* `x`: Ours to choose: all. Its series answer differently at batch 2."
    assert notes in page({"x": found}).splitlines()
    earlier = "Its figures have no verdict: run under earlier assumptions."
    assert earlier not in page({"x": found})
    assert earlier in page({"x": {**found, "assumed": "some"}})


def test_the_page_knows_no_commit_of_old_results(monkeypatch):
    monkeypatch.setattr("onestem_lab.papers.page.EXPERIMENTS", {"x": experiment(TWICE)})
    found = result(rates(1, 1, 1), commit=None)
    assert "| 2026-11-28 | unknown |" in page({"x": found})
    found["versions"] = {"onestem": "0.1.0.dev440+g2e9236af4"}
    assert "| 2026-11-28 | 2e9236af4 |" in page({"x": found})
