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


class Drawing:
    """Samples the same rows at step after step, without waiting for the device.

    Args:
        rows: as they are before the first step; only their `token_index` grows.
        settings: theirs.
        device: where the logits will be.
    """

    def __init__(
        self,
        rows: Sequence[SamplingRow],
        settings: Sequence[SamplingSettings],
        device: torch.device,
        vocab_size: int,
    ) -> None:
        drawn = [index for index, setting in enumerate(settings) if setting.temperature > 0.0]
        self._rows = [rows[index] for index in drawn]
        self._settings = [settings[index] for index in drawn]
        self._drawn = torch.tensor(drawn, dtype=torch.int64, device=device)
        self._seeds = np.array([row.seed & _MASK_64 for row in self._rows], np.uint64)
        self._indices = np.array([row.sequence_index for row in self._rows], np.int64)
        self._next = np.array([row.token_index for row in self._rows], np.int64)
        if drawn:
            self._draw = Draw.of(self._rows, self._settings, device)
            self._weighed = (self._draw.top_k >= vocab_size).nonzero().flatten()

    def start(self, logits: Tensor) -> Pending:
        """Sample the next token of each row of `logits` float32 `[n, vocab]`."""
        highest, ids = logits.max(dim=-1)
        unsure = ~torch.isfinite(highest)
        if self._rows:
            numbers = torch.from_numpy(uniform(self._seeds, self._indices, self._next))
            self._next += 1
            if logits.is_cuda:
                numbers = numbers.pin_memory()  # from pageable memory a copy waits for the device
            draw = replace(self._draw, uniform=numbers.to(logits.device, non_blocking=True))
            drawn, resolved = draw_at_once(
                logits[self._drawn], highest[self._drawn], draw, self._weighed
            )
            ids[self._drawn] = drawn
            unsure[self._drawn] |= ~resolved
        return Pending(ids, unsure)
