"""Grammars are compiled in processes of their own, which can be ended.

A schema within all limits, or an ambiguous regular expression of a few characters, can keep the
compiler busy for minutes or hours, or take all memory; its masks can be as bad. What passes comes
back.
"""

from __future__ import annotations

import itertools
import json
import signal
import socket
import struct
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, Pipe
from typing import Any, NamedTuple

from onestem.children import Limits, Process
from onestem.engine.grammar.schema import unusable
from onestem.engine.grammar.trial_process import COMPILE, END, HEAD
from onestem.errors import OnestemError, RequestError, UnsupportedError

_PROGRAM = "onestem.engine.grammar.trial_process"
_NICE, _NICER = 5, 15  # the engine's steps come first
_IDLE_WAIT = 8  # times the processor seconds, for what runs in idle time


class Pace(NamedTuple):
    """How a grammar is tried: seconds that it gets, and how nice its process is (as `nice`); None:
    it runs only where a core has nothing else to do."""

    cpu_seconds: float
    wall_seconds: float
    nice: int | None


@dataclass(frozen=True, kw_only=True)
class GrammarLimits(Limits):
    """What one grammar may take to compile, and to write some tokens under it if it may be costly;
    and:

    Attributes:
        short_tries: processor seconds of the tries before; what takes longer queues for the next.
        mask_seconds: for a token's mask, which all others in its step wait for.
        again_seconds: of processor time, up to which what was compiled is compiled once more where
            it is used, because that is quicker than to send it there.
        sent_bytes: serialised, about; what is larger is compiled once more in any case.
        kept_bytes: compiled, which is kept for the next request.
        all_kept_bytes: of all that are kept. The least recently used is forgotten first.
    """

    cpu_seconds: float = 5.0
    wall_seconds: float = 60.0
    memory_bytes: int = 2 << 30
    short_tries: tuple[float, ...] = (0.05, 0.5)
    mask_seconds: float = 0.1
    again_seconds: float = 1.5
    sent_bytes: int = 16 << 20
    kept_bytes: int = 64 << 20
    all_kept_bytes: int = 512 << 20

    @property
    def paces(self) -> list[list[Pace]]:
        """Of the tries, in order: what takes too much of the processor goes on to the next, after
        others that did. Each runs in idle time, and once more where there is none."""
        *short, cpu = *self.short_tries, self.cpu_seconds
        tries = [*zip(short, itertools.repeat(_NICE), strict=False), (cpu, _NICER)]
        return [
            [
                Pace(cpu, min(_IDLE_WAIT * cpu, self.wall_seconds), None),
                Pace(cpu, self.wall_seconds, nice),
            ]
            for cpu, nice in tries
        ]


class CostlyGrammarError(RequestError):
    """A grammar that takes more than it may.

    Attributes:
        lasts: whether it does so at each try, however busy the machine is.
    """

    lasts = True


class SlowGrammarError(CostlyGrammarError):
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

    def __init__(self, setup: Mapping[str, Any], limits: GrammarLimits) -> None:
        self._setup = json.dumps({**setup, **asdict(limits)}).encode()
        self.limits = limits
        self._lock = threading.Lock()
        self._process: _Forker | None = None
        self._closed = False

    def start(self, task: Mapping[str, Any], name: str, pace: Pace) -> Trial:
        """Begin to compile.

        Args:
            task: what `trial_process` reads, but for the pace.
            name: what errors call it.

        Raises:
            UnsupportedError: this version of xgrammar cannot be used.
            CostlyGrammarError: there is no process now.
        """
        asked = json.dumps({**task, **pace._asdict()}).encode()
        try:
            try:
                return Trial(self.process, asked, name, pace, self.limits)
            except ConnectionError:  # it ended just now
                return Trial(self.process, asked, name, pace, self.limits)
        except OSError as error:  # the system has no more processes, say
            raise _passing(CostlyGrammarError(f"{name} cannot be compiled now: {error}")) from error

    @property
    def process(self) -> _Forker:
        """The process that all are forked from, which runs.

        Raises:
            OSError: it cannot be started.
            UnsupportedError: this was closed.
        """
        with self._lock:
            if self._closed:
                raise UnsupportedError("the engine is closed, and compiles no response_format")
            if self._process is None or self._process.has_ended:
                if self._process is not None:
                    self._process.end()
                self._process = None  # not where there is none to be had
                self._process = _Forker(self._setup, self.limits.start_seconds)
            return self._process

    def close(self) -> None:
        """End all, whatever they do."""
        with self._lock:
            process, self._process, self._closed = self._process, None, True
        if process is not None:
            process.end()


class Trial:
    """A grammar that is being compiled, in a process of its own.

    Attributes:
        name: what errors call it.
        pace: how it is tried.
    """

    def __init__(
        self, process: _Forker, task: bytes, name: str, pace: Pace, limits: GrammarLimits
    ) -> None:
        self._process = process
        self.pace = pace
        self.name = name
        self._limits = limits
        self._answers, other = Pipe(duplex=False)
        with other:
            self._number = process.run(task, other)

    def end(self) -> None:
        """End it now, if it has not ended; `answer` then raises some error."""
        self._process.stop(self._number)

    def answer(self) -> Compilable:
        """What may be compiled, or is compiled; waits for it.

        Raises:
            CostlyGrammarError: it takes more time or memory than it may.
            RequestError: it is not valid, or xgrammar refuses it.
            UnsupportedError: it has what is not enforced.
            EOFError: the process that all are forked from has ended, or does not answer.
        """
        with self._answers:
            if not self._answers.poll(self._limits.patience_seconds):
                self._process.end()
                raise EOFError
            kind, _, rest = self._answers.recv_bytes().partition(b" ")
        text = rest.decode()
        if kind == b"again":
            return Compilable(**json.loads(text))
        if kind == b"grammar":
            return Compilable(size=len(text), serialised=text)
        name, limits = self.name, self._limits
        if kind == b"refused":
            raise unusable(*json.loads(text))
        if kind == b"invalid":
            error, why = json.loads(text)
            raise (RequestError if error == RequestError.__name__ else UnsupportedError)(why)
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
        name, pace = self.name, self.pace
        if status >= 0:
            return _of_version()
        number = signal.Signals(-status)
        if number == signal.SIGALRM:
            return _passing(
                SlowGrammarError(
                    f"{name} was not compiled within {pace.wall_seconds:g} s, because the machine "
                    "is busy: ask again later, or simplify it"
                )
            )
        if number == signal.SIGKILL:
            return _passing(
                CostlyGrammarError(
                    f"{name} was not compiled, because the machine has too little memory left: ask "
                    "again later, or simplify it"
                )
            )
        if number == signal.SIGPROF:
            why = f"takes more than {pace.cpu_seconds:g} s to compile"
            return _costly(name, why, SlowGrammarError)
        if number == signal.SIGABRT:
            return self._out_of_memory()
        return _costly(name, f"makes the compiler crash ({number.name})")

    def _out_of_memory(self) -> CostlyGrammarError:
        mebibytes = self._limits.memory_bytes >> 20
        return _costly(self.name, f"takes more than {mebibytes} MiB of memory to compile")


class _Forker(Process):
    """The process that all others are forked from, and the way to it.

    Args:
        setup: JSON of what it reads first.
        seconds: that it may take to load the compiler, and later to read a task.
    """

    def __init__(self, setup: bytes, seconds: float) -> None:
        self._setup: bytes | None = setup  # None: it has loaded the compiler
        self._seconds = seconds
        self._numbers = itertools.count()
        self.writing = threading.Lock()
        self._commands, other = socket.socketpair()
        self._commands.settimeout(seconds)
        with ExitStack() as failed, other:
            failed.callback(self._commands.close)
            super().__init__(_PROGRAM, self._commands, other.fileno(), patience=1.0)
            failed.pop_all()

    def run(self, task: bytes, answers: Connection) -> int:
        """Have a task done; its answer goes to `answers`. Returns its number.

        Raises:
            OSError: the process has ended, now if it does not read.
            UnsupportedError: it cannot load the compiler.
        """
        with self.writing, self._or_end():
            if self._setup is not None:
                self._load(self._setup)
                self._setup = None
            number = next(self._numbers)
            head = HEAD.pack(COMPILE, number, len(task))
            socket.send_fds(self._commands, [head], [answers.fileno()])
            self._commands.sendall(task)
            return number

    def _load(self, setup: bytes) -> None:
        ready = b""
        with suppress(ConnectionError):
            self._commands.sendall(struct.pack("!Q", len(setup)) + setup)
            ready = self._commands.recv(1)
        if not ready:
            raise _of_version()

    def stop(self, number: int) -> None:
        """End a task's process, if it runs."""
        with self.writing, suppress(OSError), self._or_end():
            self._commands.sendall(HEAD.pack(END, number, 0))

    @contextmanager
    def _or_end(self) -> Iterator[None]:
        """End it where a message went halfway."""
        try:
            yield
        except BaseException as error:
            was_ended = self.was_ended
            self.end()
            if was_ended:
                raise ConnectionError("its process was ended") from error
            if isinstance(error, TimeoutError):
                late = f"its process does not answer within {self._seconds:g} s"
                raise TimeoutError(late) from None
            raise


def _of_version() -> UnsupportedError:
    return UnsupportedError(
        "response_format needs another version of xgrammar: pip install 'xgrammar>=0.2.8,<0.2.10'"
    )


def _costly(
    name: str, why: str, kind: type[CostlyGrammarError] = CostlyGrammarError
) -> CostlyGrammarError:
    return kind(f"{name} {why}: simplify it, or repeat less in it")


def _passing(error: CostlyGrammarError) -> CostlyGrammarError:
    """An error of the machine's, which another try may not have."""
    error.lasts = False
    return error
