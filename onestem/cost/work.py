"""A job in planned order, and the limits of the engine that runs it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from onestem.planner import JobPlan
from onestem.planner.prefix_tree import PrefixTree

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Limits:
    """Attributes:
    step_tokens: rows of a step (`EngineOptions.max_step_tokens`).
    kv_tokens: tokens that KV memory holds.
    page_size: tokens in a page; each run of a sequence leaves half of its last page empty.
    num_seqs: maximum running sequences (`EngineOptions.max_num_seqs`); None: any number.
    """

    step_tokens: int
    kv_tokens: int
    page_size: int = 16
    num_seqs: int | None = None


@dataclass(frozen=True, eq=False)
class Work:
    """A job in planned order.

    Attributes:
        tree: its prompts, and the prefixes that they share.
        outputs: `[num_requests]` tokens of each answer.
        answers: `[num_requests]` sequences of each request (n).
    """

    tree: PrefixTree
    outputs: IntArray
    answers: IntArray

    @staticmethod
    def of(plan: JobPlan, outputs: IntArray | None, answers: IntArray | None = None) -> Work:
        """The work of a plan.

        Args:
            outputs: `[num_requests]` sampled tokens of all answers to each request, in input order;
                None: one.
            answers: `[num_requests]` answers to each; None: one.
        """
        ones, order, tree = np.ones(len(plan.order), np.int64), plan.order, plan.tree
        n = ones if answers is None else answers[order]
        total = ones if outputs is None else outputs[order]
        ordered = PrefixTree(tree.parent, tree.depth, tree.home[order], tree.lengths[order])
        return Work(ordered, np.maximum(total // n, 1), n)

    def part(self, positions: IntArray) -> Work:
        """Some of the requests, with the prefixes that they have.

        Args:
            positions: of the requests, in the order in which they run.
        """
        tree, home = self.tree, self.tree.home[positions]
        used = tree.below(np.bincount(home, minlength=tree.num_nodes)) > 0
        used[0] = True
        number = np.cumsum(used) - 1
        kept = PrefixTree(
            number[tree.parent[used]], tree.depth[used], number[home], tree.lengths[positions]
        )
        return Work(kept, self.outputs[positions], self.answers[positions])

    def unshared(self) -> Work:
        """The same work with nothing shared: each sequence has a prompt alone (`share="off"`)."""
        each = np.repeat(np.arange(len(self.outputs)), self.answers)
        root = np.zeros(1, np.int64)
        alone = PrefixTree(root, root, np.zeros_like(each), self.tree.lengths[each])
        return Work(alone, self.outputs[each], np.ones_like(each))

    def opened(self) -> IntArray:
        """`[num_requests]` tokens of shared prefixes that each request is the first to need."""
        count = len(self.outputs)
        first = np.minimum(self.tree.smallest(np.arange(count))[1:], count)
        return np.bincount(first, self.tree.edge[1:], count)[:count].astype(np.int64)

    def own(self) -> IntArray:
        """`[num_requests]` prompt tokens that no other request has."""
        return self.tree.distinct

    def slack(self, page_size: int) -> IntArray:
        """`[num_requests]` tokens that each request's runs leave empty in their last pages."""
        return (self.answers + (self.answers > 1)) * page_size // 2
