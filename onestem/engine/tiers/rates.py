"""Whether reading keys and values beats computing them, by what both took of late."""

from __future__ import annotations

import time

LARGE_STEP = 256  # rows of prompts; steps with fewer wait for the weights
MEASURED_ROWS = 4096  # at once: a step that is noticed late makes the one after it look short
FADING = 0.95  # of the best rates, with each that is measured
READ_SECONDS = 2.0  # after which a reader's rate may be another


class CopyRates:
    """Rates of one engine.

    Args:
        num_readers: threads that read.

    Attributes:
        row_seconds: of computing a token; None: not measured.
    """

    def __init__(self, num_readers: int) -> None:
        self.num_readers = num_readers
        self.row_seconds: float | None = None
        self._rows, self._seconds = 0, 0.0
        self._readers: dict[int, tuple[float, float]] = {}  # by how many: bytes a second, and when

    def note_read(self, num_bytes: int, seconds: float, beside: int) -> None:
        """Note how long one of `beside` readers took, with the checksum. The best of late counts:
        one that waited for the interpreter says nothing of the disk."""
        kind = self._kind(beside)
        best, _ = self._readers.get(kind, (0.0, 0.0))
        self._readers[kind] = max(num_bytes / seconds, FADING * best), time.monotonic()

    def reader(self, beside: int) -> float | None:
        """Bytes a second of a reader beside others, as measured of late; else beside fewer, where
        it may be faster: then it is measured. None: not known."""
        kind, now = self._kind(beside), time.monotonic()
        known = {one: rate for one, (rate, _) in list(self._readers.items())}
        late = {one for one, (_, at) in list(self._readers.items()) if now < at + READ_SECONDS}
        fewer = [one for one in known if one < kind]
        if kind in known and (kind in late or not fewer):
            return known[kind]
        return known[max(fewer)] if fewer else known[min(known)] if known else None

    def _kind(self, beside: int) -> int:
        return min(beside, self.num_readers).bit_length()

    def note_step(self, prompt_rows: int, seconds: float) -> None:
        """Note that a step with `prompt_rows` rows of prompts took `seconds`. The best rate of late
        counts: what is copied would be computed in large steps."""
        if prompt_rows < LARGE_STEP:
            return
        self._rows += prompt_rows
        self._seconds += seconds
        if self._rows >= MEASURED_ROWS:
            row = self._seconds / self._rows
            self.row_seconds = min(row, (self.row_seconds or row) / FADING)
            self._rows, self._seconds = 0, 0.0

    def reading_pays(self, token_bytes: float, beside: int) -> bool:
        """Whether reading a token's bytes takes less than computing it, if `beside` pieces are read
        at once. False where one of the rates is not known."""
        rate = self.reader(beside)
        if rate is None or self.row_seconds is None:
            return False
        return token_bytes / (rate * min(beside, self.num_readers)) < self.row_seconds
