"""Every two options of a request together: answered or refused, alike alone and in company, and
alike through Python, a batch file and HTTP."""

from __future__ import annotations

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from onestem import LLM, SamplingParams
from onestem.errors import RequestError
from onestem.jobs import run_file
from onestem.request import Request
from tests.engine.harness import assert_idle
from tests.pairs.options import PAIRS, merged
from tests.server.harness import running

OPTIONS = {"dtype": "float32", "kv_memory": "16MiB", "device": "cpu"}
HEAD = "The quick brown fox jumps over the lazy dog. "
# What the engine itself can be asked for, whatever the answer is to be like.
ASKED: dict[str, dict[str, Any]] = {
    "": {},
    "stream": {"stream": True},
    "salt": {"cache_salt": "mine"},
    "common": {"cache_salt": "mine", "common_prefix_tokens": 5},
    "score": {"score_from": 4},
    "job": {"priority": "job"},
    "group": {"group": 0, "group_prefix_tokens": 6},
    "group_only": {"group": 0, "group_prefix_tokens": 6, "group_only": True},
    "lone": {"group_only": True},
}


@pytest.fixture(scope="module")
def llm(model):
    return LLM(model, **OPTIONS)


def prompt_of(number: int) -> str:
    return HEAD + f"Number {number % 7}:"


def made(llm: LLM, number: int, names: tuple[str, ...], **asked: Any) -> Request | None:
    """The request of a pair; None if it is refused, with a reason."""
    try:
        params = SamplingParams(**merged(*names))
        request = Request(
            request_id=f"{number}-{'-'.join([*names, *asked])}",
            prompt_token_ids=llm.tokenizer.encode(prompt_of(number)),
            params=params,
            **asked,
        )
        llm.engine.requests.validate(request)
    except RequestError as error:
        return check_reason(str(error))
    return request


def check_reason(reason: str) -> None:
    assert 10 < len(reason) < 300
    assert "\n" not in reason


@pytest.fixture(scope="module")
def requests(llm) -> list[Request]:
    found = [made(llm, number, names) for number, names in enumerate(PAIRS)]
    good = [one for one in found if one is not None]
    assert len(good) > 0.9 * len(found)
    return good


def shown(output) -> list[tuple]:
    """What must be alike whoever else is there; log-probabilities apart, which are rounded."""
    return [
        (o.index, o.text, o.token_ids, o.finish_reason, o.stop_reason, o.choice)
        for o in output.outputs
    ]


def logprobs(output) -> list[float]:
    rows = [row for o in output.outputs for row in o.logprobs or ()]
    return [
        value for row in rows + (output.prompt_logprobs or []) for value in (row or {}).values()
    ]


def run_all(llm: LLM, requests: list[Request]) -> dict[str, Any]:
    engine = llm.engine
    for request in requests:
        engine.add_request(request)
    outputs = {}
    while engine.has_unfinished():
        outputs |= {o.request_id: o for o in engine.step() if o.finished}
    assert_idle(engine)
    assert outputs.keys() == {request.request_id for request in requests}
    return outputs


@pytest.fixture(scope="module")
def alone(llm, requests) -> dict[str, Any]:
    outputs = {}
    for request in requests:
        (output,) = llm.engine.run([request])
        outputs[request.request_id] = output
    return outputs


def test_alone_and_in_company(llm, requests, alone):
    together = run_all(llm, requests)
    for request in requests:
        name = request.request_id
        assert shown(together[name]) == shown(alone[name]), name
        assert logprobs(together[name]) == pytest.approx(logprobs(alone[name]), abs=1e-4), name
        reasons = {o.finish_reason for o in alone[name].outputs}
        # A grammar may end while nothing but more may follow: that is told.
        assert reasons <= {"stop", "length"} or "forbid" in alone[name].outputs[0].stop_reason


@pytest.mark.parametrize("asked", [name for name in ASKED if name])
def test_whatever_the_engine_is_asked(llm, requests, alone, asked):
    changed = [
        dataclasses.replace(one, request_id=f"{asked}-{one.request_id}", **ASKED[asked])
        for one in requests
    ]
    outputs = run_all(llm, changed)
    for before, after in zip(requests, changed, strict=True):
        want, got = alone[before.request_id], outputs[after.request_id]
        assert shown(got) == shown(want), after.request_id


def test_with_modules(llm):
    """The same in prompts of modules, which are computed once for all of them; a third of the pairs
    are answered alone too."""
    llm.add_schema('<schema name="s"><module name="a">Ada is 36.</module> And: </schema>')
    good = []
    for number, names in enumerate(PAIRS):
        compiled = llm.schemas.compile(f'<prompt schema="s"><a/>{number % 7}?</prompt>', "anchored")
        try:
            request = llm.pml_request(compiled, SamplingParams(**merged(*names)))
            llm.engine.requests.validate(request)
        except RequestError as error:
            check_reason(str(error))
        else:
            good.append(request)
    assert len(good) > 0.8 * len(PAIRS)
    alone = {}
    for request in good[::3]:
        (alone[request.request_id],) = llm.engine.run([request])
    together = run_all(llm, good)
    assert {n: shown(together[n]) for n in alone} == {n: shown(o) for n, o in alone.items()}


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_aborted_at_any_step(llm, requests, steps):
    """Half of them, while the others go on to the answer that they have alone."""
    engine = llm.engine
    for request in requests:
        engine.add_request(request)
    for _ in range(steps):
        engine.step()
    for request in requests[::2]:
        engine.abort(request.request_id)
        engine.check()
    while engine.has_unfinished():
        engine.step()
    assert_idle(engine)


# ----------------------------------------------------------------------------- batch and HTTP


def line(number: int, names: tuple[str, ...]) -> bytes:
    body = {"prompt": prompt_of(number), **merged(*names)}
    record = {"custom_id": "-".join(names), "method": "POST", "url": "/v1/completions"}
    return json.dumps({**record, "body": body}).encode() + b"\n"


def bodies_of(answer: dict[str, Any]) -> list[tuple]:
    return [(c["index"], c["text"], c["finish_reason"], c.get("choice")) for c in answer["choices"]]


def wanted(output) -> list[tuple]:
    return [(o.index, o.text, o.finish_reason, o.choice) for o in output.outputs]


def is_error(output) -> bool:
    return any(o.finish_reason == "error" for o in output.outputs)


def test_as_a_batch(model, llm, requests, alone, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"".join(line(number, names) for number, names in enumerate(PAIRS)))
    summary = run_file(llm, source, target)
    results = [json.loads(raw) for raw in target.read_bytes().splitlines()]
    assert [one["custom_id"] for one in results] == ["-".join(names) for names in PAIRS]
    good = {request.request_id for request in requests}
    failed = 0
    for (number, names), result in zip(enumerate(PAIRS), results, strict=True):
        name = f"{number}-{'-'.join(names)}"
        if name not in good or is_error(alone[name]):
            assert result["error"]["message"], name
            failed += 1
            continue
        assert result["error"] is None, name
        assert bodies_of(result["response"]["body"]) == wanted(alone[name]), name
    assert summary.failed == failed


@pytest.mark.parametrize("stream", [False, True])
def test_over_http(tmp_path, model, requests, alone, stream):
    good = {request.request_id for request in requests}
    with running(tmp_path, model=model) as server, server.http() as http:

        def ask(number: int) -> httpx.Response:
            body = {"prompt": prompt_of(number), **merged(*PAIRS[number]), "stream": stream}
            return http.post("/v1/completions", json=body)

        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(ask, range(len(PAIRS))))
        assert server.service.client.supervisor.restarts == 0
        server.check()
    for (number, names), answer in zip(enumerate(PAIRS), answers, strict=True):
        name = f"{number}-{'-'.join(names)}"
        no_stream = stream and "prompt_logprobs" in merged(*names)
        if name not in good or no_stream:
            assert answer.status_code == 400, name
            assert answer.json()["error"]["message"]
        elif is_error(alone[name]):
            assert "error" in answer.text, name
        else:
            assert answer.status_code == 200, name
            found = folded(answer.text) if stream else bodies_of(answer.json())
            assert found == wanted(alone[name]), name


def folded(text: str) -> list[tuple]:
    """The pieces of a stream, put together."""
    found: dict[int, tuple] = {}
    events = text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    for event in events[:-2]:
        for choice in json.loads(event.removeprefix("data: "))["choices"]:
            index = choice["index"]
            before = found.get(index, (index, "", None, None))
            text = before[1] + choice["text"]
            found[index] = (index, text, choice["finish_reason"], choice.get("choice"))
    return [found[index] for index in sorted(found)]
