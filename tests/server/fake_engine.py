"""An engine that does nothing, for tests of processes alone: no torch is imported for it."""

from __future__ import annotations

from types import SimpleNamespace

from onestem.options import EngineOptions


def load(options: EngineOptions) -> SimpleNamespace:
    stats = SimpleNamespace(to_dict=dict)
    settled = options.replace(max_model_len=64)
    decoder = SimpleNamespace(config=SimpleNamespace(vocab_size=8), kv_bytes_per_token=1)
    queue = SimpleNamespace(interactive=SimpleNamespace(gate=None, num_held=0))
    return SimpleNamespace(
        stats=stats, num_waiting=0, num_running=0, has_unfinished=lambda: False, can_step=True,
        limits=SimpleNamespace(step_seconds=None), requests=SimpleNamespace(queue=queue),
        cache=SimpleNamespace(pool=SimpleNamespace(num_tokens=64)),
        weights=SimpleNamespace(version=0, is_ready=True, decoder=decoder),
        options=settled, team=None,
    )  # fmt: skip
