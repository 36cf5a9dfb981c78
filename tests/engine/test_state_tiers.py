"""Recurrent states in host memory and on a disk: they come back with the keys and values before
them, or alone, and answers are those of an engine that never lost them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from onestem.cache.host import HostStore
from onestem.cache.storage import DiskStore
from onestem.errors import ConfigError
from onestem.llm import LLM
from onestem.request import Request, SamplingParams
from tests.engine import test_tiers
from tests.engine.harness import make_engine, requests_for
from tests.engine.test_pml_tiers import same
from tests.engine.test_states import Traffic
from tests.engine.test_tiers import (
    DAMAGES,
    computed_again,
    few_tokens,
    goes_on_after_restarts,
    long_prompts,
    run,
)
from tests.soak import seeds

__all__ = ["few_tokens"]

MIB = 1 << 20
FAMILIES = ["qwen3_5", "qwen3_next"]


def equal(first, second):
    """To the last bit."""
    return first[0] == second[0] and all(
        torch.equal(values, second[1][key]) for key, values in first[1].items()
    )


def engine_with(path, folder=None, **options):
    return test_tiers.engine_with(path, folder, **{"num_pages": 4096, **options})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "options",
    [
        {"num_pages": 24},
        {"num_pages": 24 * 16, "page_size": 1},
        {"num_states": 3},
        {"num_states": 2, "num_pages": 24},
    ],
)
def test_what_was_evicted_comes_back(tiny, family, options):
    """Keys and values with their state, or the state alone."""
    plain, engine = make_engine(tiny(family)), engine_with(tiny(family), **options)
    prompts = long_prompts(6, head=1)
    for turn in range(3):
        for i, prompt in enumerate(prompts):
            [request] = requests_for([prompt])
            first, second = run(plain, [request]), run(engine, [request])
            assert equal(first, second), (turn, i)  # both begin at the same states
            assert second[2]["0"] == (1 if turn else len(prompt))
            engine.check()
    assert (engine.tiers.stats.from_host_tokens > 600) == ("num_pages" in options)


@pytest.mark.parametrize("host", [0, 64 * MIB])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_restart_finds_what_was_closed(tiny, tmp_path, family, host):
    prompts = long_prompts(4)
    first = engine_with(tiny(family), tmp_path, host=host)
    answers = run(first, requests_for(prompts))
    first.close()
    again = engine_with(tiny(family), tmp_path, host=host)
    found = run(again, requests_for(prompts))
    again.check()
    assert same(answers, found)
    assert sum(found[2].values()) == len(prompts)
    again.close()


def test_a_prompt_that_differs_begins_at_the_state_before(tiny, tmp_path):
    """Of the second conversation with a system prompt, whose first one another process had."""
    one, other = long_prompts(2, head=83)
    requests = requests_for([one, other])
    requests = [
        Request(request_id="0", prompt_token_ids=r.prompt_token_ids, params=r.params,
                system_tokens=83)
        for r in requests
    ]  # fmt: skip
    first = engine_with(tiny("qwen3_5"), tmp_path)
    run(first, requests[:1])
    first.close()
    again = engine_with(tiny("qwen3_5"), tmp_path)
    found = run(again, requests[1:])
    assert same(run(make_engine(tiny("qwen3_5")), requests[1:]), found)
    assert found[2]["0"] == len(other) - 83


def test_a_conversation_goes_on_after_a_restart(tiny, tmp_path):
    goes_on_after_restarts(tiny("qwen3_5"), tmp_path)


@pytest.mark.parametrize("num_states", [3, 64])
def test_a_second_job_computes_its_own_tokens(tiny, tmp_path, num_states):
    """Of each group the first prompt begins at the state at the end of its prefix."""
    rng = np.random.default_rng(1)
    heads = [[3 + i, *rng.integers(3, 270, 64 + i).tolist()] for i in range(5)]
    prompts = [head + rng.integers(3, 270, 20).tolist() for head in heads for _ in range(4)]
    requests = [
        Request(
            request_id=str(i),
            prompt_token_ids=prompt,
            params=SamplingParams(max_tokens=4, temperature=0, ignore_eos=True),
            group=i // 4,
            group_prefix_tokens=65 + i // 4,
            branches=(65 + i // 4,),
            awaited_branches=int(i % 4 < 3),
        )
        for i, prompt in enumerate(prompts)
    ]
    computed = computed_again(
        requests, lambda: engine_with(tiny("qwen3_5"), tmp_path, num_states=num_states)
    )
    assert computed == 20 * len(prompts)
    states = {path.name.partition(".")[0] for path in tmp_path.glob("*-state.*")}
    assert len(states) == len(heads)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("which", ["*-state.safetensors", "*[0-9].safetensors"])
def test_a_damaged_file_is_a_miss(tiny, tmp_path, which, damage):
    """A state is of no use without the keys and values before it, nor are these without it."""
    prompts = long_prompts(3, head=1)
    first = engine_with(tiny("qwen3_5"), tmp_path)
    answers = run(first, requests_for(prompts))
    first.close()
    for path in sorted(tmp_path.glob(which)):
        damage(path)
    again = engine_with(tiny("qwen3_5"), tmp_path)
    found = run(again, requests_for(prompts))
    again.check()
    again.close()
    assert same(answers, found)
    assert sum(found[2].values()) == 3 * 130


def test_another_model_s_states_are_not_used(tiny, tmp_path):
    prompt = long_prompts(1)[0]
    for identity in ("one", "two"):
        engine = engine_with(tiny("qwen3_5"), tmp_path, identity=identity)
        assert run(engine, requests_for([prompt]))[2]["0"] == len(prompt)
        engine.close()


def test_a_copy_that_fails_is_computed(tiny, monkeypatch):
    engine = engine_with(tiny("qwen3_5"), num_states=3)
    prompts = long_prompts(4, head=1)
    answers = [run(engine, requests_for([prompt])) for prompt in prompts]

    def failing(*_):
        raise RuntimeError("no memory")

    monkeypatch.setattr(engine.tiers.stores.copies, "_into", failing)
    for prompt, want in zip(prompts, answers, strict=True):
        assert same(run(engine, requests_for([prompt])), want)
        engine.check()


class Unhurried:
    """A copy that ends when somebody waits for it."""

    def __init__(self, copied):
        self.wait = self.join = copied.wait

    def done(self):
        return False

    def go_on(self):
        pass

    hurry = go_on


def begin_copy(engine, requests, monkeypatch):
    """Have the first of two prompts with 83 tokens in common wait for its state in a step.

    Returns:
        evicts snapshots of runs.
    """
    states, copies = engine.cache.states, engine.tiers.stores.copies
    run(engine, requests[:1])

    def evict(has_gone):
        for one in [one for one in states.runs if has_gone(one)]:
            states.on_evict(one)
            states.drop(one)

    evict(lambda one: one.end > 83)
    into = copies.into
    monkeypatch.setattr(copies, "into", lambda parts: Unhurried(into(parts)))
    [beside] = requests_for([[5, 6, 7]], max_tokens=9)
    engine.add_request(replace(beside, request_id="beside"))  # steps do not wait for copies
    engine.step()
    engine.add_request(requests[0])
    engine.step()
    return evict


def two_requests():
    one, other = requests_for(long_prompts(2, head=83))
    return [replace(one, system_tokens=83), replace(other, system_tokens=83)]


def test_a_slot_that_has_no_rows_becomes_no_snapshot(tiny, monkeypatch):
    """Of a sequence that is preempted while its state is copied, when the snapshot that it would
    have begun at is gone."""
    plain, engine = make_engine(tiny("qwen3_5")), engine_with(tiny("qwen3_5"))
    requests = two_requests()
    evict = begin_copy(engine, requests, monkeypatch)
    evict(lambda one: one.end == 83)
    engine.scheduler.room.preempt_all()
    engine.check()
    assert 83 not in [one.end for one in engine.cache.states.runs]
    while engine.has_unfinished():
        engine.step()
    for request in requests:
        assert same(run(engine, [request]), run(plain, [request]))


def test_what_gives_way_to_a_copied_state_is_saved_before_sleep(tiny, monkeypatch):
    """Its slot's memory is released then."""
    engine = engine_with(tiny("qwen3_5"), num_states=3)
    begin_copy(engine, two_requests(), monkeypatch)
    assert engine.cache.states.num_free == 0
    saved = engine.tiers.prefixes.num_pieces
    engine.weights.sleep(1)
    at_sleep = engine.tiers.prefixes.num_pieces
    assert at_sleep > saved
    engine.weights.wake_up()
    engine.tiers.prefixes.save_evicted()
    assert engine.tiers.prefixes.num_pieces == at_sleep


def make_with_tiers(folder, path, **options):
    engine = make_engine(path, **options)
    disk = DiskStore(folder, 2 * MIB, "model")
    engine.keep_below("model", host=HostStore(MIB // 2), disk=disk)
    return engine


@pytest.mark.parametrize("seed", seeds(2, 4))
def test_traffic(tiny, tmp_path, seed, monkeypatch):
    """With n, scores, jobs, branches, aborts and preemptions, over tiers that forget."""
    monkeypatch.setattr("onestem.engine.schedule.states.FAR_TOKENS", 24)
    options = {"num_pages": [24, 4096][seed % 2], "num_states": 6, "max_step_tokens": 48}

    def make(path, **given):
        return make_with_tiers(tmp_path, path, **given)

    traffic = Traffic(tiny("qwen3_5"), seed, make, **options)
    traffic.run(150)
    stats = traffic.engine.tiers.stats
    assert stats.saved_tokens > 0
    traffic.engine.close()


@pytest.mark.steps_fail
def test_steps_that_fail(tiny, tmp_path, monkeypatch):
    def make(path, **given):
        return make_with_tiers(tmp_path, path, **given)

    traffic = Traffic(tiny("qwen3_5"), 1, make, num_states=6, num_pages=64)
    traffic.run(120, failing=True)
    traffic.engine.close()


OPTIONS = {"device": "cpu", "dtype": "float32", "kv_memory": "16MiB"}


def test_options(tiny, tmp_path):
    prompt, greedy = long_prompts(1)[0], SamplingParams(max_tokens=4, temperature=0)
    found = []
    for tiers in ({}, {"host_kv": "8MiB", "disk_kv": tmp_path}, {"disk_kv": tmp_path}):
        with LLM(tiny("qwen3_5"), **OPTIONS, **tiers) as llm:
            found += llm.generate([prompt], greedy)
    assert len({tuple(one.outputs[0].token_ids) for one in found}) == 1
    assert [one.metrics.num_computed_tokens for one in found] == [130, 130, 1]
    with pytest.raises(ConfigError, match="host_kv is 64KiB, and 512 tokens and a recurrent state"):
        LLM(tiny("qwen3_5"), **OPTIONS, host_kv="64KiB")
