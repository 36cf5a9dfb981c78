"""Copies of keys and values, and of recurrent states, between KV memory and host memory.

On a GPU they go through a buffer there, over pinned memory and on streams of their own: copies out
wait for the steps that wrote the pages, and copies in for those that still read them. Steps go on
meanwhile; one that writes to pages which are still copied out waits for that. What prompts copy to
the GPU waits for all copies that were begun, so a few are with each step. On a CPU copies in are
made by a thread, without PyTorch's threads, which belong to the steps.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from math import prod
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from onestem.cache.pieces import PIECE_TOKENS
from onestem.engine.tiers.arena import PinnedArena

PIECES_AHEAD = 5  # on the bus or begun: a little longer than a step of decodes takes

_BITS = {1: np.uint8, 2: np.int16, 4: np.int32}


class Part(NamedTuple):
    """Consecutive rows of a tensor in host memory, from the `first` on, and the pages' slots (int64
    `[n]`) that they go to. Of a state, which is one row, that is `at_state`."""

    whole: Tensor
    first: int
    slots: np.ndarray

    @property
    def rows(self) -> Tensor:
        """Those that are copied, `[n, width]`."""
        return self.whole[self.first : self.first + len(self.slots)]


def at_state(*slots: int) -> np.ndarray:
    """Slots of recurrent states, int64 `[n]`, as copies have them beside those of pages."""
    return -1 - np.array(slots, np.int64)


class Copied(Protocol):
    """A copy that was begun."""

    def done(self) -> bool:
        """Whether it has ended."""
        ...

    def go_on(self) -> None:
        """Begin what comes next. To be called when a step was launched, which this does not
        delay then."""
        ...

    def hurry(self) -> None:
        """Begin all that was to begin with later steps."""
        ...

    def wait(self) -> None:
        """Wait for its end; raises what made it fail."""
        ...

    def join(self) -> None:
        """Let the next step wait for its end."""
        ...


class KvCopies(Protocol):
    """Copies between the pages of one engine and rows in host memory. A row has a token's keys and
    then values in each layer that has its own, `num_kv_heads * head_dim` each. A recurrent state is
    one row: of each layer that keeps one, what it consists of.

    Attributes:
        dtype: of the values; a state is stored as if its were of this dtype.
        width: values of a row.
        state_width: values of a row that is a state; 0: the model has none.
        is_aside: whether computing may be faster: copies go over a bus.
    """

    dtype: torch.dtype
    width: int
    state_width: int
    is_aside: bool

    def host_rows(self, num_tokens: int) -> Tensor:
        """Rows `[num_tokens, width]` that copies go to and from, not initialised; of 0 tokens that
        of a state, `[1, state_width]`."""
        ...

    def out(self, parts: Sequence[np.ndarray]) -> tuple[list[Tensor], Callable[[], object]]:
        """Copy what is at slots (int64 `[n]` each, of pages, or `at_state` of one) after the steps
        that were launched. They may be written by the next step, which waits (`PageCopies.guard`).

        Returns:
            rows of each part, and what waits until all are filled.
        """
        ...

    def into(self, parts: Sequence[Part]) -> Copied:
        """Begin to copy to slots that no step reads before the copy is done."""
        ...

    def close(self) -> None:
        """End the threads, when all copies are made."""
        ...


class PageCopies(KvCopies, Protocol):
    """Those of one device, whose steps they watch."""

    def guard(self, slots: np.ndarray | None = None) -> None:
        """Let what is launched next wait until what it writes to was copied out: the pages of slots
        (int64 `[n]`) and states (`at_state`), or all."""
        ...


def copies_of(
    pages: Sequence[tuple[Tensor, Tensor]],
    budget: int,
    states: Sequence[tuple[Tensor, Tensor]] = (),
) -> PageCopies:
    """Copies of an engine's pages and states.

    Args:
        pages: K and V pages of each layer that has its own.
        budget: bytes of host memory.
        states: inputs and matrices of each layer that keeps states, `[slots, ..]`.
    """
    every = [one for pair in pages for one in pair]
    held = [one for pair in states for one in pair]
    on_gpu = every[0].device.type == "cuda"
    return _GpuCopies(every, budget, held) if on_gpu else _CpuCopies(every, held)


def _state_parts(row: Tensor, states: Sequence[Tensor], at: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The bytes of a state in its row `[1, state_width]`, and there (`at_state`), by layer."""
    held, first = row.view(-1).view(torch.uint8), 0
    for tensor in states:
        own = tensor[-1 - at].view(-1).view(torch.uint8)
        yield held[first : first + len(own)], own
        first += len(own)


def _state_width(states: Sequence[Tensor], dtype: torch.dtype) -> int:
    return sum(one[0].nbytes for one in states) // dtype.itemsize


class _ByThread:
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def go_on(self) -> None:
        pass

    hurry = go_on

    def wait(self) -> None:
        self._future.result()

    join = wait


class _CpuCopies:
    is_aside = False

    def __init__(self, every: Sequence[Tensor], states: Sequence[Tensor]) -> None:
        self.dtype = every[0].dtype
        self.width = sum(pages[0, 0].numel() for pages in every)
        self.state_width = _state_width(states, self.dtype)
        self._every, self._states = every, states
        self._thread = ThreadPoolExecutor(1, "onestem-kv-copies")

    def host_rows(self, num_tokens: int) -> Tensor:
        return torch.empty(_shape(self, num_tokens), dtype=self.dtype)

    def out(self, parts: Sequence[np.ndarray]) -> tuple[list[Tensor], Callable[[], object]]:
        every = []
        for slots in parts:
            every.append(self.host_rows(_num_tokens(slots)))
            for of, places in self._places(every[-1], slots):
                of[...] = places
        return every, lambda: None

    def into(self, parts: Sequence[Part]) -> Copied:
        return _ByThread(self._thread.submit(self._into, parts))

    def guard(self, slots: np.ndarray | None = None) -> None:
        pass

    def _into(self, parts: Sequence[Part]) -> None:
        for part in parts:
            for of, places in self._places(part.rows, part.slots):
                places[...] = of

    def _places(self, tensor: Tensor, slots: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Rows' values for consecutive slots of each pages tensor, and their places there, both
        `[n, num_kv_heads, head_dim]`; or a state's bytes, and their places."""
        if slots[0] < 0:
            for pair in _state_parts(tensor, self._states, int(slots[0])):
                yield _bits(pair[0]), _bits(pair[1])
            return
        rows, size = _bits(tensor), self._every[0].shape[1]
        breaks = (np.diff(slots) != 1) | (slots[1:] % size == 0)
        cuts = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(slots)]
        first = 0
        for pages in map(_bits, self._every):
            _, _, heads, dim = pages.shape
            mine = rows[:, first : first + heads * dim].reshape(-1, heads, dim)
            first += heads * dim
            for a, b in pairwise(cuts):
                page, place = divmod(int(slots[a]), size)
                yield mine[a:b], pages[page, place : place + b - a]

    def close(self) -> None:
        self._thread.shutdown()


def _num_tokens(slots: np.ndarray) -> int:
    """Whose rows `KvCopies.host_rows` makes."""
    return 0 if slots[0] < 0 else len(slots)


def _shape(copies: KvCopies, num_tokens: int) -> tuple[int, int]:
    return (num_tokens, copies.width) if num_tokens else (1, copies.state_width)


def num_bytes(copies: KvCopies, num_tokens: int) -> int:
    """Of rows that `KvCopies.host_rows` makes."""
    return prod(_shape(copies, num_tokens)) * copies.dtype.itemsize


def _bits(tensor: Tensor) -> np.ndarray:
    """Its memory as numpy's, which has no bfloat16: each value as bits. Not by `Tensor.numpy`:
    KV memory could not be released after it."""
    storage, size = tensor.untyped_storage(), tensor.dtype.itemsize
    return np.ndarray(
        tuple(tensor.shape),
        _BITS[size],
        memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())),
        tensor.storage_offset() * size,
        tuple(step * size for step in tensor.stride()),
    )


class _ByStream:
    """Pieces of a copy. `launch` begins one of them, rows and their index, on a stream and gives
    the event of its end. None begins before it is asked for."""

    def __init__(
        self,
        pieces: Iterable[tuple[Tensor, int]],
        launch: Callable[[Tensor, int], torch.cuda.Event],
        device: torch.device,
    ) -> None:
        self._pieces = iter(pieces)
        self._next = next(self._pieces, None)
        self._launch = launch
        self._device = device
        self._going: deque[torch.cuda.Event] = deque()
        self._most: float = PIECES_AHEAD  # that begin where nothing is on the bus

    def _begin(self, most: float) -> None:
        while self._next is not None and len(self._going) < most:
            self._going.append(self._launch(*self._next))
            self._next = next(self._pieces, None)

    def done(self) -> bool:
        self._drop_ended()
        return self._next is None and not self._going

    def go_on(self) -> None:
        self._drop_ended()
        self._begin(PIECES_AHEAD if self._going else self._most)
        self._most = float("inf")  # a step is longer than they take: all begin behind the next one

    def _drop_ended(self) -> None:
        while self._going and self._going[0].query():
            self._going.popleft()

    def hurry(self) -> None:
        self._begin(float("inf"))

    def wait(self) -> None:
        self.hurry()
        if self._going:
            self._going[-1].synchronize()

    def join(self) -> None:
        self.hurry()
        if self._going:
            torch.cuda.current_stream(self._device).wait_event(self._going[-1])


class _GpuCopies:
    is_aside = True

    def __init__(self, every: Sequence[Tensor], budget: int, states: Sequence[Tensor]) -> None:
        from onestem.ops.triton.page_rows import PageRows

        self.dtype, self._device = every[0].dtype, every[0].device
        self.width = sum(pages[0, 0].numel() for pages in every)
        self.state_width = _state_width(states, self.dtype)
        self._states = states
        self._rows = PageRows(every)
        self._arena = PinnedArena(budget)
        # Streams and their buffers: for copies in, and two for copies out, so that a page which the
        # next step needs does not wait until a thousand others are out.
        (self._in, self._landing), *self._out = (
            (
                torch.cuda.Stream(self._device),
                torch.empty(PIECE_TOKENS, self.width, dtype=self.dtype, device=self._device),
            )
            for _ in range(3)
        )
        self._page_size = every[0].shape[1]
        # Pages that are copied out, and the event after which they may be written.
        self._unread: deque[tuple[np.ndarray, torch.cuda.Event]] = deque()
        # What copies go to or come from must not be used again before they are done.
        self._busy: deque[tuple[torch.cuda.Event, object]] = deque()
        none = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._rows.gather(none, 0, 1, self._landing)  # compiled before anybody waits for it
        self._rows.scatter(none, 0, 1, self._landing)

    def host_rows(self, num_tokens: int) -> Tensor:
        shape = _shape(self, num_tokens)
        rows = self._arena.take(shape, self.dtype)
        return torch.empty(shape, dtype=self.dtype, pin_memory=True) if rows is None else rows

    def _keep(self, event: torch.cuda.Event, used: object) -> None:
        while self._busy and self._busy[0][0].query():
            self._busy.popleft()
        self._busy.append((event, used))

    def _slots(self, slots: np.ndarray) -> Tensor:
        """The same, there."""
        return torch.from_numpy(slots).pin_memory().to(self._device, non_blocking=True)

    @torch.inference_mode()
    def out(self, parts: Sequence[np.ndarray]) -> tuple[list[Tensor], Callable[[], object]]:
        self._rows.locate()
        whole = np.concatenate(parts)
        every = [self.host_rows(_num_tokens(slots)) for slots in parts]
        stream, leaving = next((one for one in self._out if one[0].query()), self._out[-1])
        stream.wait_stream(torch.cuda.current_stream(self._device))
        read, copied = torch.cuda.Event(), torch.cuda.Event()
        with torch.cuda.stream(stream):
            slots = self._slots(whole)
            for rows, at in _pieces(every):
                if whole[at] < 0:
                    for to, of in _state_parts(rows, self._states, whole[at]):
                        to.copy_(of, non_blocking=True)
                    read.record(stream)
                    continue
                self._rows.gather(slots, at, len(rows), leaving)
                read.record(stream)  # in the end, of the last
                rows.copy_(leaving[: len(rows)], non_blocking=True)
            copied.record(stream)
        self._unread.append((np.unique(whole // self._page_size), read))
        self._keep(copied, every)
        return every, copied.synchronize

    def guard(self, slots: np.ndarray | None = None) -> None:
        while self._unread and self._unread[0][1].query():
            self._unread.popleft()
        for pages, read in self._unread:
            if slots is None or np.isin(slots // self._page_size, pages).any():
                torch.cuda.current_stream(self._device).wait_event(read)

    @torch.inference_mode()
    def into(self, parts: Sequence[Part]) -> Copied:
        self._rows.locate()
        for stream in (torch.cuda.current_stream(self._device), *(one for one, _ in self._out)):
            self._in.wait_stream(stream)  # also for what was copied out shortly before
        whole = np.concatenate([part.slots for part in parts])
        slots = cache(lambda: self._slots(whole))

        @torch.inference_mode()
        def launch(rows: Tensor, at: int) -> torch.cuda.Event:
            landing = self._landing[: len(rows)]
            with torch.cuda.stream(self._in):
                if whole[at] < 0:
                    for of, to in _state_parts(rows, self._states, whole[at]):
                        to.copy_(of, non_blocking=True)
                else:
                    landing.copy_(rows, non_blocking=True)
                    self._rows.scatter(slots(), at, len(rows), landing)
                event = self._in.record_event()
            self._keep(event, parts)
            return event

        return _ByStream(_pieces(part.rows for part in parts), launch, self._device)

    def close(self) -> None:
        torch.cuda.synchronize(self._device)
        self._busy.clear()
        self._arena.close()


def _pieces(every: Iterable[Tensor]) -> Iterator[tuple[Tensor, int]]:
    """Rows that a buffer holds, and their index in all tensors together."""
    at = 0
    for rows in every:
        for piece in rows.split(PIECE_TOKENS):
            yield piece, at
            at += len(piece)
