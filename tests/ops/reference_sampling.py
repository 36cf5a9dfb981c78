"""The definition of a draw, in float64, with random numbers that are a pure function of their use.

A token's noise is computed from (seed, sequence, token index, id) by a counter-based generator,
Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from onestem.ops.sampling.torch_impl import WEIGHT_BITS

_MASK_32 = np.uint64(0xFFFFFFFF)
_SHIFT_32 = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_INCREMENTS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_ROUNDS = 10

Words = NDArray[np.uint64]  # 32-bit words in 64-bit integers, so that products do not overflow


def philox4x32(
    counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]
) -> tuple[Words, Words, Words, Words]:
    """Philox4x32-10 of every element: a counter of four words and a key of two, of one shape."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> _SHIFT_32) ^ c1 ^ k0,
            product1 & _MASK_32,
            (product0 >> _SHIFT_32) ^ c3 ^ k1,
            product0 & _MASK_32,
        )
        k0, k1 = (k0 + _KEY_INCREMENTS[0]) & _MASK_32, (k1 + _KEY_INCREMENTS[1]) & _MASK_32
    return c0, c1, c2, c3


def noise_bits(seed: int, sequence: int, token: int, ids: NDArray[np.integer]) -> Words:
    """64 random bits of each id of the vocabulary, uint64 `[n]`.

    Word `id % 4` of the generator at counter (id // 4, token, sequence, 0), and below it the same
    word at counter (..., 1); the seed's 64 bits are the key.
    """
    words = np.asarray(ids, np.uint64)

    def same(value: int) -> Words:
        return np.full(len(words), value, np.uint64)

    key = (same(seed & 0xFFFFFFFF), same((seed >> 32) & 0xFFFFFFFF))
    place = (words // np.uint64(4), same(token), same(sequence))
    halves = []
    for stream in (0, 1):
        found = np.stack(philox4x32((*place, same(stream)), key))
        halves.append(found[np.asarray(ids) % 4, np.arange(len(words))])
    return (halves[0] << _SHIFT_32) | halves[1]


def waiting_times(bits: Words) -> NDArray[np.float64]:
    """Exponentially distributed times, float64: `-log u` of `u` in (0, 1) with 64 bits. Small ones,
    which decide, are exact relative to their size."""
    half = np.uint64(1 << 63)
    low = (bits.astype(np.float64) + 0.5) * 2.0**-64  # 1 - u
    high = ((~bits).astype(np.float64) + 0.5) * 2.0**-64  # u
    return np.where(bits < half, -np.log1p(-np.minimum(low, 0.5)), -np.log(high))


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
