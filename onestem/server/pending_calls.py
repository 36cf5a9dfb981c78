"""What the engine was asked and has not answered yet."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from onestem.errors import RequestError
from onestem.server.errors import ApiError, NoAnswerError
from onestem.server.messages import Answered, Ask

__all__ = ["PendingCalls"]


class PendingCalls:
    """Sends questions and hands each answer to who asked.

    Args:
        send: a message to the engine process.
    """

    def __init__(self, send: Callable[[Ask], object]) -> None:
        self._send = send
        self._open: dict[int, asyncio.Future[Any]] = {}
        self._tokens = itertools.count()

    def __len__(self) -> int:
        return len(self._open)

    async def ask(self, what: str, value: Any, seconds: float) -> Any:
        """The answer to a question (see `messages.Ask`).

        Raises:
            NoAnswerError: none within `seconds`.
            RequestError: the engine says no; ApiError: it failed to find out, or is gone.
        """
        token = next(self._tokens)
        future = self._open[token] = asyncio.get_running_loop().create_future()
        try:
            self._send(Ask(token, what, value))
            return await asyncio.wait_for(future, seconds)
        except TimeoutError:
            raise NoAnswerError(seconds) from None
        finally:
            self._open.pop(token, None)

    def take(self, answer: Answered) -> None:
        """An answer has come."""
        future = self._open.get(answer.token)
        if future is None or future.done():
            return
        if answer.error is None:
            future.set_result(answer.value)
        elif answer.fault:
            future.set_exception(RequestError(answer.error))
        else:
            future.set_exception(ApiError(500, answer.error, code="engine_error"))

    def fail(self, error: ApiError) -> None:
        """The engine is gone."""
        for future in self._open.values():
            if not future.done():
                future.set_exception(error)
