"""A job's lines in the order of its plan, byte for byte: for an engine that runs them as they come.

Of the lines only their places are in memory, some 30 bytes each.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import numpy as np

from onestem.batch.inputs import JobInput
from onestem.batch.lines import BYTE_ORDER_MARK, open_file
from onestem.batch.workplace import file_errors, sync_folder
from onestem.errors import JobError
from onestem.files import check_apart, check_place, whole_file
from onestem.planner.sort import IntArray

OPTION = "--write"
PIECE_BYTES = 1 << 20


class OrderedLines:
    """A file for a job's lines, made before the job is read.

    Args:
        source: the job. Rows of tables are no lines.
        path: of the file. A symbolic link stays: the file that it points to is replaced.
        force: replace what is there.
        others: files that it must not be beside the input: what each is, and its path.

    Raises:
        JobError: the file cannot be there, or the job has no lines.
    """

    def __init__(
        self, source: JobInput, path: Path, *, force: bool, others: Mapping[str, Path]
    ) -> None:
        if source.unit != "line":
            raise JobError(
                f"{OPTION} puts lines in order, and {source.path} is a table: make JSON lines of it"
            )
        check_apart(OPTION, path, {"the input": source.path, **others})
        check_place(path, f"another file for {OPTION}")
        if path.exists() and path.stat().st_size and not force:
            raise JobError(
                f"{path} exists: choose another file for {OPTION}, move it away, or replace it "
                "with --force"
            )
        self._source, self._path = source.path, path
        with file_errors(self._source):
            self._state = _state(os.stat(self._source))

    def write(self, line_numbers: IntArray) -> int:
        """Write all lines of the job, or leave the file as it is.

        A last line that has no end gets one, and a byte order mark stays at the beginning.

        Args:
            line_numbers: from 1, of the lines that come first. All others, blank ones too, follow
                as they stand.

        Returns:
            the number of lines.
        """
        target = Path(os.path.realpath(self._path))
        with open_file(self._source) as source, file_errors(target), whole_file(target) as file:
            starts = _starts(source)
            is_later = np.ones(len(starts) - 1, np.bool_)
            # Lines that were cut off since the plan was made have no place: see the check below.
            first = line_numbers[line_numbers < len(starts)] - 1
            is_later[first] = False
            file.write(_mark(source))
            for line in np.concatenate((first, np.flatnonzero(is_later))):
                _copy(source, file, int(starts[line]), int(starts[line + 1]))
            if _state(os.fstat(source.fileno())) != self._state:
                raise JobError(f"{self._source} changed while it was read: give the command again")
        sync_folder(target.parent)
        return len(is_later)


def _state(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _mark(source: IO[bytes]) -> bytes:
    """The byte order mark that a file begins with, or nothing."""
    first = os.pread(source.fileno(), len(BYTE_ORDER_MARK), 0)
    return BYTE_ORDER_MARK if first == BYTE_ORDER_MARK else b""


def _starts(source: IO[bytes]) -> IntArray:
    """`[num_lines + 1]` the first byte of each line, and the end of the last one."""
    starts, at = [np.array([len(_mark(source))])], 0
    while piece := os.pread(source.fileno(), PIECE_BYTES, at):
        starts.append(np.flatnonzero(np.frombuffer(piece, np.uint8) == ord("\n")) + (at + 1))
        at += len(piece)
    found = np.concatenate(starts)
    return found if found[-1] >= at else np.append(found, at)


def _copy(source: IO[bytes], target: IO[bytes], start: int, end: int) -> None:
    """Copy a line, and end it."""
    last = b""
    while start < end and (
        piece := os.pread(source.fileno(), min(end - start, PIECE_BYTES), start)
    ):
        target.write(piece)
        start, last = start + len(piece), piece
    if not last.endswith(b"\n"):
        target.write(b"\n")
