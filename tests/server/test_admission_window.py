"""Newcomers join those who run in groups, after a wait that grows with what their joining costs."""

from __future__ import annotations

import pytest

from onestem.server.link.admission_window import (
    ENOUGH,
    LONGEST_WAIT,
    SECONDS_PER_STREAM,
    AdmissionWindow,
)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_nobody_waits_where_nobody_runs(clock):
    joining = AdmissionWindow(clock)
    for name in "ab":
        joining.add(name, name.upper())
        assert joining.take(0) == [name.upper()]
    assert joining.take(0) == []


def test_who_comes_soon_after_others_waits_the_longer_the_more_run(clock):
    joining = AdmissionWindow(clock)
    joining.add("a", 1)
    assert joining.take(200) == [1]  # none has joined for long
    joining.add("b", 2)
    clock.now += 150 * SECONDS_PER_STREAM
    joining.add("c", 3)
    assert joining.take(200) == []
    assert len(joining) == 2
    clock.now += 51 * SECONDS_PER_STREAM
    assert joining.take(200) == [2, 3]
    joining.add("d", 4)
    clock.now += LONGEST_WAIT + 0.001
    assert joining.take(10**6) == [4]


def test_many_do_not_wait_for_more(clock):
    joining = AdmissionWindow(clock)
    joining.add("first", 0)
    joining.take(10**6)
    for number in range(ENOUGH):
        assert joining.take(10**6) == []
        joining.add(str(number), number)
    assert joining.take(10**6) == list(range(ENOUGH))


def test_who_leaves_while_it_waits_never_joins(clock):
    joining = AdmissionWindow(clock)
    joining.add("first", 0)
    joining.take(100)
    joining.add("a", 1)
    joining.add("b", 2)
    assert joining.remove("a")
    assert not joining.remove("a")
    clock.now += 1
    assert joining.take(100) == [2]
    assert not joining.remove("b")
