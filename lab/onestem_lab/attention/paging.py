"""A step's keys and values in the form of a page cache without runs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from onestem.ops.kv import read_kv
from onestem_lab.attention.cases import Step

__all__ = ["BlockTables"]


@dataclass(frozen=True, eq=False)
class BlockTables:
    """Every sequence's full list of pages, as in a prefix cache of whole pages.

    Sequences share a page if all its tokens are the same, at the same places. The rest of a run,
    which does not fill a page, is copied into a page of each sequence that continues it.

    Attributes:
        pages: page ids of each stretch of rows.
        lengths: tokens of each stretch.
        slots: int64 `[num_pages, page_size]`, the step's own slot that each one copies; -1: none.
    """

    pages: list[list[int]]
    lengths: list[int]
    slots: np.ndarray

    @staticmethod
    def of(step: Step, page_size: int) -> BlockTables:
        ids: dict[bytes, int] = {}
        pages, lengths = [], []
        for slots in step.seen_slots():
            padded = np.pad(slots, (0, -len(slots) % page_size), constant_values=-1)
            blocks = padded.reshape(-1, page_size)
            pages.append([ids.setdefault(block.tobytes(), len(ids)) for block in blocks])
            lengths.append(len(slots))
        slots = np.frombuffer(bytearray(b"".join(ids)), np.int64).reshape(-1, page_size)
        return BlockTables(pages, lengths, slots)

    def rows(self, device: torch.device) -> Tensor:
        """Page ids, int32 `[num_stretches, max_pages]`, 0 after a stretch's last."""
        table = np.zeros((len(self.pages), max(map(len, self.pages))), np.int32)
        for row, pages in zip(table, self.pages, strict=True):
            row[: len(pages)] = pages
        return torch.from_numpy(table).to(device)

    def copied(self, pages: Tensor) -> Tensor:
        """The step's keys or values in these pages, `[num_pages, page_size, num_kv_heads,
        head_dim]`; zeros in slots without a token."""
        slots = torch.from_numpy(self.slots).to(pages.device)
        copy = read_kv(pages, slots.clamp(min=0))
        copy[slots < 0] = 0
        return copy
