"""Which requests run together: the shared prefix of each group.

Two choices over the same tree. `one_level` is BatchLLM's (section 3.2, Algorithm 1): each request
shares at most one prefix. `all_levels` keeps the tree and only cuts it into groups. Two baselines
need no tree: `by_threshold`, the heuristic of section 4.3.1, and `ungrouped`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from onestem.planner.prefix_tree import PrefixTree
from onestem.planner.sort import BoolArray, IntArray, SortedPrompts

Sums = Callable[[IntArray], IntArray]

# A prefix is worth pinning if that saves 1 / LEAST_SAVING of its members' prompt tokens.
LEAST_SAVING = 16


@dataclass(frozen=True, eq=False)
class GroupedTree:
    """A tree and its cut.

    Attributes:
        tree: what is shared when the plan runs.
        group_root: `[num_nodes]` the node whose subtree is the group that a node lies in; -1 for
            nodes above all groups, whose own requests run alone.
    """

    tree: PrefixTree
    group_root: IntArray


class _Hoisting:
    """Algorithm 1's mutable copy of the tree: arrays indexed by node, and children of those that
    have any."""

    def __init__(self, tree: PrefixTree) -> None:
        own = tree.at_home(np.ones_like(tree.home))
        self.tokens = array("q", tree.edge.tobytes())
        self.requests = array("q", own.tobytes())  # whose first-level prefix is the node
        self.leaves = array("q", tree.below(own).tobytes())
        self.parents: list[int] = np.unique(tree.parent[1:]).tolist()
        self._children: dict[int, list[int]] = {parent: [] for parent in self.parents}
        for node, parent in enumerate(array("q", tree.parent[1:].tobytes()), start=1):
            self._children[parent].append(node)

    def children(self, node: int) -> list[int]:
        return self._children.get(node, [])

    def maximize_reuse(self, node: int) -> None:
        """Enlarge the prefixes right below `node`; its children are done already."""
        children = self._children[node]
        self._children[node] = [kept for child in children for kept in self._hoist(node, child)]

    def _hoist(self, node: int, child: int) -> list[int]:
        """Fork `child` for each grandchild that gains more than a second `child` costs.

        Returns the children that `node` gets in place of `child`.
        """
        hoisted: list[int] = []
        kept: list[int] = []
        for grandchild in self.children(child):
            gain = (self.leaves[grandchild] - 1) * self.tokens[grandchild]
            (hoisted if gain > self.tokens[child] else kept).append(grandchild)
        for grandchild in hoisted:
            self.tokens[grandchild] += self.tokens[child]
            self.leaves[child] -= self.leaves[grandchild]
        if child in self._children:
            self._children[child] = kept
        return hoisted + self._compact(node, child)

    def _compact(self, node: int, child: int) -> list[int]:
        """What is left of `child`: an only child takes its place, a lone request needs no node."""
        kept = self.children(child)
        if len(kept) == 1 and self.requests[child] == 0:
            self.tokens[kept[0]] += self.tokens[child]
            return kept
        if self.leaves[child] > 1:
            return [child]
        self.requests[node] += self.leaves[child]
        return []


def first_level(tree: PrefixTree) -> BoolArray:
    """`[num_nodes]` the prefixes that Algorithm 1 shares.

    Bottom up, a grandchild is hoisted over its parent when
    `(leaves(grandchild) - 1) * tokens(grandchild) > tokens(parent)`. As in any compact tree, a
    node left with one child and no request of its own is merged with it. The outcome does not
    depend on the order of siblings.
    """
    hoisting = _Hoisting(tree)
    for node in reversed(hoisting.parents):
        hoisting.maximize_reuse(node)
    chosen = np.zeros(tree.num_nodes, np.bool_)
    chosen[hoisting.children(0)] = True
    return chosen


def one_level(tree: PrefixTree, chosen: BoolArray) -> GroupedTree:
    """The flat tree of the chosen prefixes: each request below the deepest one on its path."""
    nearest = _nearest(tree, chosen)
    number = np.where(chosen, np.cumsum(chosen), 0)  # 0, the root, for nodes that are not chosen
    depth = np.concatenate(([0], tree.depth[chosen]))
    return _flat(depth, number[nearest[tree.home]], tree.lengths)


def by_threshold(prompts: SortedPrompts, min_prefix_tokens: int = 1) -> GroupedTree:
    """The heuristic that BatchLLM is compared with (section 4.3.1, table 3). In sorted order, a
    prompt joins those before it if what all of them share is more than half of the shortest."""
    depth, home = [0], [0] * len(prompts.order)
    prefix = shortest = previous = 0
    ranked = zip(prompts.order.tolist(), prompts.shared.tolist(), strict=True)
    for request, shared in ranked:
        length = int(prompts.lengths[request])
        common, least = min(prefix, shared), min(shortest, length)
        if common >= min_prefix_tokens and 2 * common > least:
            if not home[previous]:
                home[previous] = len(depth)
                depth.append(common)
            home[request] = home[previous]
            depth[-1] = common
            prefix, shortest = common, least
        else:
            prefix = shortest = length
        previous = request
    return _flat(np.array(depth), np.array(home, np.int64), prompts.lengths)


def ungrouped(lengths: IntArray) -> GroupedTree:
    """A tree that shares nothing: `[num_requests]` prompts of these lengths run alone."""
    return _flat(np.zeros(1, np.int64), np.zeros_like(lengths), lengths)


def _flat(depth: IntArray, home: IntArray, lengths: IntArray) -> GroupedTree:
    """A group for each node but the root, one level below it."""
    group_root = np.arange(len(depth))
    group_root[0] = -1
    return GroupedTree(PrefixTree(np.zeros_like(depth), depth, home, lengths), group_root)


def all_levels(
    tree: PrefixTree, output_tokens: IntArray, kv_budget_tokens: int | None = None
) -> GroupedTree:
    """Cut the tree: a group is the largest subtree that need not be split.

    A subtree is split into those of its children when

    * the prefixes inside it that are worth pinning save more tokens than its own prefix has. Below
      a chat header, or BOS, each of many documents is a group. The header is part of each
      document's prefix, and so stays as well;
    * its own prefix is not worth pinning, though what is cached of it is still used;
    * all its KV (prefix, everything below it, outputs) exceeds `kv_budget_tokens`. A group within
      the budget keeps prefixes of every level until their last use.

    A prefix is worth pinning if it saves at least a sixteenth of its members' prompt tokens (of
    those beyond the parent's prefix, where the parent is kept).

    Requests right below a split node make a group of their own if its prefix is worth pinning, and
    otherwise run alone. Such a group may exceed the budget: its members share nothing more, so they
    pass through memory one after the other and only the prefix stays.
    """
    split = (_saved_inside(tree) > tree.depth) | ~_worthwhile(tree, tree.below)
    if kv_budget_tokens is not None:
        split |= _kv_tokens(tree, output_tokens) > kv_budget_tokens
    return _gather(tree, _topmost(tree, ~split))


def _saved_inside(tree: PrefixTree) -> IntArray:
    """`[num_nodes]` tokens saved by prefixes worth pinning strictly below each node."""
    members = tree.below(tree.at_home(np.ones_like(tree.home)))
    beyond_parent = tree.below(tree.at_home(tree.lengths)) - members * tree.depth[tree.parent]
    saved = (members - 1) * tree.edge
    saved[saved * LEAST_SAVING < beyond_parent] = 0
    return tree.below(saved) - saved


def _gather(tree: PrefixTree, group_root: IntArray) -> GroupedTree:
    """Give the requests right below a split node a node, and so a group, of their own."""
    gathered = np.flatnonzero((group_root < 0) & _worthwhile(tree, lambda values: values))
    added = tree.num_nodes + np.arange(len(gathered))
    number = np.arange(tree.num_nodes)
    number[gathered] = added
    grown = PrefixTree(
        np.concatenate((tree.parent, gathered)),
        np.concatenate((tree.depth, tree.depth[gathered])),
        number[tree.home],
        tree.lengths,
    )
    return GroupedTree(grown, np.concatenate((group_root, added)))


def _worthwhile(tree: PrefixTree, over: Sums) -> BoolArray:
    """`[num_nodes]` whether a node's prefix saves enough of the prompts that `over` sums up."""
    members = over(tree.at_home(np.ones_like(tree.home)))
    prompt_tokens = over(tree.at_home(tree.lengths))
    saved = (members - 1) * tree.depth
    enough: BoolArray = (saved > 0) & (saved * LEAST_SAVING >= prompt_tokens)
    return enough


def _kv_tokens(tree: PrefixTree, output_tokens: IntArray) -> IntArray:
    """`[num_nodes]` KV slots of each subtree, the prefix above it included."""
    below = tree.below(tree.edge + tree.at_home(tree.distinct + output_tokens))
    kv: IntArray = below - tree.edge + tree.depth
    return kv


def _nearest(tree: PrefixTree, chosen: BoolArray) -> IntArray:
    """`[num_nodes]` the deepest chosen node on the path to each node; the root where none is."""
    nearest = np.where(chosen, np.arange(tree.num_nodes), 0)
    for nodes in tree.nested:
        nearest[nodes] = np.where(chosen[nodes], nodes, nearest[tree.parent[nodes]])
    return nearest


def _topmost(tree: PrefixTree, eligible: BoolArray) -> IntArray:
    """`[num_nodes]` the highest eligible node on the path to each node; -1 where none is."""
    topmost = np.full(tree.num_nodes, -1)
    for nodes in tree.nested:
        above = topmost[tree.parent[nodes]]
        topmost[nodes] = np.where(above >= 0, above, np.where(eligible[nodes], nodes, -1))
    return topmost
