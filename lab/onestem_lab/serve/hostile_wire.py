"""HTTP by hand: what clients do that a good library does not let them do."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

__all__ = ["Connection", "Received", "head_of", "post", "received"]

SMALL_BUFFER = 4096  # of a reader that is to fill up soon


@dataclass(frozen=True)
class Received:
    """An answer with its whole body."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def head_of(method: str, path: str, headers: Mapping[str, str]) -> bytes:
    """What stands before a body."""
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def post(path: str, key: str, body: bytes | Mapping[str, Any], **changes: str | None) -> bytes:
    """A request of JSON, the last of its connection. `changes` are of its headers, with `_` for
    `-`; None leaves one out."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {
        "host": "127.0.0.1",
        "authorization": f"Bearer {key}",
        "content-type": "application/json",
        "content-length": str(len(raw)),
        "connection": "close",
        **{name.replace("_", "-"): value for name, value in changes.items()},
    }
    there = {name: value for name, value in headers.items() if value is not None}
    return head_of("POST", path, there) + raw


class Connection:
    """One connection to a server. However it is left, it is closed.

    Args:
        small: take little at a time, so that who writes has to wait for us.
    """

    def __init__(self, url: str, *, small: bool = False) -> None:
        parts = urlsplit(url)
        self._place = (parts.hostname or "", parts.port or 80)
        self._small = small

    async def __aenter__(self) -> Connection:
        self._socket = socket.socket()
        self._socket.setblocking(False)
        if self._small:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
        try:
            await asyncio.get_running_loop().sock_connect(self._socket, self._place)
        except BaseException:
            self._socket.close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._socket.close()

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._socket, data)

    async def send_slowly(self, data: bytes, rng: random.Random) -> None:
        """In pieces, with pauses."""
        cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randint(2, 12)))
        pauses = [rng.uniform(0, 0.05) for _ in cuts]
        for start, end, pause in zip([0, *cuts], [*cuts, len(data)], [*pauses, 0.0], strict=True):
            await self.send(data[start:end])
            await asyncio.sleep(pause)

    async def read(self, most: int = 1 << 16) -> bytes:
        """What comes next; b"" at the end."""
        return await asyncio.get_running_loop().sock_recv(self._socket, most)

    async def rest(self) -> bytes:
        """All that comes until the other end closes."""
        parts = []
        while part := await self.read():
            parts.append(part)
        return b"".join(parts)

    def half_close(self) -> None:
        self._socket.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        """Close so that the other end gets a reset."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()


def received(raw: bytes) -> list[Received]:
    """The answers in what came until the end of a connection; raises `ValueError` for others."""
    answers = []
    while raw:
        answer, raw = _first(raw)
        if answer.status >= 200:
            answers.append(answer)
    return answers


def _first(raw: bytes) -> tuple[Received, bytes]:
    head, found, rest = raw.partition(b"\r\n\r\n")
    status, *lines = head.decode("latin-1").split("\r\n")
    if not found or not status.startswith("HTTP/1.1 "):
        raise ValueError(f"no answer: {raw[:200]!r}")
    named = (line.partition(":") for line in lines)
    headers = {name.lower(): value.strip() for name, _, value in named}
    number = int(status.split()[1])
    if number < 200:
        return Received(number, headers, b""), rest
    body, rest = _body(headers, rest)
    return Received(number, headers, body), rest


def _body(headers: Mapping[str, str], rest: bytes) -> tuple[bytes, bytes]:
    if headers.get("transfer-encoding") == "chunked":
        return _chunks(rest)
    length = int(headers.get("content-length", len(rest)))
    if len(rest) < length:
        raise ValueError(f"{len(rest)} of {length} bytes came")
    return rest[:length], rest[length:]


def _chunks(rest: bytes) -> tuple[bytes, bytes]:
    parts = []
    while True:
        size, found, rest = rest.partition(b"\r\n")
        length = int(size, 16) if found else -1
        if length < 0 or rest[length : length + 2] != b"\r\n":
            raise ValueError(f"a chunk breaks off behind {sum(map(len, parts))} bytes")
        parts.append(rest[:length])
        rest = rest[length + 2 :]
        if length == 0:
            return b"".join(parts), rest
