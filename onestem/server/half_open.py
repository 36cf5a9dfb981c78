"""Connections whose client has ended its sending, and may still read.

`shutdown(SHUT_WR)` after a request and a client that is gone look the same: both send an end of
file. What is written to one that is gone is answered by a reset, so something harmless is written:
`100 Continue` before an answer, a comment into a stream.
"""

from __future__ import annotations

import asyncio
import socket

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from onestem.server.streaming import COMMENT

__all__ = ["HalfOpenProtocol"]

FIRST_PAUSE = 0.05  # seconds before the client is asked whether it is there; then always twice that


class HalfOpenProtocol(H11Protocol):
    """uvicorn's, which answers complete requests also after an end of file."""

    _timer: asyncio.TimerHandle | None = None

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection stays open: while a complete request has no complete answer.

        HTTP/1.0 knows no `100 Continue`: there, who ends its sending counts as gone.
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

    def on_response_complete(self) -> None:
        """Nothing more can be asked after an end of file."""
        super().on_response_complete()
        if self._timer is not None and not self._owes_answer:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone, or has its answer."""
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)
