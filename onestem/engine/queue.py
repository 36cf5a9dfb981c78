"""Where requests wait. The engine does not know which queue it has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Protocol

from onestem.request import Request

__all__ = ["FifoQueue", "PlannedQueue", "RequestQueue"]


class RequestQueue(Protocol):
    """Requests in the order in which they are to be admitted."""

    def peek(self) -> Request | None:
        """The next request, left where it is; None if there is none now."""
        ...

    def pop(self) -> Request:
        """Take the next request."""
        ...

    def group_open(self, group: int) -> bool:
        """Whether further requests of a planned group may still come."""
        ...


class FifoQueue:
    """First come, first served."""

    def __init__(self) -> None:
        self._waiting: dict[str, Request] = {}  # in order of arrival
        self._groups: Counter[int | None] = Counter()

    def push(self, request: Request) -> None:
        self._waiting[request.request_id] = request
        self._groups[request.group] += 1

    def remove(self, request_id: str) -> Request | None:
        """Take out a waiting request, if it is here."""
        request = self._waiting.pop(request_id, None)
        if request is not None:
            self._groups[request.group] -= 1
        return request

    def peek(self) -> Request | None:
        return next(iter(self._waiting.values()), None)

    def pop(self) -> Request:
        request = self.remove(next(iter(self._waiting)))
        assert request is not None
        return request

    def group_open(self, group: int) -> bool:
        return self._groups[group] > 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting


class PlannedQueue:
    """A job in its planned order, read as it is needed: one request ahead, no more.

    Members of a group come one after the other, so a group is complete when another begins.
    """

    def __init__(self, requests: Iterable[Request]) -> None:
        self._requests: Iterator[Request] = iter(requests)
        self._next: Request | None = None
        self._ended = False

    def peek(self) -> Request | None:
        if self._next is None and not self._ended:
            self._next = next(self._requests, None)
            self._ended = self._next is None
        return self._next

    def pop(self) -> Request:
        request = self.peek()
        if request is None:
            raise IndexError("the queue is empty")
        self._next = None
        return request

    def group_open(self, group: int) -> bool:
        """What is not read yet may be of any group: it is not read just to find out."""
        if self._next is not None:
            return self._next.group == group
        return not self._ended
