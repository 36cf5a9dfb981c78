"""OpenAI's responses over HTTP; `test_clients.py` has its client."""

from __future__ import annotations

import pytest

from onestem.server.api import reply
from onestem.server.errors import ApiError
from tests.adapters.conversations import CHAT, RESPONSES
from tests.adapters.events import events_of, folded_response
from tests.server.harness import running

ASKED = {"model": "embedded", "max_output_tokens": 8, "input": "Is it warm?", "temperature": 0}


@pytest.fixture(scope="module")
def http(embedded):
    with embedded.http() as client:
        yield client


def test_a_conversation_is_a_hit_whichever_api_it_comes_through(http):
    """All of its tokens but the last one, which is always computed."""
    chat = http.post("/v1/chat/completions", json=CHAT).json()
    num_tokens = chat["usage"]["prompt_tokens"]
    for stream in (False, True):
        answer = http.post("/v1/responses", json={**RESPONSES, "stream": stream})
        made = folded_response(events_of(answer.content)) if stream else answer.json()
        usage = made["usage"]
        assert usage["input_tokens"] == num_tokens
        assert usage["input_tokens_details"]["cached_tokens"] == num_tokens - 1
        assert usage["output_tokens"] == chat["usage"]["completion_tokens"]
        texts = [item["content"][0]["text"] for item in made["output"] if item["type"] == "message"]
        assert "".join(texts) == (chat["choices"][0]["message"]["content"] or "")


def test_a_stream_is_the_whole_response_and_is_stored(http):
    asked = {**ASKED, "temperature": 1.5, "seed": 7, "max_output_tokens": 20}
    whole = http.post("/v1/responses", json=asked).json()
    answer = http.post("/v1/responses", json={**asked, "stream": True})
    folded = folded_response(events_of(answer.content))
    assert [item["content"] for item in folded["output"]] == [
        item["content"] for item in whole["output"]
    ]
    assert folded["status"] == whole["status"]
    for made in (whole, folded):
        assert http.get(f"/v1/responses/{made['id']}").json() == made


def test_a_conversation_goes_on_from_stored_answers(http):
    """With the same prompt as if all were sent again: it is in the cache."""
    sent = [{"role": "user", "content": "Is it warm?"}]
    name = None
    for number in range(3):
        asked = {**ASKED, "previous_response_id": name, "input": sent[-1:]}
        made = http.post("/v1/responses", json=asked).json()
        assert made["previous_response_id"] == name
        again = http.post("/v1/responses", json={**ASKED, "input": sent, "store": False}).json()
        assert http.get(f"/v1/responses/{again['id']}").status_code == 404
        usage = again["usage"]
        assert usage["input_tokens"] == made["usage"]["input_tokens"]
        assert usage["input_tokens_details"]["cached_tokens"] == usage["input_tokens"] - 1
        sent += [*made["output"], {"role": "user", "content": f"And {number}?"}]
        name = made["id"]
    deleted = http.delete(f"/v1/responses/{name}").json()
    assert deleted == {"id": name, "object": "response", "deleted": True}
    for method, path, json in (
        ("POST", "/v1/responses", {**ASKED, "previous_response_id": name}),
        ("GET", f"/v1/responses/{name}", None),
        ("DELETE", f"/v1/responses/{name}", None),
    ):
        answer = http.request(method, path, json=json)
        assert answer.status_code == 404
        assert name in answer.json()["error"]["message"]
        assert answer.json()["error"]["code"] == "response_not_found"


def test_keys_have_their_own_answers(tmp_path, tiny_model):
    file = tmp_path / "keys"
    file.write_text("alice:alice-secret\nbob:bob-secret-1\n")
    with running(tmp_path / "state", model=tiny_model, api_key_file=file) as server:
        asked = {"max_output_tokens": 2, "input": "a"}
        with server.http("alice-secret") as alice, server.http("bob-secret-1") as bob:
            name = alice.post("/v1/responses", json=asked).json()["id"]
            assert alice.get(f"/v1/responses/{name}").status_code == 200
            for answer in (
                bob.get(f"/v1/responses/{name}"),
                bob.delete(f"/v1/responses/{name}"),
                bob.post("/v1/responses", json={**asked, "previous_response_id": name}),
            ):
                assert answer.status_code == 404
            assert alice.delete(f"/v1/responses/{name}").status_code == 200
        server.check()


def test_a_stream_that_fails_says_so_in_an_event(embedded, monkeypatch):
    def fail(*_):
        raise ApiError(503, "the engine is down")

    monkeypatch.setattr(reply, "events", fail)
    with embedded.http() as http:
        answer = http.post("/v1/responses", json={**ASKED, "stream": True})
        assert answer.status_code == 200
        created, _, failed = events_of(answer.content)
        assert created["response"]["id"] == failed["response"]["id"]
        assert failed["response"]["error"]["message"] == "the engine is down"
        message = {"max_tokens": 5, "messages": [{"role": "user", "content": "a"}], "stream": True}
        (event,) = events_of(http.post("/v1/messages", json=message).content)
        assert event["error"] == {"type": "overloaded_error", "message": "the engine is down"}
