"""Requests that were aborted, until the engine has said what they have cost."""

from __future__ import annotations

import asyncio

from onestem.server.link.listeners import OnEnd, nobody
from onestem.server.link.messages import Delta
from onestem.server.logs import log

__all__ = ["PendingAborts"]


class PendingAborts:
    """What to call, by request id, when the engine is done with an aborted request."""

    def __init__(self) -> None:
        self._waiting: dict[str, OnEnd] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request_id: str, on_end: OnEnd) -> None:
        """Have `on_end` called when the engine is done with a request."""
        self._waiting[request_id] = on_end

    async def gone(self, request_id: str) -> None:
        """Wait until the engine is done with a request, if it was aborted: its id is free then."""
        if request_id not in self._waiting:
            return
        before, gone = self._waiting[request_id], asyncio.get_running_loop().create_future()

        def end(last: Delta | None) -> None:
            before(last)
            if not gone.done():
                gone.set_result(None)

        self._waiting[request_id] = end
        await gone

    def take(self, request_id: str, last: Delta | None) -> None:
        """The engine is done with a request, whether it was aborted or ended by itself."""
        on_end = self._waiting.pop(request_id, nobody)
        try:
            on_end(last)
        except Exception as error:  # of one request: the news of others follow
            log.exception("news_failed", error, id=request_id)

    def give_up(self) -> None:
        """The engine is gone."""
        for request_id in list(self._waiting):
            self.take(request_id, None)
