"""Small helpers on ragged arrays."""

from __future__ import annotations

import numpy as np


def ragged(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """starts[0], starts[0] + 1, ..., (counts[0] of them), then starts[1], ..."""
    ends = np.cumsum(counts)
    size = int(ends[-1]) if len(ends) else 0
    return np.arange(size) + np.repeat(starts - (ends - counts), counts)


def argsort(keys: np.ndarray) -> np.ndarray:
    """Stable argsort of small non-negative keys (a radix sort below 65,536)."""
    small = len(keys) and keys.max() < 65536
    return np.argsort(keys.astype(np.uint16) if small else keys, kind="stable")


def before(counts: np.ndarray) -> np.ndarray:
    """Sum of the counts before each one."""
    return np.cumsum(counts) - counts
