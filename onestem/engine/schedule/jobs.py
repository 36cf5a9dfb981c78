"""Which requests in the engine belong to which job."""

from __future__ import annotations

from collections.abc import Iterable

from onestem.errors import RequestError

__all__ = ["Jobs"]


class Jobs:
    """Names of jobs and ids of their requests that the engine has read and not finished."""

    def __init__(self) -> None:
        self._open: dict[str, dict[str, None]] = {}
        self._job_of: dict[str, str] = {}

    def add(self, job_id: str) -> None:
        if job_id in self._open:
            raise RequestError(f"job id {job_id!r} is in use: give each job its own")
        self._open[job_id] = {}

    def opened(self, job_id: str, request_id: str) -> None:
        """A job's request was read."""
        self._open[job_id][request_id] = None
        self._job_of[request_id] = job_id

    def ended(self, request_id: str) -> None:
        """A request has ended; others than jobs' are no matter."""
        job_id = self._job_of.pop(request_id, None)
        if job_id is not None:
            self._open[job_id].pop(request_id, None)

    def remove(self, job_id: str) -> list[str]:
        """Forget a job; ids of its requests that were read and have not ended."""
        requests = list(self._open.pop(job_id, ()))
        for request_id in requests:
            self._job_of.pop(request_id)
        return requests

    def unfinished(self, queued: Iterable[str]) -> list[str]:
        """Jobs with requests in the engine or queued; those without are forgotten."""
        waiting = set(queued)
        for job_id in [j for j, left in self._open.items() if not left and j not in waiting]:
            del self._open[job_id]
        return list(self._open)
