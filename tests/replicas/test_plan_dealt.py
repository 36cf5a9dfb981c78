"""A job's plan on replicas that need not be here: `onestem plan --replicas`."""

from __future__ import annotations

import json

import numpy as np
import pytest

from onestem.cost import TOKENS, Weights, Work, deal_costs
from onestem.engine.schedule.queue import HybridQueue
from onestem.errors import ConfigError
from onestem.forecasts import STEAL_REQUESTS, Target
from onestem.jobs import plan_file
from onestem.models.config import ModelConfig
from onestem.models.find import find_model
from onestem.options import EngineOptions
from onestem.planner import RunningOrder, plan_job, planned
from onestem.request import Request, SamplingParams
from onestem.tree import Node, RadixTree
from onestem_lab.papers.jobs import job
from tests.engine.simulation import Simulation

OPTIONS = EngineOptions(model="shape:llama3.1-8b", device="h200")


@pytest.fixture(scope="module")
def target():
    config = ModelConfig.from_directory(find_model(str(OPTIONS.model)))
    return Target.of(OPTIONS, config, predicts=True)


def plan_of(case):
    requests = case.requests(10**6)
    outputs = np.array([tokens for _, tokens in requests])
    plan = plan_job([ids for ids, _ in requests], output_lengths=outputs)
    return plan, Work.of(plan, outputs)


def test_groups_against_requests_in_turn_as_in_the_paper(target):
    """BatchLLM's lengths (figure 6: 2,000 shared, 200 own, 8 requests each), a part of its job."""
    plan, work = plan_of(job(80, (8,), (2000,), 200, 100))
    dealt = {how: target.forecast_dealt(plan, work, "full", 8, how).whole
             for how in ("groups", "round-robin", "random", "prefix-hash")}  # fmt: skip
    groups, turns = dealt["groups"], dealt["round-robin"]
    assert groups.computed_prompt_tokens == plan.report.processed_tokens
    assert turns.computed_prompt_tokens > 1.5 * groups.computed_prompt_tokens
    assert turns.seconds > 1.5 * groups.seconds
    assert dealt["random"].seconds > 1.5 * groups.seconds
    # A hash keeps groups whole too, and does not balance them.
    assert dealt["prefix-hash"].computed_prompt_tokens <= groups.computed_prompt_tokens
    assert dealt["prefix-hash"].seconds > groups.seconds


def test_a_cut_computes_its_prefix_again(target):
    plan, work = plan_of(job(1, (64,), (400,), 50, 10))
    one = target.forecast(work, "full")
    dealt = target.forecast_dealt(plan, work, "full", 4)
    assert dealt.num_cuts == 3
    assert dealt.whole.computed_prompt_tokens == one.computed_prompt_tokens + 3 * 400
    assert len(dealt.each) == 4
    assert dealt.whole.seconds < one.seconds


@pytest.mark.parametrize("levels", ["all", "one", "heuristic"])
def test_replicas_compute_the_prompt_tokens_that_are_predicted(target, levels):
    """Each gets its part in hand-outs of 16, which cut groups of 40."""
    case = job(6, (20, 2), (200, 101), 299, 4).requests(30_000)
    prompts = [ids for ids, _ in case]
    plan = plan_job(prompts, output_lengths=4, levels=levels)
    work = Work.of(plan, np.full(len(prompts), 4))
    params = SamplingParams(max_tokens=4)
    requests = [
        Request(request_id=str(i), prompt_token_ids=ids, params=params)
        for i, ids in enumerate(prompts)
    ]
    listed = planned(requests, RunningOrder(plan))
    owner, _ = target.deal(plan, work, "full", 3, "groups")
    computed = 0
    for replica in range(3):
        mine = np.flatnonzero(owner == replica).tolist()
        queue, groups = HybridQueue(RadixTree(Node((), None, 0)), max_passed=0), {}
        for first in range(0, len(mine), STEAL_REQUESTS):
            part = [listed.request(position) for position in mine[first : first + STEAL_REQUESTS]]
            queue.add_job(str(first), part, groups=groups)
        simulation = Simulation(queue, kv_tokens=100_000)
        simulation.run()
        computed += simulation.processed
    predicted = target.forecast_dealt(plan, work, "full", 3).whole
    assert computed == predicted.computed_prompt_tokens


def test_costs_are_the_plans_tokens():
    """Two levels; whatever is cut, again and cost are what a replica of its own computes."""
    plan, work = plan_of(job(3, (3, 2), (40, 20), 5, 7))
    costs = deal_costs(plan, np.arange(len(plan.order)), TOKENS)
    assert costs.cost.sum() == plan.report.processed_tokens + plan.output_tokens.sum()
    for cut in range(1, 18):
        rest = work.part(np.arange(cut, 18))
        computed = int((rest.own() + rest.opened() + rest.outputs).sum())
        assert computed == costs.cost[cut:].sum() + costs.again[cut]


def test_a_part_that_is_left_of_a_job_costs_what_it_computes():
    plan, work = plan_of(job(3, (3, 2), (40, 20), 5, 7))
    positions = np.array([1, 2, 5, 11, 17])
    part = work.part(positions)
    costs = deal_costs(plan, positions, Weights(1.0, 0.0, 0.0))
    assert costs.cost.sum() == (part.own() + part.opened()).sum()
    assert costs.starts[0] == 0


def test_plan_file_reports_each_way_to_deal(tmp_path):
    lines = [
        {
            "custom_id": str(i),
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": [i % 6] * 300 + [100 + i] * 20, "max_tokens": 5},
        }
        for i in range(48)
    ]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "work").mkdir()
    report = plan_file(source, tmp_path / "work", options=OPTIONS, replicas=3)
    dealt = report["dealt"]
    assert dealt["replicas"] == 3
    groups = dealt["groups"]
    assert groups["seconds"] == max(groups["replica_seconds"]) > 0
    assert len(groups["replica_seconds"]) == 3
    assert groups["computed_prompt_tokens"] == report["processed_tokens"]
    assert (groups["num_cuts"], groups["computed_again_tokens"]) == (0, 0)
    assert dealt["random"]["computed_prompt_tokens"] > groups["computed_prompt_tokens"]
    assert json.dumps(report)


def test_replicas_are_not_dealt_to_without_rates(tmp_path):
    with pytest.raises(ConfigError, match="leave --no-predict out"):
        plan_file(tmp_path, tmp_path, options=OPTIONS, predicts=False, replicas=2)
