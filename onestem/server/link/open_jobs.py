"""Jobs that the engine has requests of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from onestem.request import Request
from onestem.server.link.listeners import JobSink
from onestem.server.link.messages import JobOutput, JobRequests, RemoveJob
from onestem.server.link.supervisor import Supervisor

__all__ = ["OpenJobs"]


class OpenJobs:
    """The sinks of jobs, by name.

    Args:
        supervisor: of the engine that they are sent to.
    """

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._sinks: dict[str, JobSink] = {}

    def __len__(self) -> int:
        return len(self._sinks)

    def open(self, job_id: str, sink: JobSink) -> None:
        """Have `sink` hear of a job, until it is closed or the engine has died; raises a 503
        where there is no engine."""
        self._supervisor.check_up()
        self._sinks[job_id] = sink

    def send(self, job_id: str, requests: Sequence[Request], *, first: bool = False) -> None:
        """Send a job's next requests; more may follow. `first`: they go before other jobs'."""
        self._supervisor.send(JobRequests(job_id, requests, first))

    def close(self, job_id: str) -> None:
        """End a job, with those of its requests that have not ended."""
        if self._sinks.pop(job_id, None) is not None:
            self._supervisor.send(RemoveJob(job_id))

    def take(self, outputs: Iterable[JobOutput], pulled: Mapping[str, int]) -> None:
        """Hand on what a report has of jobs."""
        for output in outputs:
            if output.job_id in self._sinks:
                self._sinks[output.job_id].on_output(output.output)
        for job_id, count in pulled.items():
            if job_id in self._sinks:
                self._sinks[job_id].on_pulled(count)

    def end(self) -> None:
        """The engine is gone, and all jobs with it."""
        for sink in list(self._sinks.values()):
            sink.on_down()
        self._sinks.clear()
