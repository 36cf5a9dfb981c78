"""Rows under traffic: who waits is admitted once there is room, and nothing is left behind."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from onestem.engine.engine import Engine
from onestem.engine.schedule.admission import SequenceFactory
from onestem.errors import RequestError
from onestem.pml import Import, Module, Prompt, Schema
from onestem.request import Request
from tests.engine import anew
from tests.engine.harness import answer, assert_idle, make_engine
from tests.engine.pml_harness import compiled_prompts, pml_request
from tests.engine.symbolic import VOCAB, alone, drain, make_symbolic, request, run_all
from tests.engine.test_order import (
    Watch,
    _of_an_application,
    assert_as_alone,
    at_depth,
    made_anew,
    under_traffic,
    watch,
)
from tests.soak import seeds

__all__ = ["watch"]

A, W = [0, 2, 3, 4, 5] * 8, [5, 4, 3, 2, 1] * 8  # prompts of 40 tokens, with nothing in common


def steps(engine: Engine, count: int) -> None:
    for _ in range(count):
        engine.step()
        engine.check()


def running(engine: Engine) -> set[str]:
    return {sequence.state.request.request_id for sequence in engine.scheduler.running}


def test_a_bad_request_behind_a_newcomer_leaves_no_kv() -> None:
    """It is read while the newcomer has rows in a step that will not be computed."""
    newcomer = request("c", [0, 7, 6, 5], max_tokens=4)

    def requests() -> Iterator[Request]:
        yield request("a", [1, 2, 3], max_tokens=20)
        yield request("b", [4, 5, 6], max_tokens=20)  # fills the first step
        yield newcomer
        yield request("d", [99], max_tokens=1)

    engine = make_symbolic(max_step_tokens=6)
    with pytest.raises(RequestError, match="token id 99"):
        list(engine.run(requests()))
    assert_idle(engine)
    assert run_all(engine, [newcomer])["c"].outputs == alone(newcomer, 100)[0]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("how", ["one token", "abort", "at once"])
def test_who_leaves_without_a_row_makes_room(how: str, depth: int) -> None:
    engine = at_depth(make_symbolic(num_pages=24), depth)
    long = request("long", [1, 2, 3], max_tokens=60)
    first = request("first", A, max_tokens=5 if how == "abort" else 1)
    second = request("second", W, max_tokens=8)
    engine.add_request(long)
    if how != "at once":
        steps(engine, 4)
    engine.add_request(first)
    engine.add_request(second)
    steps(engine, 1)
    assert engine.num_waiting == 1
    if how == "abort":
        assert engine.abort("first") is not None
    steps(engine, 3)
    assert running(engine) == {"long", "second"}
    assert drain(engine)["long"].outputs == alone(long, 100)[0]


@pytest.mark.parametrize("depth", [1, 2])
def test_what_others_were_promised_is_free_once_they_are_gone(depth: int) -> None:
    """Memory that aborted sequences would have asked for keeps nobody out."""
    engine = at_depth(make_symbolic(num_pages=40), depth)
    for i in range(4):
        engine.add_request(request(i, [i, 1], max_tokens=100))
    steps(engine, 4)
    for i in range(1, 4):
        engine.abort(str(i))
    engine.add_request(request("w", W, max_tokens=40))
    steps(engine, 2)
    assert running(engine) == {"0", "w"}
    drain(engine)


def test_an_unpinned_prefix_makes_room() -> None:
    engine = make_symbolic(num_pages=44, max_model_len=70)
    engine.requests.pin_prefix("p", A)
    drain(engine)
    engine.add_request(request("long", [1, 2, 3], max_tokens=60))
    steps(engine, 4)
    engine.add_request(request("w", W + W[:20], max_tokens=10))
    engine.add_request(request("x", [7] * 40, max_tokens=10))
    steps(engine, 4)
    assert engine.num_waiting == 1
    engine.requests.unpin_prefix("p")
    steps(engine, 2)
    assert engine.num_waiting == 0
    drain(engine)


def test_a_job_fills_the_batch() -> None:
    """Steps that its prompts fill exactly are no reason to leave the others waiting."""
    engine = make_symbolic(num_pages=400, max_step_tokens=8)
    engine.requests.add_job(
        "j", [request(f"j{i}", [i % 8, i // 8, 1, 2], max_tokens=30) for i in range(12)]
    )
    steps(engine, 11)  # of at least four rows of prompts, one of which is full
    assert len(engine.scheduler.running) == 12
    assert len(drain(engine)) == 12


def test_newcomers_join_while_a_job_waits(watch: Watch) -> None:
    engine = make_symbolic(num_pages=400)
    engine.scheduler.jobs.share.rows = lambda interactive: 0
    engine.add_request(request("a", [1, 2, 3], max_tokens=60))
    steps(engine, 3)
    engine.requests.add_job("j", [request("j", [7, 7, 7], max_tokens=4)])
    steps(engine, 1)
    for i in range(3):
        engine.add_request(request(i, [i, 1, 2, 3], max_tokens=60))
        steps(engine, 2)
    assert running(engine) == {"a", "0", "1", "2"}
    assert watch.inserted >= 3
    assert len(drain(engine)) == 5


@pytest.mark.parametrize("depth", [1, 2])
def test_a_prefix_is_pinned_that_a_running_answer_has_reached(depth: int) -> None:
    """What is pinned is the prefix, and not the answer that grows behind it."""
    engine = at_depth(make_symbolic(num_pages=60, max_model_len=80), depth)
    long = request("long", [1, 2, 3], max_tokens=60)
    want = alone(long, 80)[0]
    engine.add_request(long)
    steps(engine, 4)
    engine.requests.pin_prefix("p", [1, 2, 3, *want[0].token_ids[:1]])
    assert drain(engine)["long"].outputs == want
    (info,) = engine.requests.prefixes()
    assert info.ready
    assert info.num_computed_tokens == 4
    assert engine.cache.pool.num_held == 1


def test_rows_that_import_the_same_are_neighbours(tiny) -> None:
    """Prompts of two sets of modules in turn: as many keys are spared as in rows made anew."""
    schema = Schema("two", [Module("a", ["Alpha and beta"]), Module("b", ["Something else"])])
    prompts = [Prompt("two", [Import("ab"[i % 2]), f"{i} is asked"]) for i in range(6)]
    spared = []
    for change in (lambda engine: engine, made_anew):
        engine = change(make_engine(tiny("llama")))
        compiled = compiled_prompts("anchored", prompts, schema)
        answer(engine, [pml_request(i, one, max_tokens=12) for i, one in enumerate(compiled)])
        spared.append(engine.stats.shared_read_tokens)
    assert spared[0] == spared[1] > 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", seeds(2, 5))
def test_traffic_at_the_bounds(
    watch: Watch, monkeypatch: pytest.MonkeyPatch, seed: int, depth: int
) -> None:
    """Short lists of pages, rows that are made anew often or hardly ever."""
    rng = random.Random(seed)
    bounds = {
        "batch_rows.APART_TOKENS": [1, 3, 64], "batch_rows.SPARE_WORDS": [6, 1 << 15],
        "batch_rows.FEW_SHARE": [0.1, 9.0], "inputs.SLACK_PAGES": [1, 8],
    }  # fmt: skip
    for name, values in bounds.items():
        monkeypatch.setattr(f"onestem.engine.step.{name}", rng.choice(values))
    engine = make_symbolic(num_pages=rng.choice([60, 300]), page_size=rng.choice([1, 2, 4]))
    sizes = anew.watched(engine)
    heads = [[rng.randrange(VOCAB) for _ in range(n)] for n in (2, 9, 12)]
    requests = [_of_an_application(i, heads, rng) for i in range(30)]
    outputs, aborted = under_traffic(
        at_depth(engine, depth), requests, rng, first=5, comes=0.6, upsets=0.02
    )
    assert watch.inserted > 0
    assert max(sizes) > 3
    assert_as_alone(requests, outputs, aborted)


class AnyGrammar:
    """Allows everything, and wants to see each token before the next one is sampled."""

    is_finished = False

    def __init__(self, tokens: Callable[[], int]) -> None:
        self._tokens, self._seen = tokens, 0

    def fill_mask(self) -> torch.Tensor:
        assert self._seen == self._tokens()
        return torch.tensor([-1], dtype=torch.int32)

    def accept(self, token: int) -> None:
        self._seen += 1


def with_grammars(monkeypatch: pytest.MonkeyPatch, rng: random.Random) -> None:
    """Some sequences have one."""
    whole = SequenceFactory.sequence

    def sequence(self, state, index):
        made = whole(self, state, index)
        if rng.random() < 0.4:
            made.answer.grammar = AnyGrammar(lambda: made.num_output)
        return made

    monkeypatch.setattr(SequenceFactory, "sequence", sequence)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", seeds(3, 12))
def test_jobs_that_pause_where_memory_is_short(seed: int, depth: int) -> None:
    """Their sequences leave the order and come back, are preempted meanwhile, and part."""
    rng = random.Random(seed)
    engine = make_symbolic(
        num_pages=rng.choice([14, 20, 40]), page_size=3, max_model_len=36, max_step_tokens=5
    )
    engine.scheduler.jobs.share.rows = lambda interactive: rng.choice([0, 1, 2, 9])
    anew.watched(at_depth(engine, depth))
    requests = of_all_kinds(rng, 14)
    job = [replace(one, params=one.params.replace(n=rng.choice([1, 3]))) for one in requests[:6]]
    engine.requests.add_job("job", job)
    late, outputs = requests[6:], {}
    for _ in range(3000):
        if late and rng.random() < 0.15:
            engine.add_request(late.pop())
        outputs |= {output.request_id: output for output in engine.step() if output.finished}
        engine.check()
        assert engine.has_unfinished() or not engine.launcher.in_flight
        if not late and not engine.has_unfinished():
            break
    assert_idle(engine)
    for one in [*job, *requests[6:]]:
        assert outputs[one.request_id].outputs == alone(one, 36)[0]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", seeds(3, 12))
def test_random_traffic(monkeypatch: pytest.MonkeyPatch, seed: int, depth: int) -> None:
    """Newcomers that go on from running answers, salts, jobs, pinned prefixes, aborts and failures;
    all options of sampling; rows have their ids every few steps."""
    monkeypatch.setattr("onestem.engine.step.sequence_table.FLUSH_TOKENS", 3)
    rng = random.Random(seed)
    if seed % 2:
        with_grammars(monkeypatch, rng)
    engine = make_symbolic(
        num_pages=rng.choice([40, 150]),
        page_size=rng.choice([1, 2, 4]),
        max_model_len=40,
        max_step_tokens=rng.choice([3, 16, 512]),
    )
    at_depth(engine, depth)
    anew.watched(engine)
    requests = of_all_kinds(rng, 24)
    engine.requests.add_job("job", requests[:6])
    late, outputs, aborted = requests[6:], {}, {}

    def disturb(finished: dict) -> None:
        while late and rng.random() < 0.4:
            engine.add_request(late.pop())
        name = str(rng.randrange(24))
        if rng.random() < 0.03 and name not in finished:
            output = engine.abort(name)
            aborted.update({name: output} if output is not None else {})
        pin_or_unpin(engine, rng, requests)
        engine.launcher.runner.fail = KeyboardInterrupt() if rng.random() < 0.03 else None

    while late or engine.has_unfinished():
        with contextlib.suppress(KeyboardInterrupt):
            outputs |= {output.request_id: output for output in engine.step() if output.finished}
        engine.check()
        disturb(outputs)
    engine.launcher.runner.fail = None
    for prefix in engine.requests.prefixes():
        assert prefix.ready
        engine.requests.unpin_prefix(prefix.name)
    assert_idle(engine)
    assert outputs.keys() | aborted.keys() == {one.request_id for one in requests}
    for one in requests:
        if one.request_id not in aborted:
            assert outputs[one.request_id].outputs == alone(one, 40)[0]


OPTIONS = [
    {"n": 2},
    {"n": 2, "frequency_penalty": 0.8},
    {"logprobs": 1},
    {"presence_penalty": 0.5, "logprobs": 2},
    {"repetition_penalty": 1.5},
    {"logit_bias": {1: 1.5}, "top_p": 0.8},
    {"min_tokens": 3, "stop_token_ids": [0, 1], "max_tokens": 12},
]


def of_all_kinds(rng: random.Random, count: int) -> list[Request]:
    head = [rng.randrange(VOCAB) for _ in range(9)]
    requests: list[Request] = []
    for number in range(count):
        ids = head[: rng.randrange(10)] + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 5))]
        if requests and rng.random() < 0.3:  # it goes on from another's answer
            other = rng.choice(requests)
            answered = alone(other, 40)[0][0].token_ids
            ids = [*other.prompt_token_ids, *answered[: rng.randrange(9)]][:30]
        salt = rng.choice(["", "", "x"])
        requests.append(
            request(
                number,
                ids,
                temperature=rng.choice([0, 1.0]),
                seed=number,
                stream=rng.random() < 0.5,
                cache_salt=salt,
                common_prefix_tokens=rng.randrange(len(ids) + 1) if salt else 0,
                **{"max_tokens": rng.choice([1, 2, 9, 30])} | rng.choice([{}] * 4 + OPTIONS),
            )
        )
    return requests


def pin_or_unpin(engine: Engine, rng: random.Random, requests: list[Request]) -> None:
    if rng.random() > 0.05:
        return
    if "p" in engine.requests.pins:
        engine.requests.unpin_prefix("p")
        return
    other = rng.choice(requests)
    answered = alone(other, 40)[0][0].token_ids
    with contextlib.suppress(RequestError):  # there is no room for it
        engine.requests.pin_prefix("p", [*other.prompt_token_ids, *answered[:2]][:20])
