"""Sampling at step after step without the host between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onestem.engine.draw import Draw, draw_at_once
from onestem.engine.random import uniform
from onestem.engine.sampling_row import SamplingRow, SamplingSettings
from onestem.ops.copies import on_device

__all__ = ["Drawing", "Pending"]

_MASK_64 = 0xFFFFFFFFFFFFFFFF


class Pending:
    """Ids sampled on the device, on their way to the host.

    Attributes:
        ids: int64 `[n]`, on the device.
    """

    def __init__(self, ids: Tensor, unsure: Tensor) -> None:
        self.ids = ids
        both = torch.stack((ids, unsure.long()))
        self._arrived: torch.cuda.Event | None = None
        if both.is_cuda:
            self._both = torch.empty(both.shape, dtype=both.dtype, pin_memory=True)
            self._both.copy_(both, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()
        else:
            self._both = both

    def take(self) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Wait; ids int64 `[n]`, and bool `[n]`: rows whose id is not sure (their logits are not
        finite, or the draw needs more of the order than was looked at)."""
        if self._arrived is not None:
            self._arrived.synchronize()
        ids, unsure = self._both.numpy()
        return ids, unsure != 0


_ROW = np.dtype(
    [
        ("seed", np.uint64),
        ("sequence_index", np.int64),
        ("token_index", np.int64),
        ("temperature", np.float64),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("min_p", np.float64),
    ]
)


class Drawing:
    """Samples rows at step after step, without waiting for the device.

    Args:
        rows: as they are before the first step; only their `token_index` grows.
        settings: theirs.
        device: where the logits will be.
        vocab_size: columns of the logits.
    """

    def __init__(
        self,
        rows: Sequence[SamplingRow],
        settings: Sequence[SamplingSettings],
        device: torch.device,
        vocab_size: int,
    ) -> None:
        self._device, self._vocab_size = device, vocab_size
        self._rows = np.zeros(0, _ROW)
        self._drawn = np.zeros(0, np.int64)
        self._num_uploaded = -1
        self.put(range(len(rows)), rows, settings)

    def put(
        self,
        places: Sequence[int],
        rows: Sequence[SamplingRow],
        settings: Sequence[SamplingSettings],
    ) -> None:
        """Rows of the logits that are sampled like these from now on."""
        missing = max(places, default=-1) + 1 - len(self._rows)
        if missing > 0:
            self._rows = np.concatenate((self._rows, np.zeros(missing, _ROW)))
        for place, row, setting in zip(places, rows, settings, strict=True):
            self._rows[place] = (
                row.seed & _MASK_64,
                row.sequence_index,
                row.token_index,
                setting.temperature,
                setting.top_k,
                setting.top_p,
                setting.min_p,
            )
        self._num_uploaded = -1

    def leave(self, places: Sequence[int]) -> None:
        """Rows of the logits that nobody reads until they are `put` again. (They would take the
        place of others among the few rows that are drawn from the whole order.)"""
        self._rows["temperature"][places] = 0
        self._num_uploaded = -1

    def start(self, logits: Tensor) -> Pending:
        """Sample the next token of each row of `logits` float32 `[n, vocab]`."""
        if self._num_uploaded != len(logits):
            self._upload(len(logits))
        highest, ids = logits.max(dim=-1)
        unsure = ~torch.isfinite(highest)
        if len(self._drawn):
            rows = self._rows[self._drawn]
            numbers = uniform(rows["seed"], rows["sequence_index"], rows["token_index"])
            draw = replace(self._draw, uniform=self._to_device(numbers))
            at = self._drawn_there
            drawn, resolved = draw_at_once(logits, at, highest[at], draw, self._weighed)
            ids[at] = drawn
            unsure[at] |= ~resolved
        self._rows["token_index"][: len(logits)] += 1
        return Pending(ids, unsure)

    def _upload(self, count: int) -> None:
        """What the draw needs of the first rows."""
        self._num_uploaded = count
        self._drawn = np.flatnonzero(self._rows["temperature"][:count] > 0)
        if not len(self._drawn):
            return
        rows = self._rows[self._drawn]
        self._drawn_there = self._to_device(self._drawn)
        self._weighed = self._to_device(np.flatnonzero(rows["top_k"] >= self._vocab_size))
        floats = np.stack([rows[name] for name in ("temperature", "top_p", "min_p")])
        temperature, top_p, min_p = self._to_device(floats)
        self._draw = Draw(
            temperature=temperature,
            top_k=self._to_device(np.ascontiguousarray(rows["top_k"])),
            top_p=top_p,
            min_p=min_p,
            uniform=temperature,  # each step has its own
        )

    def _to_device(self, values: np.ndarray) -> Tensor:
        return on_device(values, self._device)
