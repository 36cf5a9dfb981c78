"""How the server paces itself: how large chunks are, when the engine is late."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

__all__ = ["ChunkSize", "RecentWindow", "Watchdog"]

# ----------------------------------------------------------------------------- chunk size
# How many tokens make a chunk of a stream.
#
# What a chunk costs the server's process (a wake-up, an event, HTTP framing, a system call) hardly
# depends on its tokens. One core writes CHUNKS_PER_SECOND of them; where streams get more tokens
# than that, readers and new requests would wait for the core. So chunks grow with the rate of
# tokens.

CHUNKS_PER_SECOND = 8000
SECONDS = 0.25  # between looks at how many tokens come


class ChunkSize:
    """The chunk size of all streams of a server.

    Args:
        least: tokens of a chunk when few streams run.

    Attributes:
        tokens: tokens of a chunk now.
    """

    def __init__(self, least: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self.tokens = least
        self._least = least
        self._clock = clock
        self._since = clock()
        self._count = 0

    def note(self, num_tokens: int) -> None:
        """Count tokens that have come for streams."""
        self._count += num_tokens
        now = self._clock()
        elapsed = now - self._since
        if elapsed >= SECONDS:
            each = self._count / elapsed / CHUNKS_PER_SECOND
            self.tokens = max(self._least, math.ceil(each))
            self._since, self._count = now, 0


# ----------------------------------------------------------------------------- recent window
# What was measured recently.


class RecentWindow:
    """Values of the last `seconds`, at most `most` of them."""

    def __init__(self, seconds: float, most: int) -> None:
        self._seconds = seconds
        self._values: deque[tuple[float, float]] = deque(maxlen=most)

    def note(self, value: float = 0.0) -> None:
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


# ----------------------------------------------------------------------------- watchdog
# Notices an engine that has work and has gone silent.

LONGEST_INTERVAL = 5.0


class Watchdog:
    """Adds up how long an engine that owes a report has been silent.

    The engine reports after every step, and whenever it has taken commands. So it owes a report
    while its last one said that it has work, and until it has taken all that was sent to it.

    Args:
        limit: seconds of silence after which it counts as stuck; 0: it never does.

    Attributes:
        interval: seconds between calls of `tick`.
    """

    def __init__(self, limit: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self.interval = min(limit / 8, LONGEST_INTERVAL)
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        """Begin anew with a new engine."""
        self._num_sent = self._num_taken = 0
        self._busy = False
        self._silent = 0.0
        self._ticked_at = self._clock()

    def note_sent(self) -> None:
        """A command was sent, which a report will answer."""
        if not self.owes:
            self._silent = 0.0
        self._num_sent += 1

    def note_report(self, num_taken: int, *, busy: bool) -> None:
        """A report has come, with the number of commands taken so far; `busy`: further reports
        follow without a command."""
        self._num_taken, self._busy = num_taken, busy
        self._silent = 0.0

    @property
    def owes(self) -> bool:
        """Whether a report is to come."""
        return self._busy or self._num_sent > self._num_taken

    def tick(self) -> bool:
        """Whether the engine is stuck. A pause of the server itself, in which reports wait unread,
        counts as two intervals at most."""
        now = self._clock()
        passed, self._ticked_at = min(now - self._ticked_at, 2 * self.interval), now
        self._silent = self._silent + passed if self.owes else 0.0
        return 0 < self.limit <= self._silent
