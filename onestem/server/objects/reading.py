"""Where a batch's first pass is, on the disk: so a batch whose lines end the server's process is
not read for ever, each time that the server is started again."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from onestem.batch import Progress
from onestem.errors import JobError

MOST_ENDS = 3


class Reading:
    """The first pass of one batch.

    Only an end while the server itself has lines in hand counts, and only at the place where the
    process ended before: whoever ends the server does so anywhere. After such an end the batch is
    read line by line, so the place is a line.

    Args:
        path: its file. It is there while the batch is read, and afterwards only if the process
            has ended meanwhile.

    Attributes:
        line_by_line: whether to read the batch so.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0
        self._before = -1
        self._ends = 0
        self._is_over = False

    @property
    def line_by_line(self) -> bool:
        """Whether the process has ended while it had lines in hand."""
        return self._ends > 0

    def begin(self) -> None:
        """Note that the batch is read from now on.

        Raises:
            JobError: the process has ended too often at one place of it.
        """
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            last = json.loads(self._path.read_bytes())
            at, before, ends = (int(last[name]) for name in ("at", "before", "ends"))
            self._before, self._ends = before, ends
            if last.get("in_hand", True):
                self._before, self._ends = at, ends + 1 if at == before else 1
        if self._ends >= MOST_ENDS:
            raise JobError(
                f"the server ended {self._ends} times while it read this batch, after byte "
                f"{self._before} of it: send the lines before and after apart"
            )
        self._note(in_hand=False)

    def note(self, progress: Progress) -> None:
        """Note how far the job is; past its first pass, forget the reading."""
        if progress.stage == "read":
            self._at = progress.done
            self._note(in_hand=True)
        elif not self._is_over:
            self.end()

    @contextlib.contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Another process has the line in hand: no end of this one is due to it."""
        self._note(in_hand=False)
        try:
            yield
        finally:
            self._note(in_hand=True)

    def end(self) -> None:
        """The batch is read, or the attempt was given up in good order."""
        self._is_over = True
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _note(self, *, in_hand: bool) -> None:
        record = {"at": self._at, "before": self._before, "ends": self._ends, "in_hand": in_hand}
        with contextlib.suppress(OSError):  # it is for the worst case alone
            self._path.write_text(json.dumps(record))
