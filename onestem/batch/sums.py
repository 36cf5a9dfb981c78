"""A checksum of each answer in the journal, beside it: so an answer that a disk has changed is
found, though the result file has no place for one.

A record has 8 bytes: the line's index and the CRC-32 of its answer. It is written before the
answer. A process that is killed in between leaves a record without an answer, so an index may have
several, and one of them has to fit. An answer without any is taken as it is: this file was lost.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

RECORD = np.dtype("<u8")
INDEX_SHIFT = 32


class Sums:
    """The checksums of a journal.

    Args:
        path: the file; created if missing.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(path, flags, 0o666)
        try:
            self._known: npt.NDArray[np.uint64] = np.sort(np.fromfile(path, RECORD))
            self._end = self._known.nbytes
            os.ftruncate(self._file, self._end)  # a torn record
        except BaseException:
            os.close(self._file)
            raise

    @property
    def is_empty(self) -> bool:
        """Whether no answer has a checksum yet."""
        return self._end == 0

    def fits(self, index: int, line: bytes) -> bool:
        """Whether an answer that was there before is as it was written, as far as is known."""
        first, end = np.searchsorted(self._known, _range(index))
        return bool(first == end or _record(index, line) in self._known[first:end])

    def forget(self) -> None:
        """Free the memory of `fits`, 8 bytes per answer: the journal has been read."""
        self._known = self._known[:0].copy()

    def note(self, index: int, line: bytes) -> None:
        """Write down the checksum of an answer."""
        record = np.array(_record(index, line), RECORD).tobytes()
        if os.write(self._file, record) < len(record):  # a nearly full disk
            os.ftruncate(self._file, self._end)
            os.write(self._file, record)  # says why
        self._end += len(record)

    def sync(self) -> None:
        """Have all that is written on the disk."""
        os.fsync(self._file)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def _record(index: int, line: bytes) -> np.uint64:
    return np.uint64(index << INDEX_SHIFT | zlib.crc32(line))


def _range(index: int) -> npt.NDArray[np.uint64]:
    return np.array([index << INDEX_SHIFT, (index + 1) << INDEX_SHIFT], np.uint64)
