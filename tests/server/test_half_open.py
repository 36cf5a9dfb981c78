"""Clients that end their sending and wait, and clients that are gone."""

from __future__ import annotations

import asyncio
import json
import math
import re
import socket
import struct
from contextlib import ExitStack
from http.client import HTTPResponse
from unittest.mock import Mock

import pytest

from onestem.server.api import half_open as http_module
from onestem.server.api.half_open import HalfOpenProtocol
from onestem.server.run import bind
from tests.server.harness import WAIT, Held, running

BODY = {"prompt": "Hello", "max_tokens": 8, "ignore_eos": True, "temperature": 0}


def request(version: str = "1.1", **body) -> bytes:
    raw = json.dumps({**BODY, **body}).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nHost: localhost\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    return head.encode() + raw


def connect(server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), WAIT)


def read(connection: socket.socket) -> bytes:
    """All that comes until the other end has closed."""
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def text_of(answer: HTTPResponse) -> str:
    """Of a completion, whole or streamed."""
    raw = answer.read().decode()
    if answer.headers["content-type"] == "application/json":
        return json.loads(raw)["choices"][0]["text"]
    events = [line.removeprefix("data: ") for line in raw.split("\n") if line.startswith("data")]
    assert events.pop() == "[DONE]"
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


def test_a_reader_that_takes_nothing_of_its_answer_is_given_up(tmp_path, tiny_model, monkeypatch):
    """A whole answer has no deadline. Who reads it gets all of it."""
    monkeypatch.setattr(http_module, "READER_SECONDS", 0.5)
    large = request(n=100, logprobs=20, max_tokens=30)
    with running(tmp_path, model=tiny_model) as server, ExitStack() as stack:
        server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
        idle, reading = (stack.enter_context(socket.socket()) for _ in range(2))
        for connection in (idle, reading):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
            connection.settimeout(WAIT)
            connection.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
        idle.sendall(large)
        connections = server.server.server_state.connections
        server.until(lambda: any(one.transport.get_write_buffer_size() for one in connections))
        server.until(lambda: len(connections) == 1)
        head, _, body = read(idle).partition(b"\r\n\r\n")
        declared = re.search(rb"content-length: (\d+)", head)
        assert declared is not None
        assert len(body) < int(declared[1])
        reading.sendall(large)
        answer = HTTPResponse(reading)
        answer.begin()
        assert len(json.loads(answer.read())["choices"]) == 100
        server.check()


def test_a_reader_of_two_answers_is_not_given_up():
    """What is unread of the second says nothing of the first."""
    protocol = HalfOpenProtocol.__new__(HalfOpenProtocol)
    protocol.loop, protocol.transport, protocol.cycle = Mock(), Mock(), Mock()
    protocol.transport.get_write_buffer_size.return_value = 100
    protocol.watch_reader()
    protocol.cycle = Mock()
    for aborted in (False, True):  # of the second, nothing was taken either
        _, look, *arguments = protocol.loop.call_later.call_args.args
        look(*arguments)
        assert protocol.transport.abort.called is aborted


@pytest.fixture
def held(tmp_path, tiny_model):
    """A server whose engine waits until it is told to go on."""
    change = Held()
    with running(tmp_path, model=tiny_model, change=change) as server:
        yield server, change
        change.let(math.inf)
        server.check()


@pytest.mark.parametrize("stream", [False, True])
def test_who_ends_its_sending_gets_the_answer(held, stream):
    server, change = held
    with connect(server) as connection:
        connection.sendall(request(stream=stream))
        connection.shutdown(socket.SHUT_WR)
        # What it is asked whether it is there with: only then the engine goes on.
        asked = b"\r\n:\n\n\r\n" if stream else b"HTTP/1.1 100 Continue\r\n\r\n"
        begun = b""
        while asked not in begun:
            begun += (part := connection.recv(1))
            assert part, begun
        assert begun.count(b"HTTP/1.1 ") == 1
        change.let(math.inf)
        rest = read(connection)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(begun + rest)
        theirs.shutdown(socket.SHUT_WR)
        answer = HTTPResponse(ours)
        answer.begin()
        with server.http() as http:
            whole = http.post("/v1/completions", json=BODY).json()["choices"][0]["text"]
        assert (answer.status, text_of(answer)) == (200, whole)


def test_a_quick_answer_and_what_was_asked_behind_it(embedded):
    asked = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with connect(embedded) as connection:
        connection.sendall(asked * 3)
        connection.shutdown(socket.SHUT_WR)
        assert read(connection).count(b"HTTP/1.1 200 OK\r\n") == 3


@pytest.mark.parametrize("sent", [b"", request()[:-1], request()[:30]])
def test_an_incomplete_request_gets_no_answer(embedded, sent):
    with connect(embedded) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        assert read(connection) == b""


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("end", ["close", "reset", "half, then reset"])
def test_who_is_gone_ends_its_request(held, version, stream, end):
    server, _ = held
    client = server.service.client
    connection = connect(server)
    connection.sendall(request(version, stream=stream))
    server.until(lambda: len(client.requests))
    if stream:  # closing with bytes that were not read would be a reset
        assert connection.recv(1 << 16).endswith(b"\r\n\r\n")
    if end.startswith("half"):
        connection.shutdown(socket.SHUT_WR)
    if end.endswith("reset"):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    # The engine stands still: nothing but the end of the connection lets go of the request.
    server.until(lambda: not len(client.requests))


def test_small_pieces_are_sent_at_once():
    """Else a client's kernel acknowledges the first piece of an answer 40 ms late, and the second
    waits for that (Nagle's algorithm)."""

    async def scene() -> int:
        served: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = writer.get_extra_info("socket")
            served.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        async with await asyncio.start_server(note, sock=bind("127.0.0.1", 0)) as server:
            _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            found = await served
            writer.close()
        return found

    assert asyncio.run(scene())


def test_streams_are_the_same_in_both_versions_of_http(embedded):
    """In 1.1 pieces are written past h11, in its own framing; 1.0 knows no pieces."""
    bodies = []
    for version in ("1.0", "1.1"):
        with connect(embedded) as connection:
            connection.sendall(request(version, stream=True, max_tokens=9, temperature=0, n=2))
            answer = HTTPResponse(connection)
            answer.begin()
            assert (answer.getheader("Transfer-Encoding") == "chunked") == (version == "1.1")
            lines = answer.read().decode().splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert lines[-2] == "data: [DONE]"
        bodies.append(["".join(e["choices"][0]["text"] for e in events
                               if e["choices"][0]["index"] == i) for i in (0, 1)])  # fmt: skip
    assert bodies[0] == bodies[1]
    assert all(bodies[0])
