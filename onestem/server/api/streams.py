"""Server-sent events: framing, and a response that notices when its reader is gone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

if TYPE_CHECKING:
    from onestem.server.api.half_open import HalfOpenProtocol

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
COMMENT = "comment"  # key in a request's `state`: bytes that may be written between two events
WRITER = "writer"  # key there: the `HalfOpenProtocol`


def piece_writer(scope: Scope) -> HalfOpenProtocol | None:
    """The writer of a call's connection; None if its answer is not chunked."""
    is_chunked = scope["http_version"] == "1.1" and scope["method"] != "HEAD"
    return scope.get("state", {}).get(WRITER) if is_chunked else None


def event(value: Mapping[str, Any], name: str | None = None) -> bytes:
    """One event. Characters above ASCII are escaped: no reader can take one for a line end."""
    head = f"event: {name}\n" if name is not None else ""
    return f"{head}data: {json.dumps(value, separators=(',', ':'))}\n\n".encode()


async def while_there(
    work: Coroutine[Any, Any, T], receive: Receive, seconds: float | None = None
) -> asyncio.Task[T]:
    """Do something while the client is there, for at most `seconds`. Returns the task, which has
    ended; it was cancelled if the client is gone, or it took too long."""

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.create_task(work), asyncio.create_task(disconnected())
    try:
        await asyncio.wait({task, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
    return task


class EventStream(Response):
    """Sends events as they come, up to `DONE`. However it ends, the generator is closed: its
    `finally` frees what it holds.

    Args:
        events: whole events, one or several at a time.
        seconds: after which a reader that does not read is given up.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        seconds: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})}
        )
        del self.headers["content-length"]
        self._events = events
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.get("state", {})[COMMENT] = b":\n\n"
        sending = self._send_all(send, piece_writer(scope))
        try:
            sender = await while_there(sending, receive, self._seconds)
        finally:
            await self._events.aclose()
        if not sender.cancelled():
            # A client that went away while we wrote to it is no error. (`result` would raise it
            # here: an error that refers to this frame, and so to itself.)
            error = sender.exception()
            if error is not None and not isinstance(error, OSError):
                raise error

    async def _send_all(self, send: Send, writer: HalfOpenProtocol | None) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for chunk in self._events:
            more = not chunk.endswith(DONE)
            if more and chunk and writer is not None and writer.is_free:
                writer.write_piece(chunk)
                continue
            await send({"type": "http.response.body", "body": chunk, "more_body": more})
            if not more:
                return
        await send({"type": "http.response.body", "body": b"", "more_body": False})
