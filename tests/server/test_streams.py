"""Framing of events, clients that go away, clients that hardly read, deadlines."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import time
from unittest.mock import Mock

import httpx
import pytest

from onestem.request import Request, SamplingParams
from onestem.server.api.calls import Call
from onestem.server.api.reply import Reply
from onestem.server.errors import ApiError
from onestem.server.link.chunk_size import ChunkSize
from onestem.server.objects.tenants import EVERYBODY
from tests.server.harness import Held, running


@pytest.fixture(scope="module")
def slow(tmp_path_factory, tiny_model):
    """A server whose engine answers as long as it may, and whose steps can be held up."""
    with running(tmp_path_factory.mktemp("slow"), model=tiny_model) as server:
        yield server
        server.check()


def send(server, **body) -> socket.socket:
    """A connection on which a request was sent and nothing is read."""
    raw = json.dumps({"prompt": [7] * 20, "ignore_eos": True, **body}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    connection.sendall(head.encode() + raw)
    return connection


def test_framing(embedded):
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 5}
    with (
        embedded.http() as http,
        http.stream("POST", "/v1/chat/completions", json=body) as answer,
    ):
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert "content-length" not in answer.headers
        raw = b"".join(answer.iter_raw())
    events = raw.split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in events[:-2]]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert [chunk["choices"][0]["delta"].get("role") for chunk in chunks] == ["assistant"] + [
        None
    ] * (len(chunks) - 1)
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons[:-1] == [None] * (len(chunks) - 1)
    assert reasons[-1] in ("stop", "length")
    assert raw.isascii()


def test_a_client_that_goes_away_frees_its_pages(slow):
    for stream in (True, False):
        connection = send(slow, max_tokens=1900, stream=stream, n=4)
        slow.until(lambda: slow.service.client.num_running == 4)
        connection.close()
        slow.until(lambda: slow.service.client.num_running == 0)
        assert slow.check()["held"] == 0
        assert slow.service.records.history.calls[0]["finish"] == "abort"


def test_a_client_that_goes_away_while_it_waits(slow):
    """In the line in front of the engine, where nothing was computed for it."""
    slow.on_loop(setattr, slow.service.client.supervisor, "state", "starting")
    slow.on_loop(setattr, slow.service.client.supervisor, "check_up", lambda: None)
    try:
        connection = send(slow, max_tokens=5)
        slow.until(lambda: slow.service.client.requests.num_waiting == 1)
        connection.close()
        slow.until(lambda: slow.service.client.requests.num_waiting == 0)
    finally:
        del slow.service.client.supervisor.check_up
        slow.on_loop(setattr, slow.service.client.supervisor, "state", "running")


def test_a_reader_that_does_not_read_holds_up_nobody(slow):
    """Its pieces become one in the inbox; when it reads at last it gets every token, in order."""
    slow.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # connections have it too
    lazy = send(slow, max_tokens=400, stream=True, return_token_ids=True, n=8, seed=1)
    with slow.http() as http:
        body = {"prompt": [7] * 20, "ignore_eos": True, "max_tokens": 20, "n": 8}
        assert http.post("/v1/completions", json=body).status_code == 200
    slow.until(lambda: slow.service.client.num_running == 0)
    lazy.settimeout(30)
    raw = b""
    while b"[DONE]" not in raw:
        raw += lazy.recv(1 << 16)
    lazy.close()
    tokens: dict[int, list[int]] = {}
    lines = [line for line in raw.split(b"\n") if line.startswith(b"data: {")]
    for line in lines:
        choice = json.loads(line.removeprefix(b"data: "))["choices"][0]
        tokens.setdefault(choice["index"], []).extend(choice["token_ids"])
    assert len(lines) < 8 * 400
    name = json.loads(lines[0].removeprefix(b"data: "))["id"]
    assert tokens == slow.launcher.finished[f"{name}-0"]


@pytest.mark.parametrize("stream", [False, True])
def test_deadline(slow, stream):
    body = {"prompt": [7] * 20, "ignore_eos": True, "max_tokens": 1900, "n": 8, "stream": stream}
    with slow.http() as http:
        answer = http.post("/v1/completions", json={**body, "timeout": 0.05})
    if stream:
        events = answer.text.split("\n\n")
        assert events[-2] == "data: [DONE]"
        error = json.loads(events[-3].removeprefix("data: "))["error"]
    else:
        assert answer.status_code == 504
        assert answer.headers["x-should-retry"] == "false"
        error = answer.json()["error"]
    assert error["code"] == "deadline_exceeded"
    assert error["type"] == "timeout_error"
    assert error["param"] == "timeout"
    assert slow.check()["held"] == 0


def test_tokens_that_came_are_sent_before_the_error_that_ends_a_stream():
    """Also those that waited for a chunk's others."""
    now = time.monotonic()
    request = Request(request_id="r-0", prompt_token_ids=[1], params=SamplingParams())
    call = Call(
        id="r", kind="completion", model="m", tenant=EVERYBODY, requests=[request], stream=True,
        return_token_ids=True, chunk_size=ChunkSize(4), arrived=now, seconds=600.0,
    )  # fmt: skip
    service = Mock()
    service.model.tokenizer = None
    reply = Reply(call, service)

    async def streamed() -> list[bytes]:
        part, sent = call.inbox.part(0), []
        part.on_token(0, 5, "a")
        async for events in reply.events(None, {"prompt"}):
            if not sent:
                part.on_token(0, 6, "b")
                part.on_token(0, 7, "c")
                part.on_error(ApiError(504, "gone", param="timeout"))
            sent.append(events)
        return sent

    first, rest = asyncio.run(streamed())
    events = [json.loads(one.removeprefix("data: ")) for one in rest.decode().split("\n\n")[:-2]]
    assert b'"token_ids":[5]' in first
    assert events[0]["choices"][0]["text"] == "bc"
    assert events[0]["choices"][0]["token_ids"] == [6, 7]
    assert events[1]["error"]["message"] == "gone"
    assert events[1]["error"]["param"] is None  # the body has no timeout
    assert rest.endswith(b"data: [DONE]\n\n")
    service.client.requests.abort.assert_called_once()
    assert service.client.requests.abort.call_args.args[0] == "r-0"


@pytest.mark.parametrize("stream", [True, False])
def test_what_was_computed_of_a_request_that_is_cut_short_is_counted(slow, stream):
    client, history = slow.service.client, slow.service.records.history
    before, aborted = client.stats.get("output_tokens", 0), history.totals["aborted"]
    connection = send(slow, max_tokens=1900, stream=stream, n=4)
    slow.until(lambda: client.stats.get("output_tokens", 0) > before)
    connection.close()
    slow.until(lambda: history.totals["aborted"] > aborted)
    slow.check()
    assert history.calls[0]["finish"] == "abort"
    assert history.calls[0]["output_tokens"] == client.stats["output_tokens"] - before
    # It ran: the page says what its prompt found in the cache.
    assert history.calls[0]["reuse"] is not None


def test_the_openai_client_sees_an_error_in_a_stream(slow):
    import openai

    with openai.OpenAI(base_url=f"{slow.url}/v1", api_key="x", max_retries=0) as client:
        stream = client.completions.create(
            model=slow.service.model.names[0], prompt=[7] * 20, max_tokens=1900, n=8, stream=True,
            extra_body={"ignore_eos": True, "timeout": 0.05},
        )  # fmt: skip
        with pytest.raises(openai.APIError, match="no answer within"):
            for _ in stream:
                pass


def test_a_full_line_is_told_to_come_back(tmp_path, tiny_model):
    held = Held()
    with running(tmp_path, model=tiny_model, max_queue=3, change=held) as server:
        waiting = [send(server, max_tokens=2) for _ in range(3)]
        server.until(lambda: server.service.client.requests.num_waiting == 3)
        with server.http() as http:
            answer = http.post("/v1/completions", json={"prompt": [7], "max_tokens": 2})
            assert answer.status_code == 429
            assert 1 <= int(answer.headers["retry-after"]) <= 60
            assert answer.json()["error"]["code"] == "queue_full"
            held.let(math.inf)
            server.until(lambda: server.service.client.requests.num_waiting < 3)
            again = http.post("/v1/completions", json={"prompt": [7], "max_tokens": 2})
            assert again.status_code == 200
        for connection in waiting:
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
            connection.close()
        server.check()


def test_a_keep_alive_connection_survives_errors(slow):
    with httpx.Client(base_url=slow.url, limits=httpx.Limits(max_connections=1)) as http:
        for _ in range(3):
            assert http.post("/v1/completions", json={"prompt": "a", "bad": 1}).status_code == 400
            assert http.get("/health").status_code == 200
