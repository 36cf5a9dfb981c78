"""What benchmarks ask of a synthetic job."""

from __future__ import annotations

import numpy as np

from onestem.bench import BatchCase

__all__ = ["batch_of", "longest_of", "prompts_of"]


def prompts_of(case: BatchCase, vocab_size: int) -> list[list[int]]:
    """Token ids of the prompts, in the case's order."""
    return [ids for ids, _ in case.requests(vocab_size)]


def longest_of(case: BatchCase) -> int:
    """An upper bound of the tokens of a prompt with its answer."""
    return sum(map(max, case.sizes))


def batch_of(case: BatchCase, kv_tokens: int, shared: int) -> int:
    """How many of the requests that many KV tokens hold, with answers, if their first `shared`
    prefixes are stored once and nothing else is shared. A request counts as the mean one."""
    *levels, output = case.sizes
    own = np.zeros(1)
    for level, (sizes, below) in enumerate(zip(levels, case.branches, strict=True)):
        own = np.repeat(own, below) + (np.array(sizes) if level >= shared else 0)
    left = kv_tokens - sum(map(sum, levels[:shared]))
    return max(1, int(left / float((own + output).mean())))
