"""What a job was predicted to take, and what came true."""

from __future__ import annotations

import json

import numpy as np
import pytest

from onestem.batch import ASSUMED_TOKENS, OpenEnded, expected_outputs
from onestem.cost import Work, named_rates
from onestem.cost.kept import keep_rates, known_rates
from onestem.errors import ConfigError
from onestem.forecasts import JobWatch, Target
from onestem.jobs import run_file
from onestem.llm import LLM
from onestem.planner import plan_job
from tests.engine.tiny_tokenizers import make_byte_level_tokenizer
from tests.models.tiny import VOCAB_SIZE, make_tiny

MAX_TOKENS = 12
STOPS = list(range(0, VOCAB_SIZE, 2))


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    path = make_tiny("llama", tmp_path_factory.mktemp("forecast") / "llama")
    make_byte_level_tokenizer(path, vocab_size=VOCAB_SIZE)
    return LLM(path, device="cpu", kv_memory="4MiB", max_step_tokens=32)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def run(llm, folder):
    """A job of 12 lines, most of which end early."""
    lines = [
        {
            "custom_id": f"q{i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {
                "prompt": f"All of these begin alike, and then they differ: {i % 3} {i:02}",
                "max_tokens": MAX_TOKENS,
                "temperature": 1,
                "seed": i,
                "stop_token_ids": STOPS,
            },
        }
        for i in range(12)
    ]
    source = folder / "in.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    llm.engine.cache.clear()
    llm.engine.reset_stats()
    watch = JobWatch.of_llm(llm)
    return run_file(llm, source, folder / "out.jsonl", watch=watch), watch


def test_nothing_is_predicted_where_no_rates_are_kept(llm, tmp_path, cache):
    summary, watch = run(llm, tmp_path)
    assert watch.verdict(1.0) is None
    assert summary.exit_code == 0
    assert not cache.exists()


def test_a_verdict_tells_lengths_from_speed(llm, tmp_path, cache):
    rates = named_rates("h200")
    keep_rates(llm.config, llm.dtype, llm.device, rates)
    assert known_rates(llm.config, llm.dtype, llm.device) == rates
    summary, watch = run(llm, tmp_path)
    verdict, stats = watch.verdict(2.0), llm.engine.stats
    assert verdict is not None
    prompts = stats.processed_prompt_tokens
    assert verdict.predicted.rows == prompts + 12 * (MAX_TOKENS - 1)
    assert verdict.at_lengths.rows == verdict.rows == prompts + summary.num_output_tokens - 12
    assert verdict.at_lengths.steps == verdict.steps == stats.steps
    assert verdict.rows < verdict.predicted.rows
    first, second = verdict.lines()
    assert first.endswith(f"{verdict.steps} of {verdict.rows} came")
    speed = verdict.at_lengths.seconds / 2.0
    assert second.endswith(f"the device ran at {speed:.2f} of its rates")


def test_replicas_are_predicted_together(llm, tmp_path, cache):
    keep_rates(llm.config, llm.dtype, llm.device, named_rates("h200"))
    _, watch = run(llm, tmp_path)
    one = watch.verdict(2.0)
    watch.num_replicas = 3
    three = watch.verdict(2.0)
    assert three.predicted.seconds < one.predicted.seconds
    assert three.predicted.rows >= one.predicted.rows
    assert (three.steps, three.rows) == (one.steps, one.rows)


class Prompts:
    """As `SpooledPrompts`: the second of three prompts asks for two answers."""

    lengths = np.array([2, 2, 900])
    most_outputs = np.array([4, 0, 0])

    def answers(self):
        return np.array([1, 2, 1])


def test_answers_without_max_tokens_are_told_and_predicted(llm, cache):
    keep_rates(llm.config, llm.dtype, llm.device, named_rates("h200"))
    assert OpenEnded.of(Prompts(), 1000) == OpenEnded(2, 998)
    outputs = expected_outputs(Prompts(), 1000)
    assert outputs.tolist() == [4, 2 * ASSUMED_TOKENS, 100]
    plan = plan_job([[5, 6], [5, 7], [5, 8]])
    report = Target.of_llm(llm).report(Work.of(plan, outputs, Prompts().answers()))
    assert report["full"]["rows"] == 4 + 3 + 2 * (ASSUMED_TOKENS - 1) + 99


def test_what_sets_no_max_tokens_is_told_before_the_job_runs(llm, tmp_path, cache):
    """A chat without it may fill the model; a completion has OpenAI's 16."""
    keep_rates(llm.config, llm.dtype, llm.device, named_rates("h200"))
    bodies = [
        ("chat", {"messages": [{"role": "user", "content": "a"}], "stop_token_ids": STOPS}),
        ("chat", {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 2}),
    ]
    lines = [
        {"custom_id": str(i), "method": "POST", "url": f"/v1/{kind}/completions", "body": body}
        for i, (kind, body) in enumerate(bodies)
    ]
    (source := tmp_path / "in.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    told, watch = [], JobWatch.of_llm(llm)

    def tell(found):
        told.append((found, watch.plan))

    run_file(llm, source, tmp_path / "out.jsonl", watch=watch, on_open_ended=tell)
    ((found, plan),) = told
    assert plan is None  # before anything runs
    assert found.requests == 1
    assert llm.engine.max_model_len - 64 < found.most_tokens < llm.engine.max_model_len
    assert f"may run to {found.most_tokens} tokens" in found.line(has_template=False)
    assert "--body" in found.line(has_template=True)
    predicted = watch.verdict(1.0).predicted
    assert (
        predicted.rows - predicted.computed_prompt_tokens
        == 1 + min(ASSUMED_TOKENS, found.most_tokens) - 1
    )


def test_a_cache_that_cannot_be_written_is_named(llm, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="XDG_CACHE_HOME"):
        keep_rates(llm.config, llm.dtype, llm.device, named_rates("h200"))
