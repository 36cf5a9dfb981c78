"""The engine answers what transformers answers: tokens, and log-probabilities at every step."""

from __future__ import annotations

import random

import pytest

from onestem.errors import ConfigError, RequestError
from onestem.models.decoder import Decoder
from tests.engine.harness import (
    TOLERANCE,
    answer,
    check,
    make_engine,
    oracle_greedy,
    oracle_logprobs,
    record_logprobs,
    requests_for,
    shared_prompts,
)
from tests.models.tiny import FAMILIES
from tests.soak import one_in, soaked

SHARES = ("full", "storage", "off")
RECOMPUTED = ("llama", "qwen3_5")  # keys and values alone, and states that depend on all before


@pytest.mark.parametrize("share", ["full", *map(soaked, ("storage", "off"))])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(tiny, expected, family, share):
    check(tiny(family), expected(family), share=share, max_step_tokens=48)


@pytest.mark.parametrize(
    ("share", "chunk", "page_size"), one_in(3, SHARES, (1, 7, 4096), (1, 16, 64))
)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3_5", "qwen3_next"])
def test_chunks_and_pages(tiny, expected, family, page_size, chunk, share):
    check(tiny(family), expected(family), share=share, page_size=page_size, max_step_tokens=chunk)


@pytest.mark.parametrize(
    ("family", "share", "pages_and_chunk"),
    one_in(3, ("gpt_oss", "gemma4_image"), SHARES, ((1, 7), (16, 1), (16, 4096))),
)
def test_others_in_small_memory(tiny, expected, family, share, pages_and_chunk):
    """Chunks of prompts, and sequences that are set back, with experts or layers that share KV."""
    page_size, chunk = pages_and_chunk
    options = {"page_size": page_size, "num_pages": 96 // page_size, "max_step_tokens": chunk}
    check(tiny(family), expected(family), share=share, **options)


@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_sinks_in_other_implementations(tiny, expected, impl):
    check(tiny("gpt_oss"), expected("gpt_oss"), impl=impl)


@pytest.mark.parametrize("share", ["full", "off"])
@pytest.mark.parametrize("family", ["llama", "qwen2_windows", "qwen3_moe"])
def test_alone_is_as_in_a_batch(tiny, expected, family, share):
    check(tiny(family), expected(family), share=share, alone=True)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("family", ["llama", "qwen2_windows"])
def test_spare_rows_change_nothing(tiny, expected, family, share, monkeypatch):
    padded = []
    monkeypatch.setattr(
        Decoder, "padded_rows", lambda _, rows: padded.append(-rows % 16) or rows + -rows % 16
    )
    check(tiny(family), expected(family), share=share, page_size=4, max_step_tokens=23)
    assert sum(padded) > 0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("family", ["llama_llama3_rope", "qwen3", "qwen3_next"])
def test_any_order(tiny, expected, family, seed):
    order = list(range(len(shared_prompts())))
    random.Random(seed).shuffle(order)
    check(tiny(family), expected(family), order=order, max_step_tokens=23)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("family", RECOMPUTED)
def test_small_pool_sets_back(tiny, expected, family, page_size, share):
    check(
        tiny(family),
        expected(family),
        share=share,
        page_size=page_size,
        num_pages=96 // page_size,
        max_step_tokens=64,
    )


@pytest.mark.parametrize("family", RECOMPUTED)
def test_set_back_happens_and_changes_nothing(tiny, family):
    """Answers so long that the pool cannot hold what admission let in."""
    path = tiny(family)
    prompts = shared_prompts()[:6]
    outputs = {}
    for pages in (4096, 12):
        engine = make_engine(path, num_pages=pages, page_size=16)
        seen = record_logprobs(engine)
        outputs[pages] = (
            answer(engine, requests_for(prompts, max_tokens=90)),
            seen,
            engine.stats.num_preempted,
        )
    assert outputs[4096][2] == 0
    assert outputs[12][2] > 0
    for key, output in outputs[4096][0].items():
        assert output.outputs[0].token_ids == outputs[12][0][key].outputs[0].token_ids
    for key, values in outputs[4096][1].items():
        assert (values - outputs[12][1][key]).abs().max() < TOLERANCE


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("family", ["mpt_clip", "falcon_40b"])
def test_alibi_and_groups_in_other_implementations(tiny, expected, family, impl):
    check(tiny(family), expected(family), impl=impl)


def test_learned_positions_to_their_end(tiny):
    """The tiny GPT-2 has 128 positions: a sequence fills them, none goes past."""
    path = tiny("gpt2")
    prompt = shared_prompts()[1][:50] + shared_prompts()[4][:60]
    engine = make_engine(path)
    assert engine.max_model_len == 128
    output = answer(engine, requests_for([prompt], max_tokens=100))["0"].outputs[0]
    assert output.finish_reason == "length"
    assert output.token_ids == oracle_greedy(path, prompt, 128 - len(prompt))
    with pytest.raises(RequestError, match="prompt has 128 tokens, limit is 127"):
        engine.add_request(requests_for([[5] * 128])[0])
    with pytest.raises(ConfigError, match=r"max_model_len is 129, expected 2 to 128"):
        make_engine(path, max_model_len=129)


def test_reference_attention_runs_the_engine_too(tiny, expected):
    check(tiny("llama"), expected("llama"), impl="reference")


@pytest.mark.parametrize("n", [2, 5])
@pytest.mark.parametrize("share", ["full", "off"])
@pytest.mark.parametrize("family", RECOMPUTED)
def test_n_shares_the_prompt(tiny, family, n, share):
    """n sequences of a request answer as n requests would, and compute the prompt once. Of
    states there is one for each, and one for a snapshot."""
    engine = make_engine(tiny(family), share=share, num_states=n + 1)
    seen = record_logprobs(engine)
    prompt = shared_prompts()[0]
    request = requests_for([prompt], max_tokens=8, n=n, temperature=1.0, seed=7)[0]
    output = answer(engine, [request])["0"]
    assert sorted(o.index for o in output.outputs) == list(range(n))
    assert len({tuple(o.token_ids) for o in output.outputs}) > 1
    for completion in output.outputs:
        want = oracle_logprobs(tiny(family), prompt + completion.token_ids)
        for step in range(1, 8):
            index = len(prompt) - 1 + step
            assert (seen["0", completion.index, index] - want[index]).abs().max() < TOLERANCE
    computed = engine.stats.processed_prompt_tokens
    assert computed == len(prompt) * (n if share == "off" else 1)


def test_modes_share_what_they_say(tiny):
    prompts = shared_prompts()[:5]
    distinct = {tuple(p[:i]) for p in prompts for i in range(1, len(p) + 1)}
    for share, computed in (
        ("full", len(distinct)),
        ("storage", len(distinct)),
        ("off", sum(map(len, prompts))),
    ):
        engine = make_engine(tiny("llama"), share=share)
        answer(engine, requests_for(prompts))
        assert engine.stats.processed_prompt_tokens == computed
