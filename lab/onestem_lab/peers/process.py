"""A runner's process: loaded once, then a run at a time."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

__all__ = ["RunnerProcess"]

# How the lines of a runner's stdout begin that are for us.
LOADED, RESULT = '{"loaded"', '{"engine"'


class RunnerProcess:
    """Args:
    command: a runner and its job file; it makes a run for each line on stdin.
    cwd: where it runs.
    environment: all of its environment variables.
    log: file for its stderr.
    """

    def __init__(
        self, command: list[str], *, cwd: Path, environment: dict[str, str], log: Path
    ) -> None:
        self.log = log
        with log.open("w") as stderr:
            self.process = subprocess.Popen(
                command,
                cwd=cwd,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,  # a compiler's workers must end with it, too
            )

    def load(self, timeout: float) -> None:
        """Wait until the engine is loaded; what went wrong, the next run will say.

        Args:
            timeout: seconds; then the process is stopped.
        """
        with self._at_most(timeout):
            self._next_line(LOADED)

    def run(self, timeout: float) -> dict[str, Any]:
        """The result of one run (of loading too, if that was not awaited), or `error` with the
        reason.

        Args:
            timeout: seconds; then the process is stopped.
        """
        with self._at_most(timeout) as late:
            line = self._next_line(RESULT) if self._ask() else None
        if line is not None:
            result: dict[str, Any] = json.loads(line)
            return result
        if late.is_set():
            return {"error": f"not done after {timeout:g} s"}
        code = self.process.wait()
        return {"error": f"exit code {code}: {_reason(self.log.read_text(errors='replace'))}"}

    @contextmanager
    def _at_most(self, seconds: float) -> Iterator[threading.Event]:
        """Stops the process after so long; then the event is set."""
        late = threading.Event()

        def stop() -> None:
            late.set()
            self._kill()

        timer = threading.Timer(seconds, stop)
        timer.start()
        try:
            yield late
        finally:
            timer.cancel()

    def _ask(self) -> bool:
        """For a run; False if the process has ended."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return False
        return True

    def _next_line(self, start: str) -> str | None:
        """The next line of stdout that begins so; None where the process ends first."""
        assert self.process.stdout is not None
        lines = iter(self.process.stdout.readline, "")
        return next((line for line in lines if line.startswith(start)), None)

    def close(self) -> None:
        self._kill()
        self.process.communicate()

    def _kill(self) -> None:
        """It and all that it started: whatever holds its stdout keeps us reading."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def _reason(log: str) -> str:
    """The line of a log that says what went wrong, as far as one can tell."""
    lines = log.strip().splitlines() or ["no output"]
    telling = [line for line in lines if re.search("error|assert|fail", line, re.IGNORECASE)]
    return (telling or lines)[-1].strip()[:600]
