"""Fewer passes of Python's collector of cycles over what lives as long as its process, and freed
memory that stays with the process."""

from __future__ import annotations

import ctypes
import gc
import os
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


@contextmanager
def collecting_less() -> Iterator[None]:
    """Collect seldom, and never what exists now, until the block ends. Enter it once the objects
    are made that live as long as the process."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, PASSES, OLD_PASSES)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()  # extensions complain of what is left at the interpreter's end
