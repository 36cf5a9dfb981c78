"""Fewer passes of Python's collector of cycles over what lives as long as its process, and freed
memory that stays with the process."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collecting_less", "keep_freed_memory"]

# New objects before a young pass, young passes before an older one, and older passes before one
# over all. Each step makes some objects for every stream; a thousand streams keep a million.
NEW_OBJECTS, PASSES, OLD_PASSES = 50_000, 20, 20
# glibc's numbers of these settings (malloc.h), then their values: the largest block that can come
# from its heap, and how much may be free at the heap's end before it is given back.
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
HEAP_BLOCK_BYTES, FREE_BYTES = 32 << 20, 1 << 30


def keep_freed_memory() -> None:
    """Have glibc keep what a step frees for the next one, up to 1 GiB. By default it gives back a
    free heap end of twice the largest block. The system clears pages that are asked for again: 20
    of 260 ms in a step of 2,048 rows of a model of 0.1B. What the user has set stays."""
    given = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not any(name in os.environ for name in given):
        mallopt(MMAP_THRESHOLD, HEAP_BLOCK_BYTES)
        mallopt(TRIM_THRESHOLD, FREE_BYTES)


_lock = threading.Lock()
_blocks = 0  # blocks of `collecting_less` that have not ended
_before = (0, 0, 0)  # thresholds before the first of them
_froze = False


@contextmanager
def collecting_less(*, clean: bool = False) -> Iterator[None]:
    """Collect seldom, and never what exists now, until the block ends. A pass over all that a
    process with PyTorch holds takes 0.1 to 0.25 s, in which a GPU ends its step and waits.

    Blocks may overlap, also of several threads: the last to end brings the settings back. What the
    user froze stays so, and a collector that the user has stopped stays still.

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
