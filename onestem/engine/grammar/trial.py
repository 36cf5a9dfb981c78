"""Grammars that may cost too much are compiled in a process of their own, which can be ended.

An ambiguous regular expression or grammar of a few characters can keep the compiler busy for hours,
or take all memory; its masks can be as bad. What passes comes back serialised.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import weakref
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

from onestem.engine.grammar.schema import unusable
from onestem.errors import OnestemError, RequestError, UnsupportedError

__all__ = ["Limits", "TooCostlyError", "TooSlowError", "Trial"]

_PROGRAM = Path(__file__).with_name("trial_process.py")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one grammar may take.

    Attributes:
        cpu_seconds: to compile it, and to write some tokens under it.
        quick_seconds: the same at the first try, while others wait; then it queues with slow ones.
        wall_seconds: the same in wall-clock time, where the machine is busy with other work.
        mask_seconds: for a token's mask, which all others in its step wait for.
        memory_bytes: beyond what the process has without grammars.
    """

    cpu_seconds: float = 5.0
    quick_seconds: float = 0.25
    wall_seconds: float = 60.0
    mask_seconds: float = 0.1
    memory_bytes: int = 2 << 30


class TooCostlyError(RequestError):
    """A grammar that takes more than it may."""


class TooSlowError(TooCostlyError):
    """A grammar that takes more time to compile than it may."""


class Trial:
    """Compiles one structural tag at a time. The process starts with the first, and again after
    one that ended it. It ends with this object or this process.

    Args:
        tokenizer: xgrammar's `TokenizerInfo`, serialised.
        vocab_size: columns of the logits.
        limits: of each grammar.
    """

    def __init__(self, tokenizer: str, vocab_size: int, limits: Limits) -> None:
        setup = {"tokenizer": tokenizer, "vocab_size": vocab_size, **asdict(limits)}
        self._setup = json.dumps(setup).encode()
        self._limits = limits
        self._lock = threading.Lock()
        self._process: _Process | None = None

    def compile(self, tag: str, name: str) -> str:
        """xgrammar's `CompiledGrammar` of a structural tag, serialised.

        Args:
            tag: as JSON.
            name: what errors call it.

        Raises:
            TooCostlyError: it takes more time or memory than it may.
            RequestError: xgrammar refuses it.
        """
        with self._lock:
            if self._process is None or self._process.has_ended:
                self._process = _Process(self._setup)
            try:
                kind, _, text = self._process.ask(tag).partition(" ")
            except (EOFError, OSError):
                status = self._process.end()
                self._process = None
                raise self._ended(name, status) from None
            except BaseException:  # an interrupt: its answer would be taken for the next one's
                self.close()
                raise
        if kind == "grammar":
            return text
        if kind == "refused":
            raise unusable(name, text)
        if kind == "memory":
            raise self._out_of_memory(name)
        limit = self._limits.mask_seconds
        raise _costly(name, f"takes {text} s for the mask of a token, limit is {limit:g} s")

    def _ended(self, name: str, status: int) -> OnestemError:
        """An error for a process that ended instead of answering."""
        if status >= 0:
            return UnsupportedError(
                f"{name} needs another version of xgrammar: pip install 'xgrammar>=0.2.8'"
            )
        limits, number = self._limits, signal.Signals(-status)
        seconds = {signal.SIGPROF: limits.cpu_seconds, signal.SIGALRM: limits.wall_seconds}
        if number in seconds:
            return TooSlowError(_why(name, f"takes more than {seconds[number]:g} s to compile"))
        if number in (signal.SIGABRT, signal.SIGKILL):
            return self._out_of_memory(name)
        return _costly(name, f"makes the compiler crash ({number.name})")

    def _out_of_memory(self, name: str) -> TooCostlyError:
        mebibytes = self._limits.memory_bytes >> 20
        return _costly(name, f"takes more than {mebibytes} MiB of memory to compile")

    def close(self) -> None:
        """End the process, whatever it does."""
        process, self._process = self._process, None
        if process is not None:
            process.end()


class _Process:
    """The process and the way to it."""

    def __init__(self, setup: bytes) -> None:
        self._channel, other = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, str(_PROGRAM), str(other.fileno())],
            pass_fds=[other.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # the compiler writes lines for people there
        )
        other.close()
        self._end = weakref.finalize(self, _end, self._process, self._channel)
        self._channel.send_bytes(setup)

    @property
    def has_ended(self) -> bool:
        """Whether it has ended while it waited, so not because of a grammar."""
        return self._process.poll() is not None

    def ask(self, tag: str) -> str:
        """What it answers; raises `EOFError` or `OSError` if it ends before."""
        self._channel.send_bytes(tag.encode())
        return self._channel.recv_bytes().decode()

    def end(self) -> int:
        """End it. Returns its exit status: what it died of, if it was dead."""
        self._end()
        return self._process.wait()


def _end(process: subprocess.Popen[bytes], channel: Connection) -> None:
    channel.close()
    process.kill()
    process.wait()


def _costly(name: str, why: str) -> TooCostlyError:
    return TooCostlyError(_why(name, why))


def _why(name: str, why: str) -> str:
    return f"{name} {why}: simplify it, or repeat less in it"
