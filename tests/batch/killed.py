"""Run a job in processes that kill themselves: `python -m tests.batch.killed IN OUT LOG K,K,...`.

With `each` in place of the numbers, a job of its own (OUT.1, OUT.2, ...) is killed at each event
and run again to its end.

For each K a fork runs the job and sends itself SIGKILL at its K-th event: a batch tokenised, a
write (before it, in its middle or after it), an fsync, a rename, a removal. LOG gets a line of JSON
per process: the requests answered by the engine, and those whole in the journal or output after.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from onestem.rawtext import RawText
from onestem.request import Request, RequestOutput
from tests.batch.fakes import FakeEngine, FakeTokenizer, run_fake

NEVER = 10**9


class Killer:
    def __init__(self, at: int) -> None:
        self.left = at

    def event(self) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def wrap(self, name: str) -> None:
        """Events before and after the function of `os`."""
        real: Callable[..., Any] = getattr(os, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.event()
            value = real(*args, **kwargs)
            self.event()
            return value

        setattr(os, name, wrapped)

    def tear_writes(self) -> None:
        """An event in the middle of each write: half of it is on the disk."""
        real = os.write

        def torn(file: int, data: bytes) -> int:
            if self.left == 1:
                real(file, data[: len(data) // 2])
            self.event()
            return real(file, data)

        os.write = torn


class LoggingEngine(FakeEngine):
    def __init__(self, log: Path) -> None:
        super().__init__()
        self.log = log

    def finish(self, request: Request) -> RequestOutput:
        with open(self.log, "a") as file:
            file.write(request.request_id + "\n")
        return super().finish(request)


class KillingTokenizer(FakeTokenizer):
    def __init__(self, killer: Killer) -> None:
        super().__init__()
        self.killer = killer

    def encode_batch(self, texts: list[RawText]) -> list[list[int]]:
        self.killer.event()
        return super().encode_batch(texts)


def run_killed(source: Path, output: Path, log: Path, at: int) -> None:
    killer = Killer(at)
    killer.tear_writes()
    for name in ("write", "fsync", "replace", "unlink", "rmdir"):
        killer.wrap(name)
    run_fake(source, output, LoggingEngine(log), tokenizer=KillingTokenizer(killer))


def whole_lines(output: Path) -> list[str]:
    """Ids of the results that are on the disk, whole."""
    partial = output.with_name(output.name + ".partial")
    path = output if output.exists() else partial
    data = path.read_bytes() if path.exists() else b""
    return [json.loads(line)["id"] for line in data.split(b"\n")[:-1]]


def run_lives(source: Path, output: Path, log: Path, lives: list[int]) -> bool:
    """One process after the other; returns whether the first was killed."""
    answered = log.with_suffix(".answered")
    killed = []
    for at in lives:
        answered.write_text("")
        child = os.fork()
        if child == 0:
            run_killed(source, output, answered, at)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert status in (0, signal.SIGKILL), status
        killed.append(status != 0)
        record = {
            "killed": killed[-1],
            "answered": answered.read_text().split(),
            "whole": whole_lines(output),
        }
        with open(log, "a") as file:
            file.write(json.dumps(record) + "\n")
    return killed[0]


def main() -> None:
    source, output, log = map(Path, sys.argv[1:4])
    if sys.argv[4] != "each":
        run_lives(source, output, log, list(map(int, sys.argv[4].split(","))))
        return
    at = 1
    while run_lives(source, output.with_name(f"{output.name}.{at}"), log, [at, NEVER]):
        at += 1


if __name__ == "__main__":
    main()
