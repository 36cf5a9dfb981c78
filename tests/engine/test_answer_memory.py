"""Host memory for answers: what a request may ask for, and how many run beside each other."""

from __future__ import annotations

import pytest

from onestem.engine.schedule import waiting
from onestem.engine.schedule.answers import ENTRY_BYTES, TOKEN_BYTES, AnswerLimit
from onestem.errors import RequestError
from onestem.request import Request, SamplingParams
from tests.engine.harness import assert_idle, make_engine

MODEL_LEN = 100
KV_TOKENS = 400
LIMIT = AnswerLimit(most=0, max_model_len=MODEL_LEN, kv_tokens=KV_TOKENS)


def request(name: str, prompt: int = 10, **fields) -> Request:
    params = SamplingParams(**{"ignore_eos": True, **fields})
    return Request(request_id=name, prompt_token_ids=list(range(3, 3 + prompt)), params=params)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_tokens": 50}, 0),
        ({"max_tokens": None}, 0),
        ({"max_tokens": 50, "logprobs": 0}, 50 * ENTRY_BYTES),
        ({"max_tokens": 50, "logprobs": 4}, 50 * 5 * ENTRY_BYTES),
        ({"max_tokens": None, "logprobs": 0}, 90 * ENTRY_BYTES),  # up to the model's length
        ({"max_tokens": 500, "logprobs": 0}, 90 * ENTRY_BYTES),
        ({"max_tokens": 50, "n": 3}, 3 * 50 * TOKEN_BYTES),
        ({"max_tokens": 50, "n": 3, "logprobs": 1}, 3 * 50 * (TOKEN_BYTES + 2 * ENTRY_BYTES)),
        ({"max_tokens": None, "n": 1024}, KV_TOKENS * TOKEN_BYTES),
        (
            {"max_tokens": 50, "n": 9, "logprobs": 0},
            9 * 50 * ENTRY_BYTES + KV_TOKENS * TOKEN_BYTES,
        ),
        ({"max_tokens": 50, "prompt_logprobs": 2}, 10 * 3 * ENTRY_BYTES),
        ({"choices": ["ab", "c"], "logprobs": 1}, 3 * 2 * ENTRY_BYTES),
        ({"choices": ["ab", "c"]}, 0),
    ],
)
def test_what_a_request_may_keep(fields, expected):
    assert LIMIT.bytes_of(request("a", **fields)) == expected


def test_one_that_asks_for_more_than_there_is_is_refused(tiny):
    engine = make_engine(tiny("llama"), answer_memory=40 * 2 * ENTRY_BYTES)
    engine.requests.validate(request("fits", max_tokens=40, logprobs=1))
    with pytest.raises(RequestError) as error:
        engine.add_request(request("large", max_tokens=41, logprobs=1))
    assert str(error.value) == (
        "n, max_tokens and logprobs ask for answers of up to 7.2 KiB in memory, limit is 7.0 KiB: "
        "lower one of them, or raise answer_memory"
    )
    with pytest.raises(RequestError, match=r"^prompt_logprobs, n, max_tokens and logprobs ask"):
        engine.requests.validate(request("prompt", prompt=50, max_tokens=1, prompt_logprobs=20))
    with pytest.raises(RequestError, match="ask for answers of up to"):
        engine.requests.validate(request("many", max_tokens=40, n=100))


@pytest.mark.parametrize("most", [7, 14])
def test_many_long_answers_count_as_they_end(tiny, most):
    """They begin with what KV memory holds of them. Where they come to more than there is, the
    request ends, and others go on."""
    kv_tokens = 24 * 4
    engine = make_engine(
        tiny("llama"),
        num_pages=24,
        page_size=4,
        max_model_len=80,
        answer_memory=most * 40 * TOKEN_BYTES,
    )
    answers = engine.scheduler.answers
    engine.add_request(request("many", prompt=4, max_tokens=40, n=14))
    for i in range(3):
        engine.add_request(request(f"{i}", prompt=5, max_tokens=30, n=2))
    engine.step()
    assert answers.taken >= kv_tokens * TOKEN_BYTES
    ended = {}
    while engine.has_unfinished():
        ended |= {output.request_id: output.outputs for output in engine.step()}
    reasons = [one.finish_reason for one in ended.pop("many")]
    assert len(reasons) == 14
    assert set(reasons) == ({"length"} if most == 14 else {"length", "error"})
    assert all(len(one.token_ids) == 30 for outputs in ended.values() for one in outputs)
    assert len(ended) == 3
    assert answers.taken == 0
    assert_idle(engine)


@pytest.mark.parametrize("jobs", [False, True])
def test_requests_wait_for_it(tiny, jobs):
    """Two of them have room at once; one without log-probabilities takes none. All are answered."""
    most = 2 * 2 * 6 * (TOKEN_BYTES + 2 * ENTRY_BYTES)
    engine = make_engine(tiny("llama"), answer_memory=most)
    asked = [request(f"{i}", max_tokens=6, n=2, logprobs=1) for i in range(7)]
    if jobs:
        engine.requests.add_job("job", asked)
    else:
        for one in [request("plain", max_tokens=6), *asked]:
            engine.add_request(one)
    answers = engine.scheduler.answers
    ended, at_once = [], set()
    while engine.has_unfinished():
        ended += [(output.request_id, output.outputs) for output in engine.step()]
        open_now = {s.state for s in engine.scheduler.running if s.state.request.params.logprobs}
        at_once.add(len(open_now))
        assert answers.taken <= most
    assert [name for name, _ in ended if name != "plain"] == [str(i) for i in range(7)]
    assert all(len(one.token_ids) == 6 for _, outputs in ended for one in outputs)
    assert max(at_once) == 2
    assert answers.taken == 0
    assert_idle(engine)


@pytest.mark.parametrize("jobs", [False, True])
def test_those_that_need_none_pass(tiny, jobs):
    """Whoever waits for host memory holds up no request that needs none, and keeps its turn."""
    need = {"max_tokens": 40, "n": 2, "logprobs": 1}
    most = 2 * 40 * (TOKEN_BYTES + 2 * ENTRY_BYTES)
    engine = make_engine(tiny("llama"), answer_memory=most)
    smaller = request("smaller", max_tokens=3, logprobs=1)
    asked = [request("first", **need), request("second", **need), smaller]
    asked += [request(f"plain {i}", max_tokens=3) for i in range(3)]
    if jobs:
        engine.requests.add_job("job", asked)
    else:
        for one in asked:
            engine.add_request(one)
    ended = []
    while engine.has_unfinished():
        ended += [output.request_id for output in engine.step()]
    assert ended == ["plain 0", "plain 1", "plain 2", "first", "second", "smaller"]
    assert_idle(engine)


def test_jobs_leave_room_for_who_comes_next(tiny, monkeypatch):
    """Jobs have half at most. Whoever comes then begins in the next step, however many wait."""
    monkeypatch.setattr(waiting, "MOST_PARKED", 1)
    fields = {"max_tokens": 40, "n": 2, "logprobs": 1}
    one = LIMIT.bytes_of(request("a", **fields))
    engine = make_engine(tiny("llama"), answer_memory=4 * one)
    answers = engine.scheduler.answers
    answers.most_of_jobs = 2 * one
    engine.requests.add_job("job", [request(f"{i}", **fields) for i in range(9)])
    for _ in range(5):
        engine.step()
    assert answers.taken == answers.taken_by_jobs == 2 * one
    assert [s.is_job for s in engine.scheduler.waiting] == [True]
    for i in range(2):
        engine.add_request(request(f"interactive {i}", **fields))
    engine.step()
    begun = {s.state.request.request_id for s in engine.scheduler.running}
    assert begun == {"0", "1", "interactive 0", "interactive 1"}
    assert answers.taken_by_jobs == 2 * one
    ended = []
    while engine.has_unfinished():
        ended += [output.request_id for output in engine.step()]
        assert answers.taken_by_jobs <= 2 * one
    assert len(ended) == 11
    assert answers.taken == answers.taken_by_jobs == 0


def test_an_abort_gives_it_back(tiny):
    most = 2 * 50 * (TOKEN_BYTES + 2 * ENTRY_BYTES)
    engine = make_engine(tiny("llama"), answer_memory=most)
    for name in ("first", "second"):
        engine.add_request(request(name, max_tokens=50, n=2, logprobs=1))
    for _ in range(3):
        engine.step()
    assert engine.scheduler.answers.taken == most
    engine.abort("first")
    assert engine.scheduler.answers.taken == 0
    engine.step()
    assert {s.state.request.request_id for s in engine.scheduler.running} == {"second"}
    engine.abort("second")
    assert engine.scheduler.answers.taken == 0
    assert_idle(engine)


def test_one_that_is_preempted_keeps_it(tiny):
    """It has its answers still, and goes on with them."""
    most = 2 * 60 * 3 * ENTRY_BYTES
    engine = make_engine(
        tiny("llama"), num_pages=24, page_size=4, max_model_len=80, answer_memory=most
    )
    for i in range(4):
        engine.add_request(request(f"{i}", prompt=5 + i, max_tokens=60, logprobs=2))
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
        assert engine.scheduler.answers.taken <= most
    assert engine.stats.num_preempted > 0
    assert len(outputs) == 4
    assert engine.scheduler.answers.taken == 0
