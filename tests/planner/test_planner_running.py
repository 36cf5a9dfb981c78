"""The order of a job while it runs, with lengths learnt from the answers that have finished."""

from __future__ import annotations

from fractions import Fraction
from itertools import groupby

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from onestem.planner import RunningOrder, plan_job, running
from tests.planner.test_planner_properties import any_levels, any_order, budgets, jobs


@given(jobs, any_levels, any_order, budgets, st.data())
def test_all_who_are_left_run_once_and_group_by_group(prompts, levels, order, budget, data):
    asked = data.draw(st.lists(st.integers(1, 9), min_size=len(prompts), max_size=len(prompts)))
    plan = plan_job(
        prompts, levels=levels, order=order, kv_budget_tokens=budget, output_lengths=asked
    )
    numbers = list(range(len(prompts)))
    finished = data.draw(st.sets(st.sampled_from(numbers))) if numbers else set()
    lengths = {i: data.draw(st.none() | st.integers(0, asked[i])) for i in finished}
    begun: list[int] = []

    def run() -> list[int]:
        running_order, ran = RunningOrder(plan, *known(lengths)), []
        for request in running_order:
            ran.append(request)
            if request % 3 == 0:
                running_order.note(request, asked[request] // 2)
        return ran

    begun = run()
    assert begun == run()
    assert sorted(begun) == [i for i in numbers if i not in finished]
    groups = [group for group, _ in groupby(plan.group_of[begun].tolist())]
    assert len(groups) == len(set(groups))
    if not plan.by_r:
        assert begun == [i for i in plan.order.tolist() if i not in finished]


@given(jobs, st.data())
def test_expected_lengths_are_shares_drawn_towards_those_of_larger_prefixes(prompts, data):
    asked = data.draw(st.lists(st.integers(1, 900), min_size=len(prompts), max_size=len(prompts)))
    sampled = {i: data.draw(st.none() | st.integers(0, asked[i])) for i in range(len(prompts))}
    plan = plan_job(prompts, output_lengths=asked)
    tree = plan.grouped.tree

    def path(node: int) -> list[int]:
        return [*(path(int(tree.parent[node])) if node else []), node]

    def share(nodes: list[int]) -> Fraction:
        if not nodes:
            return Fraction(1)
        behind = [i for i in sampled if nodes[-1] in path(int(tree.home[i]))]
        known = [i for i in behind if sampled[i] is not None]
        above = share(nodes[:-1])
        if not known:
            return above
        own = Fraction(sum(sampled[i] for i in known), sum(asked[i] for i in known))
        weight = running.SHRINKAGE
        return (len(known) * own + weight * above) / (len(known) + weight)

    order = RunningOrder(plan, *known(sampled))
    for i, expected in enumerate(order.expected_tokens().tolist()):
        assert abs(expected - asked[i] * share(path(int(tree.home[i])))) <= Fraction(501, 1000)


def known(lengths: dict[int, int | None]) -> tuple[np.ndarray, np.ndarray]:
    """Requests that have finished, and their sampled tokens; -1: not known."""
    sampled = [-1 if tokens is None else tokens for tokens in lengths.values()]
    return np.array([*lengths], np.int64), np.array(sampled, np.int64)


def kinds(header: int) -> list[list[int]]:
    """Six documents with three questions each; they are of two kinds of task in turn."""
    return [
        [*[kind] * header, *range(1000 * document, 1000 * document + 300), question]
        for document in range(6)
        for question in range(3)
        for kind in [1 + document % 2]
    ]


def test_the_kind_with_longer_answers_goes_first():
    """Kinds begin in turn; when a document of each has finished, all of one kind come first."""
    order = RunningOrder(plan_job(kinds(8), output_lengths=64))
    documents = []
    for request in order:
        documents.append(request // 3)
        order.note(request, 60 if (request // 3) % 2 else 5)
    assert documents[::3] == [0, 1, 3, 5, 2, 4]


def test_a_long_header_is_not_returned_to():
    order = RunningOrder(plan_job(kinds(200), output_lengths=64))
    documents = []
    for request in order:
        documents.append(request // 3)
        order.note(request, 60 if (request // 3) % 2 else 5)
    assert documents[::3] == [0, 2, 4, 1, 3, 5]


def test_without_news_the_order_is_the_plans():
    plan = plan_job(kinds(0), output_lengths=64)
    assert list(RunningOrder(plan)) == plan.order.tolist()
