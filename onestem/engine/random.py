"""Random numbers that are a pure function of where they are used.

A sampled token needs one number in (0, 1). It is computed from (seed, sequence index, token index)
by a counter-based generator, Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy
as 1, 2, 3"), so there is no state: the batch a sequence stands in, the order of requests, a
set-back and a resumed job change nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["derive_seed", "uniform"]

_MASK_32 = np.uint64(0xFFFFFFFF)
_SHIFT_32 = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_INCREMENTS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_ROUNDS = 10

Words = NDArray[np.uint64]  # 32-bit words kept in 64-bit integers, so that products do not overflow


def philox4x32(counter: Sequence[Words], key: Sequence[Words]) -> tuple[Words, Words, Words, Words]:
    """Philox4x32-10 of every element: a counter of four words and a key of two, each `[n]`."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> _SHIFT_32) ^ c1 ^ k0,
            product1 & _MASK_32,
            (product0 >> _SHIFT_32) ^ c3 ^ k1,
            product0 & _MASK_32,
        )
        k0 = (k0 + _KEY_INCREMENTS[0]) & _MASK_32
        k1 = (k1 + _KEY_INCREMENTS[1]) & _MASK_32
    return c0, c1, c2, c3


def _as_words(values: Sequence[int] | NDArray[np.integer]) -> tuple[Words, Words]:
    """64-bit integers (negative ones in two's complement) as their low and high 32-bit words."""
    if isinstance(values, np.ndarray):
        wide = values.astype(np.uint64)
    else:
        wide = np.fromiter((value & 0xFFFFFFFFFFFFFFFF for value in values), np.uint64, len(values))
    return wide & _MASK_32, wide >> _SHIFT_32


def uniform(
    seeds: Sequence[int] | NDArray[np.integer],
    sequence_indices: Sequence[int] | NDArray[np.integer],
    token_indices: Sequence[int] | NDArray[np.integer],
) -> NDArray[np.float64]:
    """Numbers in the open interval (0, 1), one per (seed, sequence index, token index).

    The arguments are three lists of one length, of 64-bit integers; float64 `[n]` comes back.
    """
    token_low, token_high = _as_words(token_indices)
    sequence_low, sequence_high = _as_words(sequence_indices)
    counter = (token_low, token_high, sequence_low, sequence_high)
    high, low, _, _ = philox4x32(counter, _as_words(seeds))
    # 52 bits and a half: with 53 the half would be rounded away, and the largest value be 1.0.
    bits = (high << np.uint64(20)) | (low >> np.uint64(12))
    return (bits.astype(np.float64) + 0.5) * 2.0**-52


def derive_seed(*parts: str | int) -> int:
    """A seed in 0..2^63-1 that depends on all `parts` (their types too) and on nothing else.

    Jobs use it for requests without a seed: `derive_seed(job_seed, custom_id)`.
    """
    digest = hashlib.sha256()
    for part in parts:
        # The length keeps ("ab", "c") and ("a", "bc") apart.
        kind, text = ("i", str(int(part))) if isinstance(part, int) else ("s", part)
        data = text.encode("utf-8", "surrogatepass")
        digest.update(f"{kind}{len(data)}:".encode())
        digest.update(data)
    return int.from_bytes(digest.digest()[:8], "big") >> 1
