"""What each step computes, as lines of JSON: for graphs of tokens per step (BatchLLM fig. 10)."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
import time
from collections.abc import Callable
from typing import IO

from onestem.engine.sequence import Chunk
from onestem.errors import ConfigError

log = logging.getLogger(__name__)


class StepTrace:
    """A file with a line for each step.

    `step` counts from 1. `seconds` is the time from the trace's beginning to the step's launch.
    Rows of the step are `decodes`, `prefix` (of the prompts' planned prefixes, and of modules) and
    `distinct` (of prompts otherwise, and of what is computed again). Sequences are `running`, or
    `waiting` in the engine (a job's are read as there is room, and so are few). `free_pages` are
    pages of KV memory that no sequence holds.

    What the file holds stays until the first step after `restart`. Each line is handed to the
    system at once, so that none is lost when the process is killed. A disk that fails ends the
    trace, and nothing else.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        self._step, self._began = 0, time.perf_counter()
        self._is_fresh = False  # what the file holds is of an earlier trace
        try:
            self._file: IO[str] | None = open(path, "a", buffering=1)  # noqa: SIM115
        except OSError as error:
            raise ConfigError(f"trace {path}: {error.strerror}: choose another file") from error

    def restart(self) -> None:
        """Begin again: with the next step the file is emptied, unless it is a pipe or a device."""
        self._step, self._began = 0, time.perf_counter()
        self._is_fresh = True

    def note(
        self, num_rows: int, chunks: list[Chunk], *, running: int, waiting: int, free_pages: int
    ) -> None:
        """Note that a step of `num_rows` rows was launched."""
        if self._is_fresh:
            self._is_fresh = False
            self._do(_empty)
        self._step += 1
        prefix = sum(map(_num_prefix_rows, chunks))
        of_prompts = sum(chunk.end - chunk.start for chunk in chunks)
        line = {
            "step": self._step,
            "seconds": round(time.perf_counter() - self._began, 6),
            "decodes": num_rows - of_prompts,
            "prefix": prefix,
            "distinct": of_prompts - prefix,
            "running": running,
            "waiting": waiting,
            "free_pages": free_pages,
        }
        self._do(lambda file: file.write(json.dumps(line) + "\n"))

    def close(self) -> None:
        """Close the file. Closing twice is fine."""
        self._do(lambda file: file.close())
        self._file = None

    def _do(self, action: Callable[[IO[str]], object]) -> None:
        file = self._file
        if file is None:
            return
        try:
            action(file)
        except OSError as error:
            log.error("the trace %s ends: %s", self._path, error.strerror)
            self._file = None
            with contextlib.suppress(OSError):
                file.close()


def _empty(file: IO[str]) -> None:
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.seek(0)
        file.truncate()


def _num_prefix_rows(chunk: Chunk) -> int:
    if chunk.module is not None:
        return chunk.end - chunk.start
    prefix = chunk.sequence.state.request.group_prefix_tokens
    return max(0, min(chunk.end, prefix) - chunk.start)
