"""Jobs that the engine has requests of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from onestem.request import Request, RequestOutput
from onestem.server.link.messages import JobRequests, RemoveJob
from onestem.server.link.supervisor import Supervisor

# A request of the job has ended; or so many of its requests the engine has taken so far; or, None,
# the engine is gone, and with it the job.
JobNews = RequestOutput | int | None


class OpenJobs:
    """What to call with news of each job.

    Args:
        supervisor: of the engine that they are sent to.
    """

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._hears: dict[str, Callable[[JobNews], object]] = {}

    def __len__(self) -> int:
        return len(self._hears)

    def open(self, job_id: str, hear: Callable[[JobNews], object]) -> None:
        """Have `hear` called with news of a job, until it is closed or the engine has died; raises
        a 503 where there is no engine."""
        self._supervisor.check_up()
        self._hears[job_id] = hear

    def send(self, job_id: str, requests: Sequence[Request], *, first: bool = False) -> None:
        """Send a job's next requests; more may follow. `first`: they go before other jobs'."""
        self._supervisor.send(JobRequests(job_id, requests, first))

    def close(self, job_id: str) -> None:
        """End a job, with those of its requests that have not ended."""
        if self._hears.pop(job_id, None) is not None:
            self._supervisor.send(RemoveJob(job_id))

    def take(self, news: Iterable[tuple[str, JobNews]]) -> None:
        """Hand on news of jobs; of those that are not open they are ignored."""
        for job_id, one in news:
            if job_id in self._hears:
                self._hears[job_id](one)

    def end(self) -> None:
        """The engine is gone, and all jobs with it."""
        for hear in list(self._hears.values()):
            hear(None)
        self._hears.clear()
