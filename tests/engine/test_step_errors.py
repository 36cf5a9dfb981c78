"""An error anywhere in a step costs the requests that cause it, and nobody else."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from onestem.cache import PrefixCache, Run
from onestem.engine.engine import Engine
from onestem.engine.schedule.admission import SequenceFactory
from onestem.engine.schedule.chunks import PromptChunks
from onestem.engine.schedule.room import Room
from onestem.engine.schedule.scheduler import Scheduler
from onestem.engine.sequence import Sequence
from onestem.engine.step.batch_rows import BatchRows
from onestem.engine.step.inputs import DecodeLayout
from onestem.engine.step.launch import Launcher
from onestem.engine.step.results import Results
from onestem.engine.step.sequence_table import SequenceTable
from onestem.engine.step.suspects import MAX_FAILURES
from onestem.request import Request
from tests.engine.harness import assert_idle
from tests.engine.symbolic import VOCAB, alone, drain, make_symbolic, request
from tests.engine.test_order import at_depth

pytestmark = pytest.mark.steps_fail


def of_order(batch_rows: BatchRows) -> Iterable[Sequence | None]:
    """Whose rows a step has."""
    yield from batch_rows.sequences
    yield from (chunk.sequence for chunk in batch_rows.chunks)


# Where it is raised, and whose work it is there, by the call's arguments.
PLACES: dict[str, tuple[Any, str, Callable[..., Iterable[Sequence | None]]]] = {
    "schedule a prompt": (PromptChunks, "_extend_path", lambda self, draft, one, *_: [one]),
    "admit": (PrefixCache, "attach", lambda self, tokens, limit, owner, *_: [owner]),
    "reserve": (Room, "reserve_rows", lambda self, draft, sequences: sequences),
    "end a prompt": (Scheduler, "_end_prompt", lambda self, sequence, chunk: [sequence]),
    "lay out": (DecodeLayout, "add_own", lambda self, sequences: sequences),
    "give a row": (SequenceTable, "put", lambda self, sequence, *_: [sequence]),
    "apply": (BatchRows, "apply", lambda self, changes: [c.sequence for c in changes.chunks]),
    "forward": (Launcher, "forward", lambda self, batch_rows: of_order(batch_rows)),
    "sample": (
        Launcher,
        "sample",
        lambda self, batch_rows, *_: [
            batch_rows.table.sequences[sid] for sid in batch_rows.sampled
        ],
    ),
    "commit": (
        Results,
        "_take_samples",
        lambda self, step, _: [self._table.sequences[sid] for sid in step.sids],
    ),
}


def break_at(
    monkeypatch: pytest.MonkeyPatch, place: str, is_victim: Callable[[Sequence], bool]
) -> list[str]:
    """Raise there; the places where it was raised."""
    where, name, whose = PLACES[place]
    method, raised = getattr(where, name), []

    def broken(*args: Any, **options: Any) -> Any:
        if any(one is not None and is_victim(one) for one in whose(*args)):
            raised.append(place)
            raise ZeroDivisionError("a fault of ours")
        return method(*args, **options)

    monkeypatch.setattr(where, name, broken)
    return raised


def name_of(sequence: Sequence) -> str:
    return sequence.state.request.request_id


def some_requests() -> list[Request]:
    head = [1, 2, 3, 4, 5]
    kinds = [{}, {"n": 3}, {"logprobs": 1}, {"prompt_logprobs": 1}, {"presence_penalty": 0.5}]
    return [
        request(i, [*head[: i % 6], i % VOCAB, i // 2], max_tokens=4 + i, seed=i, **kinds[i % 5])
        for i in range(10)
    ]


def at_work(depth: int, after: int) -> tuple[Engine, list]:
    """An engine after some steps, and what came of them."""
    engine = at_depth(make_symbolic(num_pages=200, page_size=2, max_step_tokens=8), depth)
    for one in some_requests():
        engine.add_request(one)
    found = [output for _ in range(after) for output in engine.step() if output.finished]
    return engine, found


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("after", [0, 6])
@pytest.mark.parametrize("place", PLACES)
def test_one_causes_it(monkeypatch: pytest.MonkeyPatch, place: str, after: int, depth: int) -> None:
    engine, found = at_work(depth, after)
    raised = break_at(monkeypatch, place, lambda sequence: name_of(sequence) == "7")
    outputs = {output.request_id: output for output in found} | drain(engine)
    assert_idle(engine)
    for one in some_requests():
        if one.request_id != "7":
            assert outputs[one.request_id].outputs == alone(one, 400)[0]
    if raised:
        (end,) = outputs["7"].outputs
        assert end.finish_reason == "error"
        assert "ZeroDivisionError: a fault of ours" in end.stop_reason
    else:
        assert after > 0  # it was past that place


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("place", PLACES)
def test_it_happens_once(monkeypatch: pytest.MonkeyPatch, place: str, depth: int) -> None:
    """Nobody ends: what failed is computed again."""
    engine, found = at_work(depth, 2)
    armed = [True]
    raised = break_at(monkeypatch, place, lambda sequence: bool(armed and armed.pop()))
    outputs = {output.request_id: output for output in found} | drain(engine)
    assert raised == [place]
    assert_idle(engine)
    for one in some_requests():
        assert outputs[one.request_id].outputs == alone(one, 400)[0]


@pytest.mark.parametrize("place", PLACES)
def test_it_happens_now_and_then(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Whoever does not end with an error has the right answer."""
    rng = random.Random(place)
    engine, found = at_work(2, 0)
    break_at(monkeypatch, place, lambda sequence: rng.random() < 0.02)
    outputs = {output.request_id: output for output in found} | drain(engine)
    assert_idle(engine)
    for one in some_requests():
        for got, want in zip(outputs[one.request_id].outputs, alone(one, 400)[0], strict=True):
            if got.finish_reason == "error":
                assert "a fault of ours" in got.stop_reason
            else:
                assert got == want


@pytest.mark.parametrize("place", PLACES)
def test_it_happens_always(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """All end, within a bound, and the engine answers who comes after that."""
    with monkeypatch.context() as patch:
        engine, found = at_work(2, 3)
        break_at(patch, place, lambda sequence: True)
        outputs = {output.request_id: output for output in found}
        outputs |= drain(engine, most_steps=6 * MAX_FAILURES)
        assert len(outputs) == 10
        assert_idle(engine)
    late = request("late", [1, 2, 3], max_tokens=5)
    engine.add_request(late)
    assert drain(engine)["late"].outputs == alone(late, 400)[0]


@pytest.mark.parametrize("is_job", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_that_cannot_be_opened(
    monkeypatch: pytest.MonkeyPatch, depth: int, is_job: bool
) -> None:
    engine = at_depth(make_symbolic(num_pages=200), depth)
    opened = SequenceFactory.open

    def broken(self: SequenceFactory, one: Request) -> Any:
        if one.request_id == "7":
            raise ZeroDivisionError("a fault of ours")
        return opened(self, one)

    monkeypatch.setattr(SequenceFactory, "open", broken)
    if is_job:
        engine.requests.add_job("job", some_requests())
    for one in [] if is_job else some_requests():
        engine.add_request(one)
    outputs = drain(engine)
    assert_idle(engine)
    assert engine.requests.job_ids == []
    assert outputs["7"].outputs[0].finish_reason == "error"
    assert all(outputs[str(i)].outputs[0].finish_reason == "length" for i in range(10) if i != 7)


def test_one_on_trial_that_finds_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the newest, and another holds the rest of memory: it waits, and is not to blame."""
    engine = make_symbolic(num_pages=23, page_size=4)
    requests = [
        request(i, [i + 1] * 4, max_tokens=60, min_tokens=59, stop_token_ids=[7]) for i in range(2)
    ]
    reserve, tried = PrefixCache.reserve, []

    def broken(self: PrefixCache, run: Run, tokens: int) -> bool:
        done = reserve(self, run, tokens)
        if not done:
            tried.append(run)
            if len(tried) == 1:
                assert run is engine.scheduler.running[-1].run
                raise ZeroDivisionError("a fault of ours")
            if len(tried) > 100:
                pytest.fail("the step does not end")
        return done

    monkeypatch.setattr(PrefixCache, "reserve", broken)
    for one in requests:
        engine.add_request(one)
    outputs = drain(engine)
    assert tried[0] is tried[1]  # the same one, by itself
    assert_idle(engine)
    for one in requests:
        assert outputs[one.request_id].outputs == alone(one, 92)[0]
