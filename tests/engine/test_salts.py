"""Prompts of different cache salts share nothing; those of one salt share as ever."""

from __future__ import annotations

import dataclasses

import pytest

from tests.engine.harness import answer, make_engine, requests_for, shared_prompts


def salted(prompts, salts):
    requests = requests_for(prompts)
    return [
        dataclasses.replace(request, cache_salt=salt)
        for request, salt in zip(requests, salts, strict=True)
    ]


@pytest.mark.parametrize("together", [True, False])
def test_only_equal_salts_share(tiny, together):
    prompt = shared_prompts()[0]
    salts = ["", "a", "b", "a", ""]
    engine = make_engine(tiny("llama"), page_size=4)
    requests = salted([prompt] * 5, salts)
    outputs = {}
    for part in [requests] if together else [[request] for request in requests]:
        outputs |= answer(engine, part)
    assert len({tuple(o.outputs[0].token_ids) for o in outputs.values()}) == 1
    assert engine.stats.processed_prompt_tokens == 3 * len(prompt) + 2
    again = answer(engine, salted([prompt, prompt], ["c", "a"]))
    assert again["0"].metrics.num_cached_tokens == 0
    assert again["1"].metrics.num_cached_tokens == len(prompt) - 1


def test_an_answer_is_found_under_its_salt_alone(tiny):
    engine = make_engine(tiny("llama"))
    prompt = shared_prompts()[0]
    first = answer(engine, salted([prompt], ["a"]))["0"]
    longer = [*prompt, *first.outputs[0].token_ids]
    outputs = answer(engine, salted([longer, longer], ["", "a"]))
    assert outputs["0"].metrics.num_cached_tokens == 0
    assert outputs["1"].metrics.num_cached_tokens == len(longer) - 1


def test_set_back_under_salts(tiny):
    prompts = shared_prompts()[:6]
    outputs = []
    for pages in (4096, 12):
        engine = make_engine(tiny("llama"), num_pages=pages, page_size=16)
        outputs.append(answer(engine, salted(prompts, "abcabc")))
    for name, output in outputs[0].items():
        assert output.outputs[0].token_ids == outputs[1][name].outputs[0].token_ids
