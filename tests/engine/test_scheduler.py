"""The scheduler alone: what is computed, what is evicted, what waits. No model."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

from onestem.engine.schedule.draft import StepDraft
from onestem.engine.schedule.queue import InteractiveQueue, PlannedQueue
from onestem.planner import plan_job
from onestem.request import Request, SamplingParams
from onestem.tree import Node, RadixTree
from tests.engine.simulation import Simulation


def job(groups: int, degree: int, prefix: int, distinct: int, *, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    heads = [rng.integers(0, 30_000, prefix).tolist() for _ in range(groups)]
    return [
        head + rng.integers(0, 30_000, distinct).tolist() for head in heads for _ in range(degree)
    ]


def reorder(prompts: list, how: str, groups: int) -> list:
    degree = len(prompts) // groups
    if how == "round-robin":
        return [prompts[g * degree + i] for i in range(degree) for g in range(groups)]
    if how == "shuffled":
        return random.Random(0).sample(prompts, len(prompts))
    return prompts


def requests(prompts, output: int, plan=None) -> list[Request]:
    made = [
        Request(
            request_id=str(i),
            prompt_token_ids=ids,
            params=SamplingParams(max_tokens=output),
            group=None if plan is None else int(plan.group_of[i]),
            group_prefix_tokens=0 if plan is None else plan.groups[plan.group_of[i]].prefix_tokens,
            group_only=plan is not None and plan.group_only,
        )
        for i, ids in enumerate(prompts)
    ]
    return made if plan is None else [made[i] for i in plan.order.tolist()]


def fifo(items) -> InteractiveQueue:
    queue = InteractiveQueue(RadixTree(Node((), None, 0)), max_passed=0)
    for item in items:
        queue.push(item)
    return queue


@pytest.mark.parametrize("how", ["grouped", "round-robin", "shuffled"])
@pytest.mark.parametrize("share_of_prefixes", [0.1, 1.2])
def test_any_order_saves_what_grouped_order_saves(how, share_of_prefixes):
    """60 documents x 8 questions, 2048 + 192 tokens, KV for a tenth of the documents: the optimum
    is 80.0%; engines that do not plan save 0.0% in question-major order (and 19.3% shuffled)."""
    prompts = reorder(job(60, 8, 2048, 192), how, 60)
    kv_tokens = int(share_of_prefixes * 60 * 2048)
    plan = plan_job(prompts, output_lengths=16, kv_budget_tokens=kv_tokens)
    simulation = Simulation(PlannedQueue(requests(prompts, 16, plan)), kv_tokens=kv_tokens)
    saving = simulation.run()
    assert saving == pytest.approx(plan.report.saving_all_levels, abs=1e-12)
    assert round(100 * saving, 1) == 80.0


def test_without_a_plan_question_major_order_saves_nothing():
    prompts = reorder(job(60, 8, 2048, 192), "round-robin", 60)
    simulation = Simulation(fifo(requests(prompts, 16)), kv_tokens=6 * 2048)
    assert simulation.run() < 0.01


@pytest.mark.parametrize("kv_tokens", [2_000, 100_000])
@pytest.mark.parametrize(
    ("levels", "shared"),
    [
        ("all", 3 * 400 + 24 * 101 + 48 * 499),
        ("one", 3 * 400 + 48 * 600),
        ("heuristic", 24 * 501 + 48 * 499),
    ],
)
def test_what_the_plan_shares_is_computed_once_and_nothing_else_is_shared(
    levels, shared, kv_tokens
):
    """BatchLLM's table 3, case B in small: global prefixes of 400, sub-prefixes of 101, pairs."""
    rng = np.random.default_rng(1)
    prompts = []
    for _ in range(3):
        head = rng.integers(0, 30_000, 400).tolist()
        for _ in range(8):
            sub = head + rng.integers(0, 30_000, 101).tolist()
            prompts += [sub + rng.integers(0, 30_000, 499).tolist() for _ in range(2)]
    random.Random(3).shuffle(prompts)
    plan = plan_job(prompts, output_lengths=4, kv_budget_tokens=kv_tokens, levels=levels)
    simulation = Simulation(PlannedQueue(requests(prompts, 4, plan)), kv_tokens=kv_tokens)
    saving = simulation.run()
    assert simulation.processed == plan.report.processed_tokens == shared
    assert saving == plan.report.saving


def test_a_hoisted_prefix_is_computed_for_each_of_its_groups():
    """Algorithm 1 forks a parent: its tokens stand in two groups, and neither takes the other's."""
    head, deeper = list(range(30)), list(range(100, 160))
    prompts = [[*head, *deeper, 1000 + i] for i in range(4)] + [[*head, 2000 + i] for i in range(4)]
    plan = plan_job(prompts, levels="one")
    assert sorted(group.prefix_tokens for group in plan.groups) == [30, 90]
    simulation = Simulation(PlannedQueue(requests(prompts, 4, plan)), kv_tokens=10_000)
    simulation.run()
    assert simulation.processed == 30 + 90 + 8


@pytest.mark.parametrize("most", [1, 2, 7])
def test_no_more_sequences_run_than_may(most):
    simulation = Simulation(
        fifo(requests(job(3, 5, 20, 4), 6)), kv_tokens=10_000, max_num_seqs=most
    )
    simulation.run()
    assert simulation.most_running == most
    assert len(simulation.order) == 15


def test_memory_bounds_a_step_not_a_number_of_requests():
    simulation = Simulation(
        fifo(requests(job(1, 300, 64, 2), 30)), kv_tokens=64_000, max_step_tokens=4096
    )
    simulation.run()
    assert simulation.most_running == 300


def test_steps_are_full_while_prompts_wait():
    """Chunked prefill beside decodes: no valleys in tokens per step (BatchLLM, figure 10)."""
    simulation = Simulation(
        fifo(requests(job(12, 4, 500, 60), 24)), kv_tokens=10**6, max_step_tokens=256
    )
    simulation.run()
    busy = simulation.rows[: simulation.processed // 256 - 2]
    assert min(busy) >= 256


def test_a_small_pool_preempts_and_finishes():
    simulation = Simulation(fifo(requests(job(1, 40, 50, 10), 200)), kv_tokens=1024, page_size=4)
    simulation.run()
    assert simulation.scheduler.room.num_preempted > 0


def test_a_planned_prefix_stays_between_its_members():
    """Members so large that they run one after the other do not lose the prefix in between."""
    prompts = job(2, 4, 256, 700)
    plan = plan_job(prompts, output_lengths=8, kv_budget_tokens=1100)
    simulation = Simulation(PlannedQueue(requests(prompts, 8, plan)), kv_tokens=1100, page_size=4)
    assert simulation.run() == pytest.approx(plan.report.saving_all_levels)


def test_a_waiting_request_takes_over_from_one_that_left():
    shared = list(range(100))
    first, second = requests([[*shared, 1001], [*shared, 1002]], 2)
    simulation = Simulation(fifo([first, second]), kv_tokens=4096, max_step_tokens=30)
    simulation.step()
    owner = simulation.scheduler.running[0]
    # A step of 30 tokens leaves the second request out; admit it by hand, as a larger step would.
    draft = StepDraft()
    second_sequence = simulation.scheduler.waiting.next(draft, jobs=False)
    assert simulation.scheduler.room.admit(draft, second_sequence)
    simulation.scheduler.waiting.remove(second_sequence)
    waiter = simulation.scheduler.running[1]
    owner.finish_reason = "abort"
    simulation.scheduler.room.finish(owner)
    assert waiter.frontier == 30
    simulation.run()
    assert simulation.processed == 30 + 71


def prompt_rows(simulation: Simulation) -> dict[str, int]:
    """Rows that each prompt has in the next step."""
    assert simulation.step()
    chunks = simulation.draft.changes.chunks
    return {c.sequence.state.request.request_id: c.end - c.start for c in chunks}


@pytest.mark.parametrize("group", [None, 3])
def test_short_prompts_have_half_of_a_step_beside_a_long_one(group):
    """In a planned group they come as planned."""
    sizes = [1000, 40, 30, 25, 950]
    prompts = [list(range(1000 * i, 1000 * i + size)) for i, size in enumerate(sizes)]
    long, *others = (dataclasses.replace(one, group=group) for one in requests(prompts, 1))
    queue = fifo([long])
    simulation = Simulation(queue, kv_tokens=8192, max_step_tokens=100)
    rows = [prompt_rows(simulation)]
    for one in others:
        queue.push(one)
    rows += [prompt_rows(simulation) for _ in range(3)]
    if group is not None:
        assert rows == [{"0": 100}] * 4
    else:
        assert rows == [
            {"0": 100},
            {"1": 40, "2": 10, "0": 50},
            {"2": 20, "3": 25, "0": 55},  # and not the last, which is the longest
            {"0": 100},
        ]
    simulation.run()


def test_tokens_being_computed_are_waited_for_not_computed_again():
    shared = list(range(1000))
    many = requests([[*shared, 2000 + i] for i in range(10)], 2)
    simulation = Simulation(fifo(many), kv_tokens=8192, max_step_tokens=64)
    simulation.run()
    assert simulation.processed == 1010
