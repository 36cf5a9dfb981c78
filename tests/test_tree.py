"""The radix tree: what matches, and where it splits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onestem.tree import Label, Node, RadixTree, Stretch, cut


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def put(tree: RadixTree[Node], tokens: list[int]) -> None:
    node, matched = tree.match(ids(*tokens))
    if matched < len(tokens):
        tree.insert(Node(tokens[matched:], node, node.end))


def test_match_splits_where_it_ends():
    tree = RadixTree(Node((), None, 0))
    put(tree, [1, 2, 3, 4])
    lower = tree.root.children[Label(), 1]
    node, matched = tree.match(ids(1, 2, 9))
    assert matched == 2
    assert list(node.tokens) == [1, 2]
    assert list(lower.tokens) == [3, 4]
    assert lower.parent is node
    assert lower.start == 2
    assert [list(n.tokens) for n in lower.path()] == [[1, 2], [3, 4]]


def test_limit_splits_too():
    tree = RadixTree(Node((), None, 0))
    put(tree, [1, 2, 3])
    node, matched = tree.match(ids(1, 2, 3), limit=2)
    assert matched == 2
    assert list(node.tokens) == [1, 2]


def test_no_two_children_begin_alike():
    tree = RadixTree(Node((), None, 0))
    put(tree, [1, 2])
    with pytest.raises(ValueError, match="token 1"):
        tree.insert(Node([1], tree.root, 0))


def test_equal_tokens_of_other_labels_do_not_match():
    tree = RadixTree(Node((), None, 0))
    put(tree, [1, 2, 3])
    mine = [Stretch(0, Label("mine"))]
    assert tree.match(ids(1, 2, 3), stretches=mine) == (tree.root, 0)
    tree.insert(Node([1, 2], tree.root, 0, Label("mine")))
    node, matched = tree.match(ids(1, 2, 3), stretches=mine)
    assert (matched, node.label.space) == (2, "mine")
    shared_then_mine = [Stretch(0, Label()), Stretch(2, Label("mine"))]
    node, matched = tree.match(ids(1, 2, 3), stretches=shared_then_mine)
    assert (matched, node.label, list(node.tokens)) == (2, Label(), [1, 2])
    tree.insert(Node([3], node, 2, Label("mine")))
    assert tree.match(ids(1, 2, 3), stretches=shared_then_mine)[1] == 3
    assert len(list(tree)) == 4


def test_a_jump_of_positions_ends_a_match():
    tree = RadixTree(Node((), None, 0))
    put(tree, [1, 2, 3, 4])
    jump = [Stretch(0, Label()), Stretch(2, Label(shift=10))]
    node, matched = tree.match(ids(1, 2, 3, 4), stretches=jump)
    assert (matched, node.end) == (2, 2)
    tree.insert(Node([3, 4], node, 2, Label(shift=10)))
    node, matched = tree.match(ids(1, 2, 3, 4), stretches=jump)
    assert (matched, node.position) == (4, 12)
    node, matched = tree.match(ids(1, 2, 3, 4))
    assert (matched, node.position) == (4, 2)


def test_a_node_whose_positions_jump():
    label = Label(shift=10, jumps=((3, 4), (5, 6)))
    assert label.positions(1, 7).tolist() == [5, 6, 9, 10, 15, 16]
    tree = RadixTree(Node((), None, 0))
    tree.insert(Node([1, 2, 3, 4], tree.root, 0, label))
    jumps = [Stretch(0, label)]
    assert tree.match(ids(1, 2, 3, 5), stretches=jumps)[1] == 3
    assert tree.match(ids(1, 2, 3, 4), stretches=jumps)[1] == 4
    others = [Stretch(0, Label(shift=10, jumps=((3, 4),)))]
    assert tree.match(ids(1, 2, 3, 4), stretches=others)[1] == 0


def test_a_node_with_children_stays():
    tree = RadixTree(Node((), None, 0))
    put(tree, [1, 2])
    put(tree, [1, 2, 3])
    with pytest.raises(ValueError, match="children"):
        tree.remove(tree.root.children[Label(), 1])


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), max_size=12),
    st.lists(st.integers(0, 2), max_size=9),
)
def test_longest_match_is_what_brute_force_finds(sequences, query):
    tree = RadixTree(Node((), None, 0))
    for tokens in sequences:
        put(tree, tokens)
    best = max((sum(1 for _ in _common(tokens, query)) for tokens in sequences), default=0)
    node, matched = tree.match(ids(*query))
    assert matched == best == node.end
    spelled = [token for part in node.path() for token in part.tokens]
    assert spelled == query[:best]
    # Every sequence is still spelled by one path.
    for tokens in sequences:
        assert tree.match(ids(*tokens))[1] == len(tokens)


def _common(a, b):
    for x, y in zip(a, b, strict=False):
        if x != y:
            return
        yield x


PROMPTS = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=9), st.integers(0, 9)), max_size=12
)


def entered(prompts) -> tuple[RadixTree[Node], list[tuple[Node, list[int], list[Stretch]]]]:
    """A tree of sequences whose first tokens are common and the others somebody's own; where each
    ends, its tokens and its stretches."""
    tree, ends = RadixTree(Node((), None, 0)), []
    for tokens, common in prompts:
        own = [Stretch(common, Label("own"))]
        stretches = [Stretch(0, Label()), *own] if common else own
        node, known = tree.match(ids(*tokens), stretches=stretches)
        for first, end, label in cut(stretches, len(tokens), known):
            node = Node(tokens[first:end], node, first, label)
            tree.insert(node)
        ends.append((node, tokens, stretches))
    return tree, ends


@given(PROMPTS, PROMPTS)
def test_the_overlap_of_trees_is_that_of_each_sequence(these, those):
    (tree, ends), (other, _) = entered(these), entered(those)
    for least in (0, 1, 3):
        overlap = dict(tree.overlap(other, least))
        for node, tokens, stretches in ends:
            found = other.num_found(ids(*tokens), stretches)
            assert overlap.get(node) == (found if found >= least else None)
    splits = other.num_splits
    for _, tokens, stretches in ends:
        found = other.num_found(ids(*tokens), stretches)
        assert other.num_splits == splits
        assert found == other.match(ids(*tokens), stretches=stretches)[1]
        splits = other.num_splits
