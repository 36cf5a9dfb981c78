"""The server's side of the engine alone, with nobody at the other end."""

from __future__ import annotations

import asyncio
import socket

import pytest

from onestem.server.errors import NoAnswerError
from onestem.server.link.client import EngineClient
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


def test_a_question_without_an_answer():
    async def ask() -> None:
        client = EngineClient(None, 4)
        with await connected(client):
            with pytest.raises(NoAnswerError, match=r"within 0\.01 s"):
                await client.ask("validate", None, seconds=0.01)
            assert not client._questions._open
            client._link.writer.close()

    asyncio.run(ask())
