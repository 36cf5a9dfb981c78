"""One attempt at a job: `run_job` in a thread of its own, answered by the engine process."""

from __future__ import annotations

import asyncio
import dataclasses
import queue
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import CancelledError, Future
from itertools import islice
from typing import Any, TypeVar

from onestem.batch import EngineDiedError
from onestem.batch.guard import guarded
from onestem.errors import JobError, RequestError, in_one_line
from onestem.request import Request, RequestOutput
from onestem.server.errors import ApiError, BusyError, EngineDownError, NoAnswerError
from onestem.server.link.client import EngineClient
from onestem.server.link.open_jobs import JobNews
from onestem.server.logs import log
from onestem.server.objects.reading import Reading
from onestem.server.objects.tenants import Tenant

WINDOW = 512  # requests of a job that the engine process holds and has not taken
PREPARE_SECONDS = 600.0  # for a line's grammar, behind those of others
PAUSES = (10.0, 60.0)  # before each further try to have it compiled, where the machine is busy

T = TypeVar("T")


class StoppedError(Exception):
    """The server is stopping, or the job was cancelled."""


class JobAttempt:
    """One attempt at a job, in its thread.

    Args:
        loop: the server's, on which the client is called.
        owner: holder of the key that the job is of.
        reading: where its first pass is.

    Attributes:
        num_answered: outputs that came in this attempt.
    """

    def __init__(
        self,
        batch_id: str,
        client: EngineClient,
        loop: asyncio.AbstractEventLoop,
        owner: Tenant,
        reading: Reading,
    ) -> None:
        self._name = batch_id
        self._client = client
        self._loop = loop
        self._owner = owner
        self._reading = reading
        self._waits: Future[Any] | None = None
        self._news: queue.SimpleQueue[JobNews] = queue.SimpleQueue()
        self._stop: Exception | None = None
        self.num_answered = 0

    def stop(self, reason: Exception) -> None:
        """End the attempt; its thread raises `reason` soon."""
        self._stop = reason
        self._news.put(None)  # wakes who waits
        waits = self._waits
        if waits is not None:
            waits.cancel()

    def check(self) -> None:
        """Raise the reason where the attempt was stopped."""
        if self._stop is not None:
            raise self._stop

    def _on_loop(self, call: Callable[..., T], *arguments: Any) -> T:
        async def run() -> T:
            return call(*arguments)

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    def _result(self, waited_for: Coroutine[Any, Any, T]) -> T:
        """What the loop comes to, however long that takes; `stop` ends it."""
        self._waits = asyncio.run_coroutine_threadsafe(waited_for, self._loop)
        try:
            self.check()
            return self._waits.result()
        except CancelledError:
            self.check()
            raise
        finally:
            self._waits.cancel()
            self._waits = None

    def validate(self, check: Callable[[Request], object], request: Request) -> None:
        """Have the engine validate a request and compile its grammar. A failure to do so is the
        line's error, unless the engine is gone. One of a busy machine is tried again.

        Raises:
            RequestError: the line cannot be answered; EngineDownError: the engine is not there.
        """
        self.check()
        guarded(check)(request)
        if request.params.response_format is None and request.pml is None:
            return
        whose: Any = {"key": self._owner.name, "weight": self._owner.weight}
        with self._reading.elsewhere():
            for pause in (*PAUSES, None):
                try:
                    self._result(self._client.ask("validate", request, PREPARE_SECONDS, **whose))
                    return
                except (BusyError, NoAnswerError) as error:
                    if pause is None:
                        tries = len(PAUSES) + 1
                        raise RequestError(f"{error.message} (tried {tries} times)") from error
                    log.warning("line_waits", job=self._name, error=error.message, seconds=pause)
                    self._result(asyncio.sleep(pause))
                except EngineDownError:
                    raise
                except ApiError as error:
                    raise RequestError(error.message) from error

    def __call__(self, requests: Iterable[Request]) -> Iterator[RequestOutput]:
        """Hand requests over as there is room for them, yield outputs as they come."""
        source = iter(requests)
        names: dict[str, str] = {}
        self._news = queue.SimpleQueue()  # news of an earlier call concern nobody
        sent = pulled = 0
        exhausted = False
        self._on_loop(self._client.jobs.open, self._name, self._news.put)
        try:
            while not exhausted or names:
                if not exhausted and sent - pulled <= WINDOW // 2:
                    more = list(islice(source, WINDOW - (sent - pulled)))
                    exhausted = not more
                    sent += len(more)
                    self._hand_over(more, names)
                    continue
                news = self._news.get()
                self.check()
                if news is None:
                    raise EngineDiedError("the engine process ended", list(names.values()))
                if isinstance(news, int):
                    pulled = news
                elif news.finished:
                    self.num_answered += 1
                    yield dataclasses.replace(news, request_id=names.pop(news.request_id))
        finally:
            self._on_loop(self._client.jobs.close, self._name)

    def _hand_over(self, requests: list[Request], names: dict[str, str]) -> None:
        self.check()
        renamed = []
        for request in requests:
            name = f"{self._name}/{request.request_id}"
            names[name] = request.request_id
            renamed.append(
                dataclasses.replace(
                    request, request_id=name, cache_salt=self._owner.salt(), priority="job"
                )
            )
        if renamed:
            self._on_loop(self._client.jobs.send, self._name, renamed)


async def in_thread(call: Callable[[], T]) -> T:
    """Run a job in a thread of its own: it takes none of the loop's pool. Whatever ends it is an
    `Exception` here."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # whoever waits may give up, and the job goes on

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(_failure(error))

    threading.Thread(target=run, name="job", daemon=True).start()
    return await asyncio.wrap_future(future)


def _failure(error: BaseException) -> Exception:
    """A job's failure. What would pass through the event loop or cannot (a library's panic, an
    exit) is the job's alone."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    log.exception("job_failed", error)
    return JobError(f"the batch cannot be read or answered: {in_one_line(error)}")
