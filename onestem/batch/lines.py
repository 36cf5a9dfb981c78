"""Files of a job's input, line by line, with every byte reported."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from onestem.batch.format import LineError
from onestem.errors import JobError

See = Callable[[bytes], object]

MAX_LINE_BYTES = 16 << 20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Seen:
    """Counts and hashes the bytes that it is called with."""

    def __init__(self) -> None:
        self.digest, self.num_bytes = hashlib.sha256(), 0

    def __call__(self, raw: bytes) -> None:
        self.digest.update(raw)
        self.num_bytes += len(raw)


def open_file(path: Path) -> IO[bytes]:
    """Open a file of the input. It must be a regular file, since it is read more than once."""
    if path.exists() and not path.is_file():
        raise JobError(f"{path} is not a regular file: a job is read twice, save it first")
    try:
        return open(path, "rb")
    except OSError as error:
        raise JobError(f"cannot read {path}: {error.strerror}") from error


def lines_of(file: IO[bytes], see: See) -> Iterator[tuple[int, bytes | LineError]]:
    """Each line that is not blank; an error for one that is too long."""
    number = 0
    while raw := file.readline(MAX_LINE_BYTES):
        see(raw)
        number += 1
        if len(raw) < MAX_LINE_BYTES or raw.endswith(b"\n"):
            text = raw.removeprefix(BYTE_ORDER_MARK) if number == 1 else raw
            if text.strip():
                yield number, text
            continue
        while raw and not raw.endswith(b"\n"):
            raw = file.readline(MAX_LINE_BYTES)
            see(raw)
        yield number, too_long("line")


def too_long(unit: str) -> LineError:
    """The error of a line or row (`unit`) that is too long."""
    return LineError(
        "line_too_long", f"the {unit} is longer than the limit of {MAX_LINE_BYTES} bytes"
    )


def unseen(raw: bytes) -> None:
    """Report nothing."""
