"""The answers so far: one line each, in the order in which they finished.

A line is appended by one unbuffered write. So all that was written survives the process, and at
most the last line can be torn. Opening a journal reads it through, cuts a torn end, takes damaged
lines out and notes where each line is: 24 bytes of memory per line of the job. The lines are not
kept in memory.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from onestem.arrays import before
from onestem.batch.results import split_result_id
from onestem.batch.sums import Sums
from onestem.batch.workplace import Workplace, file_errors, sync_folder
from onestem.errors import JobError

# A power cut may lose the answers of the last SYNC_SECONDS; a killed process loses none.
SYNC_SECONDS = 10.0
ABSENT = -1
UNKNOWN = -1
TOLD = 5  # damaged lines that are named


class ResultLine(NamedTuple):
    """Facts of a result line: the input line's number, whether it is an error, and the number of
    sampled tokens (`UNKNOWN` for an error)."""

    line_number: int
    failed: bool
    output_tokens: int


def result_line(raw: bytes, job: str) -> ResultLine | None:
    """The facts of a whole result line of this job; None for any other bytes."""
    if not raw.endswith(b"}\n"):
        return None
    try:
        record = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    name = split_result_id(record.get("id")) if isinstance(record, dict) else None
    if name is None or name[0] != job:
        return None
    failed = record.get("error") is not None
    return ResultLine(name[1], failed, UNKNOWN if failed else _output_tokens(record))


def _output_tokens(record: dict[str, Any]) -> int:
    try:
        return int(record["response"]["body"]["usage"]["completion_tokens"])
    except (KeyError, TypeError, ValueError):
        return UNKNOWN


@dataclass
class ResultCounts:
    """How many lines have a result, and how many of these are errors."""

    done: int = 0
    failed: int = 0

    def add(self, failed: bool) -> None:
        """Count a result."""
        self.done += 1
        self.failed += failed


class Journal:
    """The file of finished answers, by index (see `spool`).

    Args:
        place: of its files; they are created if missing.
        job: the job that each line must belong to.
        line_numbers: `[num_lines]` the input's line numbers, ascending.

    Attributes:
        output_tokens: `[num_lines]` tokens sampled for each line; `UNKNOWN` without an answer.
        damaged: numbers of lines that were taken out of the file: they are no results of this job,
            or not as they were written. The first `TOLD` of them are here, `num_damaged` are all.
    """

    def __init__(self, place: Workplace, job: str, line_numbers: npt.NDArray[np.int64]) -> None:
        self.path = place.partial
        self.counts = ResultCounts()
        self.damaged: list[int] = []
        self._file = -1
        self.num_damaged = 0
        self._job = job
        self._line_numbers = line_numbers
        self._start = np.full(len(line_numbers), ABSENT, np.int64)
        self._size = np.zeros(len(line_numbers), np.int64)
        self.output_tokens = np.full(len(line_numbers), UNKNOWN, np.int64)
        with file_errors(place.sums):
            self._sums = Sums(place.sums)
        try:
            with file_errors(self.path):
                self._file = self._open()
                self._end = self._scan()
                os.ftruncate(self._file, self._end)
                if self.num_damaged:
                    self._take_out(place.journal)
        except BaseException:
            self._close_files()
            raise
        self._sums.forget()
        self._synced = time.monotonic()

    def _open(self) -> int:
        return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)

    def _scan(self) -> int:
        """Note where each good line is; returns where the last whole line ends.

        A torn line is the last one and has no line end. A file without any line of this job is
        somebody else's, and refused.
        """
        end = 0
        with open(self.path, "rb") as file:
            for number, raw in enumerate(file, 1):
                if not raw.endswith(b"\n"):
                    break
                if not self._take(raw, end):
                    self.num_damaged += 1
                    if len(self.damaged) < TOLD:
                        self.damaged.append(number)
                end += len(raw)
        if self.num_damaged and not self.counts.done and self._sums.is_empty:
            raise JobError(
                f"{self.path} has no result of this job: "
                "move the file away to go on without it, or start over with --force"
            )
        return end

    def _take(self, raw: bytes, start: int) -> bool:
        """Note a line at `start`; False: it is damaged, or another's."""
        result = result_line(raw, self._job)
        if result is None:
            return False
        index = int(np.searchsorted(self._line_numbers, result.line_number))
        known = index < len(self._line_numbers) and self._line_numbers[index] == result.line_number
        if not known or self.has(index) or not self._sums.fits(index, raw):
            return False
        self._note(index, start, len(raw), result.failed, result.output_tokens)
        return True

    def _take_out(self, draft: Path) -> None:
        """Write the file without damaged lines, so that readers find answers alone."""
        kept = self.answered
        kept = kept[np.argsort(self._start[kept])]
        with open(draft, "wb") as target:
            self._copy(kept, target)
            target.flush()
            os.fsync(target.fileno())
        os.replace(draft, self.path)
        sync_folder(self.path.parent)  # else what is appended now may be lost in a power cut
        os.close(self._file)
        self._file = self._open()
        sizes = self._size[kept]
        self._start[kept] = before(sizes)
        self._end = int(sizes.sum())

    def _note(self, index: int, start: int, size: int, failed: bool, output_tokens: int) -> None:
        self._start[index] = start
        self._size[index] = size
        self.output_tokens[index] = output_tokens
        self.counts.add(failed)

    def has(self, index: int) -> bool:
        """Whether a line has a result."""
        return bool(self._start[index] != ABSENT)

    @property
    def missing(self) -> npt.NDArray[np.int64]:
        """Indices without a result, ascending."""
        return np.flatnonzero(self._start == ABSENT)

    @property
    def answered(self) -> npt.NDArray[np.int64]:
        """Indices with a result, ascending."""
        return np.flatnonzero(self._start != ABSENT)

    def write(self, index: int, line: bytes, *, failed: bool, output_tokens: int = UNKNOWN) -> None:
        """Append the result of line `index`, which has none yet."""
        if self.has(index):
            raise RuntimeError(f"a second result for input line {self._line_numbers[index]}")
        with file_errors(self.path):
            self._sums.note(index, line)
            self._append(line)
        self._note(index, self._end, len(line), failed, output_tokens)
        self._end += len(line)
        if time.monotonic() - self._synced >= SYNC_SECONDS:
            self.sync()

    def _append(self, line: bytes) -> None:
        written = os.write(self._file, line)
        try:
            while written < len(line):  # a nearly full disk may take only a part
                written += os.write(self._file, line[written:])
        except OSError:
            os.ftruncate(self._file, self._end)
            raise

    def sync(self) -> None:
        """Have all that is written on the disk."""
        with file_errors(self.path):
            self._sums.sync()
            os.fsync(self._file)
        self._synced = time.monotonic()

    def copy_in_order(self, target: IO[bytes]) -> None:
        """Write the lines in input order; none may be missing."""
        self._copy(np.arange(len(self._start)), target)

    def _copy(self, indices: npt.NDArray[np.int64], target: IO[bytes]) -> None:
        """Write the lines at `indices`, in that order."""
        for start, size in _stretches(self._start[indices], self._size[indices]):
            while size > 0:
                piece = os.pread(self._file, min(size, 1 << 20), start)
                if not piece:
                    raise JobError(f"{self.path} was cut by someone else: run the job again")
                target.write(piece)
                start, size = start + len(piece), size - len(piece)

    def close(self) -> None:
        """Flush to the disk and close the file. Closing twice is fine."""
        if self._file >= 0:
            try:
                self.sync()
            finally:
                self._close_files()

    def _close_files(self) -> None:
        self._sums.close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _stretches(
    starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]
) -> Iterator[tuple[int, int]]:
    """(start, size) of lines that follow each other in the file too."""
    if len(starts) == 0:
        return
    breaks = np.flatnonzero(starts[1:] != starts[:-1] + sizes[:-1]) + 1
    begins = np.concatenate(([0], breaks))
    for begin, size in zip(begins, np.add.reduceat(sizes, begins), strict=True):
        yield int(starts[begin]), int(size)
