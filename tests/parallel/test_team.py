"""Processes that hold a model together answer as one does."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial

import pytest
import torch

import onestem.parallel.team as teams
from onestem import LLM, SamplingParams
from onestem.engine.engine import Engine
from onestem.errors import ConfigError, RankError, WeightsError
from onestem.parallel import Team
from onestem.pml import Module, Schema
from tests.engine.harness import (
    TOLERANCE,
    answer,
    make_engine,
    record_logprobs,
    requests_for,
    shared_prompts,
)
from tests.engine.test_states import Traffic
from tests.parallel.teams import CPU, engine_of, lent_to_llms
from tests.soak import soaked

OPTIONS = {"device": "cpu", "dtype": "float32", "kv_memory": "2MiB", "seed": 3}
# Windows, experts with sinks, ALiBi, softcaps with two RoPE bases, states, states and experts.
FAMILIES = ["mistral", "gpt_oss", "falcon_rw", "gemma3", "qwen3_5", "qwen3_next"]


def check_family(team: Team, family, tiny, expected, **options) -> None:
    """Greedy tokens and each log-probability as transformers has them."""
    tokens, logprobs = expected(family)
    engine = engine_of(team, tiny(family), **options)
    seen = record_logprobs(engine)
    outputs = answer(engine, requests_for(shared_prompts(), max_tokens=len(tokens[0])))
    for i, ids in enumerate(shared_prompts()):
        assert outputs[str(i)].outputs[0].token_ids == tokens[i]
        for step in range(len(tokens[i])):
            got, want = seen[str(i), 0, len(ids) - 1 + step], logprobs[i][len(ids) - 1 + step]
            assert (got - want).abs().max() < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_families_on_two(two, tiny, expected, family):
    check_family(two, family, tiny, expected, max_step_tokens=13)


def test_four(forked_teams, tiny, expected):
    team = Team(4, CPU)
    check_family(team, "llama", tiny, expected)
    check_family(team, "llama_mha_tied", tiny, expected, page_size=4, max_step_tokens=31)
    team.close()


@pytest.mark.parametrize("form", ["int8", soaked("fp8"), soaked("int4")])
def test_rounded_weights(two, form):
    """Rounding is that of the whole model: no answer differs."""
    prompts = [f"{first} {second}" for first in "ab" for second in ("a", "dog", "1", "x y")]
    greedy = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    with LLM(**OPTIONS, quantization=form) as llm:
        alone = told(llm.generate(prompts, greedy))
    with lent_to_llms(two), LLM(**OPTIONS, quantization=form, tensor_parallel_size=2) as llm:
        assert told(llm.generate(prompts, greedy)) == alone


def test_memory_for_few(two, tiny):
    """Jobs that are preempted are computed again, on each rank."""
    options = {"num_pages": 16, "page_size": 4, "max_step_tokens": 64}
    job = requests_for([[3 + i] * 8 for i in range(8)], max_tokens=8)
    late = replace(requests_for([[7, 6, 5] * 9], max_tokens=3)[0], request_id="late")

    def run(engine: Engine) -> dict[str, list[int]]:
        engine.requests.add_job("job", job)
        for _ in range(3):
            engine.step()
        engine.add_request(late)
        outputs = {}
        while engine.has_unfinished():
            outputs |= {output.request_id: output for output in engine.step()}
            engine.check()
        assert engine.stats.num_preempted > 0
        return {name: output.outputs[0].token_ids for name, output in outputs.items()}

    alone = run(make_engine(tiny("llama"), **options))
    assert run(engine_of(two, tiny("llama"), **options)) == alone


@pytest.mark.parametrize("seed", [0, soaked(1), soaked(2)])
def test_traffic_of_states(two, tiny, seed, monkeypatch):
    """Forks, snapshots and their copies, evictions and preemptions, on each rank."""
    monkeypatch.setattr("onestem.engine.schedule.states.FAR_TOKENS", 24)
    options = {"num_pages": 24, "num_states": 6, "max_step_tokens": 48}
    traffic = Traffic(tiny("qwen3_5"), seed, partial(engine_of, two), **options)
    traffic.run(150)
    assert traffic.engine.cache.states.num_taken > 0


@pytest.fixture(scope="module")
def alone():
    with LLM(**OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def llm(two):
    with lent_to_llms(two), LLM(**OPTIONS, tensor_parallel_size=2) as made:
        yield made


DOCUMENT = "The river rises in the hills, and runs through the town to the sea. " * 4


def told(outputs) -> list:
    """Tokens, and log-probabilities beside them."""
    return [
        [(one.token_ids, one.finish_reason, _values(one.logprobs)) for one in output.outputs]
        for output in outputs
    ]


def _values(logprobs) -> list | None:
    return logprobs and [{k: pytest.approx(v.logprob, abs=1e-4) for k, v in entry.items()}
                         for entry in logprobs]  # fmt: skip


def test_all_kinds_of_requests(llm, alone):
    """Shared prefixes, several answers, seeds, penalties, log-probabilities, and a grammar."""
    params = [
        SamplingParams(max_tokens=12, temperature=0),
        SamplingParams(max_tokens=12, n=3, seed=7),
        SamplingParams(max_tokens=9, seed=1, top_p=0.9, top_k=50, repetition_penalty=1.2),
        SamplingParams(max_tokens=8, temperature=0, logprobs=2, prompt_logprobs=1),
        SamplingParams(choices=["a river", "a road"], seed=5),
    ]
    prompts = [DOCUMENT + f"Question {i}: what is it?" for i in range(len(params))]
    want, found = alone.generate(prompts, params), llm.generate(prompts, params)
    assert told(want) == told(found)
    for a, b in zip(want[3].prompt_logprobs, found[3].prompt_logprobs, strict=True):
        assert (
            a is None
            if b is None
            else _values([a]) == [{token: entry.logprob for token, entry in b.items()}]
        )
    assert llm.engine.stats.steps > 0
    llm.engine.check()


def test_a_fork_is_refused_and_harms_nobody(llm, alone):
    greedy = SamplingParams(max_tokens=5, temperature=0)
    child = os.fork()
    if not child:
        try:
            llm.generate(DOCUMENT, greedy)
        except RankError as error:
            os._exit(7 if "fork" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert told(llm.generate(DOCUMENT, greedy)) == told(alone.generate(DOCUMENT, greedy))


def test_streams_and_aborts(llm, alone):
    stream = llm.stream([DOCUMENT, DOCUMENT + "b"], SamplingParams(max_tokens=30, temperature=0))
    for _ in range(5):
        next(stream)
    stream.close()
    greedy = SamplingParams(max_tokens=5, temperature=0)
    assert told(llm.generate(DOCUMENT, greedy)) == told(alone.generate(DOCUMENT, greedy))


def test_scores(llm, alone):
    completions = [[" north", " to the sea"], [" it is"]]
    prompts = [DOCUMENT, "Once"]
    for mine, theirs in zip(
        llm.score(prompts, completions), alone.score(prompts, completions), strict=True
    ):
        assert [one.logprob for one in mine] == pytest.approx([one.logprob for one in theirs])


def test_modules(llm, alone):
    schema = Schema("s", ["You know:\n", Module("a", ["Anna is 12. "]), Module("b", ["Ben. "])])
    prompts = ['<prompt schema="s"><a/><b/>Who?</prompt>', '<prompt schema="s"><b/>Who?</prompt>']
    greedy = SamplingParams(max_tokens=6, temperature=0)
    for each in (llm, alone):
        each.add_schema(schema)
    for isolation in ("anchored", "isolated"):
        found = llm.generate_pml(prompts, greedy, isolation=isolation)
        assert told(found) == told(alone.generate_pml(prompts, greedy, isolation=isolation))


def test_sleep_and_other_weights(llm, alone):
    greedy = SamplingParams(max_tokens=8, temperature=0)
    before = told(llm.generate(DOCUMENT, greedy))
    llm.sleep(1)
    llm.wake_up()
    assert llm.reset_prefix_cache()
    assert told(llm.generate(DOCUMENT, greedy)) == before
    named = [(name, None) for name in alone.decoder.places]
    shape = dict(_shapes(alone))
    generator = torch.Generator().manual_seed(0)
    changed = {
        name: torch.randn(shape[name], generator=generator) * 0.02 + shape[name].count(0)
        for name, _ in named
        if "norm" not in name
    }
    for each in (llm, alone):
        assert each.update_weights(changed.items()) == 1
    found = told(llm.generate(DOCUMENT, greedy))
    assert found == told(alone.generate(DOCUMENT, greedy)) != before
    with pytest.raises(WeightsError, match="is given twice"):
        llm.update_weights(2 * list(changed.items()))


def _shapes(llm):
    from onestem.models.tensors import Tensors

    return Tensors(llm.config).shapes.items()


def test_what_is_refused_starts_nothing(monkeypatch):
    monkeypatch.setattr("onestem.parallel.team.start_rank", None)
    with pytest.raises(ConfigError, match="does not divide over 7 devices: tensor"):
        LLM(**OPTIONS, tensor_parallel_size=7)


def test_fewer_gpus_than_ranks(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr("onestem.parallel.team.start_rank", None)
    with pytest.raises(ConfigError, match="size is 4, there are 2 GPUs from cuda:1 on: lower it"):
        Team(4, torch.device("cuda:1"))


@pytest.fixture
def broken(tmp_path, tiny):
    """A model without weights."""
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "config.json").write_bytes((tiny("llama") / "config.json").read_bytes())
    return folder


@pytest.mark.parametrize("rank_0", ["sees it too", "waits for rank 1"])
def test_an_error_of_a_rank_that_loads(forked_teams, monkeypatch, broken, rank_0):
    """It is told as of one process, and all end, whatever they wait for."""
    team = Team(2, CPU)
    (member,) = team.members
    if rank_0 == "waits for rank 1":
        monkeypatch.setattr(
            teams, "load_decoder", lambda path, *, ranks, **options: ranks.gather(torch.zeros(1, 1))
        )
    with pytest.raises(WeightsError, match="broken"):
        engine_of(team, broken)
    assert member.process.wait() == 0


def test_an_error_of_rank_0_that_loads(forked_teams, monkeypatch, tiny):
    def failing(*arguments, **options):
        raise WeightsError("this file cannot be read")

    team = Team(2, CPU)
    (member,) = team.members
    monkeypatch.setattr(teams, "load_decoder", failing)
    with pytest.raises(WeightsError, match="this file cannot be read"):
        # Rank 1 waits for the greatest values of the other parts.
        team.load_decoder(tiny("llama"), dtype=torch.float32, device=CPU, quantization="fp8")
    assert member.process.wait() == 0
