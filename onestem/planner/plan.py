"""Plan an offline job: groups and order from all of its prompts (BatchLLM, sections 3.2, 3.3)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from onestem.errors import ConfigError, JobError
from onestem.options import EngineOptions, GroupOrder, Levels
from onestem.planner.groups import (
    GroupedTree,
    all_levels,
    by_threshold,
    first_level,
    one_level,
    ungrouped,
)
from onestem.planner.order import depth_first
from onestem.planner.prefix_tree import PrefixTree, build_tree
from onestem.planner.report import PlanReport, saving_ratio
from onestem.planner.sort import IntArray, Prompts, sort_prompts

LARGEST_SHOWN = 10

OutputLengths = Sequence[int] | npt.NDArray[Any] | int | None


@dataclass(frozen=True, eq=False)
class Group:
    """Requests that run one after the other while their common prefix stays in memory.

    Attributes:
        members: `[num_members]` int64 request indices, in the order they are to run.
        prefix_tokens: leading tokens common to every member, less than the shortest member has;
            0: a lone request.
    """

    members: IntArray
    prefix_tokens: int


class Groups:
    """Groups of a plan, made on demand: a job may have millions.

    Args:
        order: `[num_requests]` the plan's.
        starts: `[num_groups]` place of each group's first request in it, rising from 0.
        prefix_tokens: `[num_groups]` of each.
    """

    def __init__(self, order: IntArray, starts: IntArray, prefix_tokens: IntArray) -> None:
        self._order, self._bounds = order, np.append(starts, len(order))
        self.prefix_tokens = prefix_tokens

    @property
    def sizes(self) -> IntArray:
        """`[num_groups]` members of each."""
        return np.diff(self._bounds)

    def __len__(self) -> int:
        return len(self.prefix_tokens)

    def __iter__(self) -> Iterator[Group]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> Group:
        at = range(len(self))[index]
        first, end = self._bounds[at : at + 2].tolist()
        return Group(self._order[first:end], int(self.prefix_tokens[at]))

    def largest(self, count: int) -> list[Group]:
        """The shared groups with most members; of equal ones, those with most tokens."""
        shared = np.flatnonzero(self.prefix_tokens)
        size, prefix = self.sizes[shared], self.prefix_tokens[shared]
        return [self[i] for i in shared[np.lexsort((-prefix, -size))][:count].tolist()]


@dataclass(frozen=True, eq=False)
class JobPlan:
    """A job's groups in execution order.

    Attributes:
        order: `[num_requests]` int64 request indices: the groups' members, one after the other.
        groups: in execution order.
        group_of: `[num_requests]` int64 index into `groups` of each request.
        group_only: nothing is to be shared but the groups' prefixes.
        by_r: units are in order of R.
        grouped: the tree of what is shared, and its cut in groups.
        output_tokens: `[num_requests]` int64 tokens to be sampled, as R counts them.
        report: what the plan saves.
    """

    order: IntArray
    groups: Groups
    group_of: IntArray
    group_only: bool
    by_r: bool
    grouped: GroupedTree
    output_tokens: IntArray
    report: PlanReport

    @property
    def tree(self) -> PrefixTree:
        """The prefixes that are shared."""
        return self.grouped.tree

    @property
    def largest_groups(self) -> list[Group]:
        """The ten shared groups with most members, as `report.largest_groups` counts them."""
        return self.groups.largest(LARGEST_SHOWN)


def planner_of(options: EngineOptions, kv_tokens: int) -> Callable[..., JobPlan]:
    """`plan_job` as options ask for it, for an engine with KV memory of `kv_tokens` tokens."""
    return partial(plan_job, levels=options.levels, order=options.order, kv_budget_tokens=kv_tokens)


def plan_job(
    prompts: Prompts,
    *,
    output_lengths: OutputLengths = None,
    levels: Levels = "all",
    order: GroupOrder | None = None,
    kv_budget_tokens: int | None = None,
    min_prefix_tokens: int = 1,
) -> JobPlan:
    """Find what prompts share, group them by it and choose the order in which they run.

    Args:
        prompts: token ids of each prompt, in any order; see `sort_prompts` for the memory used.
        output_lengths: tokens to be sampled, for all requests or for each (observed, or the
            user's `max_tokens`); `None`: unknown, 1 for each in the order's ratio.
        levels: how prefixes are shared.
            * "one": each request shares one prefix, chosen by BatchLLM's Algorithm 1, and a group
              is all that share it.
            * "all": prefixes nest and a group is a subtree; see `groups.all_levels` for where the
              tree is cut.
            * "heuristic": `groups.by_threshold`.
            * "none": each request by itself.
        order: of the units below a node. "r": R of eq. 2 and 3, high first. "input": the first
            request's place in `prompts`. "sorted": by content. `None`: "input" where levels is
            "none", else "r".
        kv_budget_tokens: KV slots that a group with nested prefixes may fill; `None`: any number.
            A group of one level holds nothing but its prefix from member to member, so there is
            nothing to split.
        min_prefix_tokens: shorter common prefixes count as not shared.
    """
    began = time.perf_counter()
    _check_options(levels, order, kv_budget_tokens, min_prefix_tokens)
    outputs = _output_tokens(output_lengths, len(prompts))
    ranked = sort_prompts(prompts)
    tree = build_tree(ranked, min_prefix_tokens)
    flat = one_level(tree, first_level(tree))
    if levels == "all":
        known = np.zeros_like(tree.home) if outputs is None else outputs
        grouped = all_levels(tree, known, kv_budget_tokens)
    elif levels == "one":
        grouped = flat
    elif levels == "heuristic":
        grouped = by_threshold(ranked, min_prefix_tokens)
    else:
        grouped = ungrouped(tree.lengths)
    order = order or default_order(levels)
    decode = np.ones_like(tree.home) if outputs is None else outputs
    run_order = depth_first(
        grouped.tree,
        decode if order == "r" else None,
        np.argsort(ranked.order) if order == "sorted" else None,
    )
    groups, group_of = _groups(grouped, run_order)
    return JobPlan(
        order=run_order,
        groups=groups,
        group_of=group_of,
        group_only=levels in ("one", "heuristic"),
        by_r=order == "r",
        grouped=grouped,
        output_tokens=decode,
        report=_report(tree, flat.tree, grouped.tree, groups, time.perf_counter() - began),
    )


def default_order(levels: Levels) -> GroupOrder:
    """The default of `order`."""
    return "input" if levels == "none" else "r"


def _check_options(
    levels: Levels, order: GroupOrder | None, kv_budget_tokens: int | None, min_prefix_tokens: int
) -> None:
    if levels not in get_args(Levels):
        raise ConfigError(f"levels is {levels!r}, expected one of {', '.join(get_args(Levels))}")
    if order is not None and order not in get_args(GroupOrder):
        raise ConfigError(f"order is {order!r}, expected one of {', '.join(get_args(GroupOrder))}")
    if kv_budget_tokens is not None and kv_budget_tokens < 1:
        raise ConfigError(f"kv_budget_tokens is {kv_budget_tokens}, expected at least 1, or None")
    if min_prefix_tokens < 1:
        raise ConfigError(f"min_prefix_tokens is {min_prefix_tokens}, expected at least 1")


def _output_tokens(output_lengths: OutputLengths, count: int) -> IntArray | None:
    """`[count]` output lengths, or `None` where they are unknown."""
    if output_lengths is None:
        return None
    lengths = np.asarray(output_lengths, np.int64)
    if lengths.ndim == 0:
        lengths = np.full(count, lengths)
    if lengths.shape != (count,):
        raise JobError(
            f"output_lengths has shape {lengths.shape}, expected one for each of {count} prompts"
        )
    if (lengths < 0).any():
        raise JobError(f"output_lengths contains {lengths.min()}, expected at least 0")
    return lengths


def _groups(grouped: GroupedTree, order: IntArray) -> tuple[Groups, IntArray]:
    """Cut `order` where the group changes. Returns the groups and each request's group."""
    root = grouped.group_root[grouped.tree.home[order]]
    begins = np.ones(len(order), np.bool_)
    begins[1:] = (root[1:] != root[:-1]) | (root[1:] < 0)
    group_of = np.empty_like(order)
    group_of[order] = np.cumsum(begins) - 1
    roots = root[begins]
    prefix = np.where(roots < 0, 0, grouped.tree.depth[roots])
    return Groups(order, np.flatnonzero(begins), prefix), group_of


def _report(
    tree: PrefixTree, flat: PrefixTree, shared: PrefixTree, groups: Groups, seconds: float
) -> PlanReport:
    """The report of a job's whole tree, Algorithm 1's, and the one that the plan shares."""
    logical = int(tree.lengths.sum())
    return PlanReport(
        requests=len(tree.home),
        groups=len(groups),
        shared_groups=int((groups.prefix_tokens > 0).sum()),
        logical_prompt_tokens=logical,
        processed_tokens_one_level=flat.processed_tokens,
        processed_tokens_all_levels=tree.processed_tokens,
        processed_tokens=shared.processed_tokens,
        saving_one_level=saving_ratio(flat.processed_tokens, logical),
        saving_all_levels=saving_ratio(tree.processed_tokens, logical),
        saving=saving_ratio(shared.processed_tokens, logical),
        levels=tree.levels,
        planning_seconds=seconds,
        largest_groups=[
            (len(group.members), group.prefix_tokens) for group in groups.largest(LARGEST_SHOWN)
        ],
    )
