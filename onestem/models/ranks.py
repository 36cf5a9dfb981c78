"""Ranks that hold one model together, each a part of it, and their collectives.

A collective returns the same bits on every rank. None waits for a device, so CUDA graphs can hold
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions, BroadcastOptions

if TYPE_CHECKING:
    from onestem.ops.triton.peers import PeerMemory

# On a GPU collectives run in the computing stream, without events for another one.
_SUM, _GATHER, _FIRST = AllreduceOptions(), AllgatherOptions(), BroadcastOptions()
_SUM.asyncOp = _GATHER.asyncOp = _FIRST.asyncOp = False


class Table(Protocol):
    """A table that is no tensor."""

    def __len__(self) -> int: ...

    def rows(self, ids: Tensor) -> Tensor:
        """The rows `ids`, `[n, width]`."""
        ...


@dataclass(frozen=True)
class Ranks:
    """One of `size` ranks.

    Attributes:
        rank: 0 to size - 1.
        group: of their processes (NCCL; gloo on CPUs); None where size is 1.
        peers: of GPUs that write to each other's memory: collectives but large sums go by it.
    """

    rank: int
    size: int
    group: ProcessGroup | None
    peers: PeerMemory | None = None

    def sum(self, x: Tensor) -> Tensor:
        """Sum x over all ranks, in place: of one shape and dtype on each, contiguous."""
        if self.size == 1:
            return x
        if self.peers is not None and self.peers.takes(x):
            self.peers.sum(x)
            return x
        assert self.group is not None
        _ended(self.group.allreduce([x], _SUM))
        return x

    def gather(self, x: Tensor) -> Tensor:
        """x `[n, part]`, of one shape on each rank -> `[n, size * part]`, in the order of ranks."""
        if self.size == 1:
            return x
        if self.peers is not None:
            return self.peers.gather(x.contiguous())
        parts = x.new_empty(self.size * len(x), x.shape[1])
        assert self.group is not None
        _ended(self.group._allgather_base(parts, x.contiguous(), _GATHER))
        return parts.view(self.size, *x.shape).transpose(0, 1).flatten(1)

    def take_first(self, x: Tensor) -> None:
        """Copy rank 0's x to all ranks, in place: of one shape and dtype, contiguous."""
        if self.size == 1:
            return
        if self.peers is not None and self.peers.takes(x):
            self.peers.take_first(x)
            return
        assert self.group is not None
        _ended(self.group.broadcast([x], _FIRST))

    def embedding(self, ids: Tensor, table: Tensor | Table) -> Tensor:
        """Rows `ids` (int64 `[n]`) of a table, `[n, width]`. Each rank holds `[part, width]` of the
        table, in the order of ranks."""
        if self.size == 1:
            return _rows(table, ids)
        rows = ids - self.rank * len(table)
        here = (rows >= 0) & (rows < len(table))
        found = _rows(table, rows.clamp_(0, len(table) - 1))
        return self.sum(torch.where(here[:, None], found, 0))


def _rows(table: Tensor | Table, ids: Tensor) -> Tensor:
    return F.embedding(ids, table) if isinstance(table, Tensor) else table.rows(ids)


def _ended(work: Work | None) -> None:
    """Wait for a collective, unless it ran in the computing stream: then there is no work."""
    if work is not None:
        work.wait()


ALONE = Ranks(0, 1, None)
