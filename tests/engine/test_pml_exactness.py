"""Prompts of modules answer what one full pass with the block mask answers, in every way to run."""

from __future__ import annotations

from itertools import chain, permutations

import pytest
import torch

from onestem.models.weights import load_decoder
from onestem.pml import ISOLATIONS, Import, Prompt
from tests.engine.harness import TOLERANCE, answer, make_engine
from tests.engine.pml_harness import (
    PROMPTS,
    assert_seen,
    check_pml,
    compiled_prompts,
    dense_logprobs,
    pml_request,
    record,
    transformers_logprobs,
)
from tests.soak import one_in

# RoPE, whole and partial, windows; ALiBi (falcon_rw, mpt); learned positions (gpt2); softcaps, two
# RoPE bases, layers without RoPE, queries that grow, LongRoPE, sinks.
FAMILIES = ["llama", "llama_linear_rope", "mistral", "qwen2_windows", "qwen3"]
FAMILIES += ["phi", "falcon", "falcon_40b", "falcon_rw", "mpt", "gpt2"]
FAMILIES += ["gemma2", "gemma3", "smollm3", "ministral3", "phi4_mini", "gpt_oss"]
FAMILIES += ["gemma4", "gemma4_image"]


@pytest.mark.parametrize(("family", "isolation"), one_in(3, FAMILIES, ISOLATIONS))
def test_every_family(tiny, family, isolation):
    check_pml(tiny(family), isolation, max_step_tokens=48)


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_the_full_pass_is_transformers(tiny, isolation):
    decoder = load_decoder(tiny("llama"), dtype=torch.float32, device="cpu")
    for compiled in compiled_prompts(isolation):
        got = dense_logprobs(decoder, compiled, [70, 71])
        want = transformers_logprobs(tiny("llama"), compiled, [70, 71])
        assert (got - want).abs().max() < TOLERANCE


@pytest.mark.parametrize(
    ("isolation", "page_size", "chunk", "share"),
    one_in(3, ("anchored", "isolated"), (1, 16), (1, 7, 4096), ("full", "storage", "off")),
)
def test_chunks_and_pages(tiny, isolation, page_size, chunk, share):
    check_pml(tiny("llama"), isolation, share=share, page_size=page_size, max_step_tokens=chunk)


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_alone_and_in_any_order(tiny, isolation):
    check_pml(tiny("llama"), isolation, alone=True)
    check_pml(tiny("llama"), isolation, prompts=PROMPTS[::-1], max_step_tokens=31)


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_imports_in_any_order_are_one_prompt(tiny, isolation):
    """The same log-probabilities, tokens and cache hits, bit by bit: with nothing cached, and with
    what another order has cached. New text stays behind the import before it."""
    parts = [
        [Import("a", {"x": "12"}), "mid"],
        [Import("c", {"y": "no"})],
        [Import("d")],
        [Import("e")],
    ]
    orders = [order for order in permutations(parts) if order[-1] is not parts[0]]
    prompts = [Prompt("tiny", [*chain.from_iterable(order), "Ask."]) for order in orders]
    compiled = compiled_prompts(isolation, prompts)
    assert len(compiled) == 18

    def answers(order):
        engine = make_engine(tiny("llama"))
        seen = record(engine)
        for name, one in (("first", compiled[order]), ("again", compiled[order - 1])):
            output = answer(engine, [pml_request(name, one)])[name]
            yield output.outputs[0].token_ids, output.metrics.num_cached_tokens
        yield {at: values.tolist() for at, values in seen.items()}

    want = list(answers(0))
    assert want[0][1] == 0 < want[1][1]
    for order in range(1, len(compiled)):
        assert list(answers(order)) == want


@pytest.mark.parametrize("share", ["full", "storage", "off"])
@pytest.mark.parametrize(("page_size", "num_pages"), [(1, 260), (16, 20)])
def test_a_small_pool_sets_back(tiny, page_size, num_pages, share):
    engine = check_pml(
        tiny("llama"),
        "isolated",
        share=share,
        page_size=page_size,
        num_pages=num_pages,
        max_tokens=60,
        max_step_tokens=64,
    )
    assert engine.stats.num_preempted > 0 or share == "off"


@pytest.mark.parametrize("isolation", ["anchored", "isolated"])
@pytest.mark.parametrize("share", ["full", "off"])
def test_n_sequences(tiny, isolation, share):
    engine = make_engine(tiny("llama"), share=share)
    compiled = compiled_prompts(isolation)[2]
    seen = record(engine)
    request = pml_request("0", compiled, n=3, temperature=1.0, seed=5)
    output = answer(engine, [request])["0"]
    assert len({tuple(o.token_ids) for o in output.outputs}) > 1
    decoder = load_decoder(tiny("llama"), dtype=torch.float32, device="cpu")
    for completion in output.outputs:
        want = dense_logprobs(decoder, compiled, completion.token_ids)
        rows = range(compiled.num_tokens, compiled.num_tokens + len(completion.token_ids) - 1)
        for step, row in enumerate(rows):
            got = seen["0", completion.index, compiled.next_position + step]
            assert (got - want[row]).abs().max() < TOLERANCE
    assert_seen(seen, "0", compiled, want, completion.token_ids[:1], index=1)


@pytest.mark.parametrize("isolation", ["anchored", "isolated"])
def test_modules_are_computed_once(tiny, isolation):
    engine = make_engine(tiny("llama"))
    compiled = compiled_prompts(isolation)
    answer(engine, [pml_request(i, one) for i, one in enumerate(compiled)])
    distinct = {s.key: len(s.token_ids) for one in compiled for s in one.segments if s.key}
    own = {
        (tuple(s.key for s in one.segments if s.key), tuple(one.positions[-n:])): n
        for one in compiled
        if (n := one.num_computed_tokens)
    }
    assert engine.stats.processed_prompt_tokens <= sum(distinct.values()) + sum(own.values())
    before = engine.stats.processed_prompt_tokens
    again = answer(engine, [pml_request(i, one) for i, one in enumerate(compiled)])
    assert engine.stats.processed_prompt_tokens - before == len(compiled)  # their last tokens
    for output in again.values():
        assert output.metrics.num_computed_tokens == 1
