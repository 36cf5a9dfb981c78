"""Watches the first lines of a job: the fault of the first bad one, and whether any is good."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onestem.batch.inputs import JobInput
from onestem.errors import JobError, RequestError

LIMIT = 256  # if the first lines up to here are all bad, the file has another format


class FirstLines:
    """Watches the first pass: reports the first bad line, and refuses a job that begins with
    nothing but bad lines. A refused job's error names the first one instead.

    Args:
        source: the input.
        keep_going: refuse nothing.
        tell: called at most once, with the first bad line and what is wrong with it.
    """

    def __init__(
        self, source: JobInput, *, keep_going: bool, tell: Callable[[str], object] | None
    ) -> None:
        self._source, self._tell = source, tell
        self._accepted = keep_going
        self._num_lines = 0
        self._first: str | None = None

    def see(self, lines: Sequence[tuple[int, RequestError | None]]) -> None:
        """Take line number and error (None: a good line) of each of the next lines.

        Raises:
            JobError: none of the first lines is good.
        """
        self._num_lines += len(lines)
        self._accepted |= any(error is None for _, error in lines)
        where = f"{self._source.path}, {self._source.unit}"
        bad = (f"{where} {number}: {error}" for number, error in lines if error)
        self._first = self._first or next(bad, None)
        if self._num_lines >= LIMIT:
            self.end()
        if self._accepted and self._first and self._tell:
            self._tell(self._first)
            self._tell = None

    def end(self) -> None:
        """Note the end of the lines; raises `JobError` as `see` does."""
        if self._first and not self._accepted:
            raise JobError(
                f"{self._first} (0 of the first {self._num_lines} {self._source.unit}s can be "
                f"answered): correct the {self._source.unit}s, or go on with --keep-going"
            )
