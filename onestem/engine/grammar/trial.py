"""Grammars are compiled in processes of their own, which can be ended.

A schema within all limits, or an ambiguous regular expression of a few characters, can keep the
compiler busy for minutes or hours, or take all memory; its masks can be as bad. What passes comes
back.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from onestem.engine.grammar.schema import unusable
from onestem.engine.grammar.trial_process import END, HEAD, QUICK, SLOW
from onestem.errors import OnestemError, RequestError, UnsupportedError

__all__ = ["Compilable", "Limits", "TooCostlyError", "TooSlowError", "Trial", "Trials"]

LATER = "ask again later, or simplify it"
_PROGRAM = Path(__file__).with_name("trial_process.py")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one grammar may take.

    Attributes:
        cpu_seconds: to compile it, and to write some tokens under it if it may be costly.
        quick_seconds: the same at the first try; then it queues with slow ones.
        wall_seconds: the same in wall-clock time, where the machine is busy with other work.
        mask_seconds: for a token's mask, which all others in its step wait for.
        memory_bytes: to compile it, beyond what the process has without grammars.
        again_seconds: of processor time, up to which what was compiled is compiled once more where
            it is used, because that is quicker than to send it there.
        kept_bytes: compiled, which is kept for the next request.
        all_kept_bytes: of all that are kept. The least recently used is forgotten first.
    """

    cpu_seconds: float = 5.0
    quick_seconds: float = 0.25
    wall_seconds: float = 60.0
    mask_seconds: float = 0.1
    memory_bytes: int = 2 << 30
    again_seconds: float = 1.5
    kept_bytes: int = 64 << 20
    all_kept_bytes: int = 512 << 20


class TooCostlyError(RequestError):
    """A grammar that takes more than it may.

    Attributes:
        lasts: whether it does so at each try, however busy the machine is.
    """

    lasts = True


class TooSlowError(TooCostlyError):
    """A grammar that takes more time to compile than it may."""


@dataclass(frozen=True, kw_only=True)
class Compilable:
    """A grammar that takes no more than it may: a text in EBNF or a structural tag, or xgrammar's
    `CompiledGrammar`, serialised. `size`: about the bytes that it keeps."""

    size: int
    ebnf: str | None = None
    tag: str | None = None
    serialised: str | None = None


class Trials:
    """Compiles grammars, each in a process forked from one that has loaded the compiler. That one
    starts with the first grammar, and again if something ended it. All end with this object or this
    process. Safe to use from several threads.

    Args:
        setup: what the process needs beside the limits: `tokenizer` (xgrammar's `TokenizerInfo`,
            serialised), `vocab_size`, and `short` and `short_in_tags` (see `ebnf_of`).
        limits: of each grammar.
    """

    def __init__(self, setup: Mapping[str, Any], limits: Limits) -> None:
        self._setup = json.dumps({**setup, **asdict(limits)}).encode()
        self._limits = limits
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._closed = False

    def start(self, task: bytes, name: str, *, quick: bool) -> Trial:
        """Begin to compile.

        Args:
            task: JSON of what `trial_process` reads.
            name: what errors call it.
            quick: end it after `quick_seconds`.

        Raises:
            UnsupportedError: this version of xgrammar cannot be used, or there is no process.
        """
        command = QUICK if quick else SLOW
        with self._lock:
            if self._closed:
                raise UnsupportedError("the engine is closed, and compiles no response_format")
            try:
                try:
                    return Trial(self._running(), command, task, name, self._limits)
                except ConnectionError:  # it ended just now
                    return Trial(self._running(anew=True), command, task, name, self._limits)
            except OSError as error:  # the system has no more processes, say
                raise UnsupportedError(f"{name} cannot be compiled now: {error}") from error

    def _running(self, *, anew: bool = False) -> _Process:
        if self._process is not None and (anew or self._process.has_ended):
            process, self._process = self._process, None
            process.end()
        if self._process is None:
            self._process = _Process(self._setup)
        return self._process

    def close(self) -> None:
        """End all, whatever they do."""
        with self._lock:
            process, self._process, self._closed = self._process, None, True
        if process is not None:
            process.end()


class Trial:
    """A grammar that is being compiled, in a process of its own."""

    def __init__(
        self, process: _Process, command: int, task: bytes, name: str, limits: Limits
    ) -> None:
        self._process = process
        self._quick = command == QUICK
        self._name = name
        self._limits = limits
        self._answers, other = Pipe(duplex=False)
        with other:
            self._number = process.run(command, task, other)

    def end(self) -> None:
        """End it now, if it has not ended; `answer` then raises some error."""
        self._process.stop(self._number)

    def answer(self) -> Compilable:
        """What may be compiled, or is compiled; waits for it.

        Raises:
            TooCostlyError: it takes more time or memory than it may.
            RequestError: xgrammar refuses it.
            EOFError: the process that all are forked from has ended.
        """
        with self._answers:
            kind, _, rest = self._answers.recv_bytes().partition(b" ")
        text = rest.decode()
        if kind == b"again":
            return Compilable(**json.loads(text))
        if kind == b"grammar":
            return Compilable(size=len(text), serialised=text)
        name, limits = self._name, self._limits
        if kind == b"refused":
            raise unusable(*json.loads(text))
        if kind == b"memory":
            raise self._out_of_memory()
        if kind == b"large":
            most, size = limits.kept_bytes / 2**20, int(text) / 2**20
            raise _costly(name, f"takes {size:.3g} MiB when compiled, limit is {most:.3g} MiB")
        if kind == b"slow":
            most = limits.mask_seconds
            raise _costly(name, f"takes {text} s for the mask of a token, limit is {most:g} s")
        raise self._ended(int(text))

    def _ended(self, status: int) -> OnestemError:
        """An error for a process that ended instead of answering."""
        name, limits = self._name, self._limits
        if status >= 0:
            return _of_version()
        number = signal.Signals(-status)
        if number == signal.SIGALRM:
            why = f"within {limits.wall_seconds:g} s, because the machine is busy"
            return _passing(TooSlowError(f"{name} was not compiled {why}: {LATER}"))
        if number == signal.SIGKILL:
            why = "because the machine has too little memory left"
            return _passing(TooCostlyError(f"{name} was not compiled, {why}: {LATER}"))
        if number == signal.SIGPROF:
            cpu = limits.quick_seconds if self._quick else limits.cpu_seconds
            return TooSlowError(_why(name, f"takes more than {cpu:g} s to compile"))
        if number == signal.SIGABRT:
            return self._out_of_memory()
        return _costly(name, f"makes the compiler crash ({number.name})")

    def _out_of_memory(self) -> TooCostlyError:
        mebibytes = self._limits.memory_bytes >> 20
        return _costly(self._name, f"takes more than {mebibytes} MiB of memory to compile")


class _Process:
    """The process that all others are forked from, and the way to it. Starting it waits until it
    has loaded the compiler; raises `UnsupportedError` if it cannot."""

    def __init__(self, setup: bytes) -> None:
        self._commands, other = socket.socketpair()
        one = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # forks want no threads
        with ExitStack() as failed, other:
            failed.callback(self._commands.close)
            self._process = subprocess.Popen(
                [sys.executable, str(_PROGRAM), str(other.fileno())],
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # the compiler writes lines for people there
                env=os.environ | one,
            )
            failed.pop_all()
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # of what is written
        self._end = weakref.finalize(self, _end, self._process, self._commands)
        ready = b""
        with suppress(OSError):
            self._commands.sendall(struct.pack("!Q", len(setup)) + setup)
            ready = self._commands.recv(1)
        if not ready:
            self.end()
            raise _of_version()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether it has ended, so not because of a grammar."""
        return self._process.poll() is not None

    def run(self, command: int, task: bytes, answers: Connection) -> int:
        """Have a task done; its answer goes to `answers`. Returns its number; raises `OSError` if
        the process has ended."""
        with self._lock:
            number = next(self._numbers)
            head = HEAD.pack(command, number, len(task))
            socket.send_fds(self._commands, [head], [answers.fileno()])
            self._commands.sendall(task)
            return number

    def stop(self, number: int) -> None:
        """End a task's process, if it runs."""
        with self._lock, suppress(OSError):
            self._commands.sendall(HEAD.pack(END, number, 0))

    def end(self) -> None:
        """End it and all that were forked from it."""
        self._end()


def _end(process: subprocess.Popen[bytes], commands: socket.socket) -> None:
    commands.close()  # it ends the others then, and itself
    with suppress(subprocess.TimeoutExpired):
        process.wait(1)
    process.kill()
    process.wait()


def _of_version() -> UnsupportedError:
    return UnsupportedError(
        "response_format needs another version of xgrammar: pip install 'xgrammar>=0.2.8'"
    )


def _costly(name: str, why: str) -> TooCostlyError:
    return TooCostlyError(_why(name, why))


def _passing(error: TooCostlyError) -> TooCostlyError:
    """An error of the machine's, which another try may not have."""
    error.lasts = False
    return error


def _why(name: str, why: str) -> str:
    return f"{name} {why}: simplify it, or repeat less in it"
