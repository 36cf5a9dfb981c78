"""Newcomers join those who run in groups, after a wait that grows with what their joining costs."""

from __future__ import annotations

import pytest

from onestem.engine.schedule.queue import Gate, InteractiveQueue
from onestem.request import Request
from onestem.server.link.admission_window import (
    ENOUGH,
    LONGEST_WAIT,
    SECONDS_PER_STREAM,
    AdmissionWindow,
)
from onestem.tree import Node, RadixTree


class Joining:
    """An engine's queue behind the window, and a clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.waits_for_its_grammar = set()
        self.queue = InteractiveQueue(RadixTree(Node((), None, 0)), max_passed=0)
        self.window = self.queue.gate = AdmissionWindow(self._gate, lambda: self.now)

    def _gate(self, request: Request, key: str, weight: float) -> Gate:
        waits = request.request_id in self.waits_for_its_grammar
        return Gate.WAIT if waits else Gate.OPEN

    def add(self, name: str) -> None:
        self.window.close()
        self.queue.push(Request(request_id=name, prompt_token_ids=[1]))

    def take(self, num_streams: int) -> list[str]:
        """Who joins in the next step."""
        self.window.close()
        self.window.look(num_streams, self.queue.num_held)
        taken = []
        while self.queue.peek() is not None:
            taken.append(self.queue.pop().request_id)
        return taken


@pytest.fixture
def joining():
    return Joining()


def test_nobody_waits_where_nobody_runs(joining):
    for name in "ab":
        joining.add(name)
        assert joining.take(0) == [name]
    assert joining.take(0) == []


def test_who_comes_soon_after_others_waits_the_longer_the_more_run(joining):
    joining.add("a")
    assert joining.take(200) == ["a"]  # none has joined for long
    joining.add("b")
    joining.now += 150 * SECONDS_PER_STREAM
    joining.add("c")
    assert joining.take(200) == []
    assert len(joining.queue) == 2
    joining.now += 51 * SECONDS_PER_STREAM
    assert joining.take(200) == ["b", "c"]
    joining.add("d")
    joining.now += LONGEST_WAIT + 0.001
    assert joining.take(10**6) == ["d"]


def test_many_do_not_wait_for_more(joining):
    joining.add("first")
    joining.take(10**6)
    for number in range(ENOUGH):
        assert joining.take(10**6) == []
        joining.add(str(number))
    assert joining.take(10**6) == [str(number) for number in range(ENOUGH)]


def test_who_leaves_while_it_waits_never_joins(joining):
    joining.add("first")
    joining.take(100)
    joining.add("a")
    joining.add("b")
    assert joining.queue.remove("a")
    assert not joining.queue.remove("a")
    joining.now += 1
    assert joining.take(100) == ["b"]
    assert not joining.queue.remove("b")


def test_who_waits_for_its_grammar_holds_up_no_newcomer(joining):
    joining.waits_for_its_grammar.add("a")
    joining.add("a")
    assert joining.take(10**6) == []
    joining.add("b")
    assert joining.take(10**6) == ["b"]
    joining.waits_for_its_grammar.clear()
    joining.now += LONGEST_WAIT + 0.001
    assert joining.take(10**6) == ["a"]
