"""Queues of requests and of jobs. The engine does not know which queue it has."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from functools import partial
from typing import Any

from onestem.engine.schedule.backlog import Turns
from onestem.request import Request
from onestem.tree import RadixTree

JOBS = "jobs"  # the key of what jobs wait for at the gate, if the server has not checked it


class Gate(Enum):
    """Whether a request may be admitted: now, later (others may pass it), or never."""

    OPEN = "open"
    WAIT = "wait"
    REFUSE = "refuse"


def _open(request: Request, key: str, weight: float) -> Gate:
    return Gate.OPEN


Gatekeeper = Callable[[Request, str, float], Gate]  # of a request, and its key and weight


class InteractiveQueue:
    """Keys take turns. Within a key: first come, first served, but for prefixes that are cached
    (`Backlog`). A request takes its place when the gate lets it in.

    Args:
        cached, max_passed: see `Backlog`.

    Attributes:
        gate: called on push, then on each peek until it stops returning WAIT. Refused requests are
            dropped.
    """

    def __init__(self, cached: RadixTree[Any], max_passed: int, gate: Gatekeeper = _open) -> None:
        self.gate = gate
        self._turns = Turns(cached, max_passed)
        self._held: dict[str, tuple[Request, str, float]] = {}  # by the gate
        self._groups: Counter[int | None] = Counter()

    def push(self, request: Request, key: str = "", weight: float = 1.0) -> None:
        """Queue a request; `key`: whose turn it takes, `weight`: that key's share of turns."""
        self._groups[request.group] += 1
        self._held[request.request_id] = request, key, weight
        self._let_in(request, key, weight)

    def _let_in(self, request: Request, key: str, weight: float) -> None:
        answer = self.gate(request, key, weight)
        if answer is Gate.WAIT:
            return
        del self._held[request.request_id]
        if answer is Gate.OPEN:
            self._turns.push(request, key, weight)
        else:
            self._groups[request.group] -= 1

    def remove(self, request_id: str) -> Request | None:
        """Take out a waiting request, if it is here."""
        request = self._turns.remove(request_id)
        if request is None and request_id in self._held:
            request, _, _ = self._held.pop(request_id)
        if request is not None:
            self._groups[request.group] -= 1
        return request

    def peek(self) -> Request | None:
        """The next request that the gate lets in; None: none of them."""
        for held in list(self._held.values()) if self._held else ():
            self._let_in(*held)
        return self._turns.peek()

    @property
    def num_held(self) -> int:
        """Requests that wait at the gate."""
        return len(self._held)

    def pop(self) -> Request:
        """Take the request of `peek`."""
        request = self._turns.pop()
        self._groups[request.group] -= 1
        return request

    def group_open(self, group: int) -> bool:
        """Whether requests of a group wait."""
        return self._groups[group] > 0

    def __len__(self) -> int:
        return len(self._turns) + len(self._held)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._turns or request_id in self._held


class PlannedQueue:
    """A job in its planned order, read as it is needed: one request ahead, no more.

    Members of a group come one after the other, so a group is complete when another begins.

    Args:
        gate: called for the next request until it stops returning WAIT. Refused ones are skipped.
    """

    def __init__(self, requests: Iterable[Request], gate: Gatekeeper = _open) -> None:
        self._requests: Iterator[Request] = iter(requests)
        self._gate = gate
        self.holds = False  # the next one waits at the gate
        self._next: Request | None = None
        self._last_group: int | None = None  # of the request that was read last
        self._ended = False

    def peek(self) -> Request | None:
        """The next request; None: it waits at the gate, or all are taken."""
        while not self._ended:
            if self._next is None:
                self._read()
            elif not self.holds:
                break
            if self._next is not None:
                answer = self._gate(self._next, JOBS, 1.0)
                self.holds = answer is Gate.WAIT
                if answer is not Gate.REFUSE:
                    break
                self._next = None
        return None if self.holds else self._next

    def _read(self) -> None:
        self._next = next(self._requests, None)
        self._ended = self._next is None
        self._last_group = self._next.group if self._next is not None else None

    def pop(self) -> Request:
        """Take the request of `peek`."""
        request = self.peek()
        if request is None:
            raise IndexError("the queue is empty")
        self._next = None
        return request

    def group_open(self, group: int) -> bool:
        """Only the group that was read last can go on; what follows is not read to find out."""
        return self._last_group == group


class HybridQueue:
    """Interactive requests, then jobs, one after the other.

    Args:
        cached, max_passed: see `Backlog`.
        gate: see `InteractiveQueue` and `PlannedQueue`.
    """

    def __init__(self, cached: RadixTree[Any], max_passed: int, gate: Gatekeeper = _open) -> None:
        self._gate = gate
        self.interactive = InteractiveQueue(cached, max_passed, gate)
        self._jobs: dict[str, PlannedQueue] = {}
        self._numbers = itertools.count()

    def add_job(
        self,
        job_id: str,
        requests: Iterable[Request],
        *,
        first: bool = False,
        groups: dict[int, int] | None = None,
    ) -> None:
        """Queue a job's requests, in planned order; see `Requests.add_job`."""
        numbers = {} if groups is None else groups
        # Not a generator, which would end with the first error of `requests`.
        job = PlannedQueue(map(partial(self._as_job, numbers), requests), self._gate)
        self._jobs = {job_id: job, **self._jobs} if first else {**self._jobs, job_id: job}

    def remove_job(self, job_id: str) -> bool:
        """Forget requests of a job that are not admitted; False if there is no such job."""
        return self._jobs.pop(job_id, None) is not None

    def _as_job(self, numbers: dict[int, int], request: Request) -> Request:
        """Number groups apart from other jobs'; `numbers`: those of this job so far."""
        group = request.group
        if group is not None:
            group = numbers.setdefault(group, next(self._numbers))
        return dataclasses.replace(request, group=group, priority="job")

    def peek(self) -> Request | None:
        """The next interactive request, else the next of the first job that has any."""
        request = self.interactive.peek()
        return request if request is not None else self._peek_job()

    def _peek_job(self) -> Request | None:
        """The first job that has a request; those that have ended are forgotten."""
        for job_id in list(self._jobs):
            request = self._jobs[job_id].peek()
            if request is not None or self._jobs[job_id].holds:
                return request
            del self._jobs[job_id]
        return None

    @property
    def holds(self) -> bool:
        """Whether requests wait at the gate."""
        return self.interactive.num_held > 0 or any(job.holds for job in self._jobs.values())

    def pop(self) -> Request:
        """Take the request of `peek`."""
        if self.interactive.peek() is not None:
            return self.interactive.pop()
        if self._peek_job() is None:
            raise IndexError("the queue is empty")
        return next(iter(self._jobs.values())).pop()

    def group_open(self, group: int) -> bool:
        """Whether requests of a group wait, or may still be read."""
        if self.interactive.group_open(group):
            return True
        return any(job.group_open(group) for job in self._jobs.values())

    @property
    def job_ids(self) -> list[str]:
        """Jobs that may still have requests here."""
        return list(self._jobs)


# Requests in the order in which they are to be admitted.
RequestQueue = HybridQueue | PlannedQueue
