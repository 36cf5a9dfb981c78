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

__all__ = ["Chosen", "Pending", "PendingLogprobs", "Sampled"]


class Chosen(NamedTuple):
    """Natural-log probabilities on the device.

    Attributes:
        own: `[m]`, of the chosen tokens.
        ids, logprobs: `[m, k]`, of the most probable ones.
    """

    own: Tensor
    ids: Tensor
    logprobs: Tensor

    def words(self) -> list[Tensor]:
        """int64, as `TakenChosen.of` reads them."""
        return [self.ids.flatten(), _as_bits(self.own), _as_bits(self.logprobs)]


class TakenChosen(NamedTuple):
    """The same on the host."""

    own: NDArray[np.float64]
    ids: NDArray[np.int64]
    logprobs: NDArray[np.float64]

    @staticmethod
    def of(words: NDArray[np.int64], count: int) -> TakenChosen:
        """From the words of so many rows."""
        most = (len(words) // count - 1) // 2
        ids, own, logprobs = np.split(words, [count * most, count * (most + 1)])
        return TakenChosen(
            own.view(np.float64),
            ids.reshape(count, most),
            logprobs.view(np.float64).reshape(count, most),
        )

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


class _Words:
    """int64 words on their way to the host."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        packed = torch.cat(list(parts))
        self._arrived: torch.cuda.Event | None = None
        if packed.is_cuda:
            self._here = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self._here.copy_(packed, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()
        else:
            self._here = packed

    def take(self) -> NDArray[np.int64]:
        """Wait for them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._here.numpy()


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
        self._has_chosen = chosen is not None
        chosen_words = [] if chosen is None else chosen.words()
        self._words = _Words([drawn.ids, drawn.status.long(), *chosen_words])

    def take(self) -> Sampled:
        """Wait for the tokens."""
        words, count = self._words.take(), len(self.ids)
        ids, status = words[:count], words[count : 2 * count]
        entries: dict[int, TokenLogprobs] = {}
        if self._has_chosen:
            chosen = TakenChosen.of(words[2 * count :], len(self._told))
            made = chosen.entries(ids[self._told].tolist(), self._counts.tolist())
            entries = dict(zip(self._told.tolist(), made, strict=True))
        return Sampled(ids, status.astype(np.int32), entries)


class PendingLogprobs:
    """Log-probabilities of given tokens that may not be there yet, and of the `counts` most
    probable ones beside each.

    Attributes:
        tokens: the given tokens.
    """

    def __init__(self, chosen: Chosen, tokens: Sequence[int], counts: Sequence[int]) -> None:
        self.tokens, self._counts = tokens, counts
        self._words = _Words(chosen.words())

    def take(self) -> list[TokenLogprobs]:
        """Wait for them."""
        chosen = TakenChosen.of(self._words.take(), len(self.tokens))
        return chosen.entries(self.tokens, self._counts)


def _as_bits(values: Tensor) -> Tensor:
    """float64 as int64, so that one copy brings all."""
    return values.double().flatten().view(torch.int64)
