"""`onestem` in processes of their own that need not import anything: they are forked from one that
has. What a person types takes seconds to import PyTorch and transformers, and tests type it often.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

__all__ = ["ENVIRONMENT", "FORKSERVER", "Command", "Done", "onestem"]

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
_IMPORTED = "tests.forked_imports"

FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload([_IMPORTED])


@dataclass
class Done:
    """How a command ended; `returncode` is negative after a signal."""

    returncode: int
    stdout: str
    stderr: str


class Command:
    """A running `onestem`, told its arguments.

    Args:
        folder: where it runs; None: where the tests do.
        signal_after: (results, signal): a job sends itself a signal when it has written so many,
            so that the moment does not depend on who else uses the machine.
    """

    def __init__(
        self,
        *arguments: object,
        folder: Path | None = None,
        signal_after: tuple[int, int] | None = None,
    ) -> None:
        self._done: Done | None = None
        self._folder = tempfile.TemporaryDirectory()
        self._files = [Path(self._folder.name) / name for name in ("stdout", "stderr")]
        for file in self._files:
            file.touch()
        self._process = FORKSERVER.Process(
            target=_run,
            args=(list(map(str, arguments)), list(map(str, self._files)), folder, signal_after),
        )
        with patch.dict(os.environ, ENVIRONMENT):  # the process that they are forked from has it
            self._process.start()

    @property
    def is_running(self) -> bool:
        return self._done is None and self._process.is_alive()

    @property
    def stderr(self) -> str:
        """What it has said so far."""
        return self._files[1].read_text() if self._done is None else self._done.stderr

    def until(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        """Let it run until something holds, or it ends."""
        deadline = time.monotonic() + seconds
        while self.is_running and not condition():
            assert time.monotonic() < deadline, self.stderr
            time.sleep(0.02)

    def send(self, signal_number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.is_running:
            assert self._process.pid is not None
            os.kill(self._process.pid, signal_number)

    def wait(self, seconds: float = 60.0) -> Done:
        """Until it has ended; kills it where that takes longer, and fails."""
        if self._done is None:
            self._process.join(seconds)
            ended = self._process.exitcode
            if ended is None:
                self._process.kill()
                self._process.join()
            self._done = Done(ended or 0, *(file.read_text() for file in self._files))
            self._process.close()
            self._folder.cleanup()
            assert ended is not None, f"it ran for more than {seconds} s: {self._done}"
        return self._done


def _run(
    arguments: list[str],
    files: list[str],
    folder: Path | None,
    signal_after: tuple[int, int] | None,
) -> None:
    assert _IMPORTED in sys.modules, "nothing was imported before the fork"
    for number, path in enumerate(files, start=1):
        file = os.open(path, os.O_WRONLY)
        os.dup2(file, number)
        os.close(file)
    if folder is not None:
        os.chdir(folder)
    if signal_after is not None:
        _signal_oneself(*signal_after)
    from onestem.cli import main

    sys.argv = ["onestem", *arguments]
    main()


def _signal_oneself(results: int, number: int) -> None:
    from onestem.batch.journal import Journal

    write, count = Journal.write, itertools.count(1)

    def counted(*arguments: Any, **options: Any) -> None:
        write(*arguments, **options)
        if next(count) == results:
            os.kill(os.getpid(), number)

    Journal.write = counted  # type: ignore[method-assign]


def onestem(*arguments: object, code: int = 0, folder: Path | None = None) -> Done:
    """Run a command to its end, which must be `code`."""
    done = Command(*arguments, folder=folder).wait()
    assert done.returncode == code, done.stderr
    return done
