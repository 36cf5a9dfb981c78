"""Models whose layers keep a recurrent state: where a state begins changes no answer."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from onestem.build import kv_sizes
from onestem.errors import ConfigError, RequestError
from onestem.llm import LLM
from onestem.models.config import ModelConfig
from onestem.options import EngineOptions
from onestem.planner import RunningOrder, plan_job, planned
from onestem.request import Request, SamplingParams
from onestem.scores import completion_tree
from onestem.server.objects.schemas import Schemas
from tests.engine.harness import (
    TOLERANCE,
    answer,
    assert_idle,
    check,
    make_engine,
    oracle_greedy,
    oracle_logprobs,
    record_logprobs,
    requests_for,
    shared_prompts,
    watch_logits,
)
from tests.soak import seeds

# Of some thousand rows: where a head's result is near zero, its norm makes much of rounding. A row
# that a state lacks moves them by more than 1e-2.
OFTEN = 5 * TOLERANCE

SHARES = ("full", "storage", "off")


@pytest.mark.parametrize("num_states", [1, 2, 3, 5])
@pytest.mark.parametrize("share", SHARES)
def test_few_states(tiny, expected, share, num_states):
    engine = check(
        tiny("qwen3_5"), expected("qwen3_5"), share=share, num_states=num_states, max_step_tokens=48
    )
    assert engine.cache.states.num_snapshots <= num_states


def test_more_sequences_than_states(tiny):
    engine = make_engine(tiny("qwen3_5"), num_states=3)
    (request,) = requests_for([[5, 6, 7]], n=4)
    with pytest.raises(RequestError, match="n is 4, and KV memory has recurrent states for 2 seq"):
        engine.add_request(request)


def test_a_conversation_goes_on_from_its_answers(tiny):
    """Each turn computes what is new, and the answer's last token."""
    engine, tokens = make_engine(tiny("qwen3_5")), shared_prompts()[7]
    for turn in range(4):
        (request,) = requests_for([tokens], max_tokens=20)
        output = answer(engine, [request])["0"]
        new = len(tokens) if turn == 0 else 31
        assert output.metrics.num_computed_tokens == new
        assert output.metrics.num_cached_tokens == len(tokens) - new
        tokens = tokens + output.outputs[0].token_ids + shared_prompts(turn + 5)[7][:30]


def test_calls_of_one_prompt_go_on_from_one_another(tiny):
    """Nothing is known of the next call, as in a server."""
    params, tokens = (
        SamplingParams(max_tokens=20, temperature=0, ignore_eos=True),
        Traffic.some(80, 0),
    )
    with LLM(tiny("qwen3_5"), device="cpu", dtype="float32", kv_memory="16MiB") as llm:
        for turn in range(3):
            (output,) = llm.generate([tokens], params)
            assert output.metrics.num_cached_tokens == (turn and len(tokens) - 31)
            tokens = tokens + output.outputs[0].token_ids + Traffic.some(30, turn + 1)


def test_calls_of_several_prompts_go_on_from_the_header_of_those_before(tiny):
    """A job's snapshot is kept after it, as long as no other is worth more."""
    head, params = Traffic.some(80, 0), SamplingParams(max_tokens=4, temperature=0)
    with LLM(tiny("qwen3_5"), device="cpu", dtype="float32", kv_memory="16MiB") as llm:
        for call in range(3):
            own = [[3 + 8 * call + n, *Traffic.some(20, n)] for n in range(8)]
            found = llm.generate([head + one for one in own], params)
            computed = sum(output.metrics.num_computed_tokens for output in found)
            assert computed == (80 if call == 0 else 0) + 8 * 21
            alone = llm.generate([head + Traffic.some(9, call)], params)[0]
            assert alone.metrics.num_computed_tokens == 9


def test_the_second_of_two_equal_prompts_computes_its_last_token(tiny):
    engine, prompt = make_engine(tiny("qwen3_5")), Traffic.some(60, 0)
    seen = record_logprobs(engine)
    computed = [
        answer(engine, requests_for([prompt]))["0"].metrics.num_computed_tokens for _ in range(3)
    ]
    assert computed == [60, 1, 1]
    want = oracle_logprobs(tiny("qwen3_5"), prompt)[-1]
    assert (seen["0", 0, 59] - want).abs().max() < TOLERANCE


def test_the_second_prompt_goes_on_from_system_and_tools(tiny):
    """Where the first one's template says that they end."""
    engine, system = make_engine(tiny("qwen3_5")), Traffic.some(60, 0)
    for turn in range(3):
        (request,) = requests_for([system + Traffic.some(30, turn + 1)])
        request = dataclasses.replace(request, system_tokens=60)
        output = answer(engine, [request])["0"]
        assert output.metrics.num_computed_tokens == (30 if turn else 90)


@pytest.mark.parametrize(("prompt", "most", "n"), [(60, 68, 1), (126, 2, 2), (116, 3, 3)])
def test_answers_may_fill_kv_memory(tiny, prompt: int, most: int, n: int):
    """Alone a sequence is one run: parted where system and tools end, or where others fork from
    it, it would take a page more."""
    wanted = []
    for num_pages in (64, 8):
        engine = make_engine(tiny("qwen3_5"), num_pages=num_pages)
        (request,) = requests_for([Traffic.some(prompt, 0)], max_tokens=most, n=n)
        output = answer(engine, [dataclasses.replace(request, system_tokens=37)])["0"]
        wanted.append([one.token_ids for one in output.outputs])
    assert [len(token_ids) for token_ids in wanted[0]] == [most] * n
    assert wanted[0] == wanted[1]
    assert output.metrics.num_preempted > 0


def test_the_third_prompt_begins_where_the_first_two_part(tiny):
    engine, prompts = make_engine(tiny("qwen3_5")), shared_prompts()[:3]
    computed = [
        answer(engine, requests_for([prompt]))["0"].metrics.num_computed_tokens
        for prompt in prompts
    ]
    assert computed == [len(prompts[0]), len(prompts[1]), len(prompts[2]) - 54]


@pytest.mark.parametrize("step", [64, 192, 512])
def test_prompts_that_come_together_compute_what_they_share_once(tiny, step):
    """The first one's chunk ends where the next in the queue leaves it; and if that does not wait
    there yet, the chunk is cut where it does, in the same step."""
    head, *own = (Traffic.some(n, n) for n in (160, *range(60, 76)))
    engine, prompts = make_engine(tiny("qwen3_5"), max_step_tokens=step), [head + x for x in own]
    if step == 512:
        engine.scheduler.states.upcoming = lambda: None
    seen = record_logprobs(engine)
    answer(engine, requests_for(prompts))
    # Two may go on with the same few tokens.
    assert 0 <= len(head) + sum(map(len, own)) - engine.stats.processed_prompt_tokens < 3
    for number, prompt in enumerate(prompts):
        want = oracle_logprobs(tiny("qwen3_5"), prompt)[-1]
        assert (seen[str(number), 0, len(prompt) - 1] - want).abs().max() < TOLERANCE


def test_a_prompt_without_what_a_template_writes_before_an_answer(tiny):
    """Each turn leaves the one before it there: it computes no more than what is new."""
    engine, tokens, new = make_engine(tiny("qwen3_5")), Traffic.some(50, 0), 50
    for turn in range(5):
        (request,) = requests_for([[*tokens, 5, 6]], max_tokens=20)
        request = dataclasses.replace(request, prefilled_tokens=2)
        output = answer(engine, [request])["0"]
        assert output.metrics.num_computed_tokens == new + 2
        assert output.reuse is None or output.reuse.state_at == len(tokens) - new
        tokens += output.outputs[0].token_ids + Traffic.some(30, turn + 1)
        new = 50


def test_a_long_prompt_leaves_snapshots_on_its_way(tiny, monkeypatch):
    """Where its chunks end, as far apart as asked: so the second prompt need not begin again."""
    monkeypatch.setattr("onestem.engine.schedule.states.FAR_TOKENS", 100)
    engine, text = make_engine(tiny("qwen3_5"), max_step_tokens=64), Traffic.some(400, 0)
    answer(engine, requests_for([text]))
    assert engine.cache.states.num_snapshots == 5  # at 128, 256, 384, and both ends
    prompt = text[:300] + Traffic.some(20, 1)
    seen = record_logprobs(engine)
    output = answer(engine, requests_for([prompt]))["0"]
    assert output.metrics.num_computed_tokens == len(prompt) - 256
    assert (output.reuse.matched_tokens, output.reuse.state_at) == (300, 256)
    want = oracle_logprobs(tiny("qwen3_5"), prompt)[-1]
    assert (seen["0", 0, len(prompt) - 1] - want).abs().max() < TOLERANCE


def planned_prompts(groups=4, parts=1, members=16):
    """Prompts of groups, whose prefixes part again, and what all of them together have once."""
    head, prompts, distinct = Traffic.some(30, 0), [], 30
    for group in range(groups):
        document = head + Traffic.some(100, group + 1)
        distinct += 100
        for part in range(parts):
            prefix = document + (Traffic.some(20, 100 + part) if parts > 1 else [])
            distinct += len(prefix) - len(document)
            for member in range(members):
                prompts.append(prefix + Traffic.some(10, 1000 + member))
                distinct += 10
    random.Random(0).shuffle(prompts)
    return prompts, distinct


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_states": 24},
        {"num_pages": 60},
        {"max_step_tokens": 64},
        {"max_step_tokens": 64, "max_num_seqs": 5},
    ],
)
@pytest.mark.parametrize("parts", [1, 2])
def test_a_planned_job_takes_snapshots_where_prompts_part(tiny, parts, options):
    prompts, distinct = planned_prompts(parts=parts)
    engine = make_engine(tiny("qwen3_5"), **{"num_states": 100, **options})
    order = RunningOrder(plan_job([np.array(prompt, np.int32) for prompt in prompts]))
    states, held = engine.cache.states, []
    decide = engine.scheduler.decide

    def counted(draft, rows):
        held.append(states.num_snapshots)
        decide(draft, rows)

    engine.scheduler.decide = counted
    found = list(engine.run(planned(requests_for(prompts, max_tokens=4), order)))
    for output in found[:: len(found) // 8]:
        prompt = prompts[int(output.request_id)]
        assert output.outputs[0].token_ids == oracle_greedy(tiny("qwen3_5"), prompt, 4)
    # Groups may begin with the same few tokens, which are no branch.
    assert distinct <= engine.stats.processed_prompt_tokens <= distinct + 16
    branches = 1 + 4 * (1 if parts == 1 else 3)
    assert states.num_taken == branches
    assert max(held) <= branches
    assert states.num_idle == states.num_slots
    assert_idle(engine)


def test_nothing_is_awaited_of_plans_that_have_ended(tiny):
    """Of scored prompts, the first one's snapshot ends a token earlier; and streams are closed."""
    options = {"device": "cpu", "dtype": "float32", "kv_memory": "16MiB", "max_num_seqs": 2}
    with LLM(tiny("qwen3_5"), **options) as llm:
        states, held = llm.engine.cache.states, []
        decide = llm.engine.scheduler.decide

        def counted(draft, rows):
            held.append(states.num_slots - states.num_idle)
            decide(draft, rows)

        llm.engine.scheduler.decide = counted
        prompts = [Traffic.some(40, seed) for seed in range(40)]
        llm.score(prompts, [[[5] * 3, [6] * 3]] * len(prompts))
        assert max(held) <= 5
        params = SamplingParams(max_tokens=9, ignore_eos=True)
        stream = llm.stream([prompts[0] + Traffic.some(9, seed) for seed in range(300)], params)
        next(stream)
        stream.close()
        assert states.num_idle == states.num_slots


def test_nothing_is_awaited_of_a_job_that_is_removed(tiny):
    engine, (prompts, _) = make_engine(tiny("qwen3_5"), max_num_seqs=3), planned_prompts()
    order = RunningOrder(plan_job([np.array(prompt, np.int32) for prompt in prompts]))
    engine.requests.add_job("job", planned(requests_for(prompts, max_tokens=4), order))
    states = engine.cache.states
    while states.num_snapshots == 0:
        engine.step()
    engine.requests.remove_job("job")
    assert not any(run.is_branch for run in states.runs)
    assert_idle(engine)


def test_snapshots_of_a_job_are_those_that_are_still_needed(tiny):
    """Groups run one after the other: the header's, and that of the group that runs."""
    prompts, _ = planned_prompts()
    engine = make_engine(tiny("qwen3_5"), max_num_seqs=3)
    order = RunningOrder(plan_job([np.array(prompt, np.int32) for prompt in prompts]))
    states, decide = engine.cache.states, engine.scheduler.decide

    def checked(draft, rows):
        running = {one.state.request.group for one in engine.scheduler.running}
        assert sum(run.is_branch for run in states.runs) <= 2 + len(running)
        decide(draft, rows)

    engine.scheduler.decide = checked
    list(engine.run(planned(requests_for(prompts, max_tokens=4), order)))


def test_an_abort_before_forks_gives_their_slots_back(tiny):
    engine = make_engine(tiny("qwen3_5"), num_states=4, max_step_tokens=8)
    (request,) = requests_for([Traffic.some(40, 0)], n=3)
    for _ in range(3):
        engine.add_request(request)
        engine.step()
        engine.abort("0")
        assert engine.scheduler.states.promised == 0
    answer(engine, [request])


class Traffic:
    """Random requests, all of whose rows are compared with the oracle's."""

    def __init__(self, path, seed, make=make_engine, **options):
        self.path, self.chance = path, random.Random(seed)
        self.engine = make(path, **options)
        self.rows: list[tuple[object, int, torch.Tensor]] = []
        watch_logits(self.engine, lambda *row: self.rows.append(row))
        self.names = map(str, count())
        self.heads = [self.draw(n) for n in (20, 40)]

    @staticmethod
    def some(length, seed):
        chance = random.Random(seed)
        return [chance.randrange(3, 270) for _ in range(length)]

    def draw(self, length):
        return [self.chance.randrange(3, 270) for _ in range(length)]

    def request(self):
        prompt, kind = [], self.chance.random()
        if self.chance.random() < 0.8:
            prompt = list(self.chance.choice(self.heads))
            prompt = prompt[: self.chance.choice([len(prompt), 33, 17])]
        prompt += self.draw(self.chance.randrange(1, 30))
        params = SamplingParams(
            max_tokens=self.chance.randrange(1, 12),
            temperature=self.chance.choice([0, 1.0]),
            n=self.chance.choice([1, 1, min(3, self.engine.cache.states.most_sequences)]),
            ignore_eos=True,
            seed=1,
        )
        extra = {}
        if kind < 0.2:
            params, extra = params.replace(n=1), {"score_from": self.chance.randrange(1, 20)}
        elif kind < 0.4:
            _, paths = completion_tree([self.draw(length) for length in (1, 4, 4)])
            extra["paths"] = tuple(paths)
        if self.chance.random() < 0.4:
            extra["priority"] = "job"
        if self.chance.random() < 0.2:
            ends = {self.chance.randrange(1, len(prompt) + 1) for _ in range(2)}
            extra["branches"] = tuple(sorted(ends))
            extra["awaited_branches"] = self.chance.randrange(3)
        if self.chance.random() < 0.2:
            extra["prefilled_tokens"] = min(3, len(prompt) - 1)
        if self.chance.random() < 0.2:
            extra["system_tokens"] = self.chance.randrange(len(prompt) + 1)
        if self.chance.random() < 0.3 and len(prompt) < 50:
            self.heads.append(prompt)
        name = next(self.names)
        return Request(request_id=name, prompt_token_ids=prompt, params=params, **extra)

    def fail(self):
        """Let the next step fail after its rows, as a device's results may."""
        launcher, sample = self.engine.launcher, self.engine.launcher.sample

        def broken(*args):
            launcher.sample = sample
            raise RuntimeError("broken")

        launcher.sample = broken

    def run(self, steps, *, failing=False):
        engine, ids = self.engine, []
        for _ in range(steps):
            if failing and self.chance.random() < 0.05:
                self.fail()
            if self.chance.random() < 0.35:
                request = self.request()
                ids.append(request.request_id)
                engine.add_request(request)
            if ids and self.chance.random() < 0.04:
                engine.abort(self.chance.choice(ids))
            if engine.has_unfinished():
                engine.step()
            engine.check()
        while engine.has_unfinished():
            engine.step()
            engine.check()
        assert_idle(engine)
        assert engine.scheduler.states.promised == 0
        known = {}
        for sequence, index, values in self.rows:
            if sequence.finish_reason == "error":
                continue
            ids = tuple(sequence.tokens)
            if ids not in known:
                known[ids] = oracle_logprobs(self.path, ids)
            assert (values - known[ids][index]).abs().max() < OFTEN


@pytest.mark.parametrize("share", [0, 1, -1, float("nan"), "0.5"])
def test_a_share_of_memory_is_between_none_and_all(share):
    with pytest.raises(ConfigError, match="expected a number above 0 and below 1"):
        EngineOptions(state_share=share)


@pytest.mark.parametrize(("share", "states"), [(0.5, 5), (0.8, 8), (0.2, 2)])
def test_a_share_of_kv_memory_is_for_states(share, states):
    options = EngineOptions(state_share=share, page_size=4)
    assert kv_sizes(10_000, options, 10, 1000) == ((10_000 - states * 1000) // 40, states)
    with pytest.raises(ConfigError, match=f"of which state_share, {share}, is for recurrent"):
        kv_sizes(2000, options, 10, 1000)


def test_modules_are_refused(tiny):
    config = ModelConfig.from_directory(tiny("qwen3_5"))
    store = SimpleNamespace(list_named=lambda kind: [])
    schemas = Schemas(SimpleNamespace(), None, config, store)
    with pytest.raises(RequestError, match="cannot be put together of modules"):
        asyncio.run(schemas.put(SimpleNamespace(name=""), "places", {"pml": "<schema/>"}))


def test_a_request_that_is_asked_for_again_is_counted_once(tiny):
    """As by a dealer one of whose engines died."""
    prompts = [[*Traffic.some(40, 0), n] for n in range(3, 6)]
    order = RunningOrder(plan_job([np.array(prompt, np.int32) for prompt in prompts]))
    source = planned(requests_for(prompts), order)
    found = [source.request(position) for position in (0, 0, 0, 1, 2, 1)]
    assert [one.awaited_branches for one in found] == [1, 1, 1, 1, 0, 0]
    source.has_branches = False
    assert source.request(0).branches is None


@pytest.mark.steps_fail
@pytest.mark.parametrize("seed", seeds(2, 3))
def test_steps_that_fail(tiny, seed):
    Traffic(tiny("qwen3_5"), seed, num_states=8, num_pages=64).run(120, failing=True)


@pytest.mark.parametrize("seed", seeds(3, 6))
def test_traffic(tiny, seed, monkeypatch):
    monkeypatch.setattr("onestem.engine.schedule.states.FAR_TOKENS", 24)
    sizes = [(4096, 64), (24, 6), (40, 4)][seed % 3]
    options = {"num_pages": sizes[0], "num_states": sizes[1], "page_size": [16, 4][seed % 2]}
    Traffic(tiny("qwen3_5"), seed, max_step_tokens=[48, 11][seed % 2], **options).run(150)
