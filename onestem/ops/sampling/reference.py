"""The definition of a draw, in float64."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from onestem.ops.sampling.noise import noise_bits, waiting_times

__all__ = ["WEIGHT_BITS", "draw", "keep"]

WEIGHT_BITS = 30  # for top-p, probabilities are counted in units of 2^-30 of the highest


def keep(
    logits: NDArray[np.float64], *, temperature: float, top_k: int, top_p: float, min_p: float
) -> NDArray[np.int64]:
    """Ids that may be drawn: top-k, then top-p of their mass, and min-p; equal logits by id."""
    order = np.lexsort((np.arange(len(logits)), -logits))[: top_k if top_k > 0 else None]
    top = logits[order[0]]
    weights = np.floor(np.exp((logits[order] - top) / temperature) * 2.0**WEIGHT_BITS)
    before = np.cumsum(weights) - weights
    inside = before < top_p * weights.sum() if top_p < 1 else np.ones(len(order), bool)
    if min_p > 0:
        inside &= logits[order] >= top + temperature * math.log(min_p)
    return order[inside & (logits[order] > -np.inf)]


def draw(
    logits: NDArray[np.floating],
    *,
    seed: int,
    sequence: int,
    token: int,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> int:
    """The token after `token` others of a sequence: the kept id with the shortest wait, where id i
    waits `-log(u_i) / exp(logit_i / temperature)` (an exponential race).

    That is the argmax of `logit / temperature - log(-log u)`, so id i wins with its probability. A
    temperature of 0 takes the highest logit. Of equals, the lowest id wins.
    """
    x = np.asarray(logits, np.float64)
    if temperature == 0:
        return int(x.argmax())
    ids = np.sort(keep(x, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p))
    waits = waiting_times(noise_bits(seed, sequence, token, ids))
    return int(ids[np.argmax(x[ids] / temperature - np.log(waits))])
