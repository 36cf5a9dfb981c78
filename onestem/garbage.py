"""Fewer passes of Python's collector of cycles over what lives as long as its process, and what
becomes of freed memory: it stays with an engine's process, and leaves a server's."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

__all__ = [
    "collecting_less",
    "give_freed_memory_back",
    "give_holes_back",
    "keep_freed_memory",
    "share_heaps",
]

# New objects before a young pass, young passes before an older one, and older passes before one
# over all. Each step makes some objects for every stream; a thousand streams keep a million.
NEW_OBJECTS, PASSES, OLD_PASSES = 50_000, 20, 20
# glibc's numbers of these settings (malloc.h), by the variables through which users set them: the
# smallest block that is mapped on its own, which goes back to the system when it is freed; how much
# may be free at the heap's end before it goes back; how many heaps there are.
MMAP_THRESHOLD, TRIM_THRESHOLD = "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"
ARENA_MAX = "MALLOC_ARENA_MAX"
NUMBERS = {MMAP_THRESHOLD: -3, TRIM_THRESHOLD: -1, ARENA_MAX: -8}


def keep_freed_memory() -> None:
    """Have glibc keep what a step frees for the next one, up to 1 GiB: the system clears pages that
    are asked for again, in 20 of 260 ms of a step. What the user has set stays."""
    _set({MMAP_THRESHOLD: 32 << 20, TRIM_THRESHOLD: 1 << 30})


def give_freed_memory_back() -> None:
    """Have glibc give large freed blocks back at once, and threads share heaps; before there are
    threads. By default bodies and answers leave holes in heaps. What the user has set stays."""
    # What asyncio receives into is 256 KiB long: that is not to be mapped each time.
    _set({MMAP_THRESHOLD: 1 << 20, TRIM_THRESHOLD: 16 << 20})
    share_heaps()


def share_heaps() -> None:
    """Have glibc make three heaps for all threads of a server's process (8 for each core by
    default, each with holes of its own): the event loop and two that tokenise run at once. What the
    user has set stays."""
    _set({ARENA_MAX: 3})


def give_holes_back() -> None:
    """Have glibc give free pages back that lie between blocks in use, which it keeps otherwise."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _set(options: Mapping[str, int]) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or "GLIBC_TUNABLES" in os.environ:
        return
    for name, value in options.items():
        if name not in os.environ:
            mallopt(NUMBERS[name], value)


_lock = threading.Lock()
_blocks = 0  # blocks of `collecting_less` that have not ended
_before = (0, 0, 0)  # thresholds before the first of them
_froze = False


@contextmanager
def collecting_less(*, clean: bool = False) -> Iterator[None]:
    """Collect seldom, and never what exists now, until the block ends: a pass over all that a
    process with PyTorch holds takes up to 0.25 s. Blocks may overlap, also of several threads. What
    the user has frozen or stopped stays so.

    Args:
        clean: collect before, for a block that lasts as long as the process.
    """
    global _blocks, _before, _froze
    with _lock:
        if _blocks == 0:
            _before = gc.get_threshold()
            if clean:
                gc.collect()
            _froze = gc.get_freeze_count() == 0
            if _froze:
                gc.freeze()
            if _before[0] > 0:  # 0: the user stopped it
                ours = NEW_OBJECTS, PASSES, OLD_PASSES
                gc.set_threshold(*map(max, zip(_before, ours, strict=True)))
        _blocks += 1
    try:
        yield
    finally:
        with _lock:
            _blocks -= 1
            if _blocks == 0:
                gc.set_threshold(*_before)
                if _froze:
                    gc.unfreeze()  # extensions complain of what is left at the interpreter's end
