"""Hostile traffic, for some hundred requests: nothing is wrong, and a planted fault is found."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Iterator

import httpx
import pytest

from onestem_lab.serve.hostile import answering, faults, pool_of
from onestem_lab.serve.hostile_answers import Reply, reply_of
from onestem_lab.serve.hostile_hand import judged
from onestem_lab.serve.hostile_pool import APP, CHATS, COMPLETIONS, PREFIXES, SCHEMAS, Case, cases
from onestem_lab.serve.hostile_refused import MARKUPS, MESSAGES, TEXT, UNKNOWN, WRONG
from onestem_lab.serve.hostile_run import traffic
from onestem_lab.serve.hostile_setting import MAX_BODY, SECRETS, Setting, server_files
from onestem_lab.serve.hostile_wire import received
from tests.pairs.options import SAMPLING
from tests.server.harness import Running, running

SETTING = Setting(
    pool=40,
    clients=6,
    requests=40,
    max_model_len=384,
    kv_memory="24MiB",
    hang=30.0,
    pace=0.1,
    attackers=0,
)
ANSWERED = answering(SETTING)


@pytest.fixture(scope="module")
def pool() -> list[Case]:
    return pool_of(SETTING)


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("hostile")
    files = server_files(folder)
    with running(
        folder / "state",
        engine=SETTING.engine,
        api_key_file=files["keys"],
        apps={APP: {"text": PREFIXES[APP]}},
        schemas=[files["schema"]],
        max_queue=SETTING.max_queue,
        max_body=MAX_BODY,
    ) as server:
        yield server


def test_nothing_is_wrong(server, pool):
    found = asyncio.run(traffic(server.url, pool, SETTING, ANSWERED))
    assert faults(found) == [], json.dumps(found["shown"])[:2000]
    outcomes = found["outcomes"]
    assert found["dead_engines"] == 0
    assert found["requests"] == sum(outcomes.values()) >= SETTING.requests
    assert outcomes["right"] > SETTING.requests / 4
    assert outcomes["refused"] > 0
    assert found["short_seconds"]["p50"] > 0
    assert found["memory"]["engine"]["peak"] > 0
    assert found["batches"]["lines"] > found["batches"]["begun"] > 0
    assert found["latency"]["plain"]["before attacks"]["count"] > 0
    assert found["latency"]["small schema"]["before attacks"]["max"] > 0
    server.check()


@pytest.mark.soak
def test_a_planted_fault_is_found(server, pool):
    """Asked for, an answer that should be another one is wrong, and is told with all that it takes
    to ask again."""
    case = next(one for one in pool if not one.sampled and one.expected.choices)
    (choice, *others) = case.expected.choices
    other = dataclasses.replace(choice, exact={**choice.exact, "text": "something else"})
    expected = dataclasses.replace(case.expected, choices=[other, *others])
    planted = [dataclasses.replace(case, expected=expected)] * len(pool)
    short = dataclasses.replace(SETTING, requests=12)
    found = asyncio.run(traffic(server.url, [*planted, *pool], short, ANSWERED))
    assert any(fault.endswith(" wrong") for fault in faults(found))
    assert found["outcomes"]["wrong"] > 0
    told = found["shown"]["wrong"][0]
    assert (told["seed"], told["case"], told["path"]) == (0, case.number, case.path)
    assert {"client", "step", "expected", "found"} <= told.keys()
    assert "something else" in told["why"][0]


MUST_BE_REFUSED = [
    *((COMPLETIONS, {**TEXT, **fields}) for fields in [*WRONG, *UNKNOWN]),
    *((CHATS, {"messages": messages}) for messages in MESSAGES),
    *((COMPLETIONS, {"pml": markup}) for markup in MARKUPS),
]


@pytest.mark.parametrize(("path", "body"), MUST_BE_REFUSED, ids=lambda one: str(one)[:60])
def test_what_must_be_refused_is(server, path, body):
    """Nothing of it has come to be supported since."""
    headers = {"authorization": f"Bearer {SECRETS['alice']}"}
    answer = httpx.post(f"{server.url}{path}", json=body, headers=headers, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_control_tokens_have_no_place_in_the_text(server):
    """Places of tokens after one that the text leaves out are judged by what a reader sees."""
    tokenizer = server.launcher.llms[0].tokenizer
    control = next(
        token for token in sorted(tokenizer.special_ids) if token not in tokenizer.end_ids
    )
    body = {"prompt": "The mill of", "max_tokens": 6, "temperature": 1.0, "seed": 7, "logprobs": 2}
    body |= {"return_token_ids": True, "logit_bias": {str(control): 100.0}}
    [case] = ANSWERED([Case(number=-1, kind="control", names=(), path=COMPLETIONS, body=body)])
    headers = {"authorization": f"Bearer {SECRETS['alice']}"}
    answer = httpx.post(f"{server.url}{COMPLETIONS}", json=body, headers=headers, timeout=60)
    assert control in answer.json()["choices"][0]["token_ids"][:-1]
    assert judged(case, reply_of(answer.status_code, answer.content)) == ("right", [])


# ----------------------------------------------------------------------------- parts of it


def stream(*pieces: dict, last: str = "data: [DONE]\n\n") -> bytes:
    events = [json.dumps({"choices": [piece]}) for piece in pieces]
    return "".join(f"data: {event}\n\n" for event in events).encode() + last.encode()


def piece(text: str, ids: list[int], logprobs: list[float], reason: str | None = None) -> dict:
    numbers = {
        "tokens": [str(i) for i in ids],
        "token_logprobs": logprobs,
        "top_logprobs": [{"a": value} for value in logprobs],
        "text_offset": [0] * len(ids),
    }
    told = {"text": text, "token_ids": ids, "logprobs": numbers, "finish_reason": reason}
    return {"index": 0, **told}


BEGUN = piece("ab", [5, 6], [-1.0, -2.0])
GOOD = stream(BEGUN, piece("c", [7], [-3.0], "stop"))
ANOTHER_WAY = piece("d", [8], [-9.0], "stop")


@pytest.mark.parametrize(
    ("raw", "greedy", "sampled"),
    [
        (GOOD, "right", "right"),
        (stream(BEGUN, piece("c", [7], [-3.00005], "stop")), "right", "right"),
        (stream(BEGUN, piece("c", [7], [-3.001], "stop")), "wrong", "wrong"),
        (stream(BEGUN, piece("c", [7], [-3.0], "length")), "wrong", "wrong"),
        (stream(BEGUN, piece("x", [7], [-3.0], "stop")), "wrong", "wrong"),
        (stream(piece("ab", [5, 6], [-1.0, -2.0], "stop")), "wrong", "wrong"),
        (stream(BEGUN, ANOTHER_WAY), "wrong", "drawn otherwise"),
        (stream(piece("ab", [5, 6], [-1.0, -2.1]), ANOTHER_WAY), "wrong", "wrong"),
        (GOOD + b"data: 1\n\n", "error", "error"),
        (stream(BEGUN, last=""), "error", "error"),
        (stream(piece("a", [5], [-1.0], "stop"), BEGUN), "error", "error"),
    ],
)
def test_what_is_wrong_with_an_answer(raw, greedy, sampled):
    for temperature, outcome in ((0, greedy), (1, sampled)):
        body = {"temperature": temperature}
        case = Case(number=0, kind="", names=(), path="", body=body, expected=reply_of(200, GOOD))
        assert judged(case, reply_of(200, raw))[0] == outcome


@pytest.mark.parametrize(
    ("status", "code", "outcome"),
    [
        (429, None, "busy"),
        (504, "deadline_exceeded", "late"),
        (503, "engine_down", "engine down"),
        (503, "engine_slow", "error"),
        (500, None, "error"),
        (400, None, "wrong"),
    ],
)
def test_what_another_status_is(status, code, outcome):
    body = {"temperature": 0}
    case = Case(number=0, kind="", names=(), path="", body=body, expected=Reply(status=200))
    raw = json.dumps({"error": {"message": "m", "code": code}}).encode()
    assert judged(case, reply_of(status, raw))[0] == outcome


def test_answers_by_hand():
    raw = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nab"
    chunks = b"HTTP/1.1 400 No\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n2\r\nyz\r\n0\r\n\r\n"
    answers = received(raw + chunks)
    assert [(one.status, one.body) for one in answers] == [(200, b"ab"), (400, b"xyz")]
    for cut in (raw[:-1], chunks[:-3], b"HTTP/1.1 200 OK", b"x"):
        with pytest.raises(ValueError, match=r"came|breaks off|no answer"):
            received(cut)


def test_the_pool():
    """All options are in it; it is the same for the same seed, and greedy mostly."""
    made = cases(3, 600, 256)
    assert made == cases(3, 600, 256)
    assert {name for one in made for name in one.names} > set(SAMPLING)
    assert {len(one.names) for one in made} == {0, 1, 2, 3}
    assert sum(one.sampled for one in made) < len(made) / 2
    named = [one.body["pml"] for one in made if one.kind == "pml"]
    assert all(any(f'schema="{name}"' in pml for pml in named) for name in SCHEMAS)
