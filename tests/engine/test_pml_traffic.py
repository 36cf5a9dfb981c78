"""Prompts of modules beside plain ones: aborts, interrupts, memory, salts, and what is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import random

import pytest
import torch

from onestem.errors import RequestError
from onestem.models.weights import load_decoder
from onestem.pml import Import, Module, Prompt, Schema
from tests.engine import anew
from tests.engine.harness import answer, assert_idle, make_engine, requests_for, shared_prompts
from tests.engine.pml_harness import (
    assert_seen,
    compiled_prompts,
    dense_logprobs,
    pml_request,
    record,
)
from tests.soak import seeds


@pytest.fixture(scope="module")
def decoder(tiny):
    return load_decoder(tiny("llama"), dtype=torch.float32, device="cpu")


class Interrupted(BaseException):
    pass


def interrupt_some(engine, rng, share):
    """Steps of the engine fail now and then, before their results are taken."""
    run = engine.launcher.runner.run

    def failing(inputs, prepared, ids):
        logits = run(inputs, prepared, ids)
        if rng.random() < share:
            raise Interrupted
        return logits

    engine.launcher.runner.run = failing


def random_requests(rng, count):
    """Prompts of both isolations with salts, beside plain ones; (request, compiled or None)."""
    compiled = {kind: compiled_prompts(kind) for kind in ("anchored", "isolated", "off")}
    plain = shared_prompts()
    for name in range(count):
        if rng.random() < 0.3:
            yield requests_for([rng.choice(plain)], max_tokens=7)[0], None
            continue
        one = rng.choice(compiled[rng.choice(list(compiled))])
        salt, tokens = rng.choice(["", "", "a"]), rng.randint(1, 12)
        yield pml_request(name, one, max_tokens=tokens, cache_salt=salt), one


@pytest.mark.parametrize("seed", seeds(2, 6))
@pytest.mark.parametrize("share", ["full", "off"])
def test_random_traffic(tiny, decoder, seed, share):
    rng = random.Random(seed)
    engine = make_engine(
        tiny("llama"), share=share, num_pages=40, page_size=4, max_step_tokens=rng.choice([5, 40])
    )
    seen = record(engine)
    anew.watched(engine)
    interrupt_some(engine, rng, 0.15)
    todo, compiled, done = [], {}, {}
    for number, (request, one) in enumerate(random_requests(rng, 14)):
        compiled[str(number)] = one
        todo.append(dataclasses.replace(request, request_id=str(number)))
    while todo or engine.has_unfinished():
        if todo and rng.random() < 0.5:
            engine.add_request(todo.pop(0))
        if rng.random() < 0.05:
            engine.abort(str(rng.randrange(14)))
        with contextlib.suppress(Interrupted):
            done |= {output.request_id: output for output in engine.step() if output.finished}
        engine.check()
    assert_idle(engine)
    for name, output in done.items():
        if compiled[name] is not None and output.outputs[0].finish_reason == "length":
            new = output.outputs[0].token_ids
            want = dense_logprobs(decoder, compiled[name], new)
            assert_seen(seen, name, compiled[name], want, new)
    engine.cache.clear()
    assert engine.cache.pool.num_free == engine.cache.pool.num_pages


def test_an_aborted_owner_is_replaced(tiny, decoder):
    """The request that computes a module leaves in the middle of it; who waits goes on."""
    engine = make_engine(tiny("llama"), max_step_tokens=7)
    seen = record(engine)
    one = compiled_prompts("isolated")[5]
    engine.add_request(pml_request("a", one))
    engine.add_request(pml_request("b", one))
    for _ in range(4):
        engine.step()
    assert engine.abort("a") is not None
    outputs = {}
    while engine.has_unfinished():
        outputs |= {output.request_id: output for output in engine.step()}
        engine.check()
    new = outputs["b"].outputs[0].token_ids
    assert_seen(seen, "b", one, dense_logprobs(decoder, one, new), new)


def test_salts_part_modules(tiny):
    engine = make_engine(tiny("llama"))
    one = compiled_prompts("anchored")[0]
    requests = [pml_request(i, one, cache_salt=salt) for i, salt in enumerate(["", "a", "b", "a"])]
    outputs = answer(engine, requests)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs.values()}) == 1
    computed = [outputs[str(i)].metrics.num_computed_tokens for i in range(4)]
    assert computed == [one.num_tokens] * 3 + [1]


def test_modules_nobody_reads_are_evicted_and_computed_again(tiny):
    engine = make_engine(tiny("llama"), num_pages=12, page_size=16)
    one = compiled_prompts("anchored")[0]
    first = answer(engine, [pml_request("0", one)])["0"]
    assert len(engine.cache.modules) > 0
    rng = random.Random(0)
    long = [[rng.randrange(3, 270) for _ in range(185)]]
    answer(engine, requests_for(long))
    assert len(engine.cache.modules) == 0
    again = answer(engine, [pml_request("0", one)])["0"]
    assert again.metrics.num_computed_tokens == one.num_tokens
    assert again.outputs[0].token_ids == first.outputs[0].token_ids


def test_placeholders_go_once_their_module_is_there(tiny):
    engine = make_engine(tiny("llama"))
    compiled = compiled_prompts("isolated")[0]
    assert any(segment.kind == "placeholder" for segment in compiled.segments)
    answer(engine, [pml_request("0", compiled)])
    cached = {s.key for s in compiled.segments if s.kind == "cached"}
    assert {run.name[1] for run in engine.cache.modules} == cached
    hidden = {s.key for s in compiled.segments if s.kind == "placeholder"}
    assert not hidden & {run.name[1] for run in engine.cache.modules}


@pytest.mark.parametrize("isolation", ["anchored", "isolated"])
def test_long_answers(tiny, decoder, isolation):
    engine = make_engine(tiny("llama"))
    seen = record(engine)
    compiled = compiled_prompts(isolation)
    requests = [pml_request(i, one, max_tokens=40) for i, one in enumerate(compiled)]
    outputs = answer(engine, requests)
    for number, one in enumerate(compiled):
        new = outputs[str(number)].outputs[0].token_ids
        assert_seen(seen, str(number), one, dense_logprobs(decoder, one, new), new)


def test_streaming_gives_what_a_whole_answer_is(tiny):
    engine = make_engine(tiny("llama"))
    compiled = compiled_prompts("anchored")
    whole = answer(engine, [pml_request(i, one) for i, one in enumerate(compiled)])
    for number, one in enumerate(compiled):
        request = pml_request(number, one)
        engine.add_request(dataclasses.replace(request, stream=True))
    last: dict[str, list[int]] = {}
    while engine.has_unfinished():
        for output in engine.step():
            new = output.outputs[0].token_ids
            assert new[: len(last.get(output.request_id, []))] == last.get(output.request_id, [])
            last[output.request_id] = new
    assert last == {name: output.outputs[0].token_ids for name, output in whole.items()}


def test_what_has_no_room_is_refused(tiny):
    compiled = compiled_prompts("anchored")[0]
    engine = make_engine(tiny("llama"), num_pages=5, page_size=16)
    with pytest.raises(RequestError, match=r"take \d+ pages of 16 tokens, and .* KV memory has 5 "):
        engine.add_request(pml_request("0", compiled))
    engine = make_engine(tiny("llama"))
    with pytest.raises(RequestError, match="prompt_logprobs and score_from are not available"):
        engine.add_request(pml_request("0", compiled, prompt_logprobs=1))
    schema = Schema("long", [Module("m", ["x" * 3000]), "y"])
    far = compiled_prompts("anchored", [Prompt("long", [Import("m"), "z"])], schema)[0]
    with pytest.raises(RequestError, match=r"limit is 2047|begin at position"):
        engine.add_request(pml_request("0", far))


def test_an_answer_ends_where_memory_does(tiny):
    compiled = compiled_prompts("anchored")[0]
    engine = make_engine(tiny("llama"), num_pages=10, page_size=16)
    output = answer(engine, [pml_request("0", compiled, max_tokens=2000)])["0"]
    assert output.outputs[0].finish_reason == "length"
    assert 1 <= len(output.outputs[0].token_ids) < 160
