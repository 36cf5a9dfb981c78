"""Ways to choose which tokens of moved modules are computed in a prompt's own context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from onestem_lab.modules.forward import KV, Llama

BLOCK = 16  # tokens, from a module's first on


@dataclass
class Moved:
    """A prompt with keys and values of modules that were computed elsewhere. `modules` are the
    first and last place of each, and `own` the places of the question's tokens after them."""

    model: Llama
    ids: Tensor
    kv: KV
    modules: Sequence[tuple[int, int]]
    own: Tensor
    rounds: list[Tensor] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(stop - first for first, stop in self.modules)

    @cached_property
    def attention(self) -> Tensor:
        """Attention of the question's tokens: [layers, heads, tokens of the question, places]."""
        return self.look([(k.clone(), v.clone()) for k, v in self.kv], self.own)

    def look(self, kv: KV, rows: Tensor) -> Tensor:
        """The same after `rows`, which end in the question's, were computed into `kv`."""
        seen, model = [], self.model
        hidden = torch.arange(len(self.ids), device=rows.device) > self.own[:, None]

        def look(_layer: int, q: Tensor, k: Tensor) -> None:
            k = k.repeat_interleave(model.heads // model.kv_heads, 1).transpose(0, 1).float()
            q = q[-len(self.own) :].transpose(0, 1).float()
            scores = (q @ k.mT * model.dim**-0.5).masked_fill(hidden, -torch.inf)
            seen.append(scores.softmax(-1).cpu())

        model.run(self.ids, rows, kv, 1, look)
        return torch.stack(seen)

    @cached_property
    def deviation(self) -> Tensor:
        """How far keys of the second layer are from those in this prompt (as CacheBlend's)."""
        kv = self.model.empty(len(self.ids))
        rows = torch.arange(len(self.ids), device=self.ids.device)
        self.model.run(self.ids, rows, kv, 1, layers=2)
        return (kv[1][0].float() - self.kv[1][0].float()).square().sum((1, 2)).cpu()


def highest(moved: Moved, score: Tensor, share: float, width: int) -> Tensor:
    """Places of blocks of `width` whose tokens have the highest mean `score`."""
    blocks = [
        (first, min(first + width, stop))
        for start, stop in moved.modules
        for first in range(start, stop, width)
    ]
    means = [float(score[first:stop].mean()) for first, stop in blocks]
    chosen: list[int] = []
    left = int(share * moved.tokens + 1e-6)
    for _, (first, stop) in sorted(zip(means, blocks), reverse=True):
        if stop - first <= left:
            chosen += range(first, stop)
            left -= stop - first
    return torch.tensor(sorted(chosen), dtype=torch.long)


Way = Callable[[Moved, float], Tensor]


def by_attention(
    layers: slice = slice(None),
    width: int = BLOCK,
    reduce: Callable[[Tensor], Tensor] = lambda a: a.mean((0, 1, 2)),
) -> Way:
    def choose(moved: Moved, share: float) -> Tensor:
        score = reduce(moved.attention[_of(moved, layers)])
        return highest(moved, score, share, width)

    return choose


def _of(moved: Moved, layers: slice) -> slice:
    """`layers` are given in tenths of a model's depth."""
    depth = moved.model.layers
    first, stop = layers.start or 0, 10 if layers.stop is None else layers.stop
    return slice(first * depth // 10, max(stop * depth // 10, first * depth // 10 + 1))


def first_blocks(moved: Moved, share: float) -> Tensor:
    """The first blocks of each module, as many as the share allows."""
    score = torch.zeros(len(moved.ids))
    for first, stop in moved.modules:
        score[first:stop] = -torch.arange(stop - first).float()
    return highest(moved, score, share, BLOCK)


def first_and_attention(moved: Moved, share: float) -> Tensor:
    """The first block of each module, and then by attention."""
    score = moved.attention.mean((0, 1, 2))
    for first, stop in moved.modules:
        score[first : min(first + BLOCK, stop)] += 1
    return highest(moved, score, share, BLOCK)


def by_deviation(moved: Moved, share: float) -> Tensor:
    return highest(moved, moved.deviation, share, 1)


def at_random(moved: Moved, share: float) -> Tensor:
    draw = torch.Generator().manual_seed(len(moved.ids))
    return highest(moved, torch.rand(len(moved.ids), generator=draw), share, BLOCK)


def two_rounds(moved: Moved, share: float) -> Tensor:
    """Half by attention, the rest by the attention after that half was computed."""
    half = highest(moved, moved.attention.mean((0, 1, 2)), share / 2, BLOCK)
    rows = torch.cat((half.to(moved.own.device), moved.own))
    score = moved.look([(k.clone(), v.clone()) for k, v in moved.kv], rows).mean((0, 1, 2))
    score[half] += 1
    return highest(moved, score, share, BLOCK)


WAYS: dict[str, Way] = {
    "attention": by_attention(),
    "attention, tokens": by_attention(width=1),
    "attention, blocks of 4": by_attention(width=4),
    "attention, blocks of 8": by_attention(width=8),
    "attention, blocks of 32": by_attention(width=32),
    "attention, first third": by_attention(slice(0, 3)),
    "attention, middle": by_attention(slice(3, 7)),
    "attention, last third": by_attention(slice(7, None)),
    "attention, last half": by_attention(slice(5, None)),
    "attention, last third, tokens": by_attention(slice(7, None), 1),
    "attention, middle, tokens": by_attention(slice(3, 7), 1),
    "attention, highest head": by_attention(reduce=lambda a: a.mean(2).amax((0, 1))),
    "attention, highest head, tokens": by_attention(
        width=1, reduce=lambda a: a.mean(2).amax((0, 1))
    ),
    "attention, highest of all": by_attention(reduce=lambda a: a.amax((0, 1, 2))),
    "attention, highest row": by_attention(reduce=lambda a: a.mean((0, 1)).amax(0)),
    "attention, last row": by_attention(reduce=lambda a: a[:, :, -1].mean((0, 1))),
    "attention, last row, tokens": by_attention(width=1, reduce=lambda a: a[:, :, -1].mean((0, 1))),
    "attention, roots": by_attention(reduce=lambda a: a.mean((1, 2)).sqrt().mean(0)),
    "attention in two rounds": two_rounds,
    "first blocks": first_blocks,
    "first block and attention": first_and_attention,
    "deviation, tokens": by_deviation,
    "random": at_random,
}
