"""A replica's own side, in this process."""

from __future__ import annotations

import pickle

import pytest

from onestem import LLM, EngineOptions, SamplingParams
from onestem.engine.engine import Engine
from onestem.errors import RankError
from onestem.planner import RunningOrder, plan_job, planned
from onestem.replicas.worker import Facts, Failure, Worker
from onestem.request import Request

OPTIONS = EngineOptions(dtype="float32", kv_memory="2MiB", device="cpu", max_step_tokens=32)
DEATH = "rank 1 of 2 (process 7) ended by signal 9 (SIGKILL)"


def requests(names, tokens=6):
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    return [
        Request(request_id=name, prompt_token_ids=[7, 8, 9, 10 + i], params=params)
        for i, name in enumerate(names)
    ]


@pytest.fixture(scope="module")
def worker():
    worker = Worker(OPTIONS)
    facts = worker.load()
    assert isinstance(facts, Facts)
    assert pickle.loads(pickle.dumps(facts)).options.identity() == facts.options.identity()
    return worker


def work(worker, run, named, seconds=60.0):
    report = worker.work(run, named, seconds)
    assert report.died is None
    assert report.run == run
    return report


def to_the_end(worker, run):
    outputs = []
    while (report := work(worker, run, [])).outputs:
        outputs += [output.request_id for output in report.outputs]
    return outputs


def test_what_is_handed_while_it_computes_joins_in(worker):
    before = work(worker, 1, []).stats.output_tokens
    first = work(worker, 1, requests("abc", 12), seconds=0.0)
    assert first.outputs == []
    second = work(worker, 1, requests("de", 2), seconds=0.0)
    assert second.num_waiting == 0
    assert sorted(to_the_end(worker, 1)) == [*"abcde"]
    assert work(worker, 1, []).stats.output_tokens == before + 3 * 12 + 2 * 2


def test_it_returns_for_more_when_nobody_waits(worker):
    report = work(worker, 2, requests("ab", 30))
    assert (report.outputs, report.num_waiting) == ([], 0)
    assert len(to_the_end(worker, 2)) == 2


def test_another_run_begins_anew(worker):
    work(worker, 3, requests("abc", 12), seconds=0.0)
    assert [output.request_id for output in work(worker, 4, requests("a", 1)).outputs] == ["a"]
    assert work(worker, 4, []).outputs == []


def test_a_request_that_cannot_be_answered_costs_itself(worker):
    bad = Request(request_id="bad", prompt_token_ids=[10**6], params=SamplingParams())
    report = work(worker, 5, [bad, *requests("a", 1)])
    found = {output.request_id: output.outputs[0].finish_reason for output in report.outputs}
    found |= dict.fromkeys(to_the_end(worker, 5), "length")
    assert found == {"bad": "error", "a": "length"}


@pytest.mark.parametrize(("run", "levels"), [(8, "one"), (9, "heuristic")])
def test_hand_outs_that_cut_a_group_compute_its_prefix_once(worker, run, levels):
    prompts = [[*range(3 + group, 43 + group), 60 + i] for group in range(2) for i in range(6)]
    plan = plan_job(prompts, output_lengths=2, levels=levels)
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    asked = [
        Request(request_id=str(i), prompt_token_ids=ids, params=params)
        for i, ids in enumerate(prompts)
    ]
    listed = planned(asked, RunningOrder(plan))
    before = work(worker, run, []).stats.processed_prompt_tokens
    for first in range(0, 12, 4):
        hand_out = [listed.request(position) for position in range(first, first + 4)]
        work(worker, run, hand_out, seconds=0.0)
    to_the_end(worker, run)
    computed = work(worker, run, []).stats.processed_prompt_tokens - before
    assert computed == plan.report.processed_tokens == 2 * 40 + 12


def test_an_engine_that_dies_says_why(worker, monkeypatch):
    def failing(engine):
        raise RuntimeError("CUDA error:\nan illegal memory access")

    monkeypatch.setattr(Engine, "step", failing)
    assert worker.work(6, requests("a"), 1.0).died == (
        "RuntimeError: CUDA error: an illegal memory access"
    )


def test_a_rank_that_ends_between_two_calls_says_why(worker, monkeypatch):
    def engine(llm):
        raise RankError(f"{DEATH}: start the engine again")

    before = work(worker, 7, []).stats
    monkeypatch.setattr(LLM, "engine", property(engine))
    report = worker.work(7, requests("a"), 1.0)
    assert report.died == DEATH
    assert report.stats is before


def test_what_cannot_be_loaded_says_why():
    found = Worker(OPTIONS.replace(kv_memory="900TiB")).load()
    assert isinstance(found, Failure)
    assert found.is_final
    assert found.reason.startswith("kv_memory is 900TiB")


def test_a_rank_that_ends_while_it_loads_is_no_final_failure(monkeypatch):
    def load(options):
        raise RankError(f"{DEATH}: start the engine again")

    monkeypatch.setattr(LLM, "from_options", load)
    assert Worker(OPTIONS).load() == Failure(DEATH, is_final=False)
