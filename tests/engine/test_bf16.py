"""bf16: sharing adds no error of its own to log-probabilities."""

from __future__ import annotations

import numpy as np
import torch

from tests.engine.harness import answer, make_engine, record_logprobs, requests_for

NUM_PROMPTS = 1000
SHARED, DISTINCT, DEGREE = 40, 12, 20


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    out = []
    for _ in range(NUM_PROMPTS // DEGREE):
        head = rng.integers(3, 270, SHARED).tolist()
        out.extend(head + rng.integers(3, 270, DISTINCT).tolist() for _ in range(DEGREE))
    return out


def teacher_forced(
    path, dtype: torch.dtype, share: str
) -> dict[tuple[str, int, int], torch.Tensor]:
    """Log-probabilities after each of the prompts' own tokens."""
    import dataclasses

    engine = make_engine(path, dtype=dtype, share=share, num_pages=8192, max_step_tokens=2048)
    seen = record_logprobs(engine)
    requests = [
        dataclasses.replace(request, score_from=SHARED)
        for request in requests_for(prompts(), max_tokens=1)
    ]
    answer(engine, requests)
    expected = SHARED * NUM_PROMPTS // DEGREE if share == "full" else SHARED * NUM_PROMPTS
    # All but the shared tokens' last (its row scores the first of one's own) come from the cache.
    assert (
        abs(engine.stats.processed_prompt_tokens - expected - DISTINCT * NUM_PROMPTS) <= NUM_PROMPTS
    )
    return seen


def errors(got: dict, want: dict) -> np.ndarray:
    assert got.keys() == want.keys()
    assert len(got) == NUM_PROMPTS * (DISTINCT + 1)
    return np.array([float((got[key] - want[key]).abs().mean()) for key in want])


def test_sharing_adds_no_error(tiny):
    path = tiny("llama")
    want = teacher_forced(path, torch.float32, "off")
    full = errors(teacher_forced(path, torch.bfloat16, "full"), want)
    off = errors(teacher_forced(path, torch.bfloat16, "off"), want)
    assert full.mean() <= 1.1 * off.mean()
    assert np.percentile(full, 99) <= 1.1 * np.percentile(off, 99)
