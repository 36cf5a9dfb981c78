"""Pinned host memory, taken once: pinning a block takes longer than computing what it holds."""

from __future__ import annotations

import threading
import weakref
from bisect import insort
from collections import deque
from math import prod

import torch
from torch import Tensor

SLAB_BYTES = 1 << 30
ALIGNED = 512

_Place = tuple[int, int, int]  # slab, first byte, bytes


class PinnedArena:
    """Blocks of pinned memory. Slabs are made by a thread, which the first requests do not wait
    for.

    Args:
        budget: bytes.
    """

    def __init__(self, budget: int) -> None:
        self._slabs: list[Tensor] = []
        self._free: list[_Place] = []  # in their order; neighbours are one
        self._given: deque[_Place] = deque()  # free again, in any order
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._make, args=(budget,), daemon=True)
        self._thread.start()

    def _make(self, budget: int) -> None:
        while budget > 0 and not self._ended.is_set():
            size = min(SLAB_BYTES, budget)
            try:
                slab = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            except RuntimeError:  # what there is must do
                return
            budget -= size
            self._slabs.append(slab)
            self._given.append((len(self._slabs) - 1, 0, size))

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """A tensor that is not initialised; None: there is no room now. Its place is free again
        when this very tensor is gone: no view of it may live longer."""
        size = -(-prod(shape) * dtype.itemsize // ALIGNED) * ALIGNED
        with self._lock:
            while self._given:
                self._put(self._given.popleft())
            at = next((i for i, (_, _, room) in enumerate(self._free) if room >= size), None)
            if at is None:
                return None
            slab, first, room = self._free.pop(at)
            if room > size:
                self._free.insert(at, (slab, first + size, room - size))
        block = self._slabs[slab][first : first + prod(shape) * dtype.itemsize]
        tensor = block.view(dtype).view(shape)
        # Not put back here: this may be called wherever Python frees objects.
        freed = weakref.finalize(tensor, self._given.append, (slab, first, size))
        freed.atexit = False
        return tensor

    def _put(self, place: _Place) -> None:
        insort(self._free, place)
        at = self._free.index(place)
        for i in (at, at - 1):  # with the next one, then with the one before
            if 0 <= i < len(self._free) - 1:
                (slab, first, size), (other, after, more) = self._free[i : i + 2]
                if slab == other and first + size == after:
                    self._free[i : i + 2] = [(slab, first, size + more)]

    def close(self) -> None:
        """Make no further slabs."""
        self._ended.set()
        self._thread.join()
