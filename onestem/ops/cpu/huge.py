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


class _Loading(threading.local):
    """Of a thread that loads: what is left of its last slab."""

    slab: Tensor | None = None


_loading = _Loading()


@contextmanager
def in_huge_pages() -> Iterator[None]:
    """Cut this thread's weights from slabs until the block ends. What comes later has memory of its
    own: a slab keeps that of all its weights until the last one goes."""
    before = _loading.slab
    _loading.slab = torch.empty(0, dtype=torch.uint8, device="cpu")
    try:
        yield
    finally:
        _loading.slab = before


def settled(tensor: Tensor) -> Tensor:
    """A weight of a CPU where it stays: a copy in a slab, or itself outside of a load."""
    return tensor if _loading.slab is None else room_for(tensor.shape, tensor.dtype).copy_(tensor)


def room_for(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Where such a weight stays, not initialised."""
    slab = _loading.slab
    if slab is None:
        return torch.empty(shape, dtype=dtype, device="cpu")
    size = math.prod(shape) * dtype.itemsize
    if size > len(slab):
        slab = torch.empty(max(SLAB, size), dtype=torch.uint8, device="cpu")
        _ask_for_huge_pages(slab)
    _loading.slab = slab[-(-size // ALIGNED) * ALIGNED :]
    return slab[:size].view(dtype).view(shape)


def _ask_for_huge_pages(memory: Tensor) -> None:
    """Of memory that is not written yet."""
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is not None and hasattr(mmap, "MADV_HUGEPAGE"):
        begin = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        size = memory.data_ptr() + memory.nbytes - begin
        madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)
