"""The engine process's loop, with an engine that does nothing: what it tells it, and when."""

from __future__ import annotations

import contextlib
import dataclasses
from array import array
from concurrent.futures import Future
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from onestem.engine.outputs import request_output
from onestem.engine.sequence import RequestState, Sequence
from onestem.errors import RequestError
from onestem.options import EngineOptions
from onestem.request import Request, RequestMetrics, SamplingParams
from onestem.server.link import worker as module
from onestem.server.link.checks import Checks
from onestem.server.link.messages import (
    Abort,
    Add,
    Answered,
    Ask,
    Begun,
    JobRequests,
    Report,
)
from onestem.server.link.worker import RECENT_SECONDS, STATS_SECONDS, Worker
from tests.server.fake_engine import load


class Channel:
    def __init__(self) -> None:
        self.sent = []

    def send(self, message) -> None:
        self.sent.append(message)

    def of(self, kind) -> list:
        return [message for message in self.sent if isinstance(message, kind)]


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def made(seconds: float | None = 0.3):
    """A worker, its engine, whose steps take no time and bring nothing unless told, and what the
    server hears."""
    engine, channel = load(EngineOptions()), Channel()
    engine.limits.step_seconds = seconds
    engine.has_unfinished = lambda: True
    engine.added, engine.bounds = [], []
    engine.add_request = lambda request, **whose: engine.added.append((request.request_id, whose))
    engine.abort = lambda name: None

    def step():
        engine.bounds.append(engine.limits.step_seconds)
        return [], []

    engine.step_news = step
    return Worker(engine, channel, leave=lambda: None), engine, channel


def brings(engine, finished: list[RequestState], going_on: list[RequestState]):
    """The next steps have this news."""
    engine.step_news = lambda: ([request_output(one) for one in finished], going_on)


def add(name: str, number: int) -> Add:
    return Add(Request(request_id=name, prompt_token_ids=[1]), number)


def test_a_request_waits_in_its_keys_line(clock):
    worker, engine, channel = made()
    worker.take(dataclasses.replace(add("a", 0), key="alice", weight=2.0))
    worker.turn()
    assert engine.added == [("a", {"key": "alice", "weight": 2.0})]
    engine.requests.on_begin(["a"])
    assert channel.of(Begun) == [Begun(["a"])]


def test_steps_of_jobs_are_short_while_the_next_request_may_come_any_moment(clock):
    worker, engine, _ = made(0.3)
    step = engine.step_news

    def last():
        return [request_output(state("a", finish_reason="stop"))], step()[1]

    worker.turn()  # a job alone, and nobody has come yet
    worker.take(add("a", 0))
    engine.step_news = last
    worker.turn()
    engine.step_news = step
    clock.now += RECENT_SECONDS - 1
    worker.turn()
    clock.now += 2
    worker.turn()
    assert engine.bounds == [0.3, 0.3, pytest.approx(0.1), 0.3]


def test_steps_without_a_bound_stay_so(clock):
    worker, engine, _ = made(None)
    worker.take(add("a", 0))
    worker.turn()
    worker.take(Abort("a"))
    worker.turn()
    assert engine.bounds == [None, None]


def test_the_longest_step_of_jobs_alone_is_told_once(clock):
    worker, engine, channel = made()

    def slow():
        clock.now += 0.25
        return [], []

    engine.step_news = slow
    worker.turn()
    brings(engine, [], [])
    clock.now += STATS_SECONDS
    worker.turn()
    assert [report.job_step_seconds for report in channel.of(Report)] == [0.25, 0.0]


def test_parts_of_a_job_number_its_groups_alike(clock):
    worker, engine, _ = made()
    parts = []

    def add_job(name, requests, *, first, groups):
        parts.append((name, [one.request_id for one in requests], groups))

    engine.requests.add_job = add_job
    for name in ("a", "b"):
        request = Request(request_id=name, prompt_token_ids=[1])
        worker.take(JobRequests("job", [request]))
        worker.turn()
    (first, second) = parts
    assert (first[:2], second[:2]) == (("job/0", ["a"]), ("job/1", ["b"]))
    assert first[2] is second[2]


def test_a_part_that_the_engine_gives_up_costs_no_other_part(clock):
    worker, engine, _ = made()
    parts = []
    engine.requests.add_job = lambda name, requests, **how: parts.append(requests)
    requests = [Request(request_id=name, prompt_token_ids=[1]) for name in "abc"]
    worker.take(JobRequests("job", requests))
    worker.turn()
    assert next(parts[0]).request_id == "a"
    parts[0].close()
    worker.turn()
    assert [one.request_id for one in parts[1]] == ["b", "c"]


def test_a_request_that_cannot_be_taken_is_refused_and_the_engine_goes_on(clock):
    """Else each engine that is started would get it, and end."""
    worker, engine, channel = made()

    def add_request(request, **whose):
        if request.request_id == "bad":
            raise IndexError("a fault")
        engine.added.append(request.request_id)

    engine.add_request = add_request
    for number, name in enumerate(("bad", "good")):
        worker.take(add(name, number))
    worker.turn()
    (report,) = channel.of(Report)
    assert report.refused == {"bad": "the request cannot be taken: IndexError: a fault"}
    assert engine.added == ["good"]


@pytest.mark.parametrize("error", [EOFError(), ValueError("a fault")])
def test_a_worker_that_hears_nothing_any_more_leaves(error):
    left = []
    engine = load(EngineOptions())
    channel = Channel()
    channel.receive = Mock(side_effect=error)
    worker = Worker(engine, channel, leave=lambda: left.append(True))
    with contextlib.suppress(type(error)):
        worker.receive()
    assert left == [True]


def test_who_is_gone_before_it_joined_has_no_news(clock):
    worker, engine, channel = made()
    worker.take(add("a", 0))
    worker.take(Abort("a"))
    gone = state("a")
    answer(gone, [5], "x")
    brings(engine, [], [gone])
    worker.turn()
    (report,) = channel.of(Report)
    assert not report.tokens.requests
    assert not report.deltas


def state(name: str, finish_reason: str | None = None, **params) -> RequestState:
    """A request with one sequence, which has answered nothing."""
    request = Request(
        request_id=name, prompt_token_ids=[1], params=SamplingParams(**params), stream=True
    )
    made = RequestState(request, 0, RequestMetrics())
    made.sequences.append(Sequence(made, 0, array("i", [1])))
    made.sequences[0].finish_reason = finish_reason
    return made


def answer(state: RequestState, ids: list[int], text: str, logprobs: list = ()) -> None:
    sequence = state.sequences[0]
    sequence.tokens.extend(ids)
    sequence.answer.text += text
    sequence.answer.logprobs.extend(logprobs)


def test_plain_tokens_go_by_columns_and_the_rest_as_deltas(clock):
    worker, engine, channel = made()
    for number, name in enumerate(("a", "b", "c")):
        worker.take(add(name, number))
    a, b, c = state("a"), state("b"), state("c", logprobs=0)
    answer(a, [5], "x")
    answer(b, [6, 7], "yz")
    brings(engine, [], [a, b])
    worker.turn()
    answer(a, [8], " ")
    b.sequences[0].finish_reason = "stop"
    brings(engine, [b], [a])
    worker.turn()
    answer(b, [6], "late")
    answer(c, [9], "", logprobs=[{9: -0.5}])
    brings(engine, [], [c, b])
    worker.turn()
    first, second, third = channel.of(Report)
    assert (list(first.tokens.requests), list(first.tokens.token_ids)) == ([0], [5])
    assert first.tokens.texts == ["x"]
    *begun, rest = first.deltas
    assert (rest.request_id, rest.pieces[0].token_ids) == ("b", [6, 7])
    # What a prompt has cost comes once, with the first token.
    assert [(d.request_id, d.metrics.num_prompt_tokens, d.finished) for d in begun] == [
        ("a", 0, False),
        ("b", 0, False),
    ]
    assert (list(second.tokens.requests), second.tokens.texts) == ([0], [" "])
    assert [(d.request_id, d.finished, d.pieces[0].text) for d in second.deltas] == [
        ("b", True, "")
    ]
    # Log-probabilities are no plain news; a request that has ended has none.
    assert list(third.tokens.requests) == []
    assert [(d.request_id, d.pieces[0].logprobs) for d in third.deltas] == [("c", [{9: -0.5}])]


class PanicException(BaseException):
    """As a library in Rust raises it: no `Exception`."""


class AtOnce:
    """A pool that runs what it is given while it is given it."""

    def submit(self, call, *arguments):
        call(*arguments)


def checked(prepare, pool=None) -> tuple[Checks, list[Answered]]:
    answers: list[Answered] = []
    engine = SimpleNamespace(requests=SimpleNamespace(prepare=prepare))
    return Checks(engine, answers.append, pool or AtOnce()), answers


@pytest.mark.parametrize("error", [RecursionError("too deep"), PanicException("overflow")])
def test_whoever_asks_gets_an_answer_whatever_goes_wrong(error):
    checks, answers = checked(Mock(side_effect=error))
    checks.begin(Ask(7, "validate"))
    (answer,) = answers
    assert (answer.token, answer.fault) == (7, False)
    assert f"{type(error).__name__}: {error}" in answer.error


def test_an_answer_goes_out_with_the_next_report(clock):
    worker, _, channel = made()
    worker.take(Answered(7))
    worker.turn()
    assert isinstance(channel.sent[-2], Report)
    assert channel.sent[-1] == Answered(7)


def test_a_grammar_that_nobody_waits_for_is_cancelled():
    grammars, waiting = [Future(), Future()], []
    pool = SimpleNamespace(submit=lambda *call: waiting.append(call))
    checks, _ = checked(lambda number, key, weight: grammars[number], pool)
    for number in range(3):
        checks.begin(Ask(number, "validate", number if number < 2 else 99))
    for call, *arguments in waiting[:2]:
        call(*arguments)
    checks.drop(0)
    checks.drop(2)
    call, *arguments = waiting[2]
    call(*arguments)  # it is not even checked
    assert [grammar.cancelled() for grammar in grammars] == [True, False]
    assert len(checks) == 1


def test_a_grammar_that_is_compiled_holds_up_no_other_question():
    grammars = [Future() for _ in range(99)]
    checks, answers = checked(lambda number, key, weight: grammars[number] if number < 99 else None)
    for number in range(100):
        checks.begin(Ask(number, "validate", number))
    grammars[3].set_exception(RequestError("too costly"))
    grammars[4].set_result("a grammar")
    assert [(one.token, one.error) for one in answers] == [(99, None), (3, "too costly"), (4, None)]
