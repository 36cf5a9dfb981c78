from __future__ import annotations

from types import SimpleNamespace

import pytest

from onestem.server.link import recent_window
from onestem.server.link.recent_window import RecentWindow


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=50.0)
    monkeypatch.setattr(recent_window, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_what_is_old_is_forgotten(clock):
    values = RecentWindow(10.0, 100)
    assert (values.most, values.seconds_each) == (0.0, None)
    for value in (3.0, 7.0, 5.0):
        values.note(value)
        clock.now += 4.0
    assert values.most == 7.0  # 12, 8 and 4 seconds ago
    assert values.seconds_each == 4.0
    clock.now += 2.0
    assert values.most == 5.0
    assert values.seconds_each is None
    clock.now += 4.0
    assert values.most == 0.0


def test_no_more_are_kept_than_asked(clock):
    values = RecentWindow(10.0, 2)
    for value in (9.0, 1.0, 2.0):
        values.note(value)
    assert values.most == 2.0
