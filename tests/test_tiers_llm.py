"""What users call, with tiers below KV memory: equal to without."""

from __future__ import annotations

import json
import re

import pytest

from onestem import LLM, SamplingParams
from tests.engine.harness import TOLERANCE
from tests.engine.test_tiers import few_tokens, long_prompts
from tests.forked import onestem

__all__ = ["few_tokens"]
OPTIONS = {"dtype": "float32", "seed": 0}
FEW = 24 * 16  # tokens that KV memory holds
GREEDY = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def token_bytes(model):
    with LLM(model, kv_memory=1 << 20, **OPTIONS) as llm:
        return (1 << 20) // llm.kv_tokens


def small(model, token_bytes, folder, **options):
    options = {"host_kv": 200_000, "disk_kv": folder, **OPTIONS, **options}
    return LLM(model, kv_memory=FEW * token_bytes, max_model_len=FEW, **options)


def calls(llm):
    """Scores, and what is chosen, of prompts in turns that evict each other."""
    found = []
    for prompt in long_prompts(4, head=1):
        [score] = llm.score([prompt], [[prompt[i : i + 3] for i in range(3)]])
        found += [one.logprob for one in score]
        params = SamplingParams(choices=["yes", "no", "not now"], logprobs=0)
        [output] = llm.generate([prompt], params, use_tqdm=False)
        found += [output.outputs[0].choice, output.outputs[0].cumulative_logprob]
    return found


def test_scores_and_choices(model, token_bytes, tmp_path):
    with LLM(model, kv_memory="8MiB", **OPTIONS) as plain:
        want = calls(plain)
    for again in range(2):
        with small(model, token_bytes, tmp_path) as llm:
            for _ in range(2):
                assert calls(llm) == pytest.approx(want, abs=TOLERANCE)
            assert llm.engine.tiers.stats.from_host_tokens > 0
            assert not again or llm.engine.tiers.stats.from_disk_tokens > 300


def test_another_number_format_finds_nothing(model, token_bytes, tmp_path):
    [prompt] = long_prompts(1)
    kinds = ({}, {"dtype": "bfloat16"}, {"quantization": "int8"})
    answers = []
    for turn in range(2):
        for kind in kinds:
            with small(model, token_bytes, tmp_path, **kind) as llm:
                [output] = llm.generate([prompt], GREEDY, use_tqdm=False)
            answers.append(output.outputs[0].token_ids)
            assert output.metrics.num_computed_tokens == (1 if turn else len(prompt))
    assert answers[:3] == answers[3:]


def test_a_batch_file_run_twice(model, token_bytes, tmp_path):
    """The command: the second computes the tokens that are a line's own."""
    lines = [
        {
            "custom_id": f"{group}-{i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {
                "model": "m",
                "prompt": f"{group} is what these lines begin with. " * 3 + f"Question {i}?",
                "max_tokens": 3,
                "temperature": 0,
            },
        }
        for group in "ABCD"
        for i in range(4)
    ]
    source = tmp_path / "lines.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    answers, computed = [], []
    for name in ("first", "second"):
        out = tmp_path / f"{name}.jsonl"
        few = ("--kv-memory", FEW * token_bytes, "--max-model-len", FEW, "--dtype", "float32")
        command = ("batch", source, "-o", out, "--model", model, "--disk-kv", tmp_path / "kv")
        said = re.search(r"(\d+) computed", onestem(*command, *few).stderr)
        bodies = [json.loads(line)["response"]["body"] for line in out.read_text().splitlines()]
        answers.append([body["choices"][0]["text"] for body in bodies])
        computed.append(int(said[1]))
    assert answers[0] == answers[1]
    assert computed[0] > 4 * 80
    assert computed[1] == 2 * len(lines)  # a digit and a mark
