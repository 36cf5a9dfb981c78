"""The planner against references that are too slow to use and too simple to be wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from random import Random
from tempfile import gettempdir
from typing import get_args
from unittest import mock

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from onestem.options import GroupOrder, Levels
from onestem.planner import JobPlan, plan_job, sort
from onestem.planner.order import depth_first
from onestem.planner.prefix_tree import build_tree
from onestem.planner.sort import sort_prompts

Prompt = list[int]

segments = st.sampled_from([[0], [1], [2], [0, 0, 0], [3, 4, 5, 6], [7] * 9, [8] * 5 + [9]])
composed = st.lists(segments, max_size=6).map(lambda parts: [t for part in parts for t in part])
arbitrary = st.lists(st.integers(0, 2), max_size=8)
jobs = st.lists(st.one_of(composed, arbitrary), max_size=14)
any_levels: st.SearchStrategy[Levels] = st.sampled_from(get_args(Levels))
any_order: st.SearchStrategy[GroupOrder | None] = st.none() | st.sampled_from(get_args(GroupOrder))
budgets = st.none() | st.integers(1, 120)


@dataclass
class Node:
    """A compact prefix tree with a leaf for each prompt, as the paper draws it."""

    tokens: int
    children: list[Node] = field(default_factory=list)
    prompt: int | None = None

    def prompts(self) -> list[int]:
        if self.prompt is not None:
            return [self.prompt]
        return [i for child in self.children for i in child.prompts()]


def common_tokens(prompts: list[Prompt]) -> int:
    columns = zip(*prompts, strict=False)
    same = [len(set(column)) == 1 for column in columns]
    return [*same, False].index(False)


def compact_tree(prompts: list[Prompt]) -> Node:
    def children(members: list[int], start: int) -> Iterator[Node]:
        branches: dict[object, list[int]] = {}
        for i in members:
            ended = len(prompts[i]) - 1 <= start
            branches.setdefault(("end", i) if ended else prompts[i][start], []).append(i)
        for branch in branches.values():
            shareable = [prompts[i][:-1] for i in branch]
            end = max(common_tokens(shareable), start)
            if len(branch) == 1:
                yield Node(end - start, prompt=branch[0])
            else:
                yield Node(end - start, list(children(branch, end)))

    return Node(0, list(children(list(range(len(prompts))), 0)))


def maximize_reuse(node: Node) -> None:
    """Algorithm 1, word by word; a node with an only child is merged with it."""
    for child in list(node.children):
        maximize_reuse(child)
        if child.prompt is not None:
            continue
        for grandchild in list(child.children):
            gain = (len(grandchild.prompts()) - 1) * grandchild.tokens
            if gain > child.tokens:
                grandchild.tokens += child.tokens
                node.children.append(grandchild)
                child.children.remove(grandchild)
        if len(child.children) <= 1:
            node.children.remove(child)
        for only in child.children[: len(child.children) == 1]:
            only.tokens += child.tokens
            node.children.append(only)


def best_one_level(node: Node, depth: int = 0, shared: int = 0) -> int:
    """Most tokens that one shared prefix per prompt can save, by trying all choices of prefixes."""
    if node.prompt is not None:
        return shared
    depth += node.tokens
    without = sum(best_one_level(child, depth, shared) for child in node.children)
    shared_here = sum(best_one_level(child, depth, depth) for child in node.children) - depth
    return max(without, shared_here)


def reference_order(
    node: Node, prompts: list[Prompt], decode: list[int] | None, place: list[int]
) -> list[int]:
    def prefill(unit: Node, above: int) -> int:
        if unit.prompt is not None:
            return len(prompts[unit.prompt]) - above
        depth = above + unit.tokens
        return unit.tokens + sum(prefill(child, depth) for child in unit.children)

    def walk(unit: Node, above: int) -> list[int]:
        if unit.prompt is not None:
            return [unit.prompt]
        depth = above + unit.tokens

        def rank(child: Node) -> tuple[Fraction, int]:
            first = min(place[i] for i in child.prompts())
            if decode is None:
                return Fraction(0), first
            decodes = sum(decode[i] for i in child.prompts())
            return Fraction(-decodes, max(prefill(child, depth), 1)), first

        return [i for child in sorted(unit.children, key=rank) for i in walk(child, depth)]

    return walk(node, 0)


def heuristic_groups(prompts: list[Prompt], ranked: list[int]) -> set[tuple[frozenset[int], int]]:
    """BatchLLM section 4.3.1: sorted prompts are scanned, and share half of the shortest."""
    groups: list[list[int]] = []
    for i in ranked:
        joined = [*groups[-1], i] if groups else []
        least = min((len(prompts[k]) for k in joined), default=0)
        if 2 * common_tokens([prompts[k][:-1] for k in joined] or [[]]) > least:
            groups[-1] = joined
        else:
            groups.append([i])
    shared = [group for group in groups if len(group) > 1]
    return {(frozenset(g), common_tokens([prompts[k][:-1] for k in g])) for g in shared}


def check_plan(prompts: list[Prompt], plan: JobPlan) -> None:
    members = [i for group in plan.groups for i in group.members.tolist()]
    assert plan.order.dtype == plan.group_of.dtype == np.int64
    assert plan.order.tolist() == members
    assert sorted(members) == list(range(len(prompts)))
    for index, group in enumerate(plan.groups):
        assert (plan.group_of[group.members] == index).all()
        texts = [prompts[i] for i in group.members]
        assert (len(texts) > 1) == (group.prefix_tokens > 0)
        if group.prefix_tokens:
            assert common_tokens(texts) >= group.prefix_tokens
            assert min(map(len, texts)) > group.prefix_tokens
    report = plan.report
    assert report.groups == len(plan.groups)
    assert report.shared_groups == sum(group.prefix_tokens > 0 for group in plan.groups)


@given(jobs, any_levels, any_order, budgets, st.integers(1, 5))
def test_every_plan_is_sound(
    prompts: list[Prompt],
    levels: Levels,
    order: GroupOrder | None,
    budget: int | None,
    min_prefix: int,
) -> None:
    limits = {"kv_budget_tokens": budget, "min_prefix_tokens": min_prefix}
    plan = plan_job(prompts, levels=levels, order=order, **limits)
    check_plan(prompts, plan)
    assert 0 <= plan.report.saving <= plan.report.saving_all_levels
    if plan.group_only:
        saved = sum((len(group.members) - 1) * group.prefix_tokens for group in plan.groups)
        assert plan.report.logical_prompt_tokens - plan.report.processed_tokens == saved
    first = [int(group.members.min()) for group in plan.groups]
    if levels != "all" and (order == "input" or (levels == "none" and order is None)):
        assert first == sorted(first)
    assert all(g.prefix_tokens == 0 or g.prefix_tokens >= min_prefix for g in plan.groups)
    assert 0 <= plan.report.saving_one_level <= plan.report.saving_all_levels < 1


@given(jobs)
def test_all_levels_counts_each_shared_token_once(prompts: list[Prompt]) -> None:
    shareable = {tuple(p[:end]) for p in prompts for end in range(1, len(p))}
    lasts = sum(len(p) > 0 for p in prompts)
    report = plan_job(prompts).report
    assert report.processed_tokens_all_levels == len(shareable) + lasts
    assert report.logical_prompt_tokens == sum(map(len, prompts))


@given(jobs)
def test_one_level_is_algorithm_1(prompts: list[Prompt]) -> None:
    tree = compact_tree(prompts)
    best = best_one_level(tree)
    maximize_reuse(tree)
    expected = {
        (frozenset(child.prompts()), child.tokens)
        for child in tree.children
        if child.prompt is None and child.tokens
    }
    plan = plan_job(prompts, levels="one")
    shared = [group for group in plan.groups if group.prefix_tokens]
    assert {(frozenset(g.members.tolist()), g.prefix_tokens) for g in shared} == expected
    saved = sum((len(members) - 1) * tokens for members, tokens in expected)
    report = plan.report
    assert report.logical_prompt_tokens - report.processed_tokens_one_level == saved <= best
    assert best <= report.logical_prompt_tokens - report.processed_tokens_all_levels


@given(jobs, st.data())
def test_order_of_the_whole_tree(prompts: list[Prompt], data: st.DataObject) -> None:
    length = st.integers(0, 9)
    decode = data.draw(st.lists(length, min_size=len(prompts), max_size=len(prompts)))
    ranked = sort_prompts(prompts)
    tree, compact = build_tree(ranked), compact_tree(prompts)
    numbers, by_content = list(range(len(prompts))), np.argsort(ranked.order)
    order = depth_first(tree, np.array(decode, np.int64))
    assert order.tolist() == reference_order(compact, prompts, decode, numbers)
    order = depth_first(tree, None)
    assert order.tolist() == reference_order(compact, prompts, None, numbers)
    order = depth_first(tree, None, by_content)
    assert order.tolist() == reference_order(compact, prompts, None, by_content.tolist())


@given(jobs)
def test_the_heuristic_is_a_greedy_scan(prompts: list[Prompt]) -> None:
    plan = plan_job(prompts, levels="heuristic")
    shared = [group for group in plan.groups if group.prefix_tokens]
    found = {(frozenset(group.members.tolist()), group.prefix_tokens) for group in shared}
    assert found == heuristic_groups(prompts, sort_prompts(prompts).order.tolist())


@given(jobs, budgets)
def test_whoever_shares_a_prefix_runs_in_succession(
    prompts: list[Prompt], budget: int | None
) -> None:
    place = np.argsort(plan_job(prompts, kv_budget_tokens=budget).order)
    sharers: dict[tuple[int, ...], list[int]] = {}
    for i, prompt in enumerate(prompts):
        for end in range(1, len(prompt)):
            sharers.setdefault(tuple(prompt[:end]), []).append(int(place[i]))
    for places in sharers.values():
        assert max(places) - min(places) == len(places) - 1


@given(jobs, st.integers(1, 60), st.integers(0, 9))
def test_groups_fit_the_budget_or_share_nothing_more(
    prompts: list[Prompt], budget: int, outputs: int
) -> None:
    plan = plan_job(prompts, kv_budget_tokens=budget, output_lengths=outputs)
    for group in plan.groups:
        texts = [prompts[i] for i in group.members]
        shareable = {tuple(p[:end]) for p in texts for end in range(1, len(p))}
        kv = len(shareable) + len(texts) * (1 + outputs)
        pairs = [common_tokens([a[:-1], b[:-1]]) for k, a in enumerate(texts) for b in texts[:k]]
        assert len(texts) == 1 or kv <= budget or max(pairs) == group.prefix_tokens


@given(jobs, any_levels, st.randoms(use_true_random=False))
def test_permuting_the_input_keeps_the_report(
    prompts: list[Prompt], levels: Levels, random: Random
) -> None:
    shuffled = list(prompts)
    random.shuffle(shuffled)
    report = plan_job(prompts, levels=levels).report
    assert plan_job(shuffled, levels=levels).report == report
    assert plan_job(sorted(prompts), levels=levels).report == report


class Stored(list[Prompt]):
    """As a job's prompts are: on a disk."""

    folder = Path(gettempdir())

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(prompt) for prompt in self], np.int64)


@given(jobs, st.sampled_from([list, Stored]), st.integers(1, 3000))
def test_sorting_in_buckets_changes_nothing(
    prompts: list[Prompt], kind: Callable[[list[Prompt]], list[Prompt]], key_bytes: int
) -> None:
    whole = plan_job(prompts)
    with mock.patch.multiple(sort, KEY_BYTES=key_bytes, SAMPLES=2):
        in_buckets = plan_job(kind(prompts))
        ranked = sort_prompts(kind(prompts))
    assert in_buckets.order.tolist() == whole.order.tolist()
    assert in_buckets.report == whole.report
    neighbours = [prompts[i][:-1] for i in ranked.order]
    expected = [0][: len(prompts)] + [common_tokens([a, b]) for a, b in pairwise(neighbours)]
    assert ranked.shared.tolist() == expected
