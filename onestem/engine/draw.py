"""From processed logits to token ids: top-k, top-p, min-p and the inverse of the distribution.

Tokens have one order: more probable first, equal ones by id. Top-k, top-p and min-p each keep a
leading part of it, and the inverse walks along it. Probabilities are integer weights
(`exp((logit - max) / temperature)` in units of 2^-b), because integer sums do not depend on the
order of addition: what a row samples cannot depend on the rows beside it, nor on how a device
splits a sum.

Sorting a vocabulary costs more than everything else here, so the walk goes along the leading
tokens first; a row that needs more of the order than that walks again with more of it, in the end
with all, and the same result. On a CPU the C++ extension does the same in one pass over the
vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onestem.engine.random import uniform
from onestem.engine.sampling_row import SamplingRow, SamplingSettings
from onestem.ops.cpu import draw_tokens as draw_in_cpp
from onestem.ops.cpu import is_built

__all__ = [
    "Draw",
    "chunks",
    "draw_at_once",
    "draw_tokens",
    "leading",
    "needs_much_of_the_order",
    "values_at",
]

_CANDIDATES = (256, 8192)  # leading tokens to look at, before the whole vocabulary
# float64 copies of logits are made in pieces: such that stay in a CPU's cache, or that fit beside
# what else is in a GPU's memory.
_CHUNK_ELEMENTS_CPU = 2**17
_CHUNK_ELEMENTS_GPU = 2**25


@dataclass(frozen=True, slots=True)
class Draw:
    """What the draw needs of each row: float64 `[m]`, `top_k` int64 `[m]`."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor

    @classmethod
    def of(
        cls, rows: Sequence[SamplingRow], settings: Sequence[SamplingSettings], device: torch.device
    ) -> Draw:
        def floats(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64, device=device)

        numbers = uniform(
            [row.seed for row in rows],
            [row.sequence_index for row in rows],
            [row.token_index for row in rows],
        )
        return cls(
            temperature=floats([s.temperature for s in settings]),
            top_k=torch.tensor([s.top_k for s in settings], device=device),
            top_p=floats([s.top_p for s in settings]),
            min_p=floats([s.min_p for s in settings]),
            uniform=torch.from_numpy(numbers).to(device),
        )

    def rows(self, index: Tensor) -> Draw:
        return Draw(
            self.temperature[index],
            self.top_k[index],
            self.top_p[index],
            self.min_p[index],
            self.uniform[index],
        )


def needs_much_of_the_order(top_k: int, vocab_size: int) -> bool:
    """Whether a row's top-k cuts behind the leading tokens that are looked at first."""
    return _CANDIDATES[0] < top_k < vocab_size


def draw_tokens(work: Tensor, draw: Draw) -> Tensor:
    """Token ids int64 `[m]` drawn from processed logits `[m, vocab]`."""
    if _is_native(work):
        return _draw_natively(work, draw)
    vocab_size = work.shape[1]
    top = work.amax(dim=-1)
    totals = _total_weights(work, top, draw)
    token_ids, resolved = _draw_among(work, top, totals, draw, _CANDIDATES[0])
    for count in (*_CANDIDATES[1:], vocab_size):
        left = (~resolved).nonzero().flatten()
        for part in chunks(left, vocab_size):
            token_ids[part], resolved[part] = _draw_among(
                work[part], top[part], totals[part], draw.rows(part), count
            )
    return token_ids


def draw_at_once(work: Tensor, top: Tensor, draw: Draw, weighed: Tensor) -> tuple[Tensor, Tensor]:
    """As `draw_tokens`, without ever waiting for a GPU: so from the first leading tokens alone.

    Args:
        work: float32 `[m, vocab]`, processed logits.
        top: the highest logit of each row, float32 `[m]`.
        draw: of these rows.
        weighed: int64: the rows whose top-k is off (`draw.top_k >= vocab`).

    Returns:
        token_ids: int64 `[m]`.
        resolved: bool `[m]`: whether the row's token is sure.
    """
    if _is_native(work):
        token_ids = _draw_natively(work, draw)
        return token_ids, torch.ones_like(token_ids, dtype=torch.bool)
    totals = _sum_weights(work, top, draw, weighed)
    return _draw_among(work, top, totals, draw, _CANDIDATES[0])


def _is_native(work: Tensor) -> bool:
    return work.device.type == "cpu" and is_built()


def _draw_natively(work: Tensor, draw: Draw) -> Tensor:
    return draw_in_cpp(
        work,
        temperature=draw.temperature,
        top_k=draw.top_k,
        top_p=draw.top_p,
        min_p=draw.min_p,
        uniform=draw.uniform,
        weight_bits=_weight_bits(work.shape[1]),
    )


def _draw_among(
    work: Tensor, top: Tensor, totals: Tensor, draw: Draw, count: int
) -> tuple[Tensor, Tensor]:
    """Token ids int64 `[m]` if the `count` leading tokens suffice, and bool `[m]` whether."""
    values, ids, trusted = leading(work, count)
    rank, resolved = _walk(_weights(values, top, draw, work.shape[1]), trusted, totals, draw)
    return values_at(ids, rank.clamp(max=ids.shape[1] - 1)), resolved


def leading(logits: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `count` leading tokens of each row: higher logits first, equal ones by id.

    Returns values and ids `[m, count]`, and for each row how many of them are sure: where equal
    values were cut off at the end, which of them stand here is arbitrary.
    """
    vocab_size = logits.shape[1]
    if count >= vocab_size:
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
        return values, ids, torch.full_like(ids[:, 0], vocab_size)
    values, ids = logits.topk(count, dim=-1)
    ids, order = ids.sort(dim=-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order), (values > values[:, -1:]).sum(dim=-1)


def chunks(rows: Tensor, width: int) -> Iterator[Tensor]:
    """`rows` in pieces, for work that makes `width` float64 elements of each row."""
    elements = _CHUNK_ELEMENTS_CPU if rows.device.type == "cpu" else _CHUNK_ELEMENTS_GPU
    step = max(1, elements // width)
    for start in range(0, len(rows), step):
        yield rows[start : start + step]


def values_at(values: Tensor, index: Tensor) -> Tensor:
    """`values[i, index[i]]`, `[m]`."""
    return values.gather(1, index.unsqueeze(1)).squeeze(1)


def _weight_bits(vocab_size: int) -> int:
    """Bits of the top token's weight: as many as a double has, if the vocabulary's sum fits."""
    return min(52, 62 - vocab_size.bit_length())


def _weights(values: Tensor, top: Tensor, draw: Draw, vocab_size: int) -> Tensor:
    """Integer weights of logits `[m, k]`, in units that make the top token's a power of two."""
    scaled = (values.double() - top.double().unsqueeze(1)) / draw.temperature.unsqueeze(1)
    return scaled.exp_().mul_(2.0 ** _weight_bits(vocab_size)).to(torch.int64)


def _total_weights(work: Tensor, top: Tensor, draw: Draw) -> Tensor:
    """Sum of all weights of a row, int64 `[m]`; 0 where top-k makes it unnecessary."""
    return _sum_weights(work, top, draw, (draw.top_k >= work.shape[1]).nonzero().flatten())


def _sum_weights(work: Tensor, top: Tensor, draw: Draw, rows: Tensor) -> Tensor:
    """Sum of all weights of the given rows, 0 of the others; int64 `[m]`."""
    totals = torch.zeros_like(draw.top_k)
    for part in chunks(rows, work.shape[1]):
        weights = _weights(work[part], top[part], draw.rows(part), work.shape[1])
        totals[part] = weights.sum(dim=-1)
    return totals


def _walk(weights: Tensor, trusted: Tensor, totals: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:
    """Cut by top-k, top-p and min-p, then invert the cumulative distribution.

    Args:
        weights: int64 `[m, k]`, highest first: the leading tokens, or all of them.
        trusted: int64 `[m]`: how many of them are sure to be the leading ones.
        totals: int64 `[m]`: the weight of the whole vocabulary, where top-k is off.

    Returns:
        rank: int64 `[m]`: the drawn token's place in the order.
        resolved: bool `[m]`: whether the trusted tokens sufficed to know it.
    """
    count = weights.shape[1]
    cumulative = weights.cumsum(dim=-1)
    ranks = torch.arange(count, device=weights.device)
    top_k_inside = draw.top_k <= trusted
    mass = torch.where(top_k_inside, values_at(cumulative, draw.top_k.clamp(max=count) - 1), totals)
    before = (cumulative - weights).double()
    limit = torch.where(draw.top_p < 1.0, draw.top_p * mass.double(), float("inf"))
    least = draw.min_p * weights[:, 0].double()
    kept = (
        (ranks < draw.top_k.unsqueeze(1))
        & (before < limit.unsqueeze(1))
        & (weights.double() >= least.unsqueeze(1))
    ).sum(dim=-1)
    # Whether the last kept token is known: the cut lies among the trusted tokens,
    known = top_k_inside | (totals > 0)  # the mass that top-p is a part of
    closed = top_k_inside | ((kept < trusted) & known)
    mass = torch.where(closed, values_at(cumulative, (kept - 1).clamp(min=0)), mass)
    # or there is no cut, and the mass is the vocabulary's.
    uncut = (totals > 0) & (draw.top_p == 1.0) & (draw.min_p == 0.0)
    target = (draw.uniform * mass.double()).to(torch.int64).minimum(mass - 1)
    rank = (cumulative <= target.unsqueeze(1)).sum(dim=-1)
    return rank, (closed | uncut) & (rank < trusted)
