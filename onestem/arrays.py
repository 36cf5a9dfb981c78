"""Small helpers on arrays of numpy."""

from __future__ import annotations

import numpy as np


def ragged(first: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """first[0], first[0] + 1, ..., (counts[0] of them), then first[1], ..."""
    ends = counts.cumsum()
    size = int(ends[-1]) if len(ends) else 0
    return np.arange(size) + (first - ends + counts).repeat(counts)


def argsort(keys: np.ndarray) -> np.ndarray:
    """Stable argsort of small non-negative keys (a radix sort below 65,536)."""
    small = len(keys) and keys.max() < 65536
    return np.argsort(keys.astype(np.uint16) if small else keys, kind="stable")


def is_first(keys: np.ndarray) -> np.ndarray:
    """Where keys `[n]` differ from those before them; the first one does."""
    new = np.ones(len(keys), bool)
    np.not_equal(keys[1:], keys[:-1], out=new[1:])
    return new


def before(counts: np.ndarray) -> np.ndarray:
    """Sum of the counts before each one."""
    return counts.cumsum() - counts
