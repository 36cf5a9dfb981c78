"""What was measured recently."""

from __future__ import annotations

import time
from collections import deque


class RecentWindow:
    """Values of the last `seconds`, at most `most` of them."""

    def __init__(self, seconds: float, most: int) -> None:
        self._seconds = seconds
        self._values: deque[tuple[float, float]] = deque(maxlen=most)

    def note(self, value: float = 0.0) -> None:
        """Add a value, measured now; its time alone may be of interest."""
        self._values.append((time.monotonic(), value))

    def _forget(self) -> float:
        """Drop older values; returns the time now."""
        now = time.monotonic()
        while self._values and now - self._values[0][0] >= self._seconds:
            self._values.popleft()
        return now

    @property
    def most(self) -> float:
        """The largest; 0 if there is none."""
        self._forget()
        return max((value for _, value in self._values), default=0.0)

    @property
    def seconds_each(self) -> float | None:
        """Mean seconds between two values, about; None if there were too few."""
        now = self._forget()
        if len(self._values) < 2:
            return None
        return (now - self._values[0][0]) / len(self._values)
