"""What a step has sampled, on its way from the device to the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onestem.ops.sampling import Drawn
from onestem.request import TokenLogprobs

__all__ = ["Chosen", "Pending", "Sampled", "TakenChosen"]


class Chosen(NamedTuple):
    """Natural-log probabilities on the device.

    Attributes:
        own: `[m]`, of the chosen tokens.
        ids, logprobs: `[m, k]`, of the most probable ones.
    """

    own: Tensor
    ids: Tensor
    logprobs: Tensor

    def taken(self) -> TakenChosen:
        """Wait for it."""
        own, logprobs = self.own.double().cpu(), self.logprobs.double().cpu()
        return TakenChosen(own.numpy(), self.ids.cpu().numpy(), logprobs.numpy())


class TakenChosen(NamedTuple):
    """The same on the host."""

    own: NDArray[np.float64]
    ids: NDArray[np.int64]
    logprobs: NDArray[np.float64]

    def entries(self, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
        """Of each row the `counts` most probable tokens, in order, and a token that may be one of
        them, else stands behind them."""
        own, ids, logprobs = self.own.tolist(), self.ids.tolist(), self.logprobs.tolist()
        found: list[TokenLogprobs] = []
        for i, (token, count) in enumerate(zip(tokens, counts, strict=True)):
            entry = dict(zip(ids[i][:count], logprobs[i][:count], strict=True))
            entry.setdefault(token, own[i])
            found.append(entry)
        return found


class Sampled(NamedTuple):
    """What the rows of a step have sampled.

    Attributes:
        ids: int64 `[n]`.
        status: int32 `[n]` (`onestem.ops.sampling.STATUS_OK`, ...).
        entries: log-probabilities of the rows' tokens, where they are wanted.
    """

    ids: NDArray[np.int64]
    status: NDArray[np.int32]
    entries: dict[int, TokenLogprobs]


class Pending:
    """Sampled tokens that may not be there yet.

    Attributes:
        ids: int64 `[n]`, on the device.
    """

    def __init__(
        self,
        drawn: Drawn,
        chosen: Chosen | None,
        told: NDArray[np.int64],
        counts: NDArray[np.int32],
    ) -> None:
        self.ids = drawn.ids
        self._told, self._counts = told, counts
        parts: list[Tensor] = [drawn.ids, drawn.status.long()]
        if chosen is not None:
            parts += [chosen.ids.flatten(), _as_bits(chosen.own), _as_bits(chosen.logprobs)]
        self._num_told = 0 if chosen is None else len(chosen.own)
        self._most = 0 if chosen is None else chosen.ids.shape[1]
        packed = torch.cat(parts)
        self._arrived: torch.cuda.Event | None = None
        if packed.is_cuda:
            self._packed = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self._packed.copy_(packed, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()
        else:
            self._packed = packed

    def take(self) -> Sampled:
        """Wait for the tokens."""
        if self._arrived is not None:
            self._arrived.synchronize()
        words = self._packed.numpy()
        count, told, most = len(self.ids), self._num_told, self._most
        ids, status = words[:count], words[count : 2 * count]
        entries: dict[int, TokenLogprobs] = {}
        if told:
            top, own, logprobs = np.split(words[2 * count :], [told * most, told * (most + 1)])
            chosen = TakenChosen(
                own.view(np.float64),
                top.reshape(told, most),
                logprobs.view(np.float64).reshape(told, most),
            )
            made = chosen.entries(ids[self._told].tolist(), self._counts.tolist())
            entries = dict(zip(self._told.tolist(), made, strict=True))
        return Sampled(ids, status.astype(np.int32), entries)


def _as_bits(values: Tensor) -> Tensor:
    """float64 as int64, so that one copy brings all."""
    return values.double().flatten().view(torch.int64)
