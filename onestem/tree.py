"""A radix tree over token ids: match, split, insert, remove. No policy, no torch.

Edges carry the tokens: a node is a run of tokens, and its ancestors hold the tokens before it.
Nodes may be subclassed to carry what belongs to their tokens; a split calls `split_off`.

Equal tokens are not always the same: they may be at other positions, or belong to another user.
A node's *label* tells them apart, and a sequence is cut into *stretches* of one label each. A match
compares labels too, and no node goes past the end of a stretch.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator, Sequence
from itertools import pairwise
from typing import Generic, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray


class Label(NamedTuple):
    """What tokens must have in common besides their ids.

    Attributes:
        space: which requests may see them, and what they saw that is not on their path. Runs of
            different spaces never match ("" is the common one).
        shift: position of a token minus its index in the sequence.
        jumps: (index, shift), ascending: tokens before that index, from the last one's on, have
            another shift. Where a model's attention asks for no places, a node's positions may
            jump.
    """

    space: Hashable = ""
    shift: int = 0
    jumps: tuple[tuple[int, int], ...] = ()

    def positions(self, first: int, end: int) -> np.ndarray:
        """int64 `[end - first]`: position ids of tokens first..end-1."""
        index = np.arange(first, end)
        if not self.jumps:
            return index + self.shift
        ends, shifts = np.array(self.jumps).T
        return index + np.append(shifts, self.shift)[np.searchsorted(ends, index, "right")]


class Stretch(NamedTuple):
    """The tokens of a sequence from index `start` up to the next stretch."""

    start: int
    label: Label


PLAIN: tuple[Stretch, ...] = (Stretch(0, Label()),)
"""A sequence whose tokens any sequence may match, at the positions of their indices."""


class Node:
    """A run of tokens below its parent.

    Attributes:
        tokens: the run's ids (may grow at the end while the node has no children).
        start: index of its first token in every sequence that passes through it.
    """

    __slots__ = ("children", "label", "parent", "start", "tokens")

    def __init__(
        self,
        tokens: Sequence[int],
        parent: Self | None,
        start: int,
        label: Label = PLAIN[0].label,
    ) -> None:
        self.tokens = array("i", tokens)
        self.parent = parent
        self.start = start
        self.label = label
        self.children: dict[tuple[Label, int], Self] = {}

    @property
    def end(self) -> int:
        """Index after its last token in every sequence that passes through it."""
        return self.start + len(self.tokens)

    @property
    def num_matchable(self) -> int:
        """Leading tokens that others may match."""
        return len(self.tokens)

    @property
    def position(self) -> int:
        """Position id of its first token if all of its positions follow each other up to the last
        one, as they do in a node without `Label.jumps`."""
        return self.start + self.label.shift

    @property
    def key(self) -> tuple[Label, int]:
        """Its key below its parent."""
        return self.label, self.tokens[0]

    def split_off(self, at: int) -> Self:
        """Make the node above that takes the first `at` tokens; this one keeps the rest.

        Called by the tree, which links the two. Subclasses divide what they carry.
        """
        upper = type(self)(self.tokens[:at], self.parent, self.start, self.label)
        self.tokens = self.tokens[at:]
        self.start += at
        return upper

    def path(self) -> list[Self]:
        """The nodes from the root's child down to this one."""
        nodes: list[Self] = []
        node: Self | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


N = TypeVar("N", bound=Node)
M = TypeVar("M", bound=Node)


class RadixTree(Generic[N]):
    """Nodes keyed by their label and first token below their parent.

    `num_splits` counts splits: nothing else changes a node's path. `num_inserted` counts
    insertions: little else lets a sequence match more.
    """

    def __init__(self, root: N) -> None:
        self.root = root
        self.num_splits = 0
        self.num_inserted = 0

    def match(
        self,
        tokens: np.ndarray,
        limit: int | None = None,
        stretches: Sequence[Stretch] = PLAIN,
    ) -> tuple[N, int]:
        """The deepest node whose whole path begins `tokens`, splitting it where the match ends.

        Args:
            tokens: int32 `[n]`.
            limit: maximum tokens to match.
            stretches: the labels that the tokens' nodes must have, by `start`.

        Returns:
            the node (the root if nothing matches) and how many tokens its path covers.
        """
        node, at = self.root, 0
        for start, end, label in cut(stretches, len(tokens) if limit is None else limit):
            if at < start:
                break
            node, at = self.descend(node, tokens[:end], at, label)
        return node, at

    def descend(self, node: N, tokens: np.ndarray, at: int, label: Label) -> tuple[N, int]:
        """Match further tokens (int32 `[n]`) of one label below a node that ends tokens 0..at-1:
        the last node that matches, split where the match ends, and how many tokens its path covers.
        """
        node, same, at = self._walk(node, tokens, at, label)
        return (node if same == len(node.tokens) else self.split(node, same)), at

    def _walk(self, node: N, tokens: np.ndarray, at: int, label: Label) -> tuple[N, int, int]:
        """`descend` without a split: the last node that matches at all, how many of its tokens do,
        and how many tokens its path covers up to there."""
        same = len(node.tokens)
        while at < len(tokens) and same == len(node.tokens):
            child = node.children.get((label, int(tokens[at])))
            if child is None:
                break
            more = min(num_common(_ids(child.tokens), tokens[at:]), child.num_matchable)
            if more == 0:
                break
            node, same, at = child, more, at + more
        return node, same, at

    def num_found(self, tokens: np.ndarray, stretches: Sequence[Stretch] = PLAIN) -> int:
        """How many leading tokens (int32 `[n]`) are here, as `match` finds them. Splits nothing."""
        return self.find(tokens, stretches)[1]

    def find(self, tokens: np.ndarray, stretches: Sequence[Stretch] = PLAIN) -> tuple[N, int]:
        """The last node that leading tokens (int32 `[n]`) reach, and how many are here."""
        node, same, at = self.root, len(self.root.tokens), 0
        for start, end, label in cut(stretches, len(tokens)):
            if at < start or same < len(node.tokens):
                break
            node, same, at = self._walk(node, tokens[:end], at, label)
        return node, at

    def overlap(self, other: RadixTree[M], least: int) -> Iterator[tuple[N, int]]:
        """What `num_found` of another tree is for each sequence of this tree, in one pass.

        Yields:
            each node, and how many of the tokens down to its end are in the other tree; nodes with
            fewer than `least` are left out.
        """
        stack: list[tuple[N, int, M, int]] = [(self.root, 0, other.root, 0)]
        while stack:
            node, i, twin, j = stack.pop()  # they agree up to token i of one and j of the other
            same = _common_length(node, i, twin, j)
            i, j = i + same, j + same
            found = node.start + i
            ways, first = twin.children, 0  # how the other tree goes on
            if j < len(twin.tokens):
                here = {(twin.label, twin.tokens[j]): twin}
                ways, first = (here if j < twin.num_matchable else {}), j
            if i < len(node.tokens):
                on = ways.get((node.label, node.tokens[i]))
                if on is not None:
                    stack.append((node, i, on, first))
                elif found >= least:
                    yield from ((below, found) for below in subtree(node))
                continue
            both = node.children.keys() & ways.keys()
            stack.extend((node.children[key], 0, ways[key], first) for key in both)
            if found >= least:
                yield node, found
                for key in node.children.keys() - both:
                    yield from ((below, found) for below in subtree(node.children[key]))

    def split(self, node: N, at: int) -> N:
        """Split a run after `at` of its tokens and return the upper part; `node` is the lower."""
        if not 0 < at < len(node.tokens):
            raise ValueError(f"split at {at}, expected 1 to {len(node.tokens) - 1}")
        key, parent = node.key, node.parent
        assert parent is not None
        self.num_splits += 1
        upper = node.split_off(at)
        upper.parent, node.parent = parent, upper
        upper.children[node.key] = node
        if parent.children.get(key) is node:
            parent.children[key] = upper
        return upper

    def insert(self, node: N) -> None:
        """Enter a node below its parent, where no child may begin with the same token."""
        assert node.parent is not None
        if node.key in node.parent.children:
            raise ValueError(f"a child that begins with token {node.tokens[0]} is there already")
        node.parent.children[node.key] = node
        self.num_inserted += 1

    def holds(self, node: N) -> bool:
        """Whether a node is entered below its parent."""
        parent = node.parent
        return len(node.tokens) > 0 and parent is not None and parent.children.get(node.key) is node

    def remove(self, node: N) -> None:
        """Take out a node that has no children."""
        if node.children:
            raise ValueError("a node with children cannot be removed")
        if node.parent is not None and self.holds(node):
            del node.parent.children[node.key]

    def __iter__(self) -> Iterator[N]:
        """All nodes below the root, depth first."""
        for child in self.root.children.values():
            yield from subtree(child)


def subtree(node: N) -> Iterator[N]:
    """A node and all below it, depth first."""
    stack = [node]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())


def cut(stretches: Sequence[Stretch], end: int, start: int = 0) -> Iterator[tuple[int, int, Label]]:
    """Tokens start..end-1 by stretch: (first, end, label), without empty ones."""
    ends = [*(after.start for _, after in pairwise(stretches)), end]
    for (first, label), stop in zip(stretches, ends, strict=True):
        if max(first, start) < min(stop, end):
            yield max(first, start), min(stop, end), label


def num_common(a: NDArray[np.integer], b: NDArray[np.integer]) -> int:
    """How many leading tokens of two agree."""
    n = min(len(a), len(b))
    if n == 0:
        return 0
    differ = a[:n] != b[:n]
    first = int(differ.argmax())
    return first if differ[first] else n


def _common_length(a: Node, i: int, b: Node, j: int) -> int:
    """How many tokens of two nodes agree, from i and j on, as far as others may match them."""
    end = min(b.num_matchable, j + len(a.tokens) - i)
    return num_common(_ids(a.tokens)[i:], _ids(b.tokens)[j:end]) if end > j else 0


def _ids(tokens: array[int]) -> NDArray[np.int32]:
    """A node's tokens, not copied: the array cannot grow while this is held."""
    return np.frombuffer(tokens, np.int32)
