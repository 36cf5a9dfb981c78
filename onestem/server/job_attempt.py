"""One attempt at a job: `run_job` in a thread of its own, the engine process at the other end."""

from __future__ import annotations

import asyncio
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

from onestem.batch import EngineDiedError, Progress
from onestem.errors import RequestError
from onestem.request import Request, RequestOutput
from onestem.server.client import EngineClient
from onestem.server.errors import ApiError, EngineDownError
from onestem.server.messages import JobOutput, JobRequests

__all__ = ["JobAttempt", "StoppedError", "Told", "in_thread"]

WINDOW = 512  # requests of a job that the engine process holds and has not taken
PROGRESS_SECONDS = 1.0

T = TypeVar("T")


class StoppedError(Exception):
    """The server is going, or the job was cancelled."""


class _Sink:
    """Carries a job's outputs from the event loop to its thread."""

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[RequestOutput | Exception | int] = queue.SimpleQueue()

    def on_output(self, output: JobOutput) -> None:
        self.inbox.put(output.output)

    def on_pulled(self, count: int) -> None:
        self.inbox.put(count)

    def on_down(self) -> None:
        self.inbox.put(EngineDiedError("the engine process ended"))


class JobAttempt:
    """One attempt at a job, in its thread."""

    def __init__(
        self, batch_id: str, client: EngineClient, loop: asyncio.AbstractEventLoop, salt: str
    ) -> None:
        self._name = batch_id
        self._client = client
        self._loop = loop
        self._salt = salt
        self._sink = _Sink()
        self._stop: Exception | None = None
        self.num_answered = 0

    def stop(self, reason: Exception) -> None:
        self._stop = reason
        self._sink.inbox.put(reason)

    def check(self) -> None:
        if self._stop is not None:
            raise self._stop

    def _on_loop(self, call: Callable[..., T], *arguments: Any) -> T:
        async def run() -> T:
            return call(*arguments)

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    def validate(self, check: Callable[[Request], object], request: Request) -> None:
        """As the engine would; a grammar is compiled there. What it cannot find out is the line's
        error, unless it is gone.

        Raises:
            RequestError: the line cannot be answered; EngineDownError: the engine is not there.
        """
        self.check()
        check(request)
        if request.params.response_format is not None or request.pml is not None:
            asked = self._client.ask("validate", request)
            try:
                asyncio.run_coroutine_threadsafe(asked, self._loop).result()
            except EngineDownError:
                raise
            except ApiError as error:
                raise RequestError(error.message) from error

    def __call__(self, requests: Iterable[Request]) -> Iterator[RequestOutput]:
        """Hand requests over as there is room for them, yield outputs as they come."""
        source = iter(requests)
        names: dict[str, str] = {}
        sent = pulled = 0
        exhausted = False
        self._on_loop(self._client.open_job, self._name, self._sink)
        try:
            while not exhausted or names:
                if not exhausted and sent - pulled <= WINDOW // 2:
                    more = list(islice(source, WINDOW - (sent - pulled)))
                    exhausted = not more
                    sent += len(more)
                    self._hand_over(more, names)
                    continue
                news = self._sink.inbox.get()
                self.check()
                if isinstance(news, EngineDiedError):
                    raise EngineDiedError(str(news), list(names.values()))
                if isinstance(news, Exception):
                    raise news
                if isinstance(news, int):
                    pulled = news
                elif news.finished:
                    self.num_answered += 1
                    yield dataclasses.replace(news, request_id=names.pop(news.request_id))
        finally:
            self._on_loop(self._client.close_job, self._name)

    def _hand_over(self, requests: list[Request], names: dict[str, str]) -> None:
        self.check()
        renamed = []
        for request in requests:
            name = f"{self._name}/{request.request_id}"
            names[name] = request.request_id
            renamed.append(
                dataclasses.replace(request, request_id=name, cache_salt=self._salt, priority="job")
            )
        if renamed:
            self._on_loop(self._client.send_job, JobRequests(self._name, renamed, False))


class Told:
    """Passes progress on, once a second and where it matters."""

    def __init__(self, tell: Callable[[Progress], object]) -> None:
        self._tell = tell
        self._at = 0.0

    def __call__(self, progress: Progress) -> None:
        if progress.stage == "read":
            return
        now = time.monotonic()
        if progress.stage == "write" or now - self._at >= PROGRESS_SECONDS:
            self._at = now
            self._tell(progress)


async def in_thread(call: Callable[[], T]) -> T:
    """Run a job's thread; unlike the loop's own pool it keeps nobody else waiting."""
    future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    loop = asyncio.get_running_loop()

    def run() -> None:
        try:
            result = call()
        except BaseException as error:
            loop.call_soon_threadsafe(_settle, future, None, error)
        else:
            loop.call_soon_threadsafe(_settle, future, result, None)

    threading.Thread(target=run, name="job", daemon=True).start()
    return await future


def _settle(future: asyncio.Future[T], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
