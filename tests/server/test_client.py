"""The server's side of the engine alone, with nobody at the other end."""

from __future__ import annotations

import asyncio
import socket
from unittest.mock import Mock

import pytest

from onestem.request import Request
from onestem.server.errors import ApiError, NoAnswerError
from onestem.server.link.client import EngineClient
from onestem.server.link.messages import (
    LENGTH,
    Add,
    Begun,
    Channel,
    Delta,
    Tokens,
    Unask,
    frame,
    read_message,
)
from onestem.server.link.process import connect


def deep(depth: int) -> list:
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


async def connected(client: EngineClient) -> socket.socket:
    ours, theirs = socket.socketpair()
    reader, writer = await connect(ours, "hello")
    client._link = type("Link", (), {"reader": reader, "writer": writer})()
    client.state = "running"
    return theirs


def test_what_cannot_be_written_down_is_an_error_at_once():
    async def ask() -> None:
        client = EngineClient(None, 4)
        with await connected(client):
            with pytest.raises(RecursionError):
                await client.ask("validate", deep(100_000))
            assert not client._questions._open
            client._link.writer.close()

    asyncio.run(ask())


def test_what_a_dead_engine_said_is_heard():
    async def listen() -> None:
        ours, theirs = socket.socketpair()
        reader, writer = await connect(ours, "hello")
        with theirs:  # "hello" stays unread, which is an error for who reads here
            for name in "ab":
                theirs.sendall(frame(Begun([name])))
        writer.write(frame("to nobody"))
        assert [(await read_message(reader)).request_ids for _ in range(2)] == [["a"], ["b"]]
        with pytest.raises(EOFError, match="has closed the channel"):
            await read_message(reader)
        writer.close()

    asyncio.run(listen())


def test_a_question_without_an_answer():
    async def ask() -> None:
        client = EngineClient(None, 4)
        with await connected(client) as theirs:
            with pytest.raises(NoAnswerError, match=r"within 0\.01 s"):
                await client.ask("validate", None, seconds=0.01, key="a", weight=2.0)
            channel = Channel(theirs)
            assert channel.receive() == "hello"
            asked = channel.receive()
            assert (asked.key, asked.weight) == ("a", 2.0)
            assert channel.receive() == Unask(asked.token)
            channel.close()
            assert not client._questions._open
            client._link.writer.close()

    asyncio.run(ask())


def test_a_keys_requests_count_as_waiting_until_the_engine_begins_them(monkeypatch):
    sent: list[Add] = []
    monkeypatch.setattr(EngineClient, "_send", lambda self, message: sent.append(message))
    client = EngineClient(None, queue_limit=3)
    client.state = "running"
    for i, key in enumerate("aab"):
        client.submit(Request(request_id=str(i), prompt_token_ids=[1]), key, i + 1, Mock())
    assert [(add.number, add.key, add.weight) for add in sent] == [
        (0, "a", 1), (1, "a", 2), (2, "b", 3),
    ]  # fmt: skip
    client.check_room("a", 1)
    with pytest.raises(ApiError, match="2 requests of this key are waiting, limit is 3"):
        client.check_room("a", 2)
    client._take(Begun(["0", "another"]))
    client.check_room("a", 2)
    assert client.by_key() == {"a": (1, 1), "b": (1, 0)}
    client._take_delta(Delta("0", [], finished=True))
    client.abort("2")
    assert client.by_key() == {"a": (1, 0)}
    assert client.num_waiting == 1
    client._go_down("it died")
    assert (client.by_key(), client.num_waiting) == ({"a": (1, 0)}, 1)


class Failing(Mock):
    """Listens, and fails at all it hears."""

    def _fail(self, *news) -> None:
        raise RuntimeError("a listener's fault")

    on_token = on_delta = on_restart = on_error = _fail


def test_a_listener_that_fails_keeps_nobody_else_from_hearing(monkeypatch):
    monkeypatch.setattr(EngineClient, "_send", lambda self, message: None)
    client = EngineClient(None, queue_limit=9)
    client.state = "running"
    good = Mock()
    for name, listener in (("a", Failing()), ("b", good), ("c", Failing()), ("d", good)):
        client.submit(Request(request_id=name, prompt_token_ids=[1]), "", 1, listener)
    columns = ([0, 1, 2, 3], [0] * 4, [7, 8, 9, 10], ["x"] * 4)
    client._take_tokens(Tokens(0, *columns))
    assert [call.args[1] for call in good.on_token.call_args_list] == [8, 10]
    assert list(client._entries) == ["b", "d"]
    for name in "ef":
        client.submit(Request(request_id=name, prompt_token_ids=[1]), "", 1, Failing())
    client._take_delta(Delta("e", [], finished=True))
    client._take(Begun(["f", "b"]))
    client._go_down("it died")
    good.on_restart.assert_called_once()
    client.fail_all(ApiError(503, "the end"))
    assert good.on_error.call_count == 2
    assert client.num_waiting == 2


def test_what_cannot_be_understood_ends_that_engine_alone():
    """It is ended, so that the next one is started; before, nobody listened any more."""
    killed = []

    class Link:
        def kill(self) -> None:
            killed.append(self)

        async def end(self) -> str:
            self.writer.close()
            return "killed"

    class Launcher:
        async def launch(self) -> Link:
            link, (ours, theirs) = Link(), socket.socketpair()
            link.reader, link.writer = await connect(ours, "hello")
            theirs.sendall(LENGTH.pack(5) + b"\xff" * 5)
            link.theirs = theirs
            return link

    async def listen() -> None:
        reason = await EngineClient(Launcher(), 4)._run_engine()
        assert reason.startswith("what the engine said was not understood: ")
        assert len(killed) == 1
        killed[0].theirs.close()

    asyncio.run(listen())
