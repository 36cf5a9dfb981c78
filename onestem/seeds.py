"""Seeds of requests that have none."""

from __future__ import annotations

import hashlib

SAMPLER_VERSION = 2
"""Changes whenever equal seeds and logits give other tokens than before (1: a walk in the order of
probability; 2: an exponential race). A job's answers are all of one version."""


def derive_seed(*parts: str | int) -> int:
    """A seed in 0..2^63-1 that depends on all `parts` (their types too) and on nothing else.

    The engine uses it for requests without a seed: `derive_seed(engine_seed, request_id)`.
    """
    digest = hashlib.sha256()
    for part in parts:
        # The length keeps ("ab", "c") and ("a", "bc") apart.
        kind, text = ("i", str(int(part))) if isinstance(part, int) else ("s", part)
        data = text.encode("utf-8", "surrogatepass")
        digest.update(f"{kind}{len(data)}:".encode())
        digest.update(data)
    return int.from_bytes(digest.digest()[:8], "big") >> 1
