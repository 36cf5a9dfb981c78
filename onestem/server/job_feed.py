"""A job's requests on their way into the engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from onestem.request import Request
from onestem.server.messages import JobRequests

__all__ = ["JobFeed"]


class JobFeed:
    """A job's requests as they come from the server; the engine reads them as it has room.

    The engine must never wait for the server. So where the feed runs dry it says that it has ended,
    and what comes later is given to the engine as a further part of the job.
    """

    def __init__(self, job_id: str) -> None:
        self.job_id = job_id
        self.pulled = 0
        self.parts: list[str] = []
        self._requests: deque[Request] = deque()
        self._reading = False

    def extend(self, message: JobRequests) -> None:
        self._requests.extend(message.requests)

    def next_part(self) -> Iterator[Request] | None:
        """Requests for a further part; None while the engine reads one, or there are none."""
        if self._reading or not self._requests:
            return None
        self._reading = True
        self.parts.append(f"{self.job_id}/{len(self.parts)}")
        return self._read()

    def _read(self) -> Iterator[Request]:
        while self._requests:
            self.pulled += 1
            yield self._requests.popleft()
        self._reading = False
