"""Whether reading keys and values beats computing them, by what both took so far."""

from __future__ import annotations

__all__ = ["CopyRates"]

FADING = 0.95


class CopyRates:
    """Rates of one engine.

    Args:
        num_readers: threads that read.

    Attributes:
        bytes_per_second: of a reader, with checksums, at best of late; None: not measured.
        row_seconds: of computing a token; None: not measured.
    """

    def __init__(self, num_readers: int) -> None:
        self.num_readers = num_readers
        self.bytes_per_second: float | None = None
        self.row_seconds: float | None = None

    def note_read(self, num_bytes: int, seconds: float) -> None:
        """Note how long a reader took. One beside others is slower, and all of them together are
        not: so the best counts, and fades with each that is slower."""
        rate = num_bytes / seconds
        self.bytes_per_second = max(rate, FADING * (self.bytes_per_second or rate))

    def note_step(self, prompt_rows: int, seconds: float) -> None:
        """Note that a step with `prompt_rows` rows of prompts took `seconds`. The best rate counts:
        small steps wait for the weights, and what is copied would be computed in large ones."""
        if prompt_rows > 0:
            row = seconds / prompt_rows
            self.row_seconds = min(row, self.row_seconds or row)

    def reading_pays(self, token_bytes: int, beside: int) -> bool:
        """Whether reading a token's bytes takes less than computing it, if `beside` pieces are read
        at once. False where one of the rates is not known."""
        if self.bytes_per_second is None or self.row_seconds is None:
            return False
        rate = self.bytes_per_second * min(beside, self.num_readers)
        return token_bytes / rate < self.row_seconds
