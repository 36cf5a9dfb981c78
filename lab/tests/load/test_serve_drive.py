"""The open loop in virtual time: arrivals, latencies, cuts; figures against numpy's."""

from __future__ import annotations

import asyncio

import httpx2
import numpy as np
import pytest

from lab.tests.load.fake_server import FakeServer
from lab.tests.load.virtual_time import run
from onestem.errors import ConfigError
from onestem_lab.load.client import Target
from onestem_lab.load.drive import Hopeless, drive
from onestem_lab.load.figures import Outcome, distribution, summary, within_limit
from onestem_lab.load.search import RateSearch
from onestem_lab.load.workload import Workload

LOAD = Workload(seed=5, system_tokens=8, scale=0.1)


def driven(count=40, rate=2.0, limit=None, prepare=lambda server: None, **server_options):
    """Outcomes and the server, after a run in virtual time."""

    async def scene():
        server = FakeServer(**server_options)
        prepare(server)
        async with httpx2.AsyncClient(transport=server, base_url="http://fake") as client:
            outcomes = await drive(
                client,
                Target("fake"),
                [LOAD.ask(i) for i in range(count)],
                LOAD.arrivals(rate, count),
                None if limit is None else Hopeless(limit),
            )
            # What was cut off closes its stream in tasks of its own.
            await asyncio.sleep(1)
        return outcomes, server

    return run(scene())


def test_requests_leave_when_the_schedule_says():
    # One slot and long answers: all but the first wait for minutes, and arrivals do not.
    outcomes, server = driven(between=1.0, slots=1)
    schedule = LOAD.arrivals(2.0, 40)
    np.testing.assert_allclose([time for time, _ in server.received], schedule, atol=1e-9)
    np.testing.assert_allclose([outcome.sent for outcome in outcomes], schedule, atol=1e-9)
    assert max(outcome.ended for outcome in outcomes) > 10 * schedule[-1]


def test_bodies_carry_the_workload():
    _, server = driven(count=5)
    for i, (_, body) in enumerate(server.received):
        assert body["prompt"] == LOAD.ask(i).prompt
        assert body["max_tokens"] == LOAD.ask(i).output_tokens
        assert body["stream"]
        assert body["ignore_eos"]
        assert body["temperature"] == 0


def test_latencies_are_the_servers():
    outcomes, _ = driven(first=0.5, between=0.1)
    for outcome, ask in zip(outcomes, map(LOAD.ask, range(40))):
        count = ask.output_tokens
        assert outcome.ok
        assert outcome.output_tokens == count
        assert outcome.ttft == pytest.approx(0.5)
        assert outcome.ended - outcome.arrival == pytest.approx(0.5 + 0.1 * (count - 1))
        assert outcome.normalised == pytest.approx((0.5 + 0.1 * (count - 1)) / count)
        assert outcome.per_token == pytest.approx(0.1 if count > 1 else 0.0)


def test_figures_are_numpys():
    rng = np.random.default_rng(0)
    outcomes = []
    for i in range(101):
        times = list(np.cumsum(rng.exponential(size=int(rng.integers(2, 9)))) + i)
        outcomes.append(
            Outcome(
                i, 0, float(i), len(times), sent=i + 0.01, token_times=times, ended=times[-1] + 0.5,
                output_tokens=len(times), prompt_tokens=7, cached_tokens=3,
            )
        )  # fmt: skip
    found = summary(outcomes)
    first = [o.token_times[0] - o.arrival for o in outcomes]
    whole = [(o.ended - o.arrival) / len(o.token_times) for o in outcomes]
    rest = [np.diff(o.token_times).mean() for o in outcomes]
    gaps = np.concatenate([np.diff(o.token_times) for o in outcomes])
    named = {"ttft": first, "normalised": whole, "per_token": rest, "between_chunks": gaps}
    for name, values in named.items():
        assert found[name]["mean"] == pytest.approx(np.mean(values))
        assert found[name]["p50"] == pytest.approx(np.median(values))
        for p in (90, 99):
            assert found[name][f"p{p}"] == pytest.approx(np.percentile(values, p))
        assert found[name]["max"] == pytest.approx(np.max(values))
    seconds = max(o.ended for o in outcomes)
    assert found["seconds"] == seconds
    assert found["requests_per_s"] == 101 / seconds
    assert found["output_tokens_per_s"] == sum(o.output_tokens for o in outcomes) / seconds
    assert (found["prompt_tokens"], found["cached_tokens"]) == (707, 303)
    assert found["late_by_max"] == pytest.approx(0.01)
    assert distribution([]) is None


def test_torn_and_refused_requests_are_counted_and_shown():
    def prepare(server):
        server.refuse = {3, 4}
        server.spoil = {
            1: lambda events: events[1:],
            6: lambda events: events[:-1],
            7: lambda events: events[:-1],
        }

    outcomes, _ = driven(prepare=prepare)
    figures = summary(outcomes)
    assert (figures["failed"], figures["torn"], figures["answered"]) == (2, 3, 35)
    assert figures["problems"]["the stream ends without [DONE]"] == 2
    assert sum(count for text, count in figures["problems"].items() if "queue is full" in text) == 2
    assert any("streamed" in text for text in figures["problems"])
    assert not [outcome for outcome in outcomes if outcome.ok and outcome.index in (1, 3, 4, 6, 7)]


def test_nine_of_ten_must_stay_within_the_limit():
    def outcome(seconds, **bad):
        return Outcome(0, 0, 0.0, 10, ended=seconds, output_tokens=10, **bad)

    nine = [outcome(5.0)] * 9
    assert within_limit([*nine, outcome(50.0)], 0.5)
    assert within_limit([*nine, outcome(0.1, failure="429")], 0.5)
    assert not within_limit([*nine, outcome(50.0), outcome(50.0)], 0.5)
    assert not within_limit([*nine[:8], outcome(0.1, faults=["torn"]), outcome(5.1)], 0.5)


def test_a_hopeless_run_is_cut_and_leaves_nothing_open():
    outcomes, server = driven(count=200, limit=0.5, between=2.0, slots=4)
    cut = [outcome for outcome in outcomes if outcome.failure == "given up"]
    assert len(cut) > 100
    assert not within_limit(outcomes, 0.5)
    assert server.open == 0
    assert len(server.received) < 200
    assert max(outcome.ended for outcome in outcomes) < 30


def test_a_run_is_cut_only_when_it_has_missed_for_certain():
    # The verdict of a cut run is that of the whole one, at the limit and beside it.
    for between in (0.2, 0.3, 0.4, 0.5, 0.6, 0.9):
        whole, _ = driven(between=between, slots=20)
        cut, _ = driven(between=between, slots=20, limit=0.5)
        assert within_limit(whole, 0.5) == within_limit(cut, 0.5)
        if within_limit(whole, 0.5):
            assert not any(outcome.failure for outcome in cut)


def searched(capacity: float, **options) -> tuple[RateSearch, list[float]]:
    search = RateSearch(**options)
    tried = []
    while (rate := search.next_rate()) is not None:
        tried.append(rate)
        search.record(rate, rate <= capacity)
    return search, tried


@pytest.mark.parametrize("capacity", [0.013, 0.4, 1.0, 3.7, 250.0])
@pytest.mark.parametrize("start", [0.02, 1.0, 40.0])
def test_the_search_ends_within_its_resolution(capacity, start):
    search, tried = searched(capacity, start=start, resolution=0.05)
    assert search.best is not None
    assert search.best <= capacity < search.best * 1.05 * (1 + 1e-9)
    assert len(tried) == len(set(tried)) < 25


def test_the_search_ends_at_its_bounds():
    assert searched(0.001)[0].best is None
    assert searched(1e9)[0].best == 1e4
    with pytest.raises(ConfigError, match="start-rate is 0"):
        RateSearch(0)
