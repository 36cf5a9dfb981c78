"""Where a batch's first pass is, on the disk: so a batch whose lines end the server's process is
not read for ever, each time that the server is started again."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from onestem.batch import Progress
from onestem.errors import JobError

__all__ = ["Reading"]

MOST_ENDS = 3


class Reading:
    """The first pass of one batch.

    Args:
        path: its file. It is there while the batch is read, and afterwards only if the process
            has ended meanwhile.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._before = -1
        self._ends = 0

    def begin(self) -> None:
        """Note that the batch is read from now on.

        Raises:
            JobError: the process has ended too often at one place of it.
        """
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            last = json.loads(self._path.read_bytes())
            at, before, ends = (int(last[name]) for name in ("at", "before", "ends"))
            self._before, self._ends = at, ends + 1 if at == before else 1
        if self._ends >= MOST_ENDS:
            raise JobError(
                f"the server ended {self._ends} times while it read this batch, after byte "
                f"{self._before} of it: send the lines before and after apart"
            )
        self._note(0)

    def note(self, progress: Progress) -> None:
        if progress.stage == "read":
            self._note(progress.done)
        else:
            self.end()

    def end(self) -> None:
        """The batch is read, or the attempt was given up in good order."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _note(self, at: int) -> None:
        record = {"at": at, "before": self._before, "ends": self._ends}
        with contextlib.suppress(OSError):  # it is for the worst case alone
            self._path.write_text(json.dumps(record))
