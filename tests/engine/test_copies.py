"""Copies of many parts: a few are begun with each step, all of them where steps are long."""

from __future__ import annotations

import pytest
import torch

from onestem.engine.tiers.copies import PARTS_AHEAD, _ByStream, _parts


class Event:
    """Of a part that ends when the test says so."""

    def __init__(self):
        self.ended = self.waited = False

    def query(self):
        return self.ended

    def synchronize(self):
        self.waited = True


def copy_of(count, events, fails=()):
    fails = list(fails)

    def launch(rows, at):
        if at in fails:
            fails.remove(at)
            raise RuntimeError("out of memory")
        events[at] = Event()
        return events[at]

    return _ByStream(((None, i) for i in range(count)), launch, torch.device("cpu"))


def test_parts_are_rows_in_their_order():
    every = [torch.arange(10).view(5, 2), torch.arange(4).view(2, 2)]
    assert [(rows.tolist(), at) for rows, at in _parts(every, 3)] == [
        ([[0, 1], [2, 3], [4, 5]], 0),
        ([[6, 7], [8, 9]], 3),
        ([[0, 1], [2, 3]], 5),
    ]


def test_a_step_begins_as_many_as_have_ended():
    events = {}
    copy = copy_of(2 * PARTS_AHEAD, events)
    assert len(events) == PARTS_AHEAD
    assert not copy.done()
    assert len(events) == PARTS_AHEAD
    for at in range(3):
        events[at].ended = True
    assert not copy.done()
    assert len(events) == PARTS_AHEAD + 3


def test_all_are_begun_where_nothing_is_on_the_bus():
    events = {}
    copy = copy_of(5 * PARTS_AHEAD, events)
    for event in events.values():
        event.ended = True
    assert not copy.done()
    assert len(events) == 5 * PARTS_AHEAD
    for event in events.values():
        event.ended = True
    assert copy.done()


def test_waiting_begins_all():
    events = {}
    copy = copy_of(3 * PARTS_AHEAD, events)
    copy.wait()
    assert len(events) == 3 * PARTS_AHEAD
    assert [at for at, event in events.items() if event.waited] == [3 * PARTS_AHEAD - 1]


def test_what_failed_is_not_taken_for_copied():
    events = {}
    copy = copy_of(PARTS_AHEAD + 3, events, fails=[PARTS_AHEAD + 1])
    with pytest.raises(RuntimeError, match="memory"):
        copy.wait()
    copy.wait()
    assert list(events) == list(range(PARTS_AHEAD + 3))
