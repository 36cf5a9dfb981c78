"""Prompts of modules on a GPU: the tokens of the CPU, from every tier. Skipped without a GPU."""

from __future__ import annotations

import pytest
import torch

from onestem.cache.host import HostStore
from onestem.cache.storage import DiskStore
from onestem.engine.engine import Engine
from onestem.engine.step import graphs
from onestem.ops.triton import TritonAttention
from tests.engine.harness import answer, engine_on
from tests.engine.pml_harness import compiled_prompts, pml_request
from tests.engine.test_repair import prompt_of, request_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def tokens(engine: Engine, isolation: str) -> list[list[int]]:
    compiled = compiled_prompts(isolation)
    requests = [pml_request(i, one, max_tokens=24) for i, one in enumerate(compiled)]
    outputs = answer(engine, requests)
    return [outputs[str(i)].outputs[0].token_ids for i in range(len(compiled))]


@pytest.mark.parametrize("share", ["full", "storage", "off"])
@pytest.mark.parametrize("isolation", ["anchored", "isolated", "off"])
@pytest.mark.parametrize("family", ["llama", "mistral", "falcon_40b", "mpt", "phi", "gpt2"])
def test_tokens_are_those_of_the_cpu(tiny, family, isolation, share):
    want = tokens(engine_on("cpu", tiny(family), impl="torch"), isolation)
    assert tokens(engine_on("cuda", tiny(family), share=share), isolation) == want


@pytest.mark.parametrize("repair", [0.0, 0.5])
@pytest.mark.parametrize("family", ["llama", "gemma3", "phi"])
def test_documents_at_other_places(tiny, family, repair, monkeypatch):
    """The second time from the same copies; steps of moved rows have graphs, over parts of pages
    where blocks are hidden."""
    monkeypatch.setattr(graphs, "OFTEN", 0)
    monkeypatch.setattr(TritonAttention, "head_major", lambda *_: False)  # its pages have no parts
    orders = ((0, 1, 2, 3), (0, 3, 1, 2), (2, 1, 0), (4, 0, 2, 3, 1))
    requests = [
        request_of(str(i), prompt_of(order, repair), max_tokens=24, n=1 + i % 2)
        for i, order in enumerate(orders)
    ]
    want = answer(engine_on("cpu", tiny(family), impl="torch"), requests)
    engine = engine_on("cuda", tiny(family))
    for _ in range(2):
        found = answer(engine, requests)
        for name, output in want.items():
            tokens = [one.token_ids for one in found[name].outputs]
            assert tokens == [one.token_ids for one in output.outputs]
    sizes = {shape.page_size for shape in engine.launcher.runner.graphs if shape.queries}
    assert sizes == ({16, engine.cache.pool.part or 16} if repair else {16})


@pytest.mark.parametrize("page_size", [1, 16])  # scattered slots, and stretches of them
@pytest.mark.parametrize("isolation", ["anchored", "isolated"])
def test_from_host_memory(tiny, isolation, page_size):
    want = tokens(engine_on("cpu", tiny("llama"), impl="torch"), isolation)
    engine = engine_on("cuda", tiny("llama"), page_size=page_size)
    engine.keep_below("model", host=HostStore(1 << 26), disk=None)
    assert tokens(engine, isolation) == want
    for _ in range(2):
        engine.cache.clear()
        assert tokens(engine, isolation) == want
    assert engine.tiers is not None
    assert engine.tiers.stats.from_host_tokens >= 2 * engine.tiers.stats.saved_tokens > 0


def test_from_scattered_pages(tiny):
    """A pool so full of other runs that modules get pages here and there."""
    want = tokens(engine_on("cpu", tiny("llama"), impl="torch"), "anchored")
    engine = engine_on("cuda", tiny("llama"), page_size=1)
    engine.keep_below("model", host=HostStore(1 << 26), disk=None)
    assert tokens(engine, "anchored") == want
    engine.cache.clear()
    taken = engine.cache.pool.allocate(512)
    engine.cache.pool.release(taken[::2] + taken[301::2])
    kept = sorted(set(taken) - set(taken[::2] + taken[301::2]))
    compiled = compiled_prompts("anchored")[0]
    requests = [pml_request("0", compiled, max_tokens=24)]
    engine.add_request(requests[0])
    outputs = []
    while engine.requests.states or not outputs:
        outputs += engine.step()
    assert outputs[0].outputs[0].token_ids == want[0]
    engine.cache.clear()
    engine.cache.pool.release(kept)
    engine.check()


def test_from_the_disk_where_that_pays(tiny, tmp_path, monkeypatch):
    want = tokens(engine_on("cpu", tiny("llama"), impl="torch"), "anchored")
    first = engine_on("cuda", tiny("llama"))
    first.keep_below("model", host=None, disk=DiskStore(tmp_path, 1 << 26, "m"))
    assert tokens(first, "anchored") == want
    assert first.tiers is not None
    first.tiers.stores.flush()
    for row_seconds, used in ((1e-12, False), (1e3, True)):
        engine = engine_on("cuda", tiny("llama"))
        engine.keep_below("model", host=None, disk=DiskStore(tmp_path, 1 << 26, "m"))
        assert engine.tiers is not None
        rates = engine.tiers.stores.rates
        monkeypatch.setattr(rates, "note_step", lambda *_: None)
        rates.row_seconds = row_seconds
        rates.note_read(10**9, 1.0, 1)
        assert tokens(engine, "anchored") == want
        assert (engine.tiers.stats.from_disk_tokens > 0) is used
