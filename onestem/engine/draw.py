"""From processed logits to token ids: top-k, top-p, min-p and the inverse of the distribution.

Tokens have one order: more probable first, equal ones by id. Top-k, top-p and min-p each keep a
leading part of it, and the inverse walks along it. Probabilities are integer weights
(`exp((logit - max) / temperature)` in units of 2^-b), because integer sums do not depend on the
order of addition: what a row samples cannot depend on the rows beside it, nor on how a device
splits a sum.

Sorting a vocabulary costs more than everything else here, so the walk goes along the leading
tokens first; a row that needs more of the order than that walks again with more of it, in the end
with all, and the same result. Where a GPU is not to be waited for, so that nobody knows which rows
those are, a fixed number of them walks along all. On a GPU kernels find the leading tokens
(`ops.triton.leading`); on a CPU the C++ extension does all of it in one pass over the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

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
# Of rows drawn at once, so many may need the whole order: these, or a share. At temperature 1 and
# without top-k, a token in 50 to 100 comes from behind the candidates.
WHOLE_ORDER_ROWS, WHOLE_ORDER_SHARE = 8, 1 / 32
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
    weighed = (draw.top_k >= vocab_size).nonzero().flatten()
    token_ids, resolved, totals = _draw_leading(work, None, top, draw, weighed)
    for count in (*_CANDIDATES[1:], vocab_size):
        left = (~resolved).nonzero().flatten()
        for part in chunks(left, vocab_size):
            token_ids[part], resolved[part] = _draw_among(
                leading(work[part], count), top[part], totals[part], draw.rows(part), vocab_size
            )
    return token_ids


def draw_at_once(
    logits: Tensor, rows: Tensor, top: Tensor, draw: Draw, weighed: Tensor
) -> tuple[Tensor, Tensor]:
    """As `draw_tokens`, without ever waiting for a GPU: from the leading tokens, and for few of the
    rows that need more from all.

    Args:
        logits: float32 `[n, vocab]`, processed.
        rows: int64 `[m]`, those that are drawn.
        top: the highest logit of each of them, float32 `[m]`.
        draw: of these rows.
        weighed: int64: which of them have top-k off (`draw.top_k >= vocab`).

    Returns:
        token_ids: int64 `[m]`.
        resolved: bool `[m]`: whether the row's token is sure.
    """
    if _is_native(logits):
        token_ids = _draw_natively(logits[rows], draw)
        return token_ids, torch.ones_like(token_ids, dtype=torch.bool)
    token_ids, resolved, totals = _draw_leading(logits, rows, top, draw, weighed)
    if count := _num_of_the_whole_order(len(weighed)):
        # Those that are not resolved first; a row that is gets the same token again.
        some = (~resolved).int().topk(count).indices
        order = leading(logits[rows[some]], logits.shape[1])
        token_ids[some], resolved[some] = _draw_among(
            order, top[some], totals[some], draw.rows(some), logits.shape[1]
        )
    return token_ids, resolved


def _num_of_the_whole_order(num_weighed: int) -> int:
    """How many rows are drawn from the whole order. Where top-k cuts all rows among the candidates,
    none needs it, but for ties at the cut."""
    return min(num_weighed, max(WHOLE_ORDER_ROWS, int(num_weighed * WHOLE_ORDER_SHARE)))


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


def _has_kernels(logits: Tensor) -> bool:
    return logits.is_cuda and _triton_is_there()


@cache
def _triton_is_there() -> bool:
    return find_spec("triton") is not None


def _draw_leading(
    logits: Tensor, rows: Tensor | None, top: Tensor, draw: Draw, weighed: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """From the leading tokens of some rows (None: of all): token ids int64 `[m]`, and bool `[m]`
    whether they suffice; and int64 `[m]`, the weight of all tokens where top-k is off, else 0."""
    vocab_size = logits.shape[1]
    if _has_kernels(logits):
        from onestem.ops.triton.leading import leading_tokens

        rows = torch.arange(len(logits), device=logits.device) if rows is None else rows
        found = leading_tokens(
            logits, rows, top, draw.temperature, weight_bits=_weight_bits(vocab_size)
        )
        totals = found.totals.where(draw.top_k >= vocab_size, 0)
        order = found.values, found.ids, found.count
    else:
        work = logits if rows is None else logits[rows]
        totals = _sum_weights(work, top, draw, weighed)
        order = leading(work, _CANDIDATES[0])
    return *_draw_among(order, top, totals, draw, vocab_size), totals


def _draw_among(
    order: tuple[Tensor, Tensor, Tensor], top: Tensor, totals: Tensor, draw: Draw, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Token ids int64 `[m]` if leading tokens (see `leading`) suffice, and bool `[m]` whether."""
    values, ids, trusted = order
    rank, resolved = _walk(_weights(values, top, draw, vocab_size), trusted, totals, draw)
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
