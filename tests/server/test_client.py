"""The server's side of the engine alone, with nobody at the other end."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from onestem.errors import ConfigError
from onestem.options import EngineOptions
from onestem.request import Request
from onestem.server.errors import ApiError, NoAnswerError
from onestem.server.link.channel import LENGTH, Channel, frame, read_message
from onestem.server.link.client import EngineClient
from onestem.server.link.messages import Add, Begun, Delta, Facts, Ready, Tokens, Unask
from onestem.server.link.open_requests import OpenRequests
from onestem.server.link.pending_calls import PendingCalls
from onestem.server.link.process import connect


def deep(depth: int) -> list:
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


class Launcher:
    """Starts engines that are the other end of a socket; the test speaks for them."""

    def __init__(self, *said: bytes) -> None:
        self.said = said or (frame(Ready(FACTS, 1)),)
        self.killed = 0

    async def launch(self) -> Launcher:
        ours, self.theirs = socket.socketpair()
        self.reader, self.writer = await connect(ours, "hello")
        for data in self.said:
            self.theirs.sendall(data)
        return self

    def kill(self) -> None:
        self.killed += 1

    async def end(self) -> str:
        self.writer.close()
        self.theirs.close()
        return "it ended"


FACTS = Facts(options=EngineOptions(), vocab_size=8, kv_tokens=64, kv_bytes_per_token=1)


def test_what_cannot_be_written_down_is_an_error_at_once():
    async def ask() -> None:
        client = EngineClient(launcher := Launcher(), 4)
        await client.start()
        with pytest.raises(RecursionError):
            await client.ask("validate", deep(100_000))
        calls = PendingCalls(client.supervisor.send)
        with pytest.raises(RecursionError):
            await calls.ask("validate", deep(100_000), None)
        assert not len(calls)
        launcher.theirs.shutdown(socket.SHUT_RDWR)
        await client.stop()

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
        client = EngineClient(launcher := Launcher(), 4)
        await client.start()
        calls = PendingCalls(client.supervisor.send)
        with pytest.raises(NoAnswerError, match=r"within 0\.01 s"):
            await calls.ask("validate", None, 0.01, key="a", weight=2.0)
        assert not len(calls)
        channel = Channel(launcher.theirs.dup())
        assert channel.receive() == "hello"
        asked = channel.receive()
        assert (asked.key, asked.weight) == ("a", 2.0)
        assert channel.receive() == Unask(asked.token)
        channel.close()
        await client.stop()

    asyncio.run(ask())


def opened(queue_limit: int, sent: list | None = None) -> OpenRequests:
    """Requests of an engine that runs; what it is sent goes into `sent`."""
    send = ([] if sent is None else sent).append
    engine = SimpleNamespace(state="running", is_connected=True, send=send)
    return OpenRequests(engine, queue_limit)


def test_a_keys_requests_count_as_waiting_until_the_engine_begins_them():
    sent: list[Add] = []
    requests = opened(3, sent)
    for i, key in enumerate("aab"):
        requests.submit(Request(request_id=str(i), prompt_token_ids=[1]), key, i + 1, Mock())
    assert [(add.number, add.key, add.weight) for add in sent] == [
        (0, "a", 1), (1, "a", 2), (2, "b", 3),
    ]  # fmt: skip
    requests.check_room("a", 1)
    with pytest.raises(ApiError, match="2 requests of this key are waiting, limit is 3"):
        requests.check_room("a", 2)
    requests.take_begun(Begun(["0", "another"]))
    requests.check_room("a", 2)
    assert requests.by_key() == {"a": (1, 1), "b": (1, 0)}
    requests.take_delta(Delta("0", [], finished=True))
    requests.abort("2")
    assert requests.by_key() == {"a": (1, 0)}
    assert requests.num_waiting == 1
    requests.take_back()
    assert (requests.by_key(), requests.num_waiting) == ({"a": (1, 0)}, 1)


class Failing(Mock):
    """Listens, and fails at all it hears."""

    def _fail(self, *news) -> None:
        raise RuntimeError("a listener's fault")

    on_token = on_delta = on_restart = on_error = _fail


def test_a_listener_that_fails_keeps_nobody_else_from_hearing():
    requests = opened(9)
    good = Mock()
    for name, listener in (("a", Failing()), ("b", good), ("c", Failing()), ("d", good)):
        requests.submit(Request(request_id=name, prompt_token_ids=[1]), name, 1, listener)
    columns = ([0, 1, 2, 3], [0] * 4, [7, 8, 9, 10], ["x"] * 4)
    requests.take_tokens(Tokens(0, *columns))
    assert [call.args[1] for call in good.on_token.call_args_list] == [8, 10]
    assert list(requests.by_key()) == ["b", "d"]
    for name in "ef":
        requests.submit(Request(request_id=name, prompt_token_ids=[1]), "", 1, Failing())
    requests.take_delta(Delta("e", [], finished=True))
    requests.take_begun(Begun(["f", "b"]))
    requests.take_back()
    good.on_restart.assert_called_once()
    requests.fail_all(ApiError(503, "the end"))
    assert good.on_error.call_count == 2
    assert requests.num_waiting == 2


def test_what_cannot_be_understood_ends_that_engine_alone():
    """It is ended, so that the next one is started; before, nobody listened any more."""
    launcher = Launcher(LENGTH.pack(5) + b"\xff" * 5)
    with pytest.raises(ConfigError, match=r"^what the engine said was not understood: "):
        asyncio.run(EngineClient(launcher, 4).start())
    assert launcher.killed == 1
