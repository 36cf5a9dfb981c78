"""A radix tree over token ids: match, split, insert, remove. No policy, no torch.

Edges carry the tokens, so a node is a run of tokens with the tokens before it given by its
ancestors. Nodes may be subclassed to carry what belongs to their tokens; a split tells them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Generic, Self, TypeVar

import numpy as np

__all__ = ["Node", "RadixTree", "common_length"]


class Node:
    """A run of tokens below its parent.

    Attributes:
        tokens: the run's ids (may grow at the end while the node has no children).
        start: index of its first token in every sequence that passes through it.
    """

    __slots__ = ("children", "parent", "start", "tokens")

    def __init__(self, tokens: Sequence[int], parent: Self | None, start: int) -> None:
        self.tokens = array("i", tokens)
        self.parent = parent
        self.start = start
        self.children: dict[int, Self] = {}

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def split_off(self, at: int) -> Self:
        """Make the node above that takes the first `at` tokens; this one keeps the rest.

        Called by the tree, which links the two. Subclasses divide what they carry.
        """
        upper = type(self)(self.tokens[:at], self.parent, self.start)
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


class RadixTree(Generic[N]):
    """Nodes keyed by their first token below their parent.

    `num_splits` counts splits: a node's path changes with nothing else.
    """

    def __init__(self, root: N) -> None:
        self.root = root
        self.num_splits = 0

    def match(self, tokens: np.ndarray, limit: int | None = None) -> tuple[N, int]:
        """The deepest node whose whole path begins `tokens`, splitting it where the match ends.

        Args:
            tokens: int32 `[n]`.
            limit: match at most so many tokens.

        Returns:
            the node (the root if nothing matches) and how many tokens its path covers.
        """
        end = len(tokens) if limit is None else min(limit, len(tokens))
        node, at = self.root, 0
        while at < end:
            child = node.children.get(int(tokens[at]))
            if child is None:
                break
            same = common_length(child.tokens, tokens[at:end])
            if same < len(child.tokens):
                return (self.split(child, same), at + same)
            node, at = child, at + same
        return node, at

    def split(self, node: N, at: int) -> N:
        """Split a run after `at` of its tokens; give the upper part. `node` stays the lower."""
        if not 0 < at < len(node.tokens):
            raise ValueError(f"split at {at}, expected 1 to {len(node.tokens) - 1}")
        first = node.tokens[0]
        parent = node.parent
        assert parent is not None
        self.num_splits += 1
        upper = node.split_off(at)
        upper.parent, node.parent = parent, upper
        upper.children[node.tokens[0]] = node
        if parent.children.get(first) is node:
            parent.children[first] = upper
        return upper

    def insert(self, node: N) -> None:
        """Enter a node below its parent, where no child may begin with the same token."""
        assert node.parent is not None
        key = node.tokens[0]
        if key in node.parent.children:
            raise ValueError(f"a child that begins with token {key} is there already")
        node.parent.children[key] = node

    def holds(self, node: N) -> bool:
        """Whether a node is entered below its parent."""
        return (
            bool(len(node.tokens))
            and node.parent is not None
            and (node.parent.children.get(node.tokens[0]) is node)
        )

    def remove(self, node: N) -> None:
        """Take out a node that has no children."""
        if node.children:
            raise ValueError("a node with children cannot be removed")
        if self.holds(node):
            assert node.parent is not None
            del node.parent.children[node.tokens[0]]

    def __iter__(self) -> Iterator[N]:
        """All nodes below the root, depth first."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


def common_length(a: array[int], b: np.ndarray) -> int:
    """How many leading tokens agree."""
    n = min(len(a), len(b))
    if n == 0:
        return 0
    differ = np.frombuffer(a, dtype=np.int32, count=n) != b[:n]
    first = int(differ.argmax())
    return first if differ[first] else n
