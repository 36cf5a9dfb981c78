"""Connections whose client has ended its sending, and may still read.

`shutdown(SHUT_WR)` after a request and a client that is gone look the same: both send an end of
file. Only a client that is gone answers a write with a reset. So something harmless is written:
`100 Continue` before an answer, a comment into a stream.
"""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any
from weakref import ref

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from onestem.server.api.streams import COMMENT, WRITER
from onestem.server.errors import ApiError

# A reader that takes nothing of a whole answer for this long is given up: until then the answer
# is in memory. (A stream has a deadline.)
READER_SECONDS = 60.0
FIRST_PAUSE = 0.05  # seconds before the first look whether the client is there; each next is twice


class HalfOpenProtocol(H11Protocol):
    """uvicorn's protocol, but it also answers complete requests after an end of file."""

    _timer: asyncio.TimerHandle | None = None
    _reader: asyncio.TimerHandle | None = None

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, {**app_state, WRITER: self}, _loop)

    @property
    def is_free(self) -> bool:
        """Whether the client is there and reads; otherwise ASGI's `send` waits for it."""
        cycle, is_closing = self.cycle, self.transport.is_closing()
        return not (cycle is None or self.flow.write_paused or cycle.disconnected or is_closing)

    def write_piece(self, data: bytes) -> None:
        """Write bytes as one chunk, as h11 would, but past its layers and ASGI's, in a third of
        their time: streams have a piece for each token. Only while `is_free`."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection stays open: while a complete request has no complete answer.

        HTTP/1.0 knows no `100 Continue`: there, a client that ends its sending counts as gone.
        """
        if self._timer is None and self._owes_answer and self.scope["http_version"] == "1.1":
            self._look_later(FIRST_PAUSE)
        return self._timer is not None

    @property
    def _owes_answer(self) -> bool:
        cycle = self.cycle
        return cycle is not None and not cycle.more_body and not cycle.response_complete

    def _look_later(self, pause: float) -> None:
        self._timer = self.loop.call_later(pause, self._look, pause)

    def _look(self, pause: float) -> None:
        connection = self.transport.get_extra_info("socket")
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self._write_harmless()
            self._look_later(2 * pause)

    def _write_harmless(self) -> None:
        comment = self.cycle.scope["state"].get(COMMENT)
        event: h11.Event | None = None
        if not self.cycle.response_started:
            event = h11.InformationalResponse(status_code=100, headers=[], reason="Continue")
        elif comment is not None and not self.cycle.response_complete:
            event = h11.Data(data=comment)
        if event is not None:
            self.transport.write(self.conn.send(event) or b"")

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP."""
        body = json.dumps(ApiError(400, f"the request cannot be read: {msg}").body()).encode()
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        length = (b"content-length", str(len(body)).encode())
        head = h11.Response(status_code=400, headers=[*headers, length], reason=b"Bad Request")
        for part in (head, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(part) or b"")
        self.transport.close()

    def on_response_complete(self) -> None:
        """Nothing more can be asked after an end of file."""
        super().on_response_complete()
        self.watch_reader()
        if self._timer is not None and not self._owes_answer:
            self.transport.close()

    def watch_reader(self) -> None:
        """Look later whether the client has taken some of what it has not read."""
        unread, cycle = self.transport.get_write_buffer_size(), self.cycle
        if unread and cycle is not None and self._reader is None:
            self._reader = self.loop.call_later(
                READER_SECONDS, self._give_up_reader, unread, ref(cycle)
            )

    def _give_up_reader(self, unread: int, cycle: ref[RequestResponseCycle]) -> None:
        """Give up a client that has taken nothing of what it had not read. Where a further answer
        was begun since, that is not known: look again."""
        self._reader = None
        if self.cycle is cycle() and self.transport.get_write_buffer_size() >= unread:
            self.transport.abort()
        else:
            self.watch_reader()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone, or has its answer."""
        for timer in (self._timer, self._reader):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        # Both refer back here: the last call, with its body, would stay until the collector comes.
        self.cycle, self.scope, self.app_state = None, None, {}  # type: ignore[assignment]
