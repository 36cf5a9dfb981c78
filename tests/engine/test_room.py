"""Admission by the lengths of answers, where they are known. The scheduler alone."""

from __future__ import annotations

import random

import numpy as np
import pytest

from onestem.engine.schedule.chunks import PromptChunks
from onestem.engine.schedule.queue import PlannedQueue
from onestem.engine.schedule.reserved import ReservedPages
from onestem.engine.schedule.room import Room
from onestem.request import Request, SamplingParams
from tests.engine.harness import answer, assert_idle, make_engine, requests_for
from tests.engine.simulation import Simulation

SHARED = list(range(500))


def run(own: int, outputs: list[int], *, known: bool, kv_tokens: int, free_rows: int = 0):
    """A job of prompts with `own` tokens behind a prefix; `known`: nothing ends an answer early."""
    requests = [
        Request(
            request_id=str(i),
            prompt_token_ids=[*SHARED, *range(1000 + i * own, 1000 + (i + 1) * own)],
            params=SamplingParams(max_tokens=output, ignore_eos=known),
            group=0,
            group_prefix_tokens=len(SHARED),
        )
        for i, output in enumerate(outputs)
    ]
    queue = PlannedQueue(requests)
    simulation = Simulation(queue, kv_tokens=kv_tokens, page_size=4, free_rows=free_rows)
    simulation.run()
    return simulation


@pytest.mark.parametrize("own", [1, 40])
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_answers_of_known_lengths_are_computed_once(own, seed):
    rng = random.Random(seed)
    outputs = [120 if seed is None else rng.randint(20, 200) for _ in range(96)]
    simulation = run(own, outputs, known=True, kv_tokens=4000)
    assert simulation.scheduler.room.num_preempted == 0
    # Each answer's first token is sampled from a row of its prompt.
    assert sum(simulation.rows) == len(SHARED) + 96 * own + sum(outputs) - 96


def test_memory_is_used_by_those_that_follow_early_ends():
    """Half of the answers are short: others have their memory long before the last has ended."""
    simulation = run(1, [20, 200] * 40, known=True, kv_tokens=4000)
    waves = -(-40 * 200 // 3500) * 200  # of the long ones alone
    assert simulation.scheduler.room.num_preempted == 0
    assert simulation.steps < waves + 100


def test_few_rows_are_admitted_as_if_nothing_were_known():
    """Where a step takes as long for one row as for all of them."""
    outputs = [120] * 96
    alike = [
        run(1, outputs, known=known, kv_tokens=4000, free_rows=10**6) for known in (False, True)
    ]
    assert alike[0].rows == alike[1].rows
    assert alike[1].scheduler.room.num_preempted > 0


def test_what_is_reserved_is_what_a_count_finds():
    """What ends or is preempted is dropped at once, whatever the last count says."""
    simulation = Simulation(
        PlannedQueue(
            Request(
                request_id=str(i),
                prompt_token_ids=[*SHARED, 1000 + i],
                params=SamplingParams(max_tokens=7 + i % 60, ignore_eos=i % 3 > 0),
            )
            for i in range(200)
        ),
        kv_tokens=2000,
        page_size=4,
    )
    reserved = simulation.scheduler.room.reserved
    while not simulation.scheduler.idle():
        assert simulation.step()
        assert set(reserved.needs) <= set(simulation.scheduler.running)
        needs = reserved.needs.values()
        assert reserved.soon == sum(need.soon for need in needs)
        ending = sorted(need for need in needs if need.left >= 0)
        assert sorted(map(tuple, reserved.ending.tolist())) == ending
        assert (np.diff(reserved.ending[:, 0]) <= 0).all()  # the last end first


def test_forks_to_come_are_counted_once_a_step():
    """Not for each prompt that is admitted: thousands may be, in one step."""
    prompts = 300
    simulation = Simulation(
        PlannedQueue(
            Request(
                request_id=str(i),
                prompt_token_ids=[*SHARED, 1000 + i],
                params=SamplingParams(max_tokens=4),
            )
            for i in range(prompts)
        ),
        kv_tokens=100_000,
        max_num_seqs=prompts,
    )
    looked = 0
    scheduler = simulation.scheduler

    class Watched(list):
        def __iter__(self):
            nonlocal looked
            looked += len(self)
            return super().__iter__()

    lane = scheduler.interactive
    lane.prompts = Watched(lane.prompts)
    simulation.step()
    assert len(scheduler.running) == prompts
    assert looked < 20 * prompts


@pytest.mark.parametrize("known", [False, True])
def test_a_refresh_is_a_count(tiny, known, monkeypatch):
    refresh, compared = ReservedPages.refresh, []

    def checked(reserved, running):
        running = list(running)
        refresh(reserved, running)
        soon = reserved.soon
        reserved.count(running)
        compared.append(soon == reserved.soon)

    monkeypatch.setattr(ReservedPages, "refresh", checked)
    rng = random.Random(0)
    engine = make_engine(tiny("llama"), num_pages=60, page_size=4)
    for i in range(60):
        n, most, own = rng.choice((1, 1, 3)), rng.randint(1, 60), rng.randint(1, 40)
        engine.add_request(
            Request(
                request_id=str(i),
                prompt_token_ids=[3, 4, 5, 6, *(rng.randrange(3, 90) for _ in range(own))],
                params=SamplingParams(n=n, max_tokens=most, ignore_eos=known and i % 2 == 0),
            )
        )
    while engine.has_unfinished():
        engine.step()
    assert len(compared) > 20
    assert all(compared)
    assert_idle(engine)


def test_who_gives_way_is_not_admitted_again_in_the_same_step(tiny, monkeypatch):
    """Where nobody has rows beside others, each runs alone; or the newest would come and go for
    ever."""
    engine = make_engine(tiny("llama"), num_pages=60, page_size=4)
    room, extend = engine.scheduler.room, PromptChunks.extend
    progress = Room.make_progress
    made = []

    def only_alone(self, draft, sequence):
        if sequence is room.alone:
            extend(self, draft, sequence)

    def counted(self, draft):
        made.append(draft)
        assert len(made) < 100
        return progress(self, draft)

    monkeypatch.setattr(PromptChunks, "extend", only_alone)
    monkeypatch.setattr(Room, "make_progress", counted)
    outputs = answer(engine, requests_for([[3, 4, 5], [6, 7, 8], [9, 10, 11]], max_tokens=3))
    assert sorted(outputs) == ["0", "1", "2"]
    assert room.num_preempted > 2
    assert_idle(engine)
