"""Copies of many pieces: a few are begun behind each step, all of them where steps are long."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch

from onestem.engine.tiers import copies
from onestem.engine.tiers.copies import PIECES_AHEAD, _ByStream, _GpuCopies, _pieces, at_state
from onestem.ops.kv import allocate_pages, read_kv


class Event:
    """Of a part that ends when the test says so."""

    def __init__(self):
        self.ended = self.waited = False

    def record(self, stream):
        pass

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


def test_pieces_are_rows_in_their_order(monkeypatch):
    monkeypatch.setattr(copies, "PIECE_TOKENS", 3)
    every = [torch.arange(10).view(5, 2), torch.arange(4).view(2, 2)]
    assert [(rows.tolist(), at) for rows, at in _pieces(every)] == [
        ([[0, 1], [2, 3], [4, 5]], 0),
        ([[6, 7], [8, 9]], 3),
        ([[0, 1], [2, 3]], 5),
    ]


def test_behind_a_step_as_many_begin_as_have_ended():
    events = {}
    copy = copy_of(2 * PIECES_AHEAD, events)
    assert len(events) == 0
    copy.go_on()
    assert not copy.done()
    assert len(events) == PIECES_AHEAD
    for at in range(3):
        events[at].ended = True
    assert not copy.done()
    assert len(events) == PIECES_AHEAD
    copy.go_on()
    assert len(events) == PIECES_AHEAD + 3


def test_all_are_begun_where_nothing_is_on_the_bus():
    events = {}
    copy = copy_of(5 * PIECES_AHEAD, events)
    copy.go_on()
    for event in events.values():
        event.ended = True
    assert not copy.done()
    copy.go_on()
    assert len(events) == 5 * PIECES_AHEAD
    for event in events.values():
        event.ended = True
    assert copy.done()


def test_waiting_begins_all():
    events = {}
    copy = copy_of(3 * PIECES_AHEAD, events)
    copy.wait()
    assert len(events) == 3 * PIECES_AHEAD
    assert [at for at, event in events.items() if event.waited] == [3 * PIECES_AHEAD - 1]


def test_what_failed_is_not_taken_for_copied():
    events = {}
    copy = copy_of(PIECES_AHEAD + 3, events, fails=[PIECES_AHEAD + 1])
    with pytest.raises(RuntimeError, match="memory"):
        copy.wait()
    copy.wait()
    assert list(events) == list(range(PIECES_AHEAD + 3))


@pytest.fixture
def pages_aside(monkeypatch):
    """Two tensors of 9 pages of 4 tokens, and copies as on a GPU; the order of calls stands in for
    streams."""
    if torch.cuda.is_available():
        pytest.skip("test_tiers_gpu has the streams")
    pytest.importorskip("onestem.ops.triton.page_rows")
    monkeypatch.setattr(copies, "PIECE_TOKENS", 5)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Ended)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda one: one)
    monkeypatch.setattr(copies, "PinnedArena", NoArena)
    every = [allocate_pages(9, 4, 3, 8, dtype=torch.float32, device="cpu") for _ in range(2)]
    states = [torch.zeros(5, 3, 10), torch.zeros(5, 2, 4, 6)]
    for one in (*every, *states):
        one.copy_(torch.randn(one.shape))
    return every, _GpuCopies(every, 0, states), states


def test_steps_wait_where_they_write_to_what_is_copied_out(pages_aside, monkeypatch):
    _, moved, _ = pages_aside
    waited = []
    monkeypatch.setattr(Stream, "wait_event", lambda _, event: waited.append(event))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    moved.out([np.array([5, 6, 7]), np.array([20])])  # of pages 1 and 5
    moved.out([np.array([35])])  # of page 8
    moved.guard(np.array([8, 19, 31]))
    assert not waited
    moved.guard(np.array([0, 4]))
    moved.guard(np.array([22, 34]))
    first, again, second = waited
    assert first is again is not second
    moved.guard()
    assert waited[3:] == [first, second]
    first.ended = True
    moved.guard()
    assert waited[5:] == [second]


def test_what_goes_out_comes_back_in_parts(pages_aside):
    """Rows of several pieces, a few at a time."""
    every, moved, _ = pages_aside
    before = [pages.clone() for pages in every]
    order = np.random.default_rng(0).permutation(36)
    slots = [order[:13], order[13:20], order[20:33]]
    rows, wait = moved.out(slots)
    wait()
    for pages in every:
        pages.fill_(7.0)
    copy = moved.into([copies.Part(kv, 1, at[1:]) for kv, at in zip(rows, slots, strict=True)])
    copied = torch.from_numpy(np.concatenate([at[1:] for at in slots]))
    assert all(bool((pages == 7.0).all()) for pages in every)  # none before the step is launched
    while not copy.done():
        copy.go_on()
    moved.close()
    kept = torch.from_numpy(np.setdiff1d(np.arange(36), copied.numpy()))
    for pages, old in zip(every, before, strict=True):
        assert torch.equal(read_kv(pages, copied), read_kv(old, copied))
        assert bool((read_kv(pages, kept) == 7.0).all())


def test_states_come_back_beside_tokens(pages_aside):
    every, moved, states = pages_aside
    before, pages = [one.clone() for one in states], every[0].clone()
    slots = [at_state(3), np.arange(7), at_state(0)]
    rows, wait = moved.out(slots)
    wait()
    assert [tuple(one.shape) for one in rows] == [(1, 78), (7, 48), (1, 78)]
    for one in (*every, *states):
        one.fill_(7.0)
    other = [at_state(1), np.arange(7), at_state(4)]  # each to where another one was
    copy = moved.into([copies.Part(kv, 0, at) for kv, at in zip(rows, other, strict=True)])
    while not copy.done():
        copy.go_on()
    for one, old in zip(states, before, strict=True):
        assert torch.equal(one[[1, 4]], old[[3, 0]])
        assert bool((one[[0, 2, 3]] == 7.0).all())
    assert torch.equal(read_kv(every[0], torch.arange(7)), read_kv(pages, torch.arange(7)))


def test_steps_wait_for_states_that_are_copied_out(pages_aside, monkeypatch):
    _, moved, _ = pages_aside
    waited = []
    monkeypatch.setattr(Stream, "wait_event", lambda _, event: waited.append(event))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    moved.out([at_state(4)])
    moved.guard(np.concatenate((np.arange(36), at_state(0))))
    assert not waited
    moved.guard(np.concatenate((np.arange(3), at_state(0, 4))))
    assert len(waited) == 1


class Stream:
    def __init__(self, device=None):
        pass

    def wait_stream(self, other):
        pass

    def query(self):
        return True

    def record_event(self):
        event = torch.cuda.Event()
        event.record(self)
        return event

    def wait_event(self, event):
        pass


class Ended(Event):
    """Of what has ended when it is recorded."""

    def record(self, stream):
        self.ended = True


class NoArena:
    def __init__(self, budget):
        pass

    def take(self, shape, dtype):
        return torch.empty(shape, dtype=dtype)

    def close(self):
        pass
