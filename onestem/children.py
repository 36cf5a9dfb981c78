"""Processes for what may take any time or memory, or crash: the kernel ends them at their limits,
whatever they do then.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import struct
import subprocess
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe

from onestem.processes import python_module

Answer = Callable[[bytes], bytes]

EXIT_SECONDS = 1.0  # for a process that has closed its channel to end by itself


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one answer may take.

    Attributes:
        cpu_seconds: of the process.
        wall_seconds: where the machine is busy with other work.
        memory_bytes: beyond what the process has at its start.
        start_seconds: for the process to start, and for what is sent either way.
    """

    cpu_seconds: float
    wall_seconds: float
    memory_bytes: int
    start_seconds: float = 60.0

    @property
    def patience_seconds(self) -> float:
        """How long an answer is waited for: the kernel ends a process that runs sooner."""
        return self.start_seconds + self.wall_seconds


class TooCostlyError(Exception):
    """An answer took more than it may, or ended its process. Its text is a verb and its object."""


class Process:
    """A module that runs as a process with one thread. It ends with this object or this process;
    after a fork it is the other process's.

    Args:
        module: is run. Its first argument is the file descriptor, which it gets too.
        channel: this process's end of what leads there, closed when it is ended.
        arguments: further ones.
        patience: seconds in which it may then end by itself.
    """

    def __init__(
        self,
        module: str,
        channel: Connection | socket.socket,
        descriptor: int,
        *arguments: str,
        patience: float = 0.0,
    ) -> None:
        self._owner = os.getpid()
        self._process = subprocess.Popen(
            python_module(module, str(descriptor), *arguments),
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # libraries write lines for people there
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        )
        self.pid = self._process.pid
        self._end = weakref.finalize(self, _end, self._process, channel, self._owner, patience)

    @property
    def was_ended(self) -> bool:
        """Whether `end` was called."""
        return not self._end.alive

    @property
    def has_ended(self) -> bool:
        """Whether it has ended, by itself too, or is another process's."""
        return self._owner != os.getpid() or self._process.poll() is not None

    def end(self, patience: float = 0.0) -> int:
        """End it, unless it ends within these seconds. Returns its exit status: what it died of, if
        it was dead."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        self._end()
        return self._process.wait()


def _end(
    process: subprocess.Popen[bytes],
    channel: Connection | socket.socket,
    owner: int,
    patience: float,
) -> None:
    if owner != os.getpid():
        return
    if isinstance(channel, socket.socket):  # closing alone ends nobody's wait for it
        with suppress(OSError):
            channel.shutdown(socket.SHUT_RDWR)
    channel.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(patience)
    process.kill()
    process.wait()


class Child:
    """Answers one question at a time. The process starts with the first, and again after one that
    ended it. It ends with this object or this process.

    Args:
        module: is run, and calls `serve`.
        limits: of each answer.
    """

    def __init__(self, module: str, limits: Limits) -> None:
        self._module = module
        self._limits = limits
        self._lock = threading.Lock()
        self._process: Process | None = None
        self._channel: Connection  # to it

    @property
    def pid(self) -> int | None:
        """The process's id; None: it has not started, or was ended."""
        return None if self._process is None else self._process.pid

    def ask(self, question: bytes) -> bytes:
        """The answer.

        Raises:
            TooCostlyError: there is none.
        """
        with self._lock:
            process = self._running()
            try:
                self._channel.send_bytes(question)
                answer = self._channel.recv_bytes()
            except BlockingIOError:  # it is stopped, or cannot be loaded
                self._process = None
                process.end()
                seconds = self._limits.patience_seconds
                raise TooCostlyError(f"has no answer within {seconds:g} s") from None
            except (EOFError, OSError):
                self._process = None
                raise TooCostlyError(self._reason(process.end(EXIT_SECONDS))) from None
            except BaseException:  # an interrupt: its answer would be taken for the next one's
                self._process = None
                process.end()
                raise
        if not answer:
            raise TooCostlyError(self._out_of_memory())
        return answer[1:]

    def start(self) -> None:
        """Start the process before there is a question; returns at once."""
        with self._lock:
            self._running()

    def stop(self) -> None:
        """End the process, where no question may come for long; the next one starts another."""
        with self._lock:
            process, self._process = self._process, None
            if process is not None:
                process.end()

    def _running(self) -> Process:
        if self._process is None or self._process.has_ended:
            limits = self._limits
            self._channel, other = Pipe()
            _bound_waits(self._channel, limits.patience_seconds)
            told = (limits.cpu_seconds, limits.wall_seconds, limits.memory_bytes)
            with other:
                self._process = Process(
                    self._module, self._channel, other.fileno(), *map(str, told)
                )
        return self._process

    def _reason(self, status: int) -> str:
        if status >= 0:
            return f"ends its process (status {status})"
        limits, number = self._limits, signal.Signals(-status)
        seconds = {signal.SIGPROF: limits.cpu_seconds, signal.SIGALRM: limits.wall_seconds}
        if number in seconds:
            return f"takes more than {seconds[number]:g} s"
        return self._out_of_memory() if number == signal.SIGKILL else f"crashes ({number.name})"

    def _out_of_memory(self) -> str:
        return f"takes more than {self._limits.memory_bytes >> 20} MiB of memory"


def _bound_waits(channel: Connection, seconds: float) -> None:
    """Reads and writes raise `BlockingIOError` after so long."""
    most = struct.pack("ll", int(seconds), int(seconds % 1 * 1_000_000))
    with socket.socket(fileno=os.dup(channel.fileno())) as same:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            same.setsockopt(socket.SOL_SOCKET, option, most)


def serve(arguments: list[str], prepare: Callable[[], Answer]) -> None:
    """Answer questions until the parent is gone.

    Args:
        arguments: of the command, as `Child` gives them.
        prepare: imports what it needs, and returns what answers.
    """
    heed_limits()
    descriptor, memory = int(arguments[0]), int(arguments[3])
    cpu, wall = map(float, arguments[1:3])
    channel = Connection(descriptor)
    answer = prepare()
    bound_memory(memory)
    with suppress(EOFError, OSError):
        while True:
            question = channel.recv_bytes()
            bound_time(cpu, wall)
            try:
                given = b"\0" + answer(question)
            except MemoryError:
                given = b""
            bound_time(0, 0)
            channel.send_bytes(given)


def heed_limits() -> None:
    """Leave signals of limits to the kernel, and a terminal's Ctrl-C to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for deadline in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(deadline, signal.SIG_DFL)


def bound_memory(more: int) -> None:
    """End this process where it takes more bytes than it has and these."""
    with suppress(OSError), open("/proc/self/statm") as statm:  # elsewhere there is no such limit
        limit = int(statm.read().split()[0]) * resource.getpagesize() + more
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def bound_time(cpu: float, wall: float) -> None:
    """End this process after these seconds; 0: never."""
    signal.setitimer(signal.ITIMER_PROF, cpu)
    signal.setitimer(signal.ITIMER_REAL, wall)
