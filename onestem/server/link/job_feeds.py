"""Requests of jobs on their way into the engine, and their outputs on the way out."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from onestem.request import Request, RequestOutput
from onestem.server.link.messages import JobRequests

if TYPE_CHECKING:
    from onestem.engine.engine import Engine


class JobFeed:
    """A job's requests as they come from the server; the engine reads them as it has room.

    The engine must never wait for the server. So a feed that runs dry reports its end, and what
    comes later is given to the engine as a further part of the job.
    """

    def __init__(self, job_id: str, first: bool) -> None:
        self.job_id = job_id
        self.first = first  # goes before other jobs
        self.pulled = 0
        self.parts: list[str] = []
        self.groups: dict[int, int] = {}  # of all parts
        self.requests: deque[Request] = deque()  # that the engine has not taken
        self._reading = False

    def next_part(self) -> Iterator[Request] | None:
        """Requests for a further part; None while the engine reads one, or there are none."""
        if self._reading or not self.requests:
            return None
        self._reading = True
        self.parts.append(f"{self.job_id}/{len(self.parts)}")
        return self._read()

    def _read(self) -> Iterator[Request]:
        try:
            while self.requests:
                self.pulled += 1
                yield self.requests.popleft()
        finally:  # also where the engine gives a part up: the rest is for the next one
            self._reading = False


class JobFeeds:
    """The feeds of all jobs, and the job of each of their requests."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._feeds: dict[str, JobFeed] = {}
        self._job_of: dict[str, str] = {}

    def extend(self, message: JobRequests) -> None:
        """Take a job's next requests."""
        feed = self._feeds.setdefault(message.job_id, JobFeed(message.job_id, message.first))
        for request in message.requests:
            self._job_of[request.request_id] = message.job_id
        feed.requests.extend(message.requests)

    def remove(self, job_id: str) -> None:
        """Forget a job, and end its requests in the engine."""
        feed = self._feeds.pop(job_id, None)
        for part in feed.parts if feed is not None else ():
            self._engine.requests.remove_job(part)
        for request_id in [i for i, job in self._job_of.items() if job == job_id]:
            self._engine.abort(request_id)
            del self._job_of[request_id]

    def feed(self) -> None:
        """Give the engine what has come. Jobs wait until an engine that sleeps is awake."""
        if not self._engine.weights.is_ready:
            return
        for feed in self._feeds.values():
            part = feed.next_part()
            if part is not None:
                self._engine.requests.add_job(
                    feed.parts[-1], part, first=feed.first, groups=feed.groups
                )

    def outputs(self, outputs: Iterable[RequestOutput]) -> list[tuple[str, RequestOutput]]:
        """Those of jobs among finished requests, which are forgotten."""
        if not self._job_of:
            return []
        return [
            (self._job_of.pop(output.request_id), output)
            for output in outputs
            if output.request_id in self._job_of
        ]

    @property
    def pulled(self) -> dict[str, int]:
        """Job -> its requests that the engine has taken so far."""
        return {feed.job_id: feed.pulled for feed in self._feeds.values()}

    def job_of(self, request_id: str) -> str | None:
        """The job whose request it is; None: it is no job's."""
        return self._job_of.get(request_id)
