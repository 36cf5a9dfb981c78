"""Progress of a job, on its way to its record."""

from __future__ import annotations

import time
from collections.abc import Callable

from onestem.batch import Progress

__all__ = ["ProgressRelay"]

PROGRESS_SECONDS = 1.0


class ProgressRelay:
    """Passes progress on, once a second and where it matters.

    Args:
        reading: gets all progress of the first pass, and the first after it.
    """

    def __init__(
        self, tell: Callable[[Progress], object], reading: Callable[[Progress], object]
    ) -> None:
        self._tell, self._reading = tell, reading
        self._at = 0.0
        self._reads = True

    def __call__(self, progress: Progress) -> None:
        if self._reads:
            self._reading(progress)
            self._reads = progress.stage == "read"
        if progress.stage == "read":
            return
        now = time.monotonic()
        if progress.stage == "write" or now - self._at >= PROGRESS_SECONDS:
            self._at = now
            self._tell(progress)
