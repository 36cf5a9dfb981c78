"""Dealing a planned job to replicas, without any engine."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onestem.planner.deal import NOBODY, Costs, Deal, simulate


def job(groups: list[tuple[int, int, int]]) -> Costs:
    """Groups of (members, shared, own): the first member computes what is shared."""
    cost, again, starts = [], [], []
    for members, shared, own in groups:
        starts.append(len(cost))
        cost += [float(shared + own), *[float(own)] * (members - 1)]
        again += [0.0, *[float(shared)] * (members - 1)]
    return Costs(np.array(cost), np.array(again), np.array(starts, np.int64))


def run(deal: Deal, speeds: list[float] | None = None, most: int = 1) -> np.ndarray:
    return simulate(deal, deal.speeds if speeds is None else np.array(speeds, float), most)


GROUPS = st.lists(
    st.tuples(st.integers(1, 12), st.integers(0, 50), st.integers(1, 20)), min_size=1, max_size=20
)


@settings(max_examples=150)
@given(GROUPS, st.lists(st.sampled_from([0.25, 1.0, 3.0]), min_size=1, max_size=6),
       st.integers(1, 5))  # fmt: skip
def test_every_item_is_computed_once(groups, speeds, most):
    costs = job(groups)
    deal = Deal(costs, np.ones(len(speeds)))
    seen = np.zeros(len(costs.cost), int)
    take = deal.take

    def counted(replica, count):
        piece = take(replica, count)
        if piece is not None:
            assert 0 < piece.end - piece.first <= count
            seen[piece.first : piece.end] += 1
        return piece

    deal.take = counted
    ends = run(deal, speeds, most)
    assert (seen == 1).all()
    assert (deal.owner != NOBODY).all()
    assert [take(replica, 1) for replica in range(len(speeds))] == [None] * len(speeds)
    # What is done is the job, and what cuts compute again.
    total = float(costs.cost.sum()) + deal.cost_again
    assert (ends * np.array(speeds)).sum() == pytest.approx(total)
    assert deal.in_hand == pytest.approx(np.zeros(len(speeds)), abs=1e-6)
    assert deal.queued == pytest.approx(np.zeros(len(speeds)), abs=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_a_new_order_costs_nothing(seed):
    """Groups that have begun go on; the others come in the new order, each once."""
    rng = np.random.default_rng(seed)
    costs = job([(4, 100, 10)] * 24)
    deal, place = Deal(costs, np.ones(3)), rng.permutation(24).repeat(4) * 4
    done = [[piece.first for _ in range(6) if (piece := deal.take(i, 1))] for i in range(3)]
    deal.sort(place)
    for replica, before in enumerate(done):
        for _ in range(26):
            piece = deal.take(replica, 1)
            before.append(piece.first)
        assert before[4:8] == [*range(before[4], before[4] + 4)]
        after = [place[first] for first in before[8:]]
        assert after == sorted(after)
    assert sorted(first for before in done for first in before) == [*range(96)]
    assert (deal.num_cuts, deal.cost_again) == (0, 0.0)


def test_groups_of_one_size_are_dealt_whole():
    costs = job([(4, 100, 10)] * 12)
    deal = Deal(costs, np.ones(3))
    ends = run(deal)
    assert ends.tolist() == [4 * 140.0] * 3
    assert (deal.num_cuts, deal.cost_again) == (0, 0.0)
    assert (deal.owner.reshape(12, 4) == deal.owner[::4, None]).all()


def test_a_group_larger_than_a_share_is_cut_before_it_begins():
    deal = Deal(job([(64, 100, 50)]), np.ones(4))
    ends = run(deal)
    assert deal.num_cuts == 3
    assert deal.cost_again == 300
    assert ends.max() <= 100 + 50 * 16


def test_a_group_that_is_all_prefix_stays_whole():
    deal = Deal(job([(8, 10_000, 1)]), np.ones(8))
    run(deal)
    assert deal.num_cuts == 0


def test_cuts_fall_where_little_is_shared():
    """Two levels: 8 under a header of 10, in two halves that share 100 more."""
    again = np.array([0, 110, 110, 110, 10, 110, 110, 110.0])
    cost = np.array([130, 20, 20, 20, 120, 20, 20, 20.0])
    deal = Deal(Costs(cost, again, np.array([0])), np.ones(2))
    run(deal)
    assert deal.owner.tolist() in ([0] * 4 + [1] * 4, [1] * 4 + [0] * 4)
    assert deal.cost_again == 10


def test_the_fast_take_from_the_slow():
    costs = job([(4, 100, 10)] * 60)
    slow = run(Deal(costs, np.ones(3)), [1.0, 1.0, 0.1]).max()
    ideal = costs.cost.sum() / 2.1
    assert slow < 1.15 * ideal
    # In the first deal it had a third of all.
    assert 6 * slow < 20 * 140 / 0.1


def test_known_speeds_need_no_stealing():
    costs = job([(4, 100, 10)] * 60)
    speeds = np.array([4.0, 2.0, 1.0, 1.0])
    deal = Deal(costs, speeds)
    ends = run(deal)
    assert deal.num_cuts <= 3
    assert ends.max() < 1.1 * costs.cost.sum() / speeds.sum()


def test_who_leaves_is_robbed_of_all():
    costs = job([(4, 100, 10)] * 9)
    deal = Deal(costs, np.ones(3))
    deal.leave(1)
    left = []
    for replica in (0, 2) * 40:
        piece = deal.take(replica, 100)
        if piece is not None:
            deal.done(replica, piece.first, piece.end)
            left.append(piece)
    assert sorted(i for piece in left for i in range(piece.first, piece.end)) == [*range(36)]
    assert set(deal.owner.tolist()) == {0, 2}


def test_who_does_not_begin_keeps_nobody_waiting():
    """A replica that loads for ever has one group of one item left, which cannot be halved."""
    deal = Deal(job([(1, 0, 10)] * 2), np.ones(2))
    assert deal.take(0, 1) is not None
    deal.done(0, 0, 1)
    assert deal.take(0, 1) is None
    deal.begun[1] = False
    assert deal.take(0, 1) is not None
