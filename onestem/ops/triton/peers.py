"""Collectives of the GPUs of one machine that write to each other's memory, in Triton.

Each rank writes its part to all others, tells them so, waits until they have done the same, and
adds up what has come. A small sum takes a fraction of what NCCL takes, and one launch.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from onestem.ops.triton.sizes import cdiv

_BLOCK = 2048
_PROGRAMS = tl.constexpr(128)  # a GPU runs all of them at once, or one would wait for ever
_ALIGN = 256
_WORD = tl.constexpr(8)  # bytes of a flag
_PARTS_BYTES = 16 << 20  # that a rank writes in a round
_LOOKS = tl.constexpr(4096)  # at a flag, between two at `stop`


@triton.jit
def _at(addresses, rank, offset, like):
    """A pointer `offset` bytes into a rank's memory."""
    return tl.multiple_of((tl.load(addresses + rank) + offset).to(like.dtype), 16)


@triton.jit
def _meet(addresses, counters, stop, epoch, RANK: tl.constexpr, RANKS: tl.constexpr):
    """This program of all ranks is here: what each wrote before, all may read."""
    tl.debug_barrier()
    program = tl.program_id(0)
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            flags = _at(addresses, rank, RANK * _PROGRAMS * _WORD, counters)
            tl.atomic_xchg(flags + program, epoch, sem="release", scope="sys")
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            flag = _at(addresses, RANK, rank * _PROGRAMS * _WORD, counters) + program
            looks = 0
            seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
            while seen < epoch:
                seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
                looks += 1
                if looks % _LOOKS == 0:  # noqa: SIM102 - of `and` both sides would be read
                    if tl.load(stop, volatile=True) != 0:
                        seen = epoch  # a rank has ended: what comes out is not read
    tl.debug_barrier()


@triton.jit
def _exchange(
    x,
    out,
    size,
    width,
    chunk,
    addresses,
    counters,
    stop,
    slot_bytes,
    KIND: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of x, `size` values on each rank, all get: the sum, in x ("sum"); rank 0's, in x ("first");
    or all of them ("gather"), in out `[size / width, RANKS * width]`.

    A program has `chunk` values in each round. Parts have two places, used in turn: a rank in the
    next round has read those of this one.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch = tl.load(counters)
    for first in range(program * chunk, program * chunk + size, programs * chunk):
        epoch += 1
        slots = RANKS * _PROGRAMS * _WORD + (epoch % 2) * RANKS * slot_bytes
        if KIND != "first" or RANK == 0:
            for start in range(0, chunk, BLOCK):
                at = start + tl.arange(0, BLOCK)
                own = tl.load(x + first + at, mask=first + at < size)
                for rank in tl.static_range(RANKS):
                    if rank != RANK:
                        there = _at(addresses, rank, slots + RANK * slot_bytes, x)
                        tl.store(there + program * chunk + at, own, mask=first + at < size)
        _meet(addresses, counters, stop, epoch, RANK, RANKS)
        if KIND != "first" or RANK != 0:
            for start in range(0, chunk, BLOCK):
                at = start + tl.arange(0, BLOCK)
                inside = first + at < size
                total = tl.zeros((BLOCK,), tl.float32)
                for rank in tl.static_range(1 if KIND == "first" else RANKS):
                    if rank == RANK:
                        part = tl.load(x + first + at, mask=inside)
                    else:
                        here = _at(addresses, RANK, slots + rank * slot_bytes, x)
                        here += program * chunk + at
                        part = tl.load(here, mask=inside, cache_modifier=".cg")
                    if KIND == "sum":
                        total += part.to(tl.float32)
                    elif KIND == "first":
                        tl.store(x + first + at, part, mask=inside)
                    else:
                        row, column = (first + at) // width, (first + at) % width
                        to = (row * RANKS + rank) * width + column
                        tl.store(out + to, part, mask=inside)
                if KIND == "sum":
                    tl.store(x + first + at, total.to(x.dtype.element_ty), mask=inside)
    # The last program to end sets the epoch: by then all have read what it was.
    tl.debug_barrier()
    if tl.atomic_add(counters + 1, 1) == programs - 1:
        tl.store(counters + 1, 0)
        tl.store(counters, epoch)


class PeerMemory:
    """One rank's view of the memory that all ranks write to.

    Args:
        addresses: where each rank's `num_bytes(size)` begin, as this process sees them; zeros, and
            all ranks have written these before one makes an exchange.
        rank: of the caller.
        device: its GPU.
        owner: keeps the memory.
    """

    def __init__(
        self, addresses: Sequence[int], rank: int, device: torch.device, owner: object
    ) -> None:
        self._rank, self._size, self._owner = rank, len(addresses), owner
        self._addresses = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._counters = torch.zeros(2, dtype=torch.int64, device=device)  # epoch, programs at end
        # A kernel that waits looks at it, so it must be where the host can write.
        self._stop = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")

    @staticmethod
    def num_bytes(size: int) -> int:
        """Of each of `size` ranks' memory."""
        return size * _PROGRAMS.value * _WORD.value + 2 * size * slot_bytes(size)

    def takes(self, x: Tensor) -> bool:
        """Whether x is better summed here than by NCCL: it is small, or a graph is captured. NCCL's
        collectives in a graph could not be given up."""
        return x.nbytes <= slot_bytes(self._size) or (
            x.is_cuda and torch.cuda.is_current_stream_capturing()
        )

    def sum(self, x: Tensor) -> None:
        """Sum x over all ranks, in place, in float32: floating point, contiguous."""
        self._exchange("sum", x, x, 1)

    def take_first(self, x: Tensor) -> None:
        """Copy rank 0's x to all ranks, in place: contiguous."""
        self._exchange("first", x, x, 1)

    def gather(self, x: Tensor) -> Tensor:
        """x `[n, part]`, of one shape on each rank, contiguous -> `[n, size * part]`."""
        out = x.new_empty(len(x), self._size * x.shape[1])
        self._exchange("gather", x, out, x.shape[1])
        return out

    def stop(self) -> None:
        """Have every exchange end, now and from now on, whatever the others do. Any thread may
        call it."""
        self._stop[0] = 1

    def _exchange(self, kind: str, x: Tensor, out: Tensor, width: int) -> None:
        size, slot = x.numel(), slot_bytes(self._size)
        if not size:
            return
        blocks = cdiv(size, _BLOCK)
        programs = min(_PROGRAMS.value, blocks)
        most = slot // x.itemsize // programs // _BLOCK
        _exchange[(programs,)](
            x,
            out,
            size,
            width,
            min(most, cdiv(blocks, programs)) * _BLOCK,
            self._addresses,
            self._counters,
            self._stop,
            slot,
            KIND=kind,
            RANK=self._rank,
            RANKS=self._size,
            BLOCK=_BLOCK,
            num_warps=8,
        )


def slot_bytes(size: int) -> int:
    """Of one rank's part."""
    return _PARTS_BYTES // (size - 1) // _ALIGN * _ALIGN
