"""Which shared runs get items of their own, and which items walk the others.

Tokens that several atoms see alike are a *group*. Its items read them once for all rows, and cost
each row a state to merge. A group without items is walked by the items of a group inside it, whose
rows all see it, or else by its rows' atoms. In a tree of groups the cheapest choice is found from
the leaves up. A group's cost depends on the tokens that the groups around it leave to it, so on
the last of them with items.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onestem.arrays import argsort, is_first
from onestem.ops.plan import AttentionPlan
from onestem.ops.work.model import CostModel


@dataclass(frozen=True, eq=False)
class Pairs:
    """Atoms and the spans they see: atom `atom[i]` sees span `span[i]`.

    spans: int64 `[6, num_spans]`; bounds: `[num_atoms + 1]`, the rows between atoms.
    """

    spans: np.ndarray
    bounds: np.ndarray
    span: np.ndarray
    atom: np.ndarray


@dataclass(frozen=True, eq=False)
class Groups:
    """Spans over the same tokens, `[num_groups]` and `[num_pairs]`.

    Attributes:
        leader: a span of each group.
        group: the group of each pair.
        walker: the group whose items walk the pair's tokens; -1: its atom's items do.
    """

    leader: np.ndarray
    group: np.ndarray
    walker: np.ndarray


@dataclass(frozen=True, eq=False)
class _Tree:
    """The tree of groups of several atoms, `[num_nodes]`. Groups that the same rows see are one
    node.

    Attributes:
        group: the innermost group of each node.
        tokens, atoms, rows: tokens to walk, and the atoms and rows that see them.
        parent: the smallest node around each; -1: none, or not the same for all of its rows.
        pair, node: `[num_tree_pairs]`, pairs atom by atom, from larger nodes to smaller ones, and
            the node of each; in any order if no atom sees two nodes.
        inside: whether a pair's node is, or is inside, that of the pair before; empty if no atom
            sees two nodes.
    """

    group: np.ndarray
    tokens: np.ndarray
    atoms: np.ndarray
    rows: np.ndarray
    parent: np.ndarray
    pair: np.ndarray
    node: np.ndarray
    inside: np.ndarray

    @property
    def is_flat(self) -> bool:
        """Whether no atom sees two nodes."""
        return len(self.inside) == 0


def shared_groups(
    plan: AttentionPlan, pairs: Pairs, cost: CostModel, tile_rows: int, room: int | None
) -> Groups:
    """Groups of a plan's spans, and which items walk them.

    `room`: maximum states of all groups; -1: nothing is shared.
    """
    _, rows, run, first, end, step = pairs.spans
    whole = (step == 0) | (rows == 1)
    group, leader = _same_tokens(run, first, end, whole)
    walker = np.full(len(pairs.span), -1)
    groups = Groups(leader, group[pairs.span], walker)
    if room == -1 or len(run) == 0:
        return groups
    # Rows that fill a tile walk all that they see themselves.
    together = whole[pairs.span] & (np.diff(pairs.bounds)[pairs.atom] < tile_rows)
    tree = _tree(plan, pairs, groups, together)
    blocks = -(-tree.rows // tile_rows)
    own = _with_items(tree, blocks, cost.merge_tokens)
    if room is not None:
        own &= _fits(tree.tokens * (tree.atoms - blocks), tree.rows * own, room)
    if tree.is_flat:
        walker[tree.pair] = np.where(own[tree.node], tree.group[tree.node], -1)
    else:
        walker[tree.pair] = _walkers(tree, own)
    return groups


def _tree(plan: AttentionPlan, pairs: Pairs, groups: Groups, together: np.ndarray) -> _Tree:
    size = len(groups.leader)
    atoms = np.bincount(groups.group, together, size).astype(np.int64)
    rows = np.bincount(groups.group, np.diff(pairs.bounds)[pairs.atom] * together, size)
    rows = rows.astype(np.int64)
    tokens = _tokens_seen(plan, pairs, groups.group, groups.leader)
    shared = (atoms > 1) & (tokens > 0)
    pair = np.flatnonzero(together & shared[groups.group])
    if np.bincount(pairs.atom[pair], minlength=1).max() <= 1:  # most steps
        node = np.flatnonzero(shared)
        number = np.cumsum(shared)[groups.group[pair]] - 1
        none = np.full(len(node), -1)
        return _Tree(
            node, tokens[node], atoms[node], rows[node], none, pair, number, np.zeros(0, bool)
        )
    place = np.empty(size, np.int64)
    place[np.argsort(-rows, kind="stable")] = np.arange(size)  # larger groups first
    pair = pair[argsort(place[groups.group[pair]])]
    pair = pair[argsort(pairs.atom[pair])]
    group = groups.group[pair]
    around = np.where(is_first(pairs.atom[pair]), -1, np.roll(group, 1))
    one = np.empty(size, np.int64)
    one[group] = around
    alike = np.ones(size, bool)  # in all atoms the same group is around it
    alike[group[around != one[group]]] = False
    inside = (around >= 0) & alike[group]
    # A node's groups are consecutive in each of its atoms.
    outermost = np.flatnonzero(~(inside & (rows[group] == rows[around])))
    count = np.diff(np.append(outermost, len(pair)))
    inner = np.repeat(group[outermost + count - 1], count)
    is_node = np.zeros(size, bool)
    is_node[inner] = True
    nodes = np.flatnonzero(is_node)
    number = np.full(size + 1, -1)
    number[group] = (np.cumsum(is_node) - 1)[inner]
    parent = np.full(len(nodes), -1)
    parent[number[group[outermost]]] = number[np.where(inside, around, size)[outermost]]
    members = np.flatnonzero(shared)
    walked = np.bincount(number[members], tokens[members], len(nodes)).astype(np.int64)
    return _Tree(nodes, walked, atoms[nodes], rows[nodes], parent, pair, number[group], inside)


def _with_items(tree: _Tree, blocks: np.ndarray, merge_tokens: int) -> np.ndarray:
    """bool `[num_nodes]`: which groups get items of their own, `blocks` of them each.

    Arrays `[num_nodes, depth + 1]` have a column for each case: no group around has items (0), or
    the last with items is at depth column - 1.
    """
    levels = _levels(tree.parent)
    size, depth = len(tree.parent), len(levels)
    carried = np.zeros((size, depth + 1), np.int64)  # tokens left to it
    for d, node in enumerate(levels[1:], 1):
        around = tree.parent[node]
        carried[node, :d] = carried[around, :d] + tree.tokens[around, None]
    inner = np.flatnonzero(tree.parent >= 0)
    alone = tree.atoms.copy()  # atoms that are in no group inside
    np.subtract.at(alone, tree.parent[inner], tree.atoms[inner])
    below = np.zeros((size, depth + 1), np.int64)  # what the groups inside cost
    pays = np.zeros((size, depth + 1), bool)
    for d, node in reversed(list(enumerate(levels))):
        walk = carried[node, : d + 1] + tree.tokens[node, None]
        items = blocks[node, None] * walk + merge_tokens * tree.rows[node, None]
        items += below[node, d + 1, None]
        dealt = below[node, : d + 1] + alone[node, None] * walk
        pays[node, : d + 1] = items < dealt
        if d:
            np.add.at(below[:, : d + 1], tree.parent[node], np.minimum(items, dealt))
    own = np.zeros(size, bool)
    last = np.zeros(size, np.int64)  # the column that applies
    for d, node in enumerate(levels):
        if d:
            around = tree.parent[node]
            last[node] = np.where(own[around], d, last[around])
        own[node] = pays[node, last[node]]
    return own


def _levels(parent: np.ndarray) -> list[np.ndarray]:
    """Groups by depth: the number of groups around them."""
    depth = np.zeros(len(parent), np.int64)
    around = parent
    while (around >= 0).any():
        depth += around >= 0
        around = np.where(around >= 0, parent[around], -1)
    return [np.flatnonzero(depth == d) for d in range(int(depth.max(initial=0)) + 1)]


def _walkers(tree: _Tree, own: np.ndarray) -> np.ndarray:
    """The group whose items walk each of a tree's pairs: its own or the next inside; -1: none."""
    size = len(tree.node)
    place = np.where(own[tree.node], np.arange(size), size)
    place = np.minimum.accumulate(place[::-1])[::-1]
    chain = np.append(np.cumsum(~tree.inside), -1)
    walker = np.append(tree.group[tree.node], -1)[place]
    return np.where(chain[place] == chain[:-1], walker, -1)


def _fits(saved: np.ndarray, num_rows: np.ndarray, room: int) -> np.ndarray:
    """Which groups' states fit into `room`; groups that save most per state come first."""
    order = np.argsort(-saved / np.maximum(num_rows, 1), kind="stable")
    fits = np.empty(len(saved), bool)
    fits[order] = np.cumsum(num_rows[order]) <= room
    return fits


def _tokens_seen(
    plan: AttentionPlan, pairs: Pairs, pair_group: np.ndarray, leader: np.ndarray
) -> np.ndarray:
    """int64 `[num_groups]`: tokens that some row of the group sees."""
    _, _, run, first, end, _ = pairs.spans[:, leader]
    if plan.window is None:
        return end - first
    lowest = np.minimum.reduceat(plan.row_position.astype(np.int64), pairs.bounds[:-1])
    oldest = np.full(len(leader), 2**31)
    np.minimum.at(oldest, pair_group, lowest[pairs.atom])
    oldest = oldest - plan.window + 1 - plan.run_position[run]
    return np.maximum(end - np.maximum(first, oldest), 0)


def _same_tokens(
    run: np.ndarray, first: np.ndarray, end: np.ndarray, whole: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The group of each span, and a span of each group: whole spans over the same tokens."""
    n = len(run)
    if not (np.bincount(run[whole]) > 1).any():
        return np.arange(n), np.arange(n)
    order = np.lexsort((end, first, run))
    same = np.diff(run[order]) == 0
    same &= (np.diff(first[order]) == 0) & (np.diff(end[order]) == 0)
    same &= whole[order][1:] & whole[order][:-1]
    group = np.empty(n, np.int64)
    group[order] = np.concatenate(([0], np.cumsum(~same)))
    return group, order[np.flatnonzero(np.concatenate(([True], ~same)))]
