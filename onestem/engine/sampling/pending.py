"""Sampled tokens and log-probabilities on their way from the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onestem.ops.sampling import Drawn
from onestem.request import RankedLogprobs, TokenLogprobs


class Chosen(NamedTuple):
    """Natural-log probabilities on the device.

    Attributes:
        own: `[m]`, of the chosen tokens.
        ids, logprobs: `[m, k]`, of the most probable ones.
        before: int64 `[m]`, how many tokens are more probable than the chosen one, or as probable
            with a lower id; `[0]` where ranks are not asked for.
    """

    own: Tensor
    ids: Tensor
    logprobs: Tensor
    before: Tensor

    def words(self) -> list[Tensor]:
        """int64, as `TakenChosen.of` reads them."""
        return [self.ids.flatten(), _as_bits(self.own), _as_bits(self.logprobs), self.before]


class TakenChosen(NamedTuple):
    """The same on the host."""

    own: NDArray[np.float64]
    ids: NDArray[np.int64]
    logprobs: NDArray[np.float64]
    before: NDArray[np.int64]

    @staticmethod
    def of(words: NDArray[np.int64], count: int) -> TakenChosen:
        """Read the words of `count` rows, int64 `[n]` as `Chosen.words` makes them."""
        most = (len(words) // count - 1) // 2
        ends = [count * most, count * (most + 1), count * (2 * most + 1)]
        ids, own, logprobs, before = np.split(words, ends)
        return TakenChosen(
            own.view(np.float64),
            ids.reshape(count, most),
            logprobs.view(np.float64).reshape(count, most),
            before,
        )

    def part(self, first: int, end: int) -> TakenChosen:
        """The same of some of its rows."""
        at = slice(first, end)
        return TakenChosen(self.own[at], self.ids[at], self.logprobs[at], self.before[at])

    def entries(self, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
        """Of each row the `counts` most probable tokens, in order, then its token of `tokens` if it
        is not among them."""
        own, ids, logprobs = self.own.tolist(), self.ids.tolist(), self.logprobs.tolist()
        kind: Any = RankedLogprobs if len(self.before) else dict
        found: list[Any] = []
        for i, (token, count) in enumerate(zip(tokens, counts, strict=True)):
            entry = kind(zip(ids[i][:count], logprobs[i][:count], strict=True))
            entry.setdefault(token, own[i])
            found.append(entry)
        for entry, before in zip(found, self.before.tolist(), strict=False):
            entry.rank = before + 1
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


class Words:
    """Words on their way to the host, one part after the other. A copy that begins when they are
    asked for would wait for all steps launched since."""

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

    def take(self) -> NDArray[Any]:
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
        self._words = Words([drawn.ids, drawn.status.long(), *chosen_words])

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


class PendingBlocks:
    """The same of rows whose logits were made in blocks."""

    def __init__(self, parts: Sequence[Pending]) -> None:
        self._parts = parts
        self.ids = parts[0].ids if len(parts) == 1 else torch.cat([part.ids for part in parts])

    def take(self) -> Sampled:
        """Wait for the tokens."""
        taken = [part.take() for part in self._parts]
        entries: dict[int, TokenLogprobs] = {}
        first = 0
        for part in taken:
            entries |= {first + i: entry for i, entry in part.entries.items()}
            first += len(part.ids)
        ids, status = (np.concatenate([part[i] for part in taken]) for i in range(2))
        return Sampled(ids, status, entries)


class PendingLogprobs:
    """Log-probabilities of given tokens that may not be there yet, and of the most probable ones
    beside each."""

    def __init__(self, chosen: Chosen) -> None:
        self._count = len(chosen.own)
        self._words = Words(chosen.words())

    def take(self) -> TakenChosen:
        """Wait for them."""
        return TakenChosen.of(self._words.take(), self._count)


def _as_bits(values: Tensor) -> Tensor:
    """float64 as int64, so that one copy brings all."""
    return values.double().flatten().view(torch.int64)
