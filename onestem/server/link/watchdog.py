"""Notices an engine that has work and has gone silent."""

from __future__ import annotations

import time
from collections.abc import Callable

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
        """Begin again with a new engine."""
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
