"""The engine on a GPU, with CUDA graphs: the same tokens as on a CPU. Skipped without a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.engine.harness import answer, engine_on, requests_for, shared_prompts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

GPU_FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "falcon_40b", "mpt", "phi", "gpt2"]


@pytest.mark.parametrize("share", ["full", "storage", "off"])
@pytest.mark.parametrize("family", GPU_FAMILIES)
def test_tokens_are_those_of_the_cpu(tiny, family: str, share: str) -> None:
    path = tiny(family)
    requests = requests_for(shared_prompts(), max_tokens=24)
    want = answer(engine_on("cpu", path, impl="torch"), requests)
    found = answer(engine_on("cuda", path, share=share), requests)
    for name, output in want.items():
        assert found[name].outputs[0].token_ids == output.outputs[0].token_ids


def test_draws_are_those_of_the_cpu(tiny) -> None:
    requests = requests_for(
        shared_prompts(), max_tokens=16, temperature=0.8, top_p=0.9, n=3, seed=4
    )
    want = answer(engine_on("cpu", tiny("llama"), impl="torch"), requests)
    found = answer(engine_on("cuda", tiny("llama")), requests)
    for name, output in want.items():
        assert [o.token_ids for o in found[name].outputs] == [o.token_ids for o in output.outputs]


def test_a_small_pool_sets_back(tiny) -> None:
    requests = requests_for(shared_prompts(), max_tokens=40)
    pool = {"num_pages": 24, "page_size": 4}
    want = answer(engine_on("cpu", tiny("llama"), impl="torch", **pool), requests)
    engine = engine_on("cuda", tiny("llama"), **pool)
    found = answer(engine, requests)
    assert engine.stats.set_backs > 0
    for name, output in want.items():
        assert found[name].outputs[0].token_ids == output.outputs[0].token_ids


def test_a_batch_larger_than_any_graph(tiny) -> None:
    """Steps of 1,100 rows are launched kernel by kernel."""
    prompts = [[5 + i % 200, 7, 9 + i // 200] for i in range(1100)]
    requests = requests_for(prompts, max_tokens=5)
    want = answer(engine_on("cpu", tiny("llama"), impl="torch", num_pages=2048), requests)
    found = answer(engine_on("cuda", tiny("llama"), num_pages=2048), requests)
    differ = [n for n in want if want[n].outputs[0].token_ids != found[n].outputs[0].token_ids]
    assert not differ
