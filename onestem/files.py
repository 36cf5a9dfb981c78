"""Files that are there whole, or not at all."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from onestem.errors import JobError

__all__ = ["check_place", "write_whole"]


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
