"""Equal prompts, asked at once or one after the other: what is kept of their answers."""

from __future__ import annotations

import dataclasses

import pytest

from tests.engine.harness import answer, make_engine, requests_for

PROMPT = list(range(40, 63))


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("together", [True, False])
def test_each_answer_is_found(tiny, together, n):
    """They begin alike (with the prompt's last token at least), and all are kept."""
    engine = make_engine(tiny("llama"), page_size=4)
    requests = [
        dataclasses.replace(request, request_id=str(seed))
        for seed in range(6)
        for request in requests_for([PROMPT], max_tokens=9, temperature=0.7, seed=seed, n=n)
    ]
    outputs = {}
    for part in [requests] if together else [[request] for request in requests]:
        outputs |= answer(engine, part)
    answers = {tuple(one.token_ids) for output in outputs.values() for one in output.outputs}
    assert len(answers) > 2 * n
    for one in answers:
        then = answer(engine, requests_for([[*PROMPT, *one, 5, 6]]))["0"]
        assert then.metrics.num_cached_tokens == len(PROMPT) + 8
