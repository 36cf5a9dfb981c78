"""Copies of keys and values between KV pages and flat tensors in host memory.

On a GPU they go over pinned memory on a stream of their own: copies out wait for the steps that
wrote the pages, and copies in for those that still read them. Steps go on meanwhile. On a CPU
copies in are made by a thread, without PyTorch's threads, which belong to the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from onestem.ops.kv import read_kv, write_kv

__all__ = ["Copied", "KvCopies", "Part"]

FEW_STRETCHES = 4  # this many copies straight into the pages are no slower than one and a scatter


class Part(NamedTuple):
    """Tokens first..first + len(slots) - 1 of a flat tensor that holds `num_tokens`, and the pages'
    slots (int64 `[n]`) that they go to."""

    kv: Tensor
    num_tokens: int
    first: int
    slots: np.ndarray


class Copied(Protocol):
    """A copy that was begun."""

    def done(self) -> bool:
        """Whether it has ended."""
        ...

    def wait(self) -> None:
        """Wait for its end; raises what made it fail."""
        ...

    def join(self) -> None:
        """Let the next step wait for its end."""
        ...


class _ByThread:
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        self._future.result()

    join = wait


class _ByStream:
    def __init__(self, event: torch.cuda.Event, device: torch.device, kept: object) -> None:
        self._event = event
        self._device = device
        self._kept = kept  # what it copies from must not be used again before

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()

    def join(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)


class KvCopies:
    """Copies between the pages of one engine and flat tensors: for each layer that has its own,
    keys and then values, each `[num_tokens, num_kv_heads, head_dim]`.

    Args:
        pages: K and V pages of each such layer.

    Attributes:
        device: where they are.
        dtype: of the values.
    """

    def __init__(self, pages: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._every = [one for pair in pages for one in pair]
        self.device, self.dtype = self._every[0].device, self._every[0].dtype
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, "onestem-kv-copies")

    @property
    def is_aside(self) -> bool:
        """Whether copies go over pinned memory and a stream."""
        return self._stream is not None

    def num_values(self, num_tokens: int) -> int:
        """Of a flat tensor for so many tokens."""
        return num_tokens * sum(pages[0, 0].numel() for pages in self._every)

    def _views(self, kv: Tensor, num_tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Each pages tensor with what a flat one has of it, `[num_tokens, num_kv_heads,
        head_dim]`."""
        sizes = [num_tokens * pages[0, 0].numel() for pages in self._every]
        for pages, values in zip(self._every, kv.split(sizes), strict=True):
            yield pages, values.view(num_tokens, *pages.shape[2:])

    @torch.inference_mode()
    def out(self, slots: np.ndarray) -> tuple[Tensor, Callable[[], object]]:
        """Copy what is at `slots` (int64 `[n]`) after the steps that were launched. The pages may
        be written by the next step.

        Returns:
            a flat tensor, and what waits until it is filled.
        """
        count = len(slots)
        if self._stream is None:
            kv = torch.empty(self.num_values(count), dtype=self.dtype)
            for pages, values in self._views(kv, count):
                to = _numpy(values)
                for first, pieces in _stretches(slots, pages):
                    to[first : first + len(pieces)] = pieces
            return kv, lambda: None
        kv = torch.empty(self.num_values(count), dtype=self.dtype, pin_memory=True)
        where = torch.from_numpy(slots).to(self.device)
        gathered = [(values, read_kv(pages, where)) for pages, values in self._views(kv, count)]
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            for values, found in gathered:
                values.copy_(found, non_blocking=True)
                found.record_stream(self._stream)
            event = torch.cuda.Event()
            event.record(self._stream)
        return kv, event.synchronize

    def into(self, parts: Sequence[Part]) -> Copied:
        """Begin to copy to slots that no step reads before the copy is done."""
        if self._stream is None:
            return _ByThread(self._thread.submit(self._into_here, parts))
        main = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(main)
        with torch.cuda.stream(self._stream), torch.inference_mode():
            for part in parts:
                self._into_aside(part)
            event = torch.cuda.Event()
            event.record(self._stream)
        return _ByStream(event, self.device, parts)

    def _into_here(self, parts: Sequence[Part]) -> None:
        for part in parts:
            for pages, values in self._views(part.kv, part.num_tokens):
                of = _numpy(values[part.first :])
                for first, places in _stretches(part.slots, pages):
                    places[...] = of[first : first + len(places)]

    def _into_aside(self, part: Part) -> None:
        slots, count = part.slots, len(part.slots)
        cuts = [0, *(np.flatnonzero(np.diff(slots) != 1) + 1).tolist(), count]
        in_order = all(pages.is_contiguous() for pages in self._every)
        where = None
        if len(cuts) - 1 > FEW_STRETCHES or not in_order:
            where = torch.from_numpy(slots).pin_memory().to(self.device, non_blocking=True)
        for pages, values in self._views(part.kv, part.num_tokens):
            mine = values[part.first : part.first + count]
            if where is not None:
                write_kv(pages, where, mine.to(self.device, non_blocking=True))
                continue
            flat = pages.view(-1, *pages.shape[2:])
            for a, b in pairwise(cuts):
                first = int(slots[a])
                flat[first : first + b - a].copy_(mine[a:b], non_blocking=True)

    def close(self) -> None:
        """End the thread, when all copies are made."""
        self._thread.shutdown()


def _numpy(tensor: Tensor) -> np.ndarray:
    """Its memory as numpy's, which has no bfloat16: each value as bits."""
    return tensor.view(_BITS[tensor.dtype.itemsize]).numpy()


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def _stretches(slots: np.ndarray, pages: Tensor) -> Iterator[tuple[int, np.ndarray]]:
    """The places of slots in pages on a CPU, where these follow each other: the index of the first
    slot, and a view `[n, num_kv_heads, head_dim]`."""
    every, size = _numpy(pages), pages.shape[1]
    one = every.reshape(-1, *every.shape[2:]) if pages.is_contiguous() else None
    breaks = np.diff(slots) != 1
    if one is None:
        breaks |= slots[1:] % size == 0
    cuts = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(slots)]
    for a, b in pairwise(cuts):
        first = int(slots[a])
        if one is not None:
            yield a, one[first : first + b - a]
        else:
            page, place = divmod(first, size)
            yield a, every[page, place : place + b - a]
