"""Requests in front of the engine: API keys take turns, in proportion to their weights."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Generic, TypeVar

from onestem.server.errors import ApiError

__all__ = ["Turns"]

T = TypeVar("T")


class _Line(Generic[T]):
    """What waits of one key, in order of arrival. `mark`: how much of its share it has had."""

    def __init__(self, weight: float, mark: float) -> None:
        self.weight = weight
        self.mark = mark
        self.items: OrderedDict[str, T] = OrderedDict()


class Turns(Generic[T]):
    """A bounded line per key. The next comes from the key that has had the least of its share
    (stride scheduling); a key that comes back after a pause gets no credit for it.

    Args:
        limit: most requests of a key that wait.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lines: dict[str, _Line[T]] = {}
        self._now = 0.0
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def waiting(self) -> Mapping[str, int]:
        """Key -> requests that wait, for keys that have any."""
        return {key: len(line.items) for key, line in self._lines.items() if line.items}

    def check_room(self, key: str, count: int, seconds: float) -> None:
        """Raise a 429 if `count` more requests of a key are too many.

        Args:
            seconds: about how long a place takes to become free; the client is told.
        """
        line = self._lines.get(key)
        waiting = len(line.items) if line is not None else 0
        if waiting + count <= self.limit:
            return
        after = max(1, min(60, round(seconds)))
        raise ApiError(
            429,
            f"{waiting} requests of this key are waiting, limit is {self.limit}: "
            f"try again in {after} s",
            code="queue_full",
            headers={"Retry-After": str(after)},
        )

    def push(self, key: str, weight: float, name: str, item: T, *, first: bool = False) -> None:
        """Put an item at the end of its key's line, or at its front."""
        line = self._lines.setdefault(key, _Line(weight, self._now))
        line.weight = weight
        if not line.items:
            line.mark = max(line.mark, self._now)
        line.items[name] = item
        if first:
            line.items.move_to_end(name, last=False)
        self._length += 1

    def remove(self, key: str, name: str) -> T | None:
        line = self._lines.get(key)
        item = line.items.pop(name, None) if line is not None else None
        if item is not None:
            self._length -= 1
        return item

    def pop(self) -> T | None:
        """The next request; None if nobody waits."""
        ready = [line for line in self._lines.values() if line.items]
        if not ready:
            return None
        line = min(ready, key=lambda line: line.mark)
        self._now = line.mark
        line.mark += 1 / line.weight
        self._length -= 1
        return line.items.popitem(last=False)[1]
