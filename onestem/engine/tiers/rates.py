"""Whether reading keys and values beats computing them, by what both took so far."""

from __future__ import annotations

__all__ = ["CopyRates"]


class CopyRates:
    """Rates of one engine.

    Args:
        num_readers: threads that read.

    Attributes:
        bytes_per_second: of a reader, with checksums; None: not measured.
        row_seconds: of computing a token; None: not measured.
    """

    def __init__(self, num_readers: int) -> None:
        self.num_readers = num_readers
        self.bytes_per_second: float | None = None
        self.row_seconds: float | None = None

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
