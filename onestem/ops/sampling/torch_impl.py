"""Sampling in PyTorch; devices with kernels have subclasses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onestem.ops.copies import on_device
from onestem.ops.sampling.rows import STATUS_MASKED, STATUS_NOT_FINITE, RowTable

WEIGHT_BITS = 30  # for top-p, probabilities are counted in units of 2^-30 of the highest

_ELEMENTS = 1 << 21  # of a piece of rows times the vocabulary, in int64 and float64
_MASK_32 = 0xFFFFFFFF
_ROUNDS = 10


class Drawn(NamedTuple):
    """Attributes:
    ids: int64 `[n]`, the sampled tokens.
    status: int32 `[n]`: `STATUS_OK`, or why there is no token.
    """

    ids: Tensor
    status: Tensor


@dataclass(frozen=True)
class Sampling:
    """Sampling on one device. `index`, int64 `[m]`, selects rows of logits float32 `[n, vocab]`.
    In PyTorch, all arithmetic that decides a token is float64."""

    name: str = "torch"

    def draw(self, logits: Tensor, rows: RowTable) -> Drawn:
        """A token for each row, as docs/sampling.md defines it."""
        top, ids = logits.max(dim=-1)  # equal logits: the lowest id
        top = top.where(~logits.isnan().any(dim=-1), torch.nan)
        status = torch.zeros(len(logits), dtype=torch.int32, device=logits.device)
        status[top == -torch.inf] = STATUS_MASKED
        status[(top == torch.inf) | top.isnan()] = STATUS_NOT_FINITE
        step = max(1, _ELEMENTS // logits.shape[1])
        drawn = np.flatnonzero(rows.draws)
        for start in range(0, len(drawn), step):
            part = drawn[start : start + step]
            index = rows.index(part)
            ids[index] = _race(logits[index].double(), rows.rows[part], rows.steps)
        return Drawn(ids, status)

    def log_sums(self, logits: Tensor, index: Tensor) -> Tensor:
        """Natural log of the sum of exponentials of each row, `[m]`."""
        return logits[index].double().logsumexp(dim=-1)

    def leading(self, logits: Tensor, index: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Logits and ids (int64) `[m, count]` of the leading tokens: higher logits first, equal
        ones by id. `count` is at most the vocabulary's size."""
        if count == 1:  # no need to sort
            values, ids = logits[index].max(dim=-1, keepdim=True)  # equal logits: the lowest id
            return values, ids
        values, ids = logits[index].sort(dim=-1, descending=True, stable=True)
        return values[:, :count], ids[:, :count]

    def ranks(self, logits: Tensor, index: Tensor, ids: Tensor) -> Tensor:
        """Number of tokens before a given one in the order of `leading`, int64 `[m]`."""
        values = logits[index]
        own = values.gather(1, ids[:, None])
        earlier = torch.arange(values.shape[1], device=ids.device) < ids[:, None]
        return ((values > own) | ((values == own) & earlier)).sum(dim=-1)

    def penalties(self, vocab_size: int, device: torch.device) -> Penalties:
        """A new store of states, for logits on a device."""
        return Penalties(vocab_size)


def processed(logits: Tensor, rows: NDArray[np.void]) -> Tensor:
    """The log-probabilities that rows `ROW` `[m]` draw from, up to a constant each, float32
    `[m, vocab]`. Their logits `[m, vocab]`, after penalties and masks, are divided by the
    temperature, and -inf where top-k, top-p or min-p drops them. Greedy rows are unchanged."""
    drawn = np.where(rows["temperature"] > 0, rows["temperature"], np.float32(1))
    scaled = logits / on_device(drawn, logits.device)[:, None]
    cut = (rows["top_k"] > 0) | (rows["top_p"] < 1) | (rows["min_p"] > 0)
    filtered = np.flatnonzero(cut & (rows["temperature"] > 0))
    step = max(1, _ELEMENTS // logits.shape[1])
    for start in range(0, len(filtered), step):
        part = filtered[start : start + step]
        index, some = on_device(part, logits.device), rows[part]
        values = logits[index].double()
        kept = _kept(values, _column(some, "temperature", values, torch.float64), some)
        scaled[index] = scaled[index].masked_fill(~kept, -torch.inf)
    return scaled


def _column(rows: NDArray[np.void], name: str, like: Tensor, dtype: torch.dtype) -> Tensor:
    """A column of the table, `[m, 1]`."""
    wide = np.float64 if dtype.is_floating_point else np.int64
    return on_device(rows[name].astype(wide), like.device).to(dtype)[:, None]


def _race(logits: Tensor, rows: NDArray[np.void], steps: int) -> Tensor:
    """Ids, int64 `[m]`, that win the race of logits, float64 `[m, vocab]`."""
    heat = _column(rows, "temperature", logits, torch.float64)
    score = logits / heat - _waiting_times(rows, steps, logits).log()
    kept = _kept(logits, heat, rows)
    return score.where(kept & (logits > -torch.inf), -torch.inf).argmax(dim=-1)


def _kept(logits: Tensor, heat: Tensor, rows: NDArray[np.void]) -> Tensor:
    """bool `[m, vocab]`: ids that top-k, top-p and min-p keep."""
    values, order = logits.sort(dim=-1, descending=True, stable=True)
    top_k = _column(rows, "top_k", logits, torch.int64)
    top_p = _column(rows, "top_p", logits, torch.float64)
    min_p = _column(rows, "min_p", logits, torch.float64)
    kept = (torch.arange(logits.shape[1], device=logits.device) < top_k) | (top_k == 0)
    weights = (((values - values[:, :1]) / heat).exp() * 2.0**WEIGHT_BITS).long() * kept
    before = (weights.cumsum(dim=-1) - weights).double()
    total = weights.sum(dim=-1, keepdim=True).double()
    kept &= (before < top_p * total) | (top_p >= 1)
    kept &= (values >= values[:, :1] + heat * min_p.log()) | (min_p == 0)
    return torch.zeros_like(kept).scatter_(1, order, kept)


def _waiting_times(rows: NDArray[np.void], steps: int, like: Tensor) -> Tensor:
    """Exponentially distributed times, float64 `[m, vocab]`: `-log u` of u in (0, 1) with 64 bits.
    Small ones, which decide, are exact relative to their size."""
    high, low = (_noise(rows, steps, like, stream) for stream in (0, 1))
    near = (high.double() * 2.0**32 + low.double() + 0.5) * 2.0**-64  # 1 - u
    far = ((_MASK_32 - high).double() * 2.0**32 + (_MASK_32 - low).double() + 0.5) * 2.0**-64
    return torch.where(high < 1 << 31, -torch.log1p(-near.clamp(max=0.5)), -far.log())


def _noise(rows: NDArray[np.void], steps: int, like: Tensor, stream: int) -> Tensor:
    """Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): words in
    int64 `[m, vocab]`."""
    vocab = like.shape[1]
    blocks = torch.arange(-(-vocab // 4), device=like.device)[None, :]
    token = (_column(rows, "token", like, torch.int64) + steps) & _MASK_32
    sequence = _column(rows, "sequence", like, torch.int64)
    k0 = _column(rows, "seed_low", like, torch.int64)
    k1 = _column(rows, "seed_high", like, torch.int64)
    c = [blocks, token, sequence, torch.full_like(token, stream)]
    for _ in range(_ROUNDS):
        low0, high0 = _product(c[0], 0xD2511F53)
        low1, high1 = _product(c[2], 0xCD9E8D57)
        c = [high1 ^ c[1] ^ k0, low1, high0 ^ c[3] ^ k1, low0]
        k0, k1 = (k0 + 0x9E3779B9) & _MASK_32, (k1 + 0xBB67AE85) & _MASK_32
    words = torch.stack(torch.broadcast_tensors(*c), dim=-1).flatten(1)
    return words[:, :vocab]


def _product(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """Low and high words of a product of 32-bit words: int64 cannot hold its 64 bits."""
    low, high = a * (b & 0xFFFF), a * (b >> 16)  # each below 2^48
    middle = (low >> 16) + high
    return ((middle & 0xFFFF) << 16) | (low & 0xFFFF), middle >> 16


class Penalties:
    """The tokens that rows have seen, in states with places from 0 on. Here they are on the host;
    where a device has kernels they are on it.

    Args:
        vocab_size: columns of the logits; other ids are ignored.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._states: dict[int, _Seen] = {}

    def assign(
        self, place: int, prompt: NDArray[np.integer] | None, output: NDArray[np.integer]
    ) -> None:
        """Replace the state of a place.

        Args:
            prompt: ids that count for repetition alone; None: the row has no repetition penalty.
            output: ids that count for all penalties, in any order.
        """
        state = self._states[place] = _Seen()
        if prompt is not None:
            state.see(self._inside(prompt), 0)
        for token in self._inside(output).tolist():
            state.sample(token)

    def release(self, place: int) -> None:
        """Free the state of a place until it is assigned again."""
        self._states.pop(place, None)

    def _inside(self, ids: NDArray[np.integer]) -> NDArray[np.int64]:
        known = np.asarray(ids, np.int64)
        return known[known < self._vocab_size]

    def apply(self, logits: Tensor, rows: RowTable) -> None:
        """Change the logits `[n, vocab]` of the rows that have a state, in place. First repetition
        (CTRL's, Keskar et al. 2019: a seen token's logit / p if positive, else * p), then OpenAI's
        penalties (minus frequency * count + presence, over sampled tokens)."""
        for row in rows.penalised.tolist():
            asked = rows.rows[row]
            self._states[int(asked["penalty"])].apply(logits[row], asked)

    def note(self, rows: RowTable, ids: Tensor) -> None:
        """Note that the rows have sampled these tokens, int64 `[n]`."""
        sampled = ids.tolist() if len(rows.penalised) else []
        for row in rows.penalised.tolist():
            self._states[int(rows.rows["penalty"][row])].sample(sampled[row])


class _Seen:
    """Distinct ids in order of arrival, and how often each was sampled."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._ids = np.zeros(0, np.int64)
        self._counts = np.zeros(0, np.float32)

    def see(self, ids: NDArray[np.int64], count: int) -> None:
        """Add ids, each sampled `count` times; either none is known yet, or `count` is 0."""
        new = np.unique(ids)
        first = len(self._places)
        self._places |= {token: first + i for i, token in enumerate(new.tolist())}
        missing = len(self._places) - len(self._ids)
        if missing > 0:
            room = max(missing, len(self._ids), 64)
            self._ids = np.append(self._ids, np.zeros(room, np.int64))
            self._counts = np.append(self._counts, np.zeros(room, np.float32))
        self._ids[first : len(self._places)] = new
        self._counts[first : len(self._places)] = count

    def sample(self, token: int) -> None:
        place = self._places.get(token)
        if place is None:
            self.see(np.array([token]), 1)
        else:
            self._counts[place] += 1

    def apply(self, logits: Tensor, row: np.void) -> None:
        """Penalise a row of logits `[vocab]`, in place."""
        count = len(self._places)
        ids = torch.from_numpy(self._ids[:count]).to(logits.device)
        values, times = logits[ids], self._counts[:count]
        penalty = float(row["repetition"])
        if penalty != 1:
            values = torch.where(values > 0, values / penalty, values * penalty)
        amount = np.where(times > 0, row["frequency"] * times + row["presence"], np.float32(0))
        logits[ids] = values - torch.from_numpy(amount).to(logits.device)
