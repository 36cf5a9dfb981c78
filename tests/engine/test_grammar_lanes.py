"""Keys take turns at compiling, and what is compiled is kept up to a number of bytes."""

from __future__ import annotations

import gc
import os
import signal
import threading
from typing import Any
from unittest.mock import Mock

import pytest

from onestem.engine.grammar.kept import Kept
from onestem.engine.grammar.lanes import Lane
from onestem.engine.grammar.state import Grammar


class Hand:
    """Does one task after the other, each when it is let."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.begun = threading.Semaphore(0)
        self.let = threading.Semaphore(0)

    def __call__(self, task: str) -> None:
        self.begun.release()
        assert self.let.acquire(timeout=60)
        self.done.append(task)

    def finish(self, lane: Lane[str], count: int) -> list[str]:
        for _ in range(count):
            self.let.release()
            assert self.begun.acquire(timeout=60)
        self.let.release()
        lane.close()
        return self.done


def test_a_key_with_many_grammars_holds_back_no_other() -> None:
    hand = Hand()
    lane = Lane("test", 1, hand)
    for number in range(10):
        lane.push(f"a{number}", "a", 1.0)
    assert hand.begun.acquire(timeout=60)
    lane.push("b0", "b", 1.0)
    lane.push("c0", "c", 1.0)
    assert hand.finish(lane, 3)[:3] == ["a0", "b0", "c0"]


def test_a_fork_that_ends_waits_for_no_thread() -> None:
    """A thread that it does not have holds the lock."""
    lane: Lane[str] = Lane("test", 1, Hand())
    held, let = threading.Event(), threading.Event()

    def hold() -> None:
        with lane.changed:
            held.set()
            assert let.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(60)
    child = os.fork()
    if not child:
        signal.alarm(30)
        lane.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    let.set()
    thread.join()


def test_a_task_of_two_keys_is_done_once_and_in_the_first_turn() -> None:
    hand = Hand()
    lane = Lane("test", 1, hand)
    for task in ("a0", "a1", "both"):
        lane.push(task, "a", 1.0)
    assert hand.begun.acquire(timeout=60)
    lane.push("both", "b", 1.0)
    assert hand.finish(lane, 2)[:2] == ["a0", "both"]


def test_a_key_that_is_known_goes_before_many_new_ones() -> None:
    hand = Hand()
    lane = Lane("test", 1, hand, advance=60.0)
    for task in ("a0", "a1"):
        lane.push(task, "a", 1.0)
    assert hand.begun.acquire(timeout=60)
    for number in range(8):
        lane.push(f"new{number}", f"new{number}", 1.0)
    lane.push("a2", "a", 1.0)
    assert hand.finish(lane, 3)[:3] == ["a0", "a1", "a2"]


def test_what_was_discarded_is_not_done() -> None:
    hand = Hand()
    lane = Lane("test", 1, hand)
    for task in ("a0", "a1", "a2"):
        lane.push(task, "a", 1.0)
    assert hand.begun.acquire(timeout=60)
    lane.discard("a1")
    assert hand.finish(lane, 1)[:1] == ["a0"]
    assert "a1" not in hand.done


def test_a_lane_without_a_thread_gets_one_later(monkeypatch: pytest.MonkeyPatch) -> None:
    hand = Hand()
    lane = Lane("test", 1, hand)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("no new thread")))
        with pytest.raises(RuntimeError, match="no new thread"):
            lane.push("a0", "a", 1.0)
    lane.push("a1", "a", 1.0)
    assert hand.begun.acquire(timeout=60)
    assert hand.finish(lane, 1)[:1] == ["a0"]


def grammar(num_bytes: int) -> Grammar:
    unused: Any = None
    return Grammar(unused, unused, num_bytes)


def test_the_least_recently_used_is_forgotten_first() -> None:
    kept = Kept(100)
    for name in "abc":
        kept.add(name, grammar(30))
    assert kept.get("a") is not None
    kept.add("d", grammar(60))
    assert [name for name in "abcd" if kept.get(name) is not None] == ["a", "d"]
    assert kept.num_bytes == 90


def test_a_grammar_in_use_stays() -> None:
    kept = Kept(100)
    used = grammar(90)
    sequence: Any = Hand()
    used.states.add(sequence)
    kept.add("used", used)
    kept.add("other", grammar(50))
    kept.add("last", grammar(50))
    assert kept.get("other") is None
    assert kept.num_bytes == 140
    del sequence
    gc.collect()
    kept.add("next", grammar(10))
    assert kept.get("used") is None
    assert kept.num_bytes == 60


@pytest.mark.parametrize("count", [1_000, 5_000])
def test_failures_are_remembered_in_bounds(count: int) -> None:
    kept = Kept(100)
    for number in range(count):
        kept.add_failure(str(number), ValueError(number))
    assert str(kept.get(str(count - 1))) == str(count - 1)
    assert len(kept.failures) == 1_000
