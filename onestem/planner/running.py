"""A job's order while it runs: lengths of answers are learnt from finished ones.

R of BatchLLM (section 3.3.2) needs lengths that are not known before. The paper sets all to 1,
since answers of one kind of task are of much the same length (fig. 5). Here a job may have many
kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from onestem.planner.groups import GroupedTree
from onestem.planner.order import depth_first
from onestem.planner.plan import JobPlan
from onestem.planner.prefix_tree import PrefixTree
from onestem.planner.sort import BoolArray, IntArray
from onestem.request import Request

# What is known of the prefix above counts as much as this many finished answers.
SHRINKAGE = 4
# The rest is sorted again when the number of finished answers has grown by this factor.
GROWTH = 1.25
# A group whose header is at most 1 / LIGHT_HEADER of its prompt tokens is sorted by itself.
LIGHT_HEADER = 32


class RunningOrder:
    """Requests of a planned job in the order in which they are to begin: iterate once, or ask for
    the order `again` and tell which ones `begin`.

    If the plan's order is by R, groups that have not begun are sorted again as answers finish. An
    answer's expected length is a share of its asked maximum. It is what answers behind the same
    prefix have come to, drawn towards the share of the prefix above, and so on. The whole job's
    share is drawn towards 1. The same finishes at the same times give the same order.

    Args:
        plan: what to run.
        finished: `[num_finished]` requests that are not to run any more; None: none.
        sampled: `[num_finished]` their sampled tokens; -1: not known.
    """

    def __init__(
        self, plan: JobPlan, finished: IntArray | None = None, sampled: IntArray | None = None
    ) -> None:
        self.plan = plan
        self._units = _loosened(plan.grouped)
        self._sampled = np.full(len(plan.order), -1, np.int64)  # of each request; -1: not known
        self._num_noted = 0
        self._sort_at = 0.0
        self._pending = np.ones(len(plan.order), np.bool_)
        self._begun = np.zeros(len(plan.order), np.bool_)
        if finished is not None and sampled is not None:
            self._pending[finished] = False
            self._sampled[finished] = sampled
            self._num_noted = int((sampled >= 0).sum())

    @property
    def to_run(self) -> BoolArray:
        """`[num_requests]` those that were not finished before."""
        return self._pending | self._begun

    def note(self, request: int, tokens: int) -> None:
        """Note that a request has finished, with `tokens` sampled tokens."""
        self._sampled[request] = tokens
        self._num_noted += 1

    def begin(self, requests: int | IntArray) -> None:
        """Note that requests begin."""
        self._pending[requests], self._begun[requests] = False, True

    def again(self) -> IntArray | None:
        """`[num_requests]` the order by all that is known; None: it is not due, or not by R."""
        if self._num_noted < self._sort_at or not self.plan.by_r:
            return None
        self._sort_at = max(1.0, GROWTH * self._num_noted)
        return depth_first(
            self._units, self.expected_tokens(), pending=self._pending, begun=self._begun
        )

    def __iter__(self) -> Iterator[int]:
        group_of = self.plan.group_of
        rest, at, group = self._rest(self.plan.order), 0, -1
        while at < len(rest):
            if group_of[rest[at]] != group and (order := self.again()) is not None:
                rest, at = self._rest(order), 0
            request = int(rest[at])
            self.begin(request)
            group, at = group_of[request], at + 1
            yield request

    def _rest(self, order: IntArray) -> IntArray:
        return order[self._pending[order]]

    def expected_tokens(self) -> IntArray:
        """`[num_requests]` tokens that each answer is expected to have."""
        tree, asked, known = self.plan.grouped.tree, self.plan.output_tokens, self._sampled >= 0
        count = tree.below(tree.at_home(known)).astype(np.float64)
        most = tree.below(tree.at_home(np.where(known, asked, 0)))
        sampled = tree.below(tree.at_home(np.where(known, self._sampled, 0)))
        found = count * sampled / np.maximum(most, 1)
        share = np.ones(tree.num_nodes)
        for nodes in (np.zeros(1, np.int64), *tree.nested):
            above = share[tree.parent[nodes]]  # of the root its own
            drawn = (found[nodes] + SHRINKAGE * above) / (count[nodes] + SHRINKAGE)
            share[nodes] = np.where(count[nodes] > 0, drawn, above)
        expected: IntArray = np.rint(asked * share[tree.home]).astype(np.int64)
        return expected


def _loosened(grouped: GroupedTree) -> PrefixTree:
    """The tree to sort. A group that costs many times what it shares with its siblings need not
    follow them. So kinds of tasks with a header each are all begun early, and their lengths learnt.
    The price is a header that may have to be computed again."""
    tree, root = grouped.tree, grouped.group_root
    cost = tree.below(tree.edge + tree.at_home(tree.distinct))
    light = tree.depth[tree.parent] * LIGHT_HEADER <= cost
    inside = (root >= 0) & (root != np.arange(tree.num_nodes))
    parent = np.where(light & ~inside, 0, tree.parent)
    return PrefixTree(parent, tree.depth, tree.home, tree.lengths)


class Planned:
    """Requests of a planned job with their groups, made when they are asked for. Iterating gives
    them in the order in which they are to begin, which new answers may change.

    Args:
        make: the request at an index of the plan, without its group.
        order: of these requests, and maybe of others; the caller reports answers to it.
        positions: `[num_requests]` int64 positions of the requests in the plan's order, rising;
            None: all.

    Attributes:
        has_branches: requests say where others part from them, which layers with states need.
    """

    def __init__(
        self, make: Callable[[int], Request], order: RunningOrder, positions: IntArray | None = None
    ) -> None:
        self._make, self.order = make, order
        self.positions = np.arange(len(order.plan.order)) if positions is None else positions
        self.has_branches = True
        self._parted: set[int] = set()  # requests that are not below their nodes any more

    def __iter__(self) -> Iterator[Request]:
        return map(self._grouped, self.order)

    def request(self, position: int) -> Request:
        """The request at a position of the plan's order."""
        return self._grouped(int(self.order.plan.order[position]))

    @cached_property
    def _left(self) -> list[int]:
        """How many requests each node of the tree still has below it."""
        tree = self.order.plan.tree
        return tree.below(tree.at_home(self.order.to_run)).tolist()

    def _branches(self, index: int) -> tuple[tuple[int, ...], int]:
        """Depths of the nodes on a request's path, and at how many of them others are left."""
        tree, node = self.order.plan.tree, int(self.order.plan.tree.home[index])
        depths: dict[int, bool] = {}
        is_new = index not in self._parted  # a request whose engine died is asked for again
        self._parted.add(index)
        while node:
            self._left[node] -= is_new
            depth = int(tree.depth[node])
            depths[depth] = depths.get(depth, False) or self._left[node] > 0
            node = int(tree.parent[node])
        return tuple(reversed(depths)), sum(depths.values())

    def _grouped(self, index: int) -> Request:
        request, plan = self._make(index), self.order.plan
        if request.pml is not None:  # a group shares a prefix, and modules are no prefixes
            return request
        group = int(plan.group_of[index])
        prefix = int(plan.groups.prefix_tokens[group])
        # After a call of one prompt others may follow, of which nothing is known.
        is_told = self.has_branches and len(plan.order) > 1
        branches, awaited = self._branches(index) if is_told else (None, 0)
        return replace(
            request,
            branches=branches,
            awaited_branches=awaited,
            group=group if prefix else None,
            group_prefix_tokens=prefix,
            group_only=plan.group_only,
        )


def planned(requests: Sequence[Request], order: RunningOrder) -> Planned:
    """Requests that are in memory, by their index in the plan."""
    return Planned(requests.__getitem__, order)
