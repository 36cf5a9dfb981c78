"""Conversations beside other prompts in small KV memory: they are kept, and answers are those of an
engine without a cache."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from onestem.cache.idle import IdleRuns
from tests.engine.harness import answer, make_engine, record_logprobs, requests_for
from tests.engine.test_pml_tiers import same


def talk(engine, *, marked: bool):
    """Two conversations of six turns, and a growing number of other prompts between them: tokens,
    log-probabilities, and tokens that each turn computed."""
    rng = np.random.default_rng(3)
    seen = record_logprobs(engine)
    histories = [rng.integers(3, 270, 40).tolist() for _ in range(2)]
    found, computed = [], []
    for turn in range(6):
        for history in histories:
            [request] = requests_for([history])
            [output] = answer(engine, [replace(request, in_conversation=marked)]).values()
            tokens = {request.request_id: [output.outputs[0].token_ids]}
            found.append((tokens, dict(seen)))
            computed.append(output.metrics.num_computed_tokens)
            history += output.outputs[0].token_ids + rng.integers(3, 270, 9).tolist()
            seen.clear()
        for _ in range(2 + turn):
            answer(engine, requests_for([rng.integers(3, 270, 60).tolist()], max_tokens=1))
            seen.clear()
        engine.check()
    return found, computed


@pytest.mark.parametrize("marked", [False, True])
def test_answers_are_those_without_a_cache(tiny, monkeypatch, marked):
    options = {"page_size": 4, "num_pages": 96}
    expected, every = talk(make_engine(tiny("llama"), share="off", **options), marked=False)
    found, computed = talk(make_engine(tiny("llama"), **options), marked=marked)
    monkeypatch.setattr(IdleRuns, "rate", lambda self, run: 0.0)
    oldest_first = talk(make_engine(tiny("llama"), **options), marked=marked)[1]
    assert all(same(*pair) for pair in zip(expected, found, strict=True))
    assert every == [40 + 15 * turn for turn in range(6) for _ in "12"]
    # The last sampled token, which has no keys and values, and 9 new ones.
    assert computed == [40, 40, *10 * [10]]
    assert oldest_first == [40, 40, *4 * [10], 25, 40, 100, 100, 115, 115]
