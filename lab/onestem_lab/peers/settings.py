"""Settings of each engine: what it runs with unless told, and what a sweep tries."""

from __future__ import annotations

from typing import Any

__all__ = ["ENGINES", "combined", "default", "sweep"]

Settings = dict[str, Any]

ENGINES = ("onestem", "vllm", "transformers", "llama_cpp")

# Engine -> the settings it runs with unless told, and what a sweep changes of them, one at a time.
_DEFAULTS: dict[str, Settings] = {
    "onestem": {},
    "vllm": {"block_size": 128, "eager": False, "max_num_batched_tokens": 2048, "preload": True},
    "transformers": {"batch_size": 64, "cache": "dynamic"},
    "llama_cpp": {
        "weights": "f16",
        "kv": "f16",
        "flash_attention": False,
        "unified": True,
        "ubatch": 512,
        "max_seqs": 64,
    },
}
_CHANGES: dict[str, list[Settings]] = {
    "onestem": [],
    "vllm": [
        {"block_size": 32},
        {"eager": True},
        {"max_num_batched_tokens": 512},
        {"max_num_batched_tokens": 8192},
        {"preload": False},
    ],
    "transformers": [{"cache": "static"}, {"batch_size": 16}],
    "llama_cpp": [
        {"flash_attention": True},
        {"unified": False},
        {"ubatch": 2048},
        {"max_seqs": 16},
    ],
}


def default(engine: str, dtype: str) -> Settings:
    """What an engine runs with unless told."""
    given = dict(_DEFAULTS[engine])
    if engine == "llama_cpp" and dtype == "float32":
        return {**given, "weights": "f32", "kv": "f32"}
    return given


def sweep(engine: str, dtype: str) -> list[Settings]:
    """The default, and what differs from it in one respect."""
    base = default(engine, dtype)
    return [base, *({**base, **change} for change in _changes(engine, dtype))]


def combined(engine: str, dtype: str, runs: list[dict[str, Any]]) -> Settings:
    """The default with every change that made it faster; of changes of one setting, the best.

    Args:
        runs: of `sweep`'s settings, with `seconds` where they did not fail.
    """
    base = default(engine, dtype)
    seconds = [(run["seconds"], run["settings"]) for run in runs if "seconds" in run]
    limit = min((took for took, settings in seconds if settings == base), default=float("inf"))
    best = dict(base)
    for took, settings in sorted(seconds, key=lambda one: one[0], reverse=True):
        if took < limit:
            best.update({name: value for name, value in settings.items() if value != base[name]})
    return best


def _changes(engine: str, dtype: str) -> list[Settings]:
    """Weights of as many bits as the others have; of 16 bits, both kinds.

    llama.cpp's flash attention computes with keys and values in 16 bits, whatever they are kept in,
    so with float32 it gets them so from the start: less exact than the others, in its favour.
    """
    changes = _CHANGES[engine]
    if engine != "llama_cpp":
        return changes
    if dtype == "float32":
        return [{"kv": "f16", **change} if "flash_attention" in change else change
                for change in changes]  # fmt: skip
    return [{"weights": "bf16"}, *changes]
