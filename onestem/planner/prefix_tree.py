"""The compact prefix tree of a job (BatchLLM section 3.2): what is shared by which prompts.

Only nodes that at least two prompts share are kept; what a prompt has to itself needs no node.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from onestem.arrays import before, ragged
from onestem.planner.sort import BoolArray, IntArray, SortedPrompts


@dataclass(frozen=True, eq=False)
class PrefixTree:
    """Shared prefixes as nodes; node 0 is the root, the empty prefix. Parents precede children.

    Attributes:
        parent: `[num_nodes]` node index; the root is its own parent.
        depth: `[num_nodes]` tokens from the prompt's beginning to the node's end.
        home: `[num_requests]` deepest node on each prompt's path.
        lengths: `[num_requests]` tokens of each prompt.
    """

    parent: IntArray
    depth: IntArray
    home: IntArray
    lengths: IntArray

    @property
    def num_nodes(self) -> int:
        """Number of nodes, the root among them."""
        return len(self.parent)

    @property
    def edge(self) -> IntArray:
        """`[num_nodes]` tokens that a node adds to its parent's."""
        return self.depth - self.depth[self.parent]

    @property
    def distinct(self) -> IntArray:
        """`[num_requests]` tokens that each prompt does not share, its last among them."""
        return self.lengths - self.depth[self.home]

    @property
    def processed_tokens(self) -> int:
        """Prompt tokens to compute when each node is computed once (eq. 1, numerator)."""
        return int(self.edge.sum() + self.distinct.sum())

    @cached_property
    def nested(self) -> list[IntArray]:
        """Item k: the nodes that are k + 1 steps below the root."""
        children = 1 + np.argsort(self.parent[1:], kind="stable")
        count = np.bincount(self.parent[1:], minlength=self.num_nodes)
        begin = before(count)
        found: list[IntArray] = []
        nodes = np.zeros(1, np.int64)
        while True:
            nodes = children[ragged(begin[nodes], count[nodes])]
            if len(nodes) == 0:
                return found
            found.append(nodes)

    @property
    def levels(self) -> int:
        """Deepest nesting of shared prefixes; 0 where nothing is shared."""
        return len(self.nested)

    def at_home(self, values: IntArray | BoolArray) -> IntArray:
        """`[num_requests]` values summed over the prompts that each node is home to."""
        return np.bincount(self.home, values, self.num_nodes).astype(np.int64)

    def below(self, values: IntArray) -> IntArray:
        """`[num_nodes]` values summed over the subtree of each node."""
        sums = values.astype(np.int64)
        for nodes in reversed(self.nested):
            np.add.at(sums, self.parent[nodes], sums[nodes])
        return sums

    def smallest(self, values: IntArray) -> IntArray:
        """`[num_nodes]` smallest of the prompts' values in each node's subtree."""
        first = np.full(self.num_nodes, np.iinfo(np.int64).max)
        np.minimum.at(first, self.home, values)
        for nodes in reversed(self.nested):
            np.minimum.at(first, self.parent[nodes], first[nodes])
        return first


def build_tree(prompts: SortedPrompts, min_prefix_tokens: int = 1) -> PrefixTree:
    """Build the tree in one pass over neighbours' common prefixes, with a stack of open nodes.

    Prefixes shorter than `min_prefix_tokens` count as not shared.
    """
    shared = np.where(prompts.shared < min_prefix_tokens, 0, prompts.shared)
    depth, parent, home_by_rank = _nodes(shared)
    home = np.empty(len(prompts.order), np.int64)
    home[prompts.order] = home_by_rank
    return _parents_first(np.array(parent), np.array(depth), home, prompts.lengths)


def _nodes(shared: IntArray) -> tuple[array[int], array[int], array[int]]:
    """Intervals of neighbours with a common prefix. Returns depth and parent by node, in order of
    discovery, and each prompt's home by its rank."""
    depth, parent, home = array("q", [0]), array("q", [0]), array("q")
    path = [0]  # open nodes, root first
    ahead = array("q", np.append(shared[1:], 0)[: len(shared)].tobytes())

    def add(node_depth: int) -> int:
        depth.append(node_depth)
        parent.append(path[-1])
        path.append(len(depth) - 1)
        return path[-1]

    for common in ahead:
        if common > depth[path[-1]]:
            add(common)
        home.append(path[-1])
        while depth[path[-1]] > common:
            closed = path.pop()
            if depth[path[-1]] < common:
                parent[closed] = add(common)
    return depth, parent, home


def _parents_first(
    parent: IntArray, depth: IntArray, home: IntArray, lengths: IntArray
) -> PrefixTree:
    """Renumber nodes by depth, which puts parents before children and the root first."""
    by_depth = np.argsort(depth, kind="stable")
    number = np.empty_like(by_depth)
    number[by_depth] = np.arange(len(by_depth))
    return PrefixTree(number[parent][by_depth], depth[by_depth], number[home], lengths)
