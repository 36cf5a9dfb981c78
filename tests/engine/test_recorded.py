"""Steps of few rows that are one call of C++ give what they give call by call."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from onestem import LLM, SamplingParams
from onestem.engine.step import cpu
from onestem.ops.cpu import CpuCodes, is_built
from onestem.ops.cpu.recorded import Recorded
from tests.forked import FORKSERVER
from tests.models.tiny import VOCAB_SIZE

pytestmark = pytest.mark.skipif(not is_built(), reason="the extension is not built")


def answers(llm, number, *, requests=1, **changes):
    """Tokens and log-probabilities of random prompts, of which some end before the others."""
    rng = np.random.default_rng(number)
    prompts = [
        {"prompt_token_ids": rng.integers(3, VOCAB_SIZE, rng.integers(5, 60)).tolist()}
        for _ in range(requests)
    ]
    lengths = rng.integers(4, 24, requests).tolist()
    plain = {"temperature": 0, "logprobs": 4, "ignore_eos": True}
    each = [SamplingParams(**{"max_tokens": length} | plain | changes) for length in lengths]
    outputs = llm.generate(prompts, each, use_tqdm=False)
    return [
        (list(one.token_ids), [{k: v.logprob for k, v in at.items()} for at in one.logprobs])
        for output in outputs
        for one in output.outputs
    ]


def open_llm(path, **options):
    return LLM(str(path), device="cpu", kv_memory="8MiB", page_size=16, **options)


def modules_after_a_step(path):
    with open_llm(path) as llm:
        answers(llm, 0)
        assert llm.engine.launcher.runner.recorded
    return set(sys.modules)


def test_a_compiler_is_not_imported(tiny):
    """That of PyTorch, which takes a second and which nothing here needs."""
    with FORKSERVER.Pool(1) as pool:
        assert "torch._dynamo" not in pool.apply(modules_after_a_step, (tiny("llama"),))


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"quantization": "int8", "dtype": "bfloat16"}),
        ("qwen3", {"quantization": "int8", "dtype": "float32"}),
        ("mistral", {"quantization": "int8", "dtype": "bfloat16"}),
        ("llama", {"quantization": "int8", "dtype": "bfloat16", "share": "storage"}),
    ],
)
@pytest.mark.parametrize("requests", [1, 3, 6])
def test_recorded_steps_are_equal(tiny, monkeypatch, family, options, requests):
    with open_llm(tiny(family), **options) as llm:
        found = [answers(llm, seed, requests=requests) for seed in range(3)]
        recorded = llm.engine.launcher.runner.recorded
        assert recorded
        assert all(one is not None for one in recorded.values())
        assert max(rows for rows, _ in recorded) <= cpu.MOST_ROWS
    monkeypatch.setattr(cpu, "MOST_ROWS", 0)
    with open_llm(tiny(family), **options) as llm:
        assert found == [answers(llm, seed, requests=requests) for seed in range(3)]
        assert not llm.engine.launcher.runner.recorded


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5"])
def test_what_pytorch_computes_is_not_recorded(tiny, monkeypatch, family):
    """Products of weights in 16 bits, GELU, and states."""
    options = {"dtype": "bfloat16", "quantization": None if family == "llama" else "int8"}
    with open_llm(tiny(family), **options) as llm:
        found = answers(llm, 0, requests=2)
        assert set(llm.engine.launcher.runner.recorded.values()) <= {None}
    monkeypatch.setattr(cpu, "MOST_ROWS", 0)
    with open_llm(tiny(family), **options) as llm:
        assert found == answers(llm, 0, requests=2)


@pytest.mark.parametrize("threads", [2, 5])
def test_products_that_threads_share_are_equal(threads):
    """One behind the other, of other rows each time: a thread that still computes what was, or
    begins with what is not yet there, changes them."""
    generator = torch.Generator().manual_seed(threads)
    codes = torch.randint(-128, 128, (8, 640, 640), generator=generator, dtype=torch.int8)
    weights = [CpuCodes.of8(one, torch.full((640,), 1 / 2048)) for one in codes]

    def call(inputs):
        (x,) = inputs
        for weight in weights:
            x = weight.product(x, None)
        return x

    rows = torch.randn(100, 1, 640, generator=generator)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        made = Recorded([rows[0]], [], call)
        assert made.works
        found = [made.run([x], [], 0).clone() for x in rows]
        torch.set_num_threads(1)
        assert all(torch.equal(one, call([x])) for one, x in zip(found, rows, strict=True))
    finally:
        torch.set_num_threads(before)


def test_addresses_of_released_memory_are_forgotten(tiny):
    with open_llm(tiny("llama"), quantization="int8", dtype="bfloat16") as llm:
        before = answers(llm, 0)
        assert llm.engine.launcher.runner.recorded
        llm.sleep()
        assert not llm.engine.launcher.runner.recorded
        held = torch.empty(1 << 22)  # takes the place of what was freed
        llm.wake_up()
        assert answers(llm, 0) == before
        assert llm.engine.launcher.runner.recorded
        del held


def test_answers_of_requests_with_everything(tiny, monkeypatch):
    """Samples, several answers, stops, and prompts that come while others decode."""
    options = {"quantization": "int8", "dtype": "bfloat16"}
    changes = {"temperature": 1.0, "n": 2, "seed": 5, "repetition_penalty": 1.1}
    with open_llm(tiny("llama"), **options) as llm:
        found = [answers(llm, seed, requests=2, **changes) for seed in range(2)]
        assert llm.engine.launcher.runner.recorded
    monkeypatch.setattr(cpu, "MOST_ROWS", 0)
    with open_llm(tiny("llama"), **options) as llm:
        assert found == [answers(llm, seed, requests=2, **changes) for seed in range(2)]
