"""One loop: everything passes through the same three calls, and costs what has changed."""

from __future__ import annotations

import statistics
import sys
from typing import Any

import pytest
import torch

from onestem import LLM, SamplingParams
from onestem.engine.engine import Engine
from onestem.engine.step.runner import Logits
from onestem.pml import Import, Module, Prompt, Schema
from onestem.request import Request
from tests.engine.harness import make_engine
from tests.engine.pml_harness import compiled_prompts, pml_request
from tests.engine.symbolic import VOCAB, drain, make_symbolic, request
from tests.engine.test_order import at_depth
from tests.engine.tiny_tokenizers import make_byte_level_tokenizer
from tests.models.tiny import VOCAB_SIZE, make_tiny


def counted(engine: Engine) -> dict[str, int]:
    """How often each of the loop's calls is made."""
    counts: dict[str, int] = {}

    def count(owner: Any, name: str) -> None:
        call = getattr(owner, name)

        def counting(*args: Any, **options: Any) -> Any:
            counts[name] = counts.get(name, 0) + 1
            return call(*args, **options)

        setattr(owner, name, counting)

    count(engine.scheduler, "decide")
    count(engine.batch_rows, "apply")
    count(engine.launcher, "forward")
    count(engine.launcher, "sample")
    count(engine.results, "commit")
    return counts


@pytest.mark.parametrize("depth", [1, 2])
def test_each_step_is_the_same_calls(depth: int) -> None:
    """Forks, scores, jobs, pins, preemption and chunks: an edit, a launch and a commit a step."""
    engine = make_symbolic(num_pages=15, page_size=2, max_step_tokens=7, max_model_len=20)
    at_depth(engine, depth)
    counts = counted(engine)
    engine.requests.pin_prefix("p", [1, 2, 3])
    engine.requests.add_job("j", [request(f"j{i}", [i, 1, 2], max_tokens=5) for i in range(4)])
    kinds = [{"n": 3}, {"prompt_logprobs": 1}, {"logprobs": 1}, {"presence_penalty": 0.5}, {}]
    for i, fields in enumerate(kinds):
        engine.add_request(request(i, [1, 2, 3, 4, i, i], max_tokens=9, seed=i, **fields))
    assert len(drain(engine)) == len(kinds) + 4
    assert engine.stats.num_preempted > 0
    steps = engine.stats.steps
    assert counts["forward"] == counts["sample"] == counts["commit"] == steps
    # At depth 2 a look at the queue may tell that what is in flight comes first.
    assert steps <= counts["apply"] <= counts["decide"] <= (1 if depth == 1 else 2) * steps + 2
    for prefix in engine.requests.prefixes():
        engine.requests.unpin_prefix(prefix.name)


def test_modules_pass_through_the_same_calls(tiny) -> None:
    engine = make_engine(tiny("llama"))
    counts = counted(engine)
    schema = Schema("two", [Module("a", ["Alpha and beta"]), Module("b", ["Something else"])])
    prompts = [Prompt("two", [Import("ab"[i % 2]), f"{i} is asked"]) for i in range(4)]
    for i, one in enumerate(compiled_prompts("anchored", prompts, schema)):
        engine.add_request(pml_request(i, one, max_tokens=6))
    while engine.has_unfinished():
        engine.step()
    assert counts["forward"] == counts["sample"] == counts["commit"] == engine.stats.steps > 5


def test_grammars_and_choices_pass_through_the_same_calls(tmp_path) -> None:
    path = make_tiny("llama", tmp_path / "llama")
    make_byte_level_tokenizer(path, vocab_size=VOCAB_SIZE)
    llm = LLM(path, dtype="float32", kv_memory="8MiB", max_model_len=256, device="cpu")
    counts = counted(llm.engine)
    json = SamplingParams(max_tokens=12, response_format={"type": "json_object"}, seed=1)
    outputs = llm.generate(
        ["a", "b", "c"], [json, SamplingParams(choices=["yes", "no"]), SamplingParams(max_tokens=9)]
    )
    assert all(output.finished for output in outputs)
    assert counts["forward"] == counts["commit"] == llm.engine.stats.steps


class Blank:
    """A runner whose logits say nothing: what is counted is the engine."""

    depth = 1
    may_be_interrupted = True

    def check(self) -> None:
        pass

    def prepare(self, inputs, new_pages):
        return {}

    def run(self, inputs, prepared, ids) -> Logits:
        return Logits([torch.zeros(len(inputs.logit_rows), VOCAB)])


def python_calls(rows: int, streamed: int) -> float:
    """Python functions called in a step of decodes in which nothing changes but lengths."""
    engine = make_symbolic(num_pages=4 * rows, page_size=256, max_step_tokens=4096)
    engine.launcher.runner = Blank()
    for i in range(rows):
        one = request(
            i,
            [1, i // VOCAB**2, i // VOCAB % VOCAB, i % VOCAB],
            max_tokens=100,
            stream=i < streamed,
        )
        engine.add_request(one)
    while len(engine.batch_rows) < rows:
        engine.step()
    engine.step()
    counts = []
    for _ in range(9):
        count = [0]

        def note(frame, event, argument, count=count) -> None:
            count[0] += event == "call"

        sys.setprofile(note)
        engine.step()
        sys.setprofile(None)
        counts.append(count[0])
    return statistics.median(counts)


def test_python_works_for_what_changes_alone() -> None:
    """Rows that nobody watches cost no calls; those that are watched cost so many each."""
    assert python_calls(8, 0) == python_calls(512, 0)
    none, four, eight, sixteen = (python_calls(64, streamed) for streamed in (0, 4, 8, 16))
    assert none < four
    assert eight - four == (sixteen - eight) / 2


def test_a_request_of_everything_at_once_is_one_of_many() -> None:
    """All of it in one batch, at both depths: the same answers."""
    fields = {"n": 2, "logprobs": 2, "presence_penalty": 0.4, "seed": 5, "temperature": 1.0}
    requests: list[Request] = [
        request(i, [1, 2, 3, i], max_tokens=11, prompt_logprobs=1 if i % 2 else None, **fields)
        for i in range(5)
    ]
    found = []
    for depth in (1, 2):
        engine = at_depth(make_symbolic(num_pages=300, page_size=4), depth)
        for one in requests:
            engine.add_request(one)
        outputs = drain(engine)
        found.append([outputs[one.request_id].outputs for one in requests])
    assert found[0] == found[1]


def test_logits_of_many_rows_are_sampled_in_blocks(tmp_path, monkeypatch) -> None:
    """Of 3 rows at a time: every way to sample, with log-probabilities and a grammar's masks."""
    path = make_tiny("llama", tmp_path / "model")
    make_byte_level_tokenizer(path)
    ways: list[dict[str, Any]] = [
        {"n": 4, "temperature": 0.7, "logprobs": 0},
        {"temperature": 0, "logprobs": 3, "logit_bias": {7: 2.0}},
        {"top_k": 20, "min_tokens": 3, "stop_token_ids": list(range(30))},
        {"n": 2, "repetition_penalty": 1.2, "presence_penalty": 0.3},
        {"response_format": {"type": "json_object"}},
    ]
    answers, sizes = [], []
    for most in (None, 3 * VOCAB_SIZE + 1):
        if most is not None:
            monkeypatch.setattr("onestem.engine.step.runner.SAMPLED_LOGITS", most)
        with LLM(path, device="cpu", dtype="float32", kv_memory="4MiB", seed=1) as llm:
            launch, seen = llm.engine.launcher.sampler.launch, []
            llm.engine.launcher.sampler.launch = lambda logits, step, launch=launch, seen=seen: (
                seen.append(len(logits)) or launch(logits, step)
            )
            prompts = [[5, 6, 7, i] for i in range(2 * len(ways))]
            params = [SamplingParams(max_tokens=12, seed=i, **ways[i % 5]) for i in range(10)]
            answers.append(llm.generate(prompts, params))
            sizes.append(max(seen))
    assert sizes[1] == 3 < sizes[0]
    for whole, parts in zip(*answers, strict=True):
        for one, other in zip(whole.outputs, parts.outputs, strict=True):
            assert one.token_ids == other.token_ids
            for before, after in zip(one.logprobs or (), other.logprobs or (), strict=True):
                assert before.keys() == after.keys()
                for token in before:
                    assert before[token].logprob == pytest.approx(after[token].logprob, abs=1e-5)
