"""Anthropic's messages over HTTP; `test_clients.py` has its client."""

from __future__ import annotations

import math

import pytest

from onestem.server.api import reply
from tests.adapters.conversations import CHAT, MESSAGES
from tests.adapters.events import events_of, folded_message
from tests.server.harness import Held, running

USER = {"role": "user", "content": "Is it warm in Rome?"}
ASKED = {"model": "embedded", "max_tokens": 8, "messages": [USER], "temperature": 0}


@pytest.fixture(scope="module")
def http(embedded):
    with embedded.http() as client:
        yield client


def test_a_conversation_is_a_hit_whichever_api_it_comes_through(http):
    """All of its tokens but the last one, which is always computed."""
    chat = http.post("/v1/chat/completions", json=CHAT).json()
    num_tokens = chat["usage"]["prompt_tokens"]
    for stream in (False, True):
        answer = http.post("/v1/messages", json={**MESSAGES, "stream": stream})
        message = folded_message(events_of(answer.content)) if stream else answer.json()
        if stream:
            start = events_of(answer.content)[0]["message"]["usage"]
            # A busy machine has more than the first token when the stream begins.
            assert 1 <= start["output_tokens"] <= message["usage"]["output_tokens"]
            assert start | {"output_tokens": 0} == message["usage"] | {"output_tokens": 0}
        assert message["usage"] == {
            "input_tokens": 0,
            "cache_creation_input_tokens": 1,
            "cache_read_input_tokens": num_tokens - 1,
            "output_tokens": chat["usage"]["completion_tokens"],
        }
        texts = [block["text"] for block in message["content"] if block["type"] == "text"]
        assert "".join(texts) == (chat["choices"][0]["message"]["content"] or "")
    again = http.post("/v1/chat/completions", json=CHAT).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == num_tokens - 1
    counted = {name: MESSAGES[name] for name in ("messages", "system", "tools")}
    answer = http.post("/v1/messages/count_tokens?beta=true", json=counted)
    assert answer.json() == {"input_tokens": num_tokens}


def test_a_stream_is_the_whole_message(http):
    asked = {**ASKED, "temperature": 1.5, "seed": 7, "max_tokens": 20}
    whole = http.post("/v1/messages?beta=true", json=asked).json()
    answer = http.post("/v1/messages", json={**asked, "stream": True})
    folded = folded_message(events_of(answer.content))
    ours = ("content", "stop_reason", "stop_sequence", "model", "role", "type")
    assert {name: folded[name] for name in ours} == {name: whole[name] for name in ours}
    assert answer.headers["x-request-id"] == folded["id"] != whole["id"]


def test_a_stream_that_waits_is_told_so(tmp_path, tiny_model, monkeypatch):
    monkeypatch.setattr(reply, "PING_SECONDS", 0.05)
    held = Held()
    body = {"max_tokens": 3, "messages": [USER], "stream": True}
    with (
        running(tmp_path / "state", model=tiny_model, change=held) as server,
        server.http() as http,
        http.stream("POST", "/v1/messages", json=body) as answer,
    ):
        chunks = answer.iter_raw()
        first = next(chunks)
        held.let(math.inf)
        events = events_of(first + b"".join(chunks))
    assert events[0] == {"type": "ping"}
    assert folded_message(events)["usage"]["output_tokens"] == 3


def test_stop_sequences(http):
    asked = {**ASKED, "max_tokens": 30}
    (block,) = http.post("/v1/messages", json=asked).json()["content"]
    stop = block["text"][2:4]
    made = http.post("/v1/messages", json={**asked, "stop_sequences": [stop]}).json()
    assert (made["stop_reason"], made["stop_sequence"]) == ("stop_sequence", stop)
    assert made["content"][0]["text"] == block["text"][: block["text"].index(stop)]


def test_calls_follow_their_schemas(http):
    schema = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"]}
    tools = [{"name": "answer", "input_schema": schema}]
    choice = {"type": "tool", "name": "answer"}
    asked = {**ASKED, "max_tokens": 80, "temperature": 1, "seed": 3}
    asked |= {"tools": tools, "tool_choice": choice}
    made = http.post("/v1/messages", json=asked).json()
    (block,) = made["content"]
    assert (block["type"], block["name"]) == ("tool_use", "answer")
    assert isinstance(block["input"]["yes"], bool)
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": "right"}
    turns = [USER, {"role": "assistant", "content": made["content"]},
             {"role": "user", "content": [result]}]  # fmt: skip
    again = {**asked, "messages": turns, "tool_choice": {"type": "none"}}
    then = http.post("/v1/messages", json=again).json()["usage"]
    before = made["usage"]
    assert then["cache_read_input_tokens"] > before["cache_creation_input_tokens"]


def test_errors_have_anthropics_form(http):
    for path, json, status, kind in (
        ("/v1/messages", {**ASKED, "max_tokens": 0}, 400, "invalid_request_error"),
        ("/v1/messages", {**ASKED, "model": "other"}, 404, "not_found_error"),
        ("/v1/messages/count_tokens", {}, 400, "invalid_request_error"),
        ("/v1/messages/batches", {}, 404, "not_found_error"),
        ("/v1/messages?gamma=1", ASKED, 400, "invalid_request_error"),
    ):
        answer = http.post(path, json=json)
        body = answer.json()
        assert answer.status_code == status
        assert body["type"] == "error"
        assert body["error"]["type"] == kind
        assert body["request_id"] == answer.headers["request-id"]
    # One that has been answered when its time is looked at is not late.
    asked = {**ASKED, "timeout": 0.001, "max_tokens": 500}
    answers = (http.post("/v1/messages", json=asked) for _ in range(50))
    late = next(answer for answer in answers if answer.status_code != 200)
    assert (late.status_code, late.json()["error"]["type"]) == (504, "timeout_error")


def test_keys_as_anthropics_clients_send_them(tmp_path, tiny_model):
    file = tmp_path / "keys"
    file.write_text("alice:alice-secret\n")
    with running(tmp_path / "state", model=tiny_model, api_key_file=file) as server:
        asked = {"max_tokens": 2, "messages": [{"role": "user", "content": "a"}]}
        with server.http() as http:
            for headers, status in (
                ({"x-api-key": "alice-secret", "anthropic-version": "2023-06-01"}, 200),
                ({"authorization": "Bearer alice-secret"}, 200),
                ({"authorization": "Bearer alice-secret", "x-api-key": "other"}, 200),
                ({"authorization": "Bearer other", "x-api-key": "alice-secret"}, 401),
                ({}, 401),
            ):
                answer = http.post("/v1/messages", json=asked, headers=headers)
                assert answer.status_code == status
            assert answer.json()["error"]["type"] == "authentication_error"
        (call,) = {call["key"] for call in server.service.records.history.calls}
        assert call == "alice"
        server.check()
