"""Weights in huge pages. One row of a product reads each of them once, from some hundred thousand
pages of 4 KiB: to find these takes a tenth of the time and more."""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

SLAB = 64 << 20  # bytes that weights are cut from; what is left of the last is never touched
ALIGNED = 64

_lock = threading.Lock()
_slabs: list[tuple[Tensor, int]] = []  # of a load: the last one, and how much of it is used


@contextmanager
def in_huge_pages() -> Iterator[None]:
    """Cut weights from slabs until the block ends. What comes later has memory of its own: a slab
    keeps that of all its weights until the last one goes."""
    with _lock:
        _slabs[:] = [(torch.empty(0, dtype=torch.uint8, device="cpu"), 0)]
    try:
        yield
    finally:
        with _lock:
            _slabs.clear()


def settled(tensor: Tensor) -> Tensor:
    """A weight of a CPU where it stays."""
    return room_for(tensor.shape, tensor.dtype).copy_(tensor) if _slabs else tensor


def room_for(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Where such a weight stays, not initialised."""
    size = math.prod(shape) * dtype.itemsize
    with _lock:
        if not _slabs:
            return torch.empty(shape, dtype=dtype, device="cpu")
        slab, used = _slabs[0]
        if used + size > len(slab):
            slab, used = torch.empty(max(SLAB, size), dtype=torch.uint8, device="cpu"), 0
            _ask_for_huge_pages(slab)
        _slabs[0] = slab, -(-(used + size) // ALIGNED) * ALIGNED
    return slab[used : used + size].view(dtype).view(shape)


def _ask_for_huge_pages(memory: Tensor) -> None:
    """Of memory that is not written yet."""
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is not None and hasattr(mmap, "MADV_HUGEPAGE"):
        begin = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        size = memory.data_ptr() + memory.nbytes - begin
        madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)
