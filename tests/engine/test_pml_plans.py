"""A step reads each module once, for all requests that import it in whatever combination."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from onestem.ops.items import CostModel, SharedItem, make_items
from onestem.pml import Import, Module, Prompt, Schema
from tests.engine.harness import answer, make_engine
from tests.engine.pml_harness import compiled_prompts, pml_request

NAMES = "abcdef"
LIBRARY = Schema("lib", ["Own. ", *(Module(name, [name * 20]) for name in NAMES)])
PROMPTS = [
    Prompt("lib", [*(Import(name) for name in chosen), f"Question {number}"])
    for number, chosen in enumerate(combinations(NAMES, 3))
]


@pytest.mark.parametrize("isolation", ["anchored", "isolated"])
@pytest.mark.parametrize("share", ["full", "storage"])
def test_one_read_of_each_module(tiny, isolation, share):
    engine = make_engine(tiny("llama"), share=share)
    compiled = compiled_prompts(isolation, PROMPTS, LIBRARY)
    answer(engine, [pml_request(i, one, max_tokens=2) for i, one in enumerate(compiled)])
    plans = []
    runner = engine.launcher.runner
    prepare = runner.prepare
    runner.prepare = lambda inputs, change: (
        plans.append(inputs.plans[None]) or prepare(inputs, change)
    )
    answer(engine, [pml_request(i, one, max_tokens=4) for i, one in enumerate(compiled)])
    decodes = plans[-1]
    assert decodes.num_rows == len(PROMPTS)
    slots = {run.name[1]: run.slots(0, len(run.tokens)) for run in engine.cache.modules}
    items = make_items(decodes, CostModel(item_tokens=1), share == "full")
    shared = [item for item in items if isinstance(item, SharedItem)]
    for key, where in slots.items():
        readers = [item for item in shared if np.isin(where, item.slots).all()]
        importing = sum(key in {s.key for s in one.segments} for one in compiled)
        assert importing >= 10
        if share == "full":
            assert [len(item.rows) for item in readers] == [importing]
            continue
        # Rows one by one, though the module is stored once.
        assert sum(len(item.rows) for item in readers) == importing
        assert all(item.copies or len(item.rows) == 1 for item in readers)
