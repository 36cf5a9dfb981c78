"""A process that compiles grammars; `onestem.engine.grammar.trial` starts it.

It is run as a file and imports no torch, so it starts in a third of a second. It loads the compiler
and the vocabulary once, and forks for each grammar: a fork takes milliseconds, and can be ended at
any time, by the engine or by the kernel at its limits, whatever its native code does then.

A compiled grammar comes back serialised only if it took long. xgrammar (0.2.8) writes all states
once for each rule. The calls of 50 tools are 218 MB: 1 s to compile, 15 s to write and to read. So
what took little is compiled again in the engine, which takes as little there.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import os
import random
import resource
import select
import signal
import socket
import struct
import sys
import time
import types
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

__all__: list[str] = []

HEAD = struct.Struct("!BQQ")  # a command, an attempt's number, bytes that follow
QUICK, SLOW, END = range(3)
_NICE = {QUICK: 5, SLOW: 15}  # the engine's steps come first
_WALK_TOKENS = 64  # an ambiguous grammar takes longer with each token


def _native() -> Any:
    """xgrammar's native part, without its package, which imports torch and transformers."""
    sys.modules["torch"] = None  # type: ignore[assignment]
    found = importlib.util.find_spec("xgrammar")
    assert found is not None
    package = types.ModuleType("xgrammar")
    package.__path__ = list(found.submodule_search_locations or ())
    sys.modules["xgrammar"] = package
    importlib.import_module("xgrammar.load_binding")
    return importlib.import_module("xgrammar.base")._core


def _resident() -> int:
    """Bytes of this process that are in memory; 0 where that is unknown."""
    with suppress(OSError), open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()
    return 0


def _bound_memory(more: int) -> None:
    with suppress(OSError), open("/proc/self/statm") as statm:  # elsewhere there is no such limit
        limit = int(statm.read().split()[0]) * resource.getpagesize() + more
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _bound_time(cpu: float, wall: float) -> None:
    """The signals have no handlers: the kernel ends the process."""
    signal.setitimer(signal.ITIMER_PROF, cpu)
    signal.setitimer(signal.ITIMER_REAL, wall)


class _Compiler:
    """xgrammar with a vocabulary, and the limits."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self.limits = setup
        self._native = _native()
        self._numpy: Any = importlib.import_module("numpy")
        self._ebnf: Any = importlib.import_module("onestem.engine.grammar.ebnf")
        info = self._native.TokenizerInfo.deserialize_json(setup["tokenizer"])
        self._compiler = self._native.GrammarCompiler(info, 1, False, -1)

    def answer(self, task: dict[str, Any]) -> bytes:
        """An answer's kind, and after a space: "again" and what to compile; "grammar" and it,
        serialised; "large" and its size; "slow" and the seconds of a mask; "refused" and the name
        and the reason; or "memory"."""
        try:
            return self._tried(task)
        except MemoryError:
            return b"memory "
        except self._ebnf.Refused as error:
            return self._refusal(error.name, error.reason)
        except Exception as error:  # it raises many kinds for a bad tag
            return self._refusal(task["name"], str(error))

    def _tried(self, task: dict[str, Any]) -> bytes:
        limits = self.limits
        before = _resident()
        ebnf, tag = self._written(task)
        grammar = self._compiled(ebnf, tag)
        size = max(_resident() - before, grammar.memory_size_bytes())
        if size > limits["kept_bytes"]:
            return b"large %d" % size
        slow = self._walk(grammar) if task["is_costly"] else ""
        if slow:
            return f"slow {slow}".encode()
        if time.process_time() <= limits["again_seconds"]:
            return b"again " + json.dumps({"ebnf": ebnf, "tag": tag, "size": size}).encode()
        text = str(grammar.serialize_json()).encode()
        size = len(text)
        return b"grammar " + text if size <= limits["kept_bytes"] else b"large %d" % size

    def _written(self, task: dict[str, Any]) -> tuple[str | None, str | None]:
        """What xgrammar compiles: a grammar, or a structural tag."""
        ebnf = self._ebnf
        if task["schema"] is None:
            tag = ebnf.with_grammars(self._native, task["tags"], self.limits["short_in_tags"])
            return None, json.dumps({"type": "structural_tag", "format": tag})
        grammar = ebnf.ebnf_of(
            self._native,
            task["schema"],
            strict=task["strict"],
            whitespace=task["whitespace"],
            short=self.limits["short"],
        )
        return grammar, None

    def _compiled(self, ebnf: str | None, tag: str | None) -> Any:
        if ebnf is None:
            return self._compiler.compile_structural_tag(tag)
        grammar = self._native.Grammar.from_ebnf(ebnf, "root")
        return self._compiler.compile_grammar_ebnf(grammar)

    @staticmethod
    def _refusal(name: str, reason: str) -> bytes:
        if "bad_alloc" in reason:
            return b"memory "
        return b"refused " + json.dumps([name, reason]).encode()

    def _walk(self, grammar: Any) -> str:
        """Write some random tokens; the seconds of a mask if that is beyond the limit, or ""."""
        np, rng = self._numpy, random.Random(0)
        matcher = self._native.GrammarMatcher(grammar, None, False, -1, None)
        mask = np.zeros((1, (self.limits["vocab_size"] + 31) // 32), dtype=np.int32)
        for _ in range(_WALK_TOKENS):
            began = time.thread_time()
            matcher.fill_next_token_bitmask(mask, 0, False)
            took = time.thread_time() - began
            if took > self.limits["mask_seconds"]:
                return f"{took:.2g}"
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            if not len(allowed):
                break
            matcher.accept_token(int(rng.choice(allowed)), False)
            if matcher.is_terminated():
                break
        return ""


class _Forks:
    """The processes that compile, each with the number that the engine gave its grammar."""

    def __init__(self, commands: socket.socket, compiler: _Compiler) -> None:
        self._commands = commands
        self._compiler = compiler
        self._running: dict[int, tuple[int, Connection]] = {}  # by process id
        # Ends with this process, whatever ends it. Loaded before there is a fork to do it in.
        self._control = ctypes.CDLL(None) if sys.platform == "linux" else None

    def start(self, command: int, number: int, task: bytes, descriptor: int) -> None:
        child = os.fork()
        if child == 0:
            try:
                self._compile(command, task, Connection(descriptor, readable=False))
            finally:
                os._exit(1)
        self._running[child] = number, Connection(descriptor, readable=False)

    def _compile(self, command: int, task: bytes, answers: Connection) -> None:
        """The work of a fork, which does not return."""
        if self._control is not None:
            self._control.prctl(1, signal.SIGKILL)
        signal.set_wakeup_fd(-1)
        self._commands.close()
        for _, other in self._running.values():
            other.close()
        os.nice(_NICE[command])
        limits = self._compiler.limits
        _bound_memory(limits["memory_bytes"])
        cpu = limits["quick_seconds" if command == QUICK else "cpu_seconds"]
        _bound_time(cpu, limits["wall_seconds"])
        answer = self._compiler.answer(json.loads(task))
        _bound_time(0, 0)
        answers.send_bytes(answer)
        os._exit(0)

    def end(self, number: int) -> None:
        for child, (other, _) in self._running.items():
            if other == number:
                os.kill(child, signal.SIGKILL)

    def end_all(self) -> None:
        for child in self._running:
            os.kill(child, signal.SIGKILL)

    def bury(self) -> None:
        """Tell the engine what those died of that have ended; one that has answered is not read."""
        while self._running:
            child, status = os.waitpid(-1, os.WNOHANG)
            if not child:
                break
            _, answers = self._running.pop(child)
            with suppress(OSError):
                answers.send_bytes(b"ended %d" % os.waitstatus_to_exitcode(status))
            answers.close()


def _received(commands: socket.socket, size: int) -> bytes:
    """That many bytes; raises `EOFError` when the engine is gone."""
    parts = []
    while size:
        part = commands.recv(min(size, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _serve(commands: socket.socket) -> None:
    (size,) = struct.unpack("!Q", _received(commands, 8))
    forks = _Forks(commands, _Compiler(json.loads(_received(commands, size))))
    ended, waker = socket.socketpair()
    for end in (ended, waker):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    commands.sendall(b"r")  # ready
    try:
        while True:
            ready, _, _ = select.select([commands, ended], [], [])
            if ended in ready:
                ended.recv(4096)
                forks.bury()
            if commands in ready:
                head, descriptors, _, _ = socket.recv_fds(commands, HEAD.size, 1)
                if not head:
                    break
                head += _received(commands, HEAD.size - len(head))
                command, number, size = HEAD.unpack(head)
                task = _received(commands, size)
                if command == END:
                    forks.end(number)
                else:
                    forks.start(command, number, task, descriptors[0])
    finally:
        forks.end_all()


def main(descriptor: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the engine's
    for deadline in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(deadline, signal.SIG_DFL)
    low = os.dup(descriptor)  # `select` takes none from 1024 on, which an engine may have
    os.close(descriptor)
    with suppress(EOFError, OSError):  # the engine is gone
        _serve(socket.socket(fileno=low))


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[3])  # of this package, instead of this folder
    main(int(sys.argv[1]))
