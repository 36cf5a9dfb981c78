"""Server-sent events: framing, and a response that notices when nobody reads it any more."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

__all__ = ["COMMENT", "DONE", "EventStream", "disconnected", "event"]

DONE = b"data: [DONE]\n\n"
COMMENT = "comment"  # name in a request's `state` of what may be written between two events


def event(value: Mapping[str, Any], name: str | None = None) -> bytes:
    """One event. Characters above ASCII are escaped: no reader can take one for a line end."""
    head = f"event: {name}\n" if name is not None else ""
    return f"{head}data: {json.dumps(value, separators=(',', ':'))}\n\n".encode()


async def disconnected(receive: Receive) -> None:
    """Return when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends events as they come, up to `DONE`. However it ends, the generator is closed, whose
    `finally` lets go of what it holds.

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
        sender = asyncio.create_task(self._send_all(send))
        watcher = asyncio.create_task(disconnected(receive))
        try:
            await asyncio.wait(
                {sender, watcher}, timeout=self._seconds, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            for task in (sender, watcher):
                task.cancel()
            await asyncio.gather(sender, watcher, return_exceptions=True)
            await self._events.aclose()
        if sender.done() and not sender.cancelled():
            # A client that went away while we wrote to it is nobody's mistake.
            with contextlib.suppress(OSError):
                sender.result()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for chunk in self._events:
            more = not chunk.endswith(DONE)
            await send({"type": "http.response.body", "body": chunk, "more_body": more})
            if not more:
                return
        await send({"type": "http.response.body", "body": b"", "more_body": False})
