"""Runs that come back to a GPU's pages from pinned memory and from files."""

from __future__ import annotations

import pytest
import torch

from onestem.cache.host import HostStore
from onestem.cache.storage import DiskStore
from onestem.ops.kv import read_kv
from tests.engine.harness import answer, engine_on, make_engine, requests_for, shared_prompts
from tests.engine.pml_harness import compiled_prompts, pml_request
from tests.engine.test_tiers import few_tokens, long_prompts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
__all__ = ["few_tokens"]

MIB = 1 << 20


def tokens(engine, requests):
    outputs = answer(engine, requests)
    return {name: one.outputs[0].token_ids for name, one in outputs.items()}


def gpu_engine(path, folder=None, **options):
    engine = engine_on("cuda", path, **options)
    disk = DiskStore(folder, 64 * MIB, "model") if folder is not None else None
    engine.keep_below("model", host=HostStore(256 * MIB), disk=disk)
    return engine


@pytest.mark.parametrize("family", ["llama", "gemma4_image", "qwen3_moe", "qwen3_5"])
@pytest.mark.parametrize("page_size", [1, 16])  # scattered slots, and stretches of them
def test_what_was_evicted_comes_back(tiny, family, page_size):
    want = [
        tokens(make_engine(tiny(family)), requests_for([prompt]))["0"]
        for prompt in long_prompts(6, head=1)
    ]
    engine = gpu_engine(tiny(family), page_size=page_size, num_pages=24 * 16 // page_size)
    for _ in range(3):
        for prompt, ids in zip(long_prompts(6, head=1), want, strict=True):
            assert tokens(engine, requests_for([prompt]))["0"] == ids
    assert engine.tiers.stats.from_host_tokens > 1200


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_copies_beside_steps(tiny, family):
    """Many requests at once over memory for a few: all pages are right while others are copied."""
    prompts = long_prompts(8, head=1)
    want = tokens(make_engine(tiny(family)), requests_for(prompts, max_tokens=20))
    engine = gpu_engine(tiny(family), page_size=16, num_pages=40, num_states=7)
    for _ in range(5):
        assert tokens(engine, requests_for(prompts, max_tokens=20)) == want
    assert engine.tiers.stats.from_host_tokens > 2000


def test_states_come_back_alone(tiny):
    prompts = long_prompts(6, head=1)
    want = [tokens(make_engine(tiny("qwen3_5")), requests_for([one]))["0"] for one in prompts]
    engine = gpu_engine(tiny("qwen3_5"), num_pages=4096, num_states=3)
    for turn in range(3):
        for prompt, ids in zip(prompts, want, strict=True):
            output = answer(engine, requests_for([prompt]))["0"]
            assert output.outputs[0].token_ids == ids
            assert output.metrics.num_computed_tokens == (1 if turn else 130)


def test_a_restart_finds_files(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("onestem.engine.tiers.stores.TierStores.disk_pays", lambda *_: True)
    requests = requests_for(shared_prompts())
    first = gpu_engine(tiny("llama"), tmp_path)
    want = tokens(first, requests)
    first.close()
    again = gpu_engine(tiny("llama"), tmp_path)
    assert tokens(again, requests) == want
    assert again.tiers.stats.from_disk_tokens > 100


def bits(engine):
    """Keys and values of the first run."""
    torch.cuda.synchronize()
    run = next(iter(engine.cache.tree))
    slots = torch.from_numpy(run.slots(0, 129)).cuda()
    every = [pages for pair in engine.launcher.runner.kv_pages for pages in pair]
    return [read_kv(pages, slots).view(torch.int16).clone() for pages in every]


def test_bits_stay(tiny):
    engine = gpu_engine(tiny("llama"), dtype=torch.bfloat16, page_size=16)
    [request] = requests_for([long_prompts(1)[0]])
    answer(engine, [request])
    every = [pages for pair in engine.launcher.runner.kv_pages for pages in pair]
    before = bits(engine)
    engine.cache.make_room(engine.cache.pool.num_pages)
    engine.tiers.prefixes.save_evicted()
    engine.launcher.runner.copies.guard()
    for pages in every:
        with torch.inference_mode():
            pages.fill_(float("nan"))
    answer(engine, [request])
    assert all(map(torch.equal, before, bits(engine)))


def test_a_step_waits_for_what_it_writes_to(tiny):
    """Nothing is copied out until the next request's steps were launched, in the same pages."""
    engine = gpu_engine(tiny("llama"), dtype=torch.bfloat16, page_size=16, num_pages=10)
    first, second = requests_for(long_prompts(2, head=1))
    answer(engine, [first])
    before = bits(engine)
    engine.cache.make_room(engine.cache.pool.num_pages)
    for stream, _ in engine.launcher.runner.copies._out:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1 << 30)
    answer(engine, [second])
    engine.cache.make_room(engine.cache.pool.num_pages)
    answer(engine, [first])
    assert engine.tiers.stats.from_host_tokens > 100
    assert all(map(torch.equal, before, bits(engine)))


def test_an_engine_that_slept(tiny):
    """KV memory is elsewhere afterwards: both directions find it."""
    engine = gpu_engine(tiny("llama"), page_size=16, num_pages=40)
    requests = requests_for(long_prompts(4, head=1))
    want = tokens(make_engine(tiny("llama")), requests)
    for i in range(3):
        assert tokens(engine, requests) == want
        engine.cache.make_room(engine.cache.pool.num_pages)
        engine.weights.sleep(1)
        taken = torch.full((64 * MIB,), 255, dtype=torch.uint8, device="cuda")  # where it was
        engine.weights.wake_up()
        assert engine.tiers.stats.from_host_tokens >= i * 500
        del taken


def test_what_a_module_takes_the_place_of_is_saved_first(tiny):
    """A module that is copied back evicts a run, whose pages it gets."""
    engine = gpu_engine(tiny("llama"), page_size=16, num_pages=24)
    plain = make_engine(tiny("llama"))
    prompts, modules = long_prompts(4, head=1), compiled_prompts("anchored")
    for i in range(16):
        for request in (*requests_for([prompts[i % 4]]), pml_request("pml", modules[i % 8])):
            assert tokens(plain, [request]) == tokens(engine, [request]), i
    assert engine.tiers.stats.from_host_tokens > 0
