"""Ranks that are threads of one process, and meet at a barrier."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from onestem.models.ranks import Ranks

__all__ = ["on_ranks"]

T = TypeVar("T")

SECONDS = 60  # a rank that waits longer waits for one that failed


class _Table:
    """What the ranks have said."""

    def __init__(self, size: int) -> None:
        self.said: list[Tensor | None] = [None] * size
        self.barrier = threading.Barrier(size, timeout=SECONDS)

    def all(self, rank: int, x: Tensor) -> list[Tensor]:
        self.said[rank] = x.clone()
        self.barrier.wait()
        said = [one for one in self.said if one is not None]
        self.barrier.wait()
        return said


@dataclass(frozen=True)
class _Thread(Ranks):
    """The collectives of `Ranks`, written out."""

    table: _Table = field(kw_only=True)

    def sum(self, x: Tensor) -> Tensor:
        assert x.is_contiguous()
        return x.copy_(torch.stack(self.table.all(self.rank, x)).sum(0))

    def gather(self, x: Tensor) -> Tensor:
        return torch.cat(self.table.all(self.rank, x), dim=1)


def on_ranks(size: int, work: Callable[[Ranks], T]) -> list[T]:
    """What each of the ranks makes of its work."""
    table = _Table(size)

    def one(rank: int) -> T:
        try:
            return work(_Thread(rank, size, None, table=table))
        except BaseException:
            table.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(one, rank) for rank in range(size)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        broken = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)]
        for error in [*broken, *errors]:
            raise error
        return [future.result() for future in futures]
