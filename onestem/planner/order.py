"""The order in which a job runs: depth first, and much decoding first (BatchLLM section 3.3.2)."""

from __future__ import annotations

import numpy as np

from onestem.planner.prefix_tree import PrefixTree
from onestem.planner.sort import BoolArray, IntArray


def depth_first(
    tree: PrefixTree,
    decode_tokens: IntArray | None,
    place: IntArray | None = None,
    *,
    pending: BoolArray | None = None,
    begun: BoolArray | None = None,
) -> IntArray:
    """`[num_requests]` request indices in execution order.

    The units below a node, its child nodes and its own requests, run in order of

        R = sum L_decode / (L_prefix + sum L_distinct)        (eq. 2 and 3)

    high first, so that their decodes mix with the prefills that come later. The denominator is
    what the unit adds when all above it is computed. Equal R: smallest place of a request first.
    Depth first, so that a nested prefix is freed as soon as possible.

    Args:
        decode_tokens: `[num_requests]` tokens to be sampled; None: order by places alone.
        place: `[num_requests]` each request's place in another order; None: the input's.
        pending: `[num_requests]` requests whose tokens count in R; None: all.
        begun: `[num_requests]` requests that have begun: units with any come first; None: none.
    """
    count = len(tree.home)
    ones = np.ones_like(tree.home)
    requests = np.arange(count)
    place = requests if place is None else place
    # units: all nodes but the root, then all requests
    parent = np.concatenate((tree.parent[1:], tree.home))
    size = np.concatenate((tree.below(tree.at_home(ones))[1:], ones))
    keys = [np.concatenate((tree.smallest(place)[1:], place))]
    if decode_tokens is not None:
        keys.append(-_ratios(tree, decode_tokens, ones if pending is None else pending))
    if begun is not None:
        keys.append(np.concatenate((tree.below(tree.at_home(begun))[1:], begun)) == 0)
    offset = _offsets(parent, size, keys)
    start = _starts(tree, offset[: tree.num_nodes - 1])
    order = np.empty(count, np.int64)
    order[start[tree.home] + offset[tree.num_nodes - 1 :]] = requests
    return order


def _ratios(tree: PrefixTree, decode_tokens: IntArray, pending: np.ndarray) -> np.ndarray:
    """`[num_units]` R of each unit; an empty prompt counts as one token."""
    outputs, distinct = decode_tokens * pending, tree.distinct * pending
    decode = np.concatenate((tree.below(tree.at_home(outputs))[1:], outputs))
    prefill = tree.below(tree.edge + tree.at_home(distinct))[1:]
    return decode / np.maximum(np.concatenate((prefill, distinct)), 1)


def _offsets(parent: IntArray, size: IntArray, keys: list[np.ndarray]) -> IntArray:
    """`[num_units]` requests that run before a unit under the same parent. Units are in ascending
    order of the last key, then of the one before."""
    ranked = np.lexsort((*keys, parent))
    before = np.cumsum(size[ranked]) - size[ranked]
    parents, begin = np.unique(parent[ranked], return_index=True)
    offset = np.empty_like(size)
    offset[ranked] = before - before[begin][np.searchsorted(parents, parent[ranked])]
    return offset


def _starts(tree: PrefixTree, offset: IntArray) -> IntArray:
    """`[num_nodes]` place of each node's first request in the order."""
    start = np.concatenate((np.zeros(1, np.int64), offset))
    for nodes in tree.nested:
        start[nodes] += start[tree.parent[nodes]]
    return start
