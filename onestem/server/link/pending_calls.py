"""What the engine was asked and has not answered yet."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from onestem.errors import RequestError
from onestem.server.errors import ApiError, BusyError, NoAnswerError
from onestem.server.link.messages import Answered, Ask, Unask


class PendingCalls:
    """Sends questions and hands each answer to its asker.

    Args:
        send: a message to the engine process.
    """

    def __init__(self, send: Callable[[Ask | Unask], object]) -> None:
        self._send = send
        self._open: dict[int, asyncio.Future[Answered]] = {}
        self._tokens = itertools.count()

    def __len__(self) -> int:
        return len(self._open)

    async def ask(
        self, what: str, value: Any, seconds: float | None, key: str = "", weight: float = 1.0
    ) -> Any:
        """The answer to a question (see `messages.Ask`), which may take `seconds`; None: any time.
        The engine hears of it if nobody waits any more for a request to be validated.

        Raises:
            NoAnswerError: none within `seconds`.
            BusyError: the machine has no time or memory left for it.
            RequestError: the engine refuses; ApiError: it failed to find out, or is gone.
        """
        token = next(self._tokens)
        self._send(Ask(token, what, value, key, weight))
        future = self._open[token] = asyncio.get_running_loop().create_future()
        try:
            answer = await asyncio.wait_for(future, seconds)
        except TimeoutError:
            raise NoAnswerError(seconds or 0.0) from None
        finally:
            self._open.pop(token, None)
            if what == "validate" and future.cancelled():
                self._send(Unask(token))
        if answer.error is None:
            return answer.value
        if not answer.lasts:
            raise BusyError(answer.error)
        if answer.fault:
            raise RequestError(answer.error)
        raise ApiError(500, answer.error, code="engine_error")

    def take(self, answer: Answered) -> None:
        """Hand an answer to its asker; ignored where nobody waits any more."""
        future = self._open.get(answer.token)
        # Also one that is an error: a future with an exception stays until the collector comes,
        # with all that its frames have.
        if future is not None and not future.done():
            future.set_result(answer)

    def fail(self, error: ApiError) -> None:
        """Have `ask` raise an error wherever it waits: the engine is gone."""
        for future in self._open.values():
            if not future.done():
                future.set_exception(error)
