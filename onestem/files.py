"""Files that are there whole, or not at all."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

from onestem.errors import JobError, OnestemError

LARGEST_TEXT = 256 << 20  # bytes of a file that is read as a whole; a tokenizer has 40 MB


def check_regular(
    path: Path, error: type[OnestemError], *, most_bytes: int | None = LARGEST_TEXT
) -> None:
    """Raise `error` for what is there and no regular file, through links too, or too long. A pipe
    is read for ever, and a device may have no end.

    Args:
        most_bytes: None: of any length, as it is mapped and not read.

    Raises:
        OSError: it is not there, or cannot be looked at.
    """
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise error(f"{path} is no regular file: put a file there")
    if most_bytes is not None and status.st_size > most_bytes:
        raise error(
            f"{path} has {status.st_size} bytes, limit is {most_bytes}: it is damaged, or no "
            "file of a model"
        )


def is_file(path: Path) -> bool:
    """Whether a path is that of a file; False where that cannot be found out."""
    try:
        return path.is_file()
    except OSError:  # such as a name that is too long
        return False


def read_regular(path: Path, error: type[OnestemError]) -> bytes:
    """A regular file's bytes; raises as `check_regular`."""
    check_regular(path, error)
    return path.read_bytes()


def _is_same(one: Path, other: Path) -> bool:
    """Whether two paths name one file, through links too; it need not exist."""
    try:
        linked = one.exists() and other.exists() and one.samefile(other)
    except OSError:  # what cannot be looked at is refused where it is opened
        return False
    return linked or os.path.realpath(one) == os.path.realpath(other)


def check_apart(option: str, path: str | os.PathLike[str] | None, read: Mapping[str, Path]) -> None:
    """Raise `JobError` where an option's file would be written over one that is read.

    Args:
        path: of the option; None: it is not given.
        read: what each of the other files is, and its path.
    """
    if path is None:
        return
    for what, other in read.items():
        if _is_same(Path(path), other):
            raise JobError(f"{option} {path} is {what}: choose another file")


def check_place(path: Path, choose: str) -> None:
    """Raise `JobError` where no file can be put, before anything is computed.

    Args:
        choose: what the user may choose instead.
    """
    if path.exists() and not path.is_file():
        raise JobError(f"{path} is not a regular file: choose {choose}")
    if not path.parent.is_dir():
        raise JobError(f"folder {path.parent} does not exist: make it first")
    if not os.access(path.parent, os.W_OK):
        raise JobError(f"folder {path.parent} cannot be written: choose {choose}")


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write, which replaces the one at `path` at the end of the block. Where that raises,
    or the disk does, the old one stays."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with open(draft, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def write_whole(path: Path, content: bytes) -> None:
    """Write a `whole_file` at once; after an `OSError` it is as it was."""
    with whole_file(path) as file:
        file.write(content)
