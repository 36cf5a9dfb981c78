"""The order of fields: against all orders, and against the tree of the prompts that it makes."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onestem.planner import plan_job
from onestem.planner.fields import INVERSION_COST, best_order, costs_in

ROWS = st.integers(1, 4).flatmap(
    lambda fields: st.lists(
        st.lists(st.integers(0, 3), min_size=fields, max_size=fields), min_size=1, max_size=12
    )
)


def table(rows):
    """Values, and lengths that depend on field and value."""
    values = np.array(rows).T
    return values, 1 + values + 3 * np.arange(len(values))[:, None] % 5


def tokens(rows, order):
    """Prompts of tokens that differ from value to value from the first one on."""
    _, lengths = table(rows)
    return [
        [t for f in order for t in [100 * f + row[f]] * int(lengths[f, i])] + [-1 - i]
        for i, row in enumerate(rows)
    ]


@settings(max_examples=40)
@given(ROWS)
def test_costs_are_the_tokens_that_a_plan_computes(rows):
    for order in list(permutations(range(len(rows[0]))))[:6]:
        found = plan_job(tokens(rows, order)).report.processed_tokens - len(rows)
        assert sum(costs_in(*table(rows), list(order))) == found


@settings(max_examples=40)
@given(ROWS)
def test_no_order_costs_less(rows):
    values, lengths = table(rows)
    penalty = lengths.sum() * INVERSION_COST

    def cost(order):
        inversions = sum(a > b for i, a in enumerate(order) for b in order[i + 1 :])
        return sum(costs_in(values, lengths, list(order))) + penalty * inversions

    best = best_order(values, lengths)
    assert cost(best) == pytest.approx(min(map(cost, permutations(range(len(values))))))
    assert best_order(values, lengths, last=1)[-1] == len(values) - 1


def test_many_fields_are_ordered_by_their_values():
    values = np.array([np.arange(60) % (12 - field) for field in range(11)])
    order = best_order(values, np.full_like(values, 10))
    assert order == list(range(11))[::-1]
    same = np.tile(np.arange(60), (11, 1))
    assert best_order(same, np.full_like(same, 10)) == list(range(11))
