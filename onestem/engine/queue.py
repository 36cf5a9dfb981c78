"""Where requests wait. The engine does not know which queue it has."""

from __future__ import annotations

from collections import deque
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
        self._waiting: deque[Request] = deque()

    def push(self, request: Request) -> None:
        self._waiting.append(request)

    def remove(self, request_id: str) -> Request | None:
        """Take out a waiting request, if it is here."""
        for request in self._waiting:
            if request.request_id == request_id:
                self._waiting.remove(request)
                return request
        return None

    def peek(self) -> Request | None:
        return self._waiting[0] if self._waiting else None

    def pop(self) -> Request:
        return self._waiting.popleft()

    def group_open(self, group: int) -> bool:
        return any(request.group == group for request in self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting)


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
        request = self.peek()
        return request is not None and request.group == group
