"""Sampling in C++ (`csrc/sampling.cpp`), with one or a few passes over each row of logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onestem.errors import ConfigError
from onestem.ops.cpu.extension import chosen_isa, native
from onestem.ops.sampling import Drawn, RowTable, Sampling


@dataclass(frozen=True)
class CpuSampling(Sampling):
    """`Sampling` in C++.

    Attributes:
        isa: instruction set; None: the one in use.
    """

    name: str = "cpu"
    isa: str | None = None

    def draw(self, logits: Tensor, rows: RowTable) -> Drawn:
        """Raises `ConfigError` unless the logits are float32 `[n, vocab]` on the CPU."""
        logits = _checked(logits)
        if len(rows) != len(logits):
            raise ConfigError(f"got {len(rows)} rows, expected {len(logits)}, as the logits have")
        ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        status = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
        native().draw_tokens(
            self.isa or chosen_isa(),
            logits.data_ptr(),
            *logits.shape,
            rows.words.data_ptr(),
            rows.steps,
            ids.data_ptr(),
            status.data_ptr(),
            torch.get_num_threads(),
        )
        return Drawn(ids, status)

    def log_sums(self, logits: Tensor, index: Tensor) -> Tensor:
        """See `Sampling`; the result is float64."""
        logits, index = _checked(logits), _checked_index(index, len(logits), "index")
        sums = torch.empty(len(index), dtype=torch.float64, device=logits.device)
        native().log_sums(*self._rows(logits, index), sums.data_ptr(), torch.get_num_threads())
        return sums

    def leading(self, logits: Tensor, index: Tensor, count: int) -> tuple[Tensor, Tensor]:
        logits, index = _checked(logits), _checked_index(index, len(logits), "index")
        if count > logits.shape[1]:
            raise ConfigError(f"count is {count}, expected at most {logits.shape[1]} (vocabulary)")
        values = logits.new_empty(len(index), count)
        ids = torch.empty(len(index), count, dtype=torch.int64, device=logits.device)
        pointers = (values.data_ptr(), ids.data_ptr())
        if count:
            native().leading_tokens(
                *self._rows(logits, index), count, *pointers, torch.get_num_threads()
            )
        return values, ids

    def ranks(self, logits: Tensor, index: Tensor, ids: Tensor) -> Tensor:
        logits, index = _checked(logits), _checked_index(index, len(logits), "index")
        ids = _checked_index(ids, logits.shape[1], "ids")
        if len(ids) != len(index):
            raise ConfigError(f"got {len(ids)} ids, expected {len(index)}, one for each row")
        ranks = torch.empty(len(index), dtype=torch.int64, device=logits.device)
        native().token_ranks(
            *self._rows(logits, index),
            ids.data_ptr(),
            ranks.data_ptr(),
            torch.get_num_threads(),
        )
        return ranks

    def _rows(self, logits: Tensor, index: Tensor) -> tuple[str, int, int, int, int]:
        count = logits.shape[1]
        isa = self.isa or chosen_isa()
        return isa, logits.data_ptr(), count, index.data_ptr(), len(index)


def _checked(logits: Tensor) -> Tensor:
    here = logits.device.type == "cpu" and logits.dtype == torch.float32 and logits.dim() == 2
    if not here:
        raise ConfigError(
            f"logits are {logits.dtype} {list(logits.shape)} on {logits.device}, expected "
            "torch.float32 [rows, vocabulary] on the CPU"
        )
    return logits.contiguous()


def _checked_index(index: Tensor, limit: int, what: str) -> Tensor:
    good = index.device.type == "cpu" and index.dtype == torch.int64 and index.dim() == 1
    if not good or (len(index) > 0 and not 0 <= int(index.min()) <= int(index.max()) < limit):
        raise ConfigError(f"{what} must be int64 [m] on the CPU, below {limit}, got {index}")
    return index.contiguous()
