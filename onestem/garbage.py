"""Fewer passes of Python's collector of cycles over what lives as long as its process, and what
becomes of freed memory: an engine's process keeps it for a while, and it leaves a server's."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from onestem.threads import resident_bytes

# New objects before a young pass, young passes before an older one, and older passes before one
# over all. Each step makes some objects for every stream; a thousand streams keep a million.
NEW_OBJECTS, PASSES, OLD_PASSES = 50_000, 20, 20
# glibc's numbers of these settings (malloc.h), by the variables through which users set them: the
# smallest block that is mapped on its own, which goes back to the system when it is freed; how much
# may be free at the heap's end before it goes back; how many heaps there are.
MMAP_THRESHOLD, TRIM_THRESHOLD = "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"
ARENA_MAX = "MALLOC_ARENA_MAX"
NUMBERS = {MMAP_THRESHOLD: -3, TRIM_THRESHOLD: -1, ARENA_MAX: -8}

# Where a process has grown by so much, the free parts of its heaps are given back; what stays is
# tried again after up to so many looks.
TRIM_BYTES, MOST_LOOKS = 64 << 20, 12


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


@contextmanager
def giving_holes_back(seconds: float) -> Iterator[None]:
    """Give freed parts of this process's heaps back until the block ends, from a thread that looks
    at them now and then. A look costs nothing; giving back holds up other threads for some
    milliseconds, and what they need again is cleared again.

    Args:
        seconds: between two looks.
    """
    ended = threading.Event()
    threading.Thread(target=_give_back, args=(seconds, ended), daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _give_back(seconds: float, ended: threading.Event) -> None:
    held = resident_bytes(os.getpid())
    pace = None if held is None else TrimPace(held)
    while pace is not None and not ended.wait(seconds):
        if pace.is_due(resident_bytes(os.getpid()) or 0):
            give_holes_back()
            pace.note(resident_bytes(os.getpid()) or 0)


class TrimPace:
    """When to give memory back: where this process has grown, and where it holds more than it once
    did. What stayed then was in use, maybe by answers that were being written: it is tried again,
    less and less often.

    Args:
        held: resident bytes of the process now.
    """

    def __init__(self, held: int) -> None:
        self._least = self._last = held  # of all tries, and of the last
        self._pause = self._left = 1  # looks until the next try

    def is_due(self, held: int) -> bool:
        """At each look: whether a try is worth it. `held`: as above."""
        self._last, self._left = min(self._last, held), self._left - 1
        if held < self._least + TRIM_BYTES:
            self._pause = self._left = 1
            return False
        return self._left <= 0 or held >= self._last + TRIM_BYTES

    def note(self, held: int) -> None:
        """What is resident after a try."""
        self._last, self._least = held, min(self._least, held)
        more = held >= self._least + TRIM_BYTES
        self._pause = min(2 * self._pause, MOST_LOOKS) if more else 1
        self._left = self._pause


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
