"""Random requests, aborts and pools: every request ends once, and every page comes back."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onestem.errors import ConfigError, RequestError
from onestem.request import Request, SamplingParams
from tests.engine.harness import (
    assert_idle,
    make_engine,
    oracle_greedy,
    requests_for,
    shared_prompts,
)

PROMPT = st.lists(st.integers(3, 5), min_size=1, max_size=30)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    jobs=st.lists(
        st.tuples(PROMPT, st.integers(1, 12), st.integers(1, 3), st.integers(0, 30)),
        min_size=1,
        max_size=12,
    ),
    page_size=st.sampled_from([1, 3, 8]),
    pages=st.integers(16, 60),
    chunk=st.integers(1, 40),
    share=st.sampled_from(["full", "storage", "off"]),
)
def test_everything_ends_once_and_answers_do_not_depend_on_company(
    tiny, jobs, page_size, pages, chunk, share
):
    engine = make_engine(
        tiny("llama"),
        page_size=page_size,
        num_pages=max(pages, -(-45 // page_size)),
        max_step_tokens=chunk,
        share=share,
    )
    requests = [
        Request(
            request_id=str(i),
            prompt_token_ids=ids,
            params=SamplingParams(max_tokens=count, n=n, temperature=0.9, seed=i, ignore_eos=True),
        )
        for i, (ids, count, n, _) in enumerate(jobs)
    ]
    aborts = {str(i): at for i, (_, _, _, at) in enumerate(jobs) if at < 8}
    for request in requests:
        engine.add_request(request)
    ended = {}
    step = 0
    while engine.has_unfinished():
        for output in engine.step():
            assert output.request_id not in ended
            ended[output.request_id] = output
        engine.check()
        step += 1
        for request_id, at in aborts.items():
            if at == step and request_id not in ended:
                ended[request_id] = engine.abort(request_id)
                assert {o.finish_reason for o in ended[request_id].outputs} <= {"abort", "length"}
                assert len(ended[request_id].outputs) == jobs[int(request_id)][2]
                engine.check()
        assert step < 5000
    assert_idle(engine)
    assert sorted(ended) == sorted(str(i) for i in range(len(jobs)))
    plain = make_engine(tiny("llama"), share="off")
    for request in requests:
        if request.request_id in aborts:
            continue
        plain.add_request(request)
        want = None
        while plain.has_unfinished():
            want = plain.step() or want
        got = ended[request.request_id]
        assert [o.token_ids for o in got.outputs] == [o.token_ids for o in want[0].outputs]
        assert all(o.finish_reason == "length" for o in got.outputs)


def test_abort_of_a_waiting_request(tiny):
    engine = make_engine(tiny("llama"))
    for request in requests_for(shared_prompts()[:2], n=2):
        engine.add_request(request)
    output = engine.abort("1")
    assert [o.finish_reason for o in output.outputs] == ["abort", "abort"]
    assert engine.abort("nobody") is None
    while engine.has_unfinished():
        engine.step()
    assert_idle(engine)


def test_what_can_never_be_answered_is_refused_at_once(tiny):
    engine = make_engine(tiny("llama"), num_pages=4, page_size=8)
    assert engine.max_model_len == 32
    for ids, message in (
        ([], "empty"),
        ([3] * 32, "prompt has 32 tokens, limit is 31"),
        ([3, 999], "token id 999"),
        ([-1], "token id -1"),
    ):
        with pytest.raises(RequestError, match=message):
            engine.add_request(Request(request_id="x", prompt_token_ids=ids))
    engine.add_request(Request(request_id="x", prompt_token_ids=[3]))
    with pytest.raises(RequestError, match="'x' is in use"):
        engine.add_request(Request(request_id="x", prompt_token_ids=[3]))
    with pytest.raises(RequestError, match="needs a tokenizer"):
        engine.add_request(
            Request(request_id="y", prompt_token_ids=[3], params=SamplingParams(stop="a"))
        )
    with pytest.raises(ConfigError, match="share is 'some'"):
        make_engine(tiny("llama"), share="some")
    with pytest.raises(ConfigError, match="max_model_len is 4096"):
        make_engine(tiny("llama"), max_model_len=4096)


def test_the_longest_request_fits_alone(tiny):
    """Whatever the cache holds: a prompt and answer of max_model_len tokens are answered."""
    engine = make_engine(tiny("llama"), num_pages=6, page_size=8)
    prompts = [
        list(range(3, 23)),
        [*range(3, 13), *range(50, 60)],
        [*range(3, 13), *range(50, 55), *range(80, 90)],
    ]
    for prompt in prompts:
        request = Request(
            request_id="a",
            prompt_token_ids=prompt,
            params=SamplingParams(max_tokens=None, temperature=0, ignore_eos=True),
        )
        engine.add_request(request)
        outputs = []
        while engine.has_unfinished():
            outputs += engine.step()
        tokens = outputs[0].outputs[0].token_ids
        assert len(prompt) + len(tokens) == 48
        assert tokens == oracle_greedy(tiny("llama"), prompt, len(tokens))
        assert outputs[0].outputs[0].finish_reason == "length"
    assert_idle(engine)


def test_eos_and_stop_ids_and_min_tokens(tiny):
    path = tiny("llama")
    prompt = shared_prompts()[0]
    greedy = oracle_greedy(path, prompt, 6)
    engine = make_engine(path)
    for params, reason, count in (
        (SamplingParams(max_tokens=6, temperature=0, stop_token_ids=[greedy[0]]), "stop", 1),
        (SamplingParams(max_tokens=6, temperature=0, ignore_eos=True), "length", 6),
    ):
        engine.add_request(Request(request_id="a", prompt_token_ids=prompt, params=params))
        outputs = []
        while engine.has_unfinished():
            outputs += engine.step()
        answer = outputs[0].outputs[0]
        assert (answer.finish_reason, len(answer.token_ids)) == (reason, count)
    params = SamplingParams(max_tokens=6, min_tokens=4, temperature=0, stop_token_ids=[greedy[0]])
    engine.add_request(Request(request_id="a", prompt_token_ids=prompt, params=params))
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
    assert greedy[0] not in outputs[0].outputs[0].token_ids[:4]
    assert len(outputs[0].outputs[0].token_ids) >= 4
