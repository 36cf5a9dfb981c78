"""A process that compiles grammars which may cost too much; `onestem.engine.grammar.trial` starts
it.

It is run as a file, and imports neither torch nor anything else of this package: it starts in a
quarter of a second. The kernel ends it at its limits, whatever its native code does then.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import random
import resource
import signal
import sys
import time
import types
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

__all__: list[str] = []

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


def _bound_memory(more: int) -> None:
    with suppress(OSError), open("/proc/self/statm") as statm:  # elsewhere there is no such limit
        limit = int(statm.read().split()[0]) * resource.getpagesize() + more
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _bound_time(cpu: float, wall: float) -> None:
    """The signals have no handlers: the kernel ends the process."""
    signal.setitimer(signal.ITIMER_PROF, cpu)
    signal.setitimer(signal.ITIMER_REAL, wall)


def _walk(native: Any, grammar: Any, vocab_size: int, limit: float) -> str:
    """Write some random tokens; the seconds of a mask if that is beyond the limit, or ""."""
    import numpy as np

    rng = random.Random(0)
    matcher = native.GrammarMatcher(grammar, None, False, -1, None)
    mask = np.zeros((1, (vocab_size + 31) // 32), dtype=np.int32)
    for _ in range(_WALK_TOKENS):
        began = time.thread_time()
        matcher.fill_next_token_bitmask(mask, 0, False)
        took = time.thread_time() - began
        if took > limit:
            return f"{took:.2g}"
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if not len(allowed):
            break
        matcher.accept_token(int(rng.choice(allowed)), False)
        if matcher.is_terminated():
            break
    return ""


def _compiled(
    native: Any, compiler: Any, tag: str, vocab_size: int, limit: float
) -> tuple[str, str]:
    """An answer: ("grammar", serialised), ("slow", seconds of a mask), ("refused", xgrammar's
    reason) or ("memory", "")."""
    try:
        grammar = compiler.compile_structural_tag(tag)
        slow = _walk(native, grammar, vocab_size, limit)
        return ("slow", slow) if slow else ("grammar", str(grammar.serialize_json()))
    except Exception as error:
        if isinstance(error, MemoryError) or "bad_alloc" in str(error):
            return "memory", ""
        return "refused", str(error)


def main(descriptor: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the engine's
    for deadline in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(deadline, signal.SIG_DFL)
    native = _native()
    channel = Connection(descriptor)
    with suppress(EOFError, OSError):  # the engine is gone
        setup = json.loads(channel.recv_bytes())
        info = native.TokenizerInfo.deserialize_json(setup["tokenizer"])
        compiler = native.GrammarCompiler(info, 1, False, -1)
        _bound_memory(setup["memory_bytes"])
        while True:
            tag = channel.recv_bytes().decode()
            _bound_time(setup["cpu_seconds"], setup["wall_seconds"])
            kind, text = _compiled(
                native, compiler, tag, setup["vocab_size"], setup["mask_seconds"]
            )
            _bound_time(0, 0)
            channel.send_bytes(f"{kind} {text}".encode())


if __name__ == "__main__":
    del sys.path[0]  # this folder
    main(int(sys.argv[1]))
