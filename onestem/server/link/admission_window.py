"""When new requests may join those that run.

They may join at any step, but a step with prompts has rows of its own to lay out and to launch.
So where many run, new requests wait a little for one another, and join together.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["AdmissionWindow"]

SECONDS_PER_STREAM = 0.00004
LONGEST_WAIT = 0.02
ENOUGH = 24  # new requests that need not wait for more

T = TypeVar("T")


class AdmissionWindow(Generic[T]):
    """Requests that have come and have not joined, in order."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._arrived: dict[str, T] = {}
        self._joined_at = float("-inf")

    def __len__(self) -> int:
        return len(self._arrived)

    def add(self, name: str, item: T) -> None:
        """Add a request after those that are here; `name`: for `remove`."""
        self._arrived[name] = item

    def remove(self, name: str) -> bool:
        """Remove a request; returns whether it was here."""
        return self._arrived.pop(name, None) is not None

    def take(self, num_streams: int) -> list[T]:
        """Take all, if it is time to join `num_streams` requests that run; else none."""
        if not self._arrived:
            return []
        now = self._clock()
        patience = min(num_streams * SECONDS_PER_STREAM, LONGEST_WAIT)
        if now - self._joined_at < patience and len(self._arrived) < ENOUGH:
            return []
        self._joined_at = now
        taken, self._arrived = list(self._arrived.values()), {}
        return taken
