"""How the engine process is started and ended, and how both processes collect garbage less."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
from dataclasses import dataclass

from onestem.options import EngineOptions
from onestem.processes import python_module
from onestem.server.link.channel import BUFFER_BYTES, frame

LOADER = "onestem.server.link.worker:load"


async def connect(
    end: socket.socket, first: object
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """The server's end of a channel, as streams; sends the first message."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    loop, reader = asyncio.get_running_loop(), _Reader(end)
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await loop.create_connection(lambda: protocol, sock=end)
    writer = asyncio.StreamWriter(transport, protocol, reader, loop)
    writer.write(frame(first))
    return reader, writer


class _Reader(asyncio.StreamReader):
    """Reads to the end of what was sent, also where writing to the dead process failed first: then
    asyncio would drop what has not been read, such as the last request that was begun."""

    def __init__(self, end: socket.socket) -> None:
        super().__init__(BUFFER_BYTES)
        self._rest = end.dup()
        self._rest.setblocking(False)

    def set_exception(self, exc: Exception) -> None:
        with contextlib.suppress(OSError):
            while data := self._rest.recv(BUFFER_BYTES):
                self.feed_data(data)
        self.feed_eof()

    def feed_eof(self) -> None:
        self._rest.close()
        super().feed_eof()


class EngineProcess:
    """Starts `python -m onestem.server.link.worker`.

    Args:
        factory: `module:function` that makes an engine from the options.
        logs: level and style of its log (`logs.set_up`); none: as Python has them.
    """

    def __init__(
        self, options: EngineOptions, factory: str = LOADER, logs: tuple[str, ...] = ()
    ) -> None:
        self._first = factory, options, logs

    async def launch(self) -> ProcessLink:
        """Start a process; it says `Ready` when it has loaded its model."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.to_thread(self._start, theirs)
        reader, writer = await connect(ours, self._first)
        return ProcessLink(process, reader, writer)

    def _start(self, end: socket.socket) -> subprocess.Popen[bytes]:
        command = python_module("onestem.server.link.worker", str(end.fileno()))
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno(), pass_fds=[end.fileno()]
        )


@dataclass
class ProcessLink:
    """A started engine."""

    process: subprocess.Popen[bytes]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def kill(self) -> None:
        """End the engine at once, whatever it does."""
        self.process.kill()
        self.writer.close()

    async def end(self) -> str:
        """Make sure that the engine is gone; returns how it ended."""
        self.writer.close()
        try:
            code = await asyncio.to_thread(self.process.wait, 10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = await asyncio.to_thread(self.process.wait)
        return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
