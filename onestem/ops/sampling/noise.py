"""Random numbers that are a pure function of where they are used.

A token's noise is computed from (seed, sequence, token index, id) by a counter-based generator,
Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). There is no
state, so the batch, the order of requests, a preemption or a resumed job changes nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["noise_bits", "philox4x32", "waiting_times"]

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
