"""Messages between the server and the engine process on a socket: a length, then a pickled value.

Both ends are the same program on the same machine, over a socket that no other process holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import socket
import struct
from typing import Any

LENGTH = struct.Struct("!Q")
BUFFER_BYTES = 4 << 20


def frame(message: object) -> bytes:
    """A message's bytes. Raises what pickle does of one that it cannot write."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(body)) + body


class Channel:
    """The engine process's end: blocking. One thread sends, another receives."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        end.setblocking(True)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        self._file = end.makefile("rb")

    def send(self, message: object) -> None:
        """Send a message, however long the other end takes to read; raises `OSError` if it is
        gone."""
        self._socket.sendall(frame(message))

    def receive(self) -> Any:
        """The next message; raises `EOFError` when the other end is gone."""
        (size,) = LENGTH.unpack(self._read(LENGTH.size))
        return pickle.loads(self._read(size))

    def _read(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) < size:
            raise EOFError("the other process has closed the channel")
        return data

    def close(self) -> None:
        """Close the channel; this also wakes a thread that is receiving."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._file.close()
        self._socket.close()


async def read_message(reader: asyncio.StreamReader) -> Any:
    """The next message at the server's end; raises `EOFError` when the engine process is gone."""
    try:
        (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        return pickle.loads(await reader.readexactly(size))
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise EOFError("the engine process has closed the channel") from error
