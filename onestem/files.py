"""Files that are there whole, or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from onestem.errors import JobError

__all__ = ["check_apart", "check_place", "write_whole"]


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


def write_whole(path: Path, content: bytes) -> None:
    """Write a file beside its place and move it there: who reads sees the old one or all of it.

    Raises:
        OSError: the file is as it was.
    """
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(content)
        os.replace(draft, path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise
