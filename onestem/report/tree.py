"""A job's tree of shared prefixes, cut down to what can be drawn."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from onestem.planner import JobPlan, Prompts
from onestem.planner.prefix_tree import PrefixTree

WORDS_CHARACTERS = 120
WORDS_TOKENS = 96  # tokens decoded for these characters

Decode = Callable[[list[int]], str]


def first_words(ids: list[int], decode: Decode, most: int) -> str:
    """The text of some of a prompt's tokens, at most `most` characters of it. It may end inside a
    character, of which nothing is shown."""
    text = decode(ids).rstrip("\ufffd")
    return text if len(text) <= most else text[: most - 1] + "…"


def savings_by_level(tree: PrefixTree) -> list[dict[str, int]]:
    """For each depth of nesting: prefixes, their tokens, and the prompt tokens that sharing saves.
    A prefix of t tokens in r requests saves t * (r - 1)."""
    level = [0] * tree.num_nodes
    for node, parent in enumerate(tree.parent.tolist()[1:], start=1):
        level[node] = level[parent] + 1
    saved = tree.edge * (tree.below(tree.at_home(np.ones_like(tree.home))) - 1)
    sums = [np.bincount(level, values) for values in (np.ones_like(saved), tree.edge, saved)]
    return [
        {"prefixes": int(count), "tokens": int(tokens), "saved_tokens": int(gain)}
        for count, tokens, gain in zip(*sums, strict=True)
    ][1:]


@dataclass(frozen=True)
class DrawnTree:
    """The part of a tree that saves most.

    Attributes:
        nodes: parents before children; node 0 is the empty prefix. Each is a list: index of the
            parent; tokens that it adds; requests below it. Then requests that continue alone, and
            their mean tokens; prefixes below it that are left out, requests in them, and their mean
            tokens. Last, its first words, and those of one request that continues alone.
        left_out: prefixes that are not drawn.
        left_out_tokens: tokens that sharing these saves.
    """

    nodes: list[list[Any]]
    left_out: int
    left_out_tokens: int

    @staticmethod
    def of(plan: JobPlan, prompts: Prompts, decode: Decode, most: int) -> DrawnTree:
        """The tree of a plan, with at most `most` nodes."""
        tree = plan.tree
        ones = np.ones_like(tree.home)
        alone = tree.at_home(ones)
        requests = tree.below(alone)
        saved = tree.edge * (requests - 1)
        saved[0] = 0
        chosen = _chosen(tree, tree.below(saved).tolist(), most)
        place = {node: i for i, node in enumerate(chosen)}
        own = tree.at_home(tree.distinct)
        total = tree.below(tree.at_home(tree.lengths))
        first = tree.smallest(np.arange(len(tree.home)))
        first_alone = np.full(tree.num_nodes, len(tree.home))
        np.minimum.at(first_alone, tree.home, np.arange(len(tree.home)))
        out, out_requests, out_tokens = _left_out(tree, place, requests, total)

        def words(request: int, start: int, end: int) -> str:
            ids = np.asarray(prompts[request][start : min(end, start + WORDS_TOKENS)])
            return first_words(ids.tolist(), decode, WORDS_CHARACTERS)

        nodes = []
        for node in chosen:
            parent, depth = int(tree.parent[node]), int(tree.depth[node])
            count, hidden = int(alone[node]), int(out_requests[node])
            nodes.append(
                [
                    place[parent],
                    int(tree.edge[node]),
                    int(requests[node]),
                    count,
                    round(int(own[node]) / count) if count else 0,
                    int(out[node]),
                    hidden,
                    round(int(out_tokens[node]) / hidden) - depth if hidden else 0,
                    words(int(first[node]), int(tree.depth[parent]), depth) if node else "",
                    words(int(first_alone[node]), depth, 1 << 60) if count else "",
                ]
            )
        left_out = int(saved.sum() - saved[chosen].sum())
        return DrawnTree(nodes, tree.num_nodes - len(chosen), left_out)


def _chosen(tree: PrefixTree, saved_below: list[int], most: int) -> list[int]:
    """At most `most` nodes, always with their ancestors, by the largest savings below them."""
    children: list[list[int]] = [[] for _ in range(tree.num_nodes)]
    for node, parent in enumerate(tree.parent.tolist()[1:], start=1):
        children[parent].append(node)
    waiting, chosen = [(0, 0)], list[int]()
    while waiting and len(chosen) < most:
        _, node = heapq.heappop(waiting)
        chosen.append(node)
        for child in children[node]:
            heapq.heappush(waiting, (-saved_below[child], child))
    return sorted(chosen)


def _left_out(
    tree: PrefixTree, place: dict[int, int], requests: Any, total: Any
) -> tuple[Any, Any, Any]:
    """For each drawn node, `[num_nodes]` each: prefixes left out below it, and the requests and
    prompt tokens of those directly below it."""
    counts = np.zeros((3, tree.num_nodes), np.int64)
    parent = tree.parent.tolist()
    for node in range(tree.num_nodes - 1, 0, -1):
        if node in place:
            continue
        above = parent[node]
        counts[0, above] += 1 + counts[0, node]
        if above in place:
            counts[1, above] += requests[node]
            counts[2, above] += total[node]
    return counts[0], counts[1], counts[2]
