"""The fake OpenAI server on a real socket, in a thread: every event at once, no waits."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from lab.tests.load.fake_server import Spoil, events_of


class SocketServer:
    def __init__(self, spoil: Spoil) -> None:
        self.spoil = spoil
        self.bodies: list[dict[str, object]] = []
        self.keys: set[str] = set()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                await self.answer(head, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def answer(
        self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        lines = head.decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:] if ": " in line)
        self.keys.add(headers.get("authorization", ""))
        if lines[0].startswith("GET"):
            listed = json.dumps({"data": [{"id": "fake-model"}]}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(listed), listed))
            return
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        number = len(self.bodies)
        self.bodies.append(body)
        events = events_of(number, body)
        # The first request is the warm-up.
        events = self.spoil(events) if number == 3 else events
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        for event in [*events, b""]:
            writer.write(b"%x\r\n%s\r\n" % (len(event), event))
            await writer.drain()


@contextmanager
def running(spoil: Spoil = lambda events: events) -> Iterator[tuple[str, SocketServer]]:
    """The base URL of a server, and what it has received."""
    fake = SocketServer(spoil)
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(fake.handle, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", fake
    finally:
        asyncio.run_coroutine_threadsafe(_close(server), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _close(server: asyncio.Server) -> None:
    server.close()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
