"""Nothing of a call that has ended is alive in the server, without Python's collector of cycles."""

from __future__ import annotations

import gc
from collections import Counter

import pytest

from onestem.openai.read import Asked
from onestem.request import Request, SamplingParams
from onestem.server.api.calls import Call
from onestem.server.api.half_open import HalfOpenProtocol
from onestem.server.api.streams import EventStream
from onestem.server.errors import ApiError
from onestem.server.link.inbox import Inbox
from onestem.server.link.messages import Answered, Ask, Delta
from onestem.server.link.open_requests import OpenRequest
from tests.server.harness import running

OF_A_CALL = (
    Answered, ApiError, Ask, Asked, Call, Delta, EventStream, HalfOpenProtocol, Inbox, Request,
    SamplingParams, OpenRequest,
)  # fmt: skip
SCHEMA = {
    "type": "json_schema",
    "json_schema": {"schema": {"type": "object", "properties": {"a": {"type": "boolean"}}}},
}
ANSWER = {"prompt": "abc", "max_tokens": 5, "n": 2, "logprobs": 3}
LONG = {**ANSWER, "max_tokens": 300, "ignore_eos": True}

# Path, body, and how it ends.
CALLS: dict[str, tuple[str, dict, str | int]] = {
    "whole": ("completions", ANSWER, 200),
    "stream": ("completions", {**ANSWER, "stream": True}, "read"),
    "one stream": ("completions", {"prompt": "a", "max_tokens": 5, "stream": True}, "read"),
    "a reader who leaves": ("completions", {**LONG, "stream": True}, "left"),
    "too late": ("completions", {**LONG, "timeout": 0.02}, 504),
    "a stream too late": ("completions", {**LONG, "timeout": 0.02, "stream": True}, "read"),
    "grammar": ("completions", {**ANSWER, "response_format": SCHEMA}, 200),
    "a bad grammar": (
        "completions",
        {**ANSWER, "response_format": {"type": "regex", "regex": "("}},
        400,
    ),
    "choices": ("completions", {"prompt": "abc", "choices": ["d", "ef"]}, 200),
    "score": ("score", {"prompt": "abc", "completions": ["d", "ef"]}, 200),
    "refused": ("completions", {"prompt": "a" * 5000}, 400),
    "bad": ("completions", {"prompt": 5}, 400),
    "too large": ("completions", {"prompt": "a" * (9 << 20)}, 413),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory, tiny_model):
    with running(tmp_path_factory.mktemp("ended"), model=tiny_model) as server:
        yield server


def alive() -> Counter[str]:
    return Counter(type(one).__name__ for one in gc.get_objects() if type(one) in OF_A_CALL)


def call(server, name: str) -> None:
    """Send a call and wait until server and engine are done with it and its connection."""
    path, body, end = CALLS[name]
    with server.http() as http, http.stream("POST", f"/v1/{path}", json=body) as answer:
        if end == "left":
            next(answer.iter_bytes())
        else:
            answer.read()
            assert answer.status_code == (200 if end == "read" else end)
    state = server.server.server_state
    server.until(lambda: not state.connections and not state.tasks)
    server.check()


@pytest.mark.parametrize("name", CALLS)
def test_a_call(server, name):
    call(server, name)  # what is made once is made here
    gc.disable()
    gc.freeze()  # what exists now is not listed
    try:
        for _ in range(3):
            call(server, name)
        # One may be in a local variable of a thread that waits for the next.
        assert max(alive().values(), default=0) < 3
    finally:
        gc.unfreeze()
        gc.enable()
