"""A process that compiles grammars; `onestem.engine.grammar.trial` starts it.

It imports no torch, so it starts in a third of a second. It loads the compiler
and the vocabulary once, and forks for each grammar: a fork takes milliseconds, and can be ended at
any time, by the engine or by the kernel at its limits, whatever its native code does then.

A compiled grammar comes back serialised only if it took long and is small. xgrammar (0.2.8) writes
all states once for each rule. The calls of 50 tools are 218 MB: 1 s to compile, 15 s to write and
to read. So the rest is compiled again in the engine, which takes no longer there.
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
from typing import Any

from onestem.children import bound_memory, bound_time, heed_limits
from onestem.engine.grammar import ebnf
from onestem.engine.grammar.schema import check_schema
from onestem.engine.grammar.tags import check_tags
from onestem.errors import OnestemError
from onestem.garbage import give_holes_back, keep_freed_memory

HEAD = struct.Struct("!BQQ")  # a command, an attempt's number, bytes that follow
COMPILE, END = range(2)
_NICEST = 19
# So long after its start, an idle process must have had this part of it: else no core is idle.
_IDLE_SECONDS, _IDLE_PART = 0.1, 0.1
# Serialised, about: a rule's part of the states for each rule, and the masks.
_RULE_BYTES, _MASK_BYTES = 350, 3
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


def _serialised_size(grammar: Any) -> int:
    """About the bytes of a compiled grammar, serialised; up to three times too much."""
    rules = str(grammar.grammar().to_string()).count(" ::= ")
    return _RULE_BYTES * rules**2 + _MASK_BYTES * int(grammar.memory_size_bytes())


class _Compiler:
    """xgrammar with a vocabulary, and the limits."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self.limits = setup
        self._native = _native()
        self._numpy: Any = importlib.import_module("numpy")
        info = self._native.TokenizerInfo.deserialize_json(setup["tokenizer"])
        given = info, 1, False, -1
        try:
            self._compiler = self._native.GrammarCompiler(*given)
        except TypeError:  # from 0.2.9 on: whether masks wait until they are asked for
            self._compiler = self._native.GrammarCompiler(*given, False)

    def answer(self, task: dict[str, Any]) -> bytes:
        """An answer's kind, and after a space: "again" and what to compile; "grammar" and it,
        serialised; "large" and its size; or "slow" and the seconds of a mask. Where there is no
        grammar: "refused", the name and the reason; "invalid", an error's kind and text; or
        "memory"."""
        try:
            if task["unchecked"]:
                self._check(task)
            return self._tried(task)
        except MemoryError:
            return b"memory "
        except OnestemError as error:
            return b"invalid " + json.dumps([type(error).__name__, str(error)]).encode()
        except ebnf.Refused as error:
            return self._refusal(*error.args)
        except Exception as error:  # it raises many kinds for a bad tag
            return self._refusal(task["name"], str(error))

    @staticmethod
    def _check(task: dict[str, Any]) -> None:
        if task["schema"] is None:
            check_tags(task["tags"])
        else:
            check_schema(task["schema"], task["strict"])

    def _tried(self, task: dict[str, Any]) -> bytes:
        limits = self.limits
        before = _resident()
        text, tag = self._written(task)
        grammar = self._compiled(text, tag)
        give_holes_back()
        size = max(_resident() - before, grammar.memory_size_bytes())
        if size > limits["kept_bytes"]:
            return b"large %d" % size
        slow = self._walk(grammar) if task["is_costly"] else ""
        if slow:
            return f"slow {slow}".encode()
        took_long = time.process_time() > limits["again_seconds"]
        if took_long and _serialised_size(grammar) <= limits["sent_bytes"]:
            return b"grammar " + str(grammar.serialize_json()).encode()
        return b"again " + json.dumps({"ebnf": text, "tag": tag, "size": size}).encode()

    def _written(self, task: dict[str, Any]) -> tuple[str | None, str | None]:
        """What xgrammar compiles: a grammar, or a structural tag."""
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

    def _compiled(self, text: str | None, tag: str | None) -> Any:
        if text is None:
            return self._compiler.compile_structural_tag(tag)
        grammar = self._native.Grammar.from_ebnf(text, "root")
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


def yield_to_others(nice: int | None) -> None:
    """Let the engine's steps go first; None: run only where a core has nothing else to do.

    Being nice is not enough. Linux keeps the threads of a step on one core while a process runs on
    the other, however nice it is: they wait for each other there, and a step takes five times as
    long. A core with an idle process counts as free.
    """
    os.nice(_NICEST if nice is None else nice)
    if nice is None and sys.platform == "linux":
        with suppress(OSError):  # sandboxes have no such policy: there it is nice at least
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


class _Forks:
    """The processes that compile, each with the number that the engine gave its grammar."""

    def __init__(self, commands: socket.socket, compiler: _Compiler) -> None:
        self._commands = commands
        self._compiler = compiler
        self._running: dict[int, tuple[int, Connection]] = {}  # by process id
        self._idle: dict[int, float] = {}  # when those began whose first part is not over
        # Ends with this process, whatever ends it. Loaded before there is a fork to do it in.
        self._control = ctypes.CDLL(None) if sys.platform == "linux" else None

    @property
    def wait_seconds(self) -> float | None:
        """Until `end_starved` is to be called; None: there is no need to."""
        return _IDLE_SECONDS if self._idle else None

    def start(self, number: int, raw: bytes, descriptor: int) -> None:
        task = json.loads(raw)
        child = os.fork()
        if child == 0:
            try:
                self._compile(task, Connection(descriptor, readable=False))
            finally:
                os._exit(1)
        self._running[child] = number, Connection(descriptor, readable=False)
        if task["nice"] is None and sys.platform == "linux":
            self._idle[child] = time.monotonic()

    def end_starved(self) -> None:
        """End those that had no time, as if it were over."""
        until = time.monotonic() - _IDLE_SECONDS
        for child in [child for child, began in self._idle.items() if began <= until]:
            del self._idle[child]
            # The processor clock of another process, as `clock_getcpuclockid` numbers it.
            if time.clock_gettime(~child << 3 | 2) < _IDLE_PART * _IDLE_SECONDS:
                os.kill(child, signal.SIGALRM)
                os.kill(child, signal.SIGCONT)  # one that is stopped would not hear it

    def _compile(self, task: dict[str, Any], answers: Connection) -> None:
        """The work of a fork, which does not return."""
        if self._control is not None:
            self._control.prctl(1, signal.SIGKILL)
        signal.set_wakeup_fd(-1)
        self._commands.close()
        for _, other in self._running.values():
            other.close()
        yield_to_others(task["nice"])
        bound_memory(self._compiler.limits["memory_bytes"])
        bound_time(task["cpu_seconds"], task["wall_seconds"])
        answer = self._compiler.answer(task)
        bound_time(0, 0)
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
            self._idle.pop(child, None)
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
            ready, _, _ = select.select([commands, ended], [], [], forks.wait_seconds)
            forks.end_starved()
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
                    forks.start(number, task, descriptors[0])
    finally:
        forks.end_all()


def main(descriptor: int) -> None:
    """Compile what the engine asks for on this file descriptor, until it is gone."""
    heed_limits()
    keep_freed_memory()
    low = os.dup(descriptor)  # `select` takes none from 1024 on, which an engine may have
    os.close(descriptor)
    with suppress(EOFError, OSError):  # the engine is gone
        _serve(socket.socket(fileno=low))


if __name__ == "__main__":
    main(int(sys.argv[1]))
