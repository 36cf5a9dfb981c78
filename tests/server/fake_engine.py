"""An engine that does nothing, for tests of processes alone: no torch is imported for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def load(options: dict[str, Any]) -> SimpleNamespace:
    stats = SimpleNamespace(to_dict=dict)
    pool = SimpleNamespace(page_size=16, num_pages=4)
    engine = SimpleNamespace(
        max_model_len=64, cache=SimpleNamespace(pool=pool), impl=SimpleNamespace(name="none"),
        share="full", stats=stats, num_waiting=0, num_running=0, has_unfinished=lambda: False,
        scheduler=SimpleNamespace(budget=SimpleNamespace(seconds=None)),
    )  # fmt: skip
    decoder = SimpleNamespace(config=SimpleNamespace(vocab_size=8), kv_bytes_per_token=1)
    device = SimpleNamespace(type="cpu")
    return SimpleNamespace(
        engine=engine, decoder=decoder, dtype="float32", device=device, random_weights=False
    )
