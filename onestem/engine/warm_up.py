"""A first job, so that no user's or timed job waits for what a first one takes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from onestem.engine.engine import Engine
from onestem.request import ONE_TOKEN, Request

PROMPTS = 16
# Of the rows of a full step: libraries choose their kernels by the number of rows.
SHARES = (1.0, 0.75, 0.5)


def warm_up(engine: Engine, shares: Sequence[float] = SHARES) -> float | None:
    """Run full steps of prompts behind a prefix, then forget them. A GPU's kernels are compiled and
    chosen meanwhile.

    Args:
        shares: of the rows of a full step that each of them has.

    Returns:
        seconds that a prompt's row took; None: there were too few.
    """
    tokens, names = count(), map(str, count())
    vocab_size, room = engine.weights.decoder.config.vocab_size, engine.max_model_len - 2

    def some(length: int) -> list[int]:
        return [next(tokens) % vocab_size for _ in range(length)]

    for share in shares:
        rows = int(share * min(engine.limits.step_tokens, engine.cache.pool.num_tokens // 2))
        own = min(rows // (2 * PROMPTS), room // 2)
        prefix = some(min(rows - PROMPTS * own, room - own))
        prompts = [prefix + some(own) for _ in range(PROMPTS)]
        params = ONE_TOKEN.replace(max_tokens=2)
        requests = [
            Request(request_id=next(names), prompt_token_ids=ids, params=params)
            for ids in prompts
            if ids
        ]
        for _ in engine.run(requests):
            pass
    engine.cache.clear()
    engine.reset_stats()
    seconds = engine.limits.row_seconds
    engine.limits.forget()
    return seconds
