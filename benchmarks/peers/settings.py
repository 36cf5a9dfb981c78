"""Settings of each engine: what it runs with unless told, and what a sweep tries."""

from __future__ import annotations

from itertools import product
from typing import Any

__all__ = ["ENGINES", "default", "sweep"]

Settings = dict[str, Any]

ENGINES = ("onestem", "vllm", "transformers", "llama_cpp")


def default(engine: str, dtype: str) -> Settings:
    """The first of the sweep; Onestem has nothing to tune."""
    return sweep(engine, dtype)[0]


def sweep(engine: str, dtype: str) -> list[Settings]:
    if engine == "vllm":
        return _vllm()
    if engine == "transformers":
        return [
            {"batch_size": size, "cache": cache}
            for cache, size in product(("dynamic", "static"), (64, 16))
        ]
    if engine == "llama_cpp":
        return _llama_cpp(dtype)
    if engine == "onestem":
        return [{}]
    raise ValueError(f"engine is {engine!r}, expected one of {', '.join(ENGINES)}")


def _vllm() -> list[Settings]:
    grid = product((128, 32), (False, True), (2048, 512, 8192))
    settings = [
        {"block_size": block, "eager": eager, "max_num_batched_tokens": tokens, "preload": True}
        for block, eager, tokens in grid
    ]
    return [*settings, {**settings[0], "preload": False}]


def _llama_cpp(dtype: str) -> list[Settings]:
    """Weights of as many bits as the others have; of 16 bits, both kinds.

    Its flash attention computes with keys and values in 16 bits, whatever they are kept in, so with
    float32 it gets them so from the start: less exact than the others, in its favour.
    """
    if dtype == "float32":
        kinds = [("f32", "f32", False), ("f32", "f16", True)]
    else:
        kinds = [(w, "f16", flash) for w in ("f16", "bf16") for flash in (False, True)]
    return [
        {
            "weights": weights,
            "kv": kv,
            "flash_attention": flash,
            "unified": unified,
            "ubatch": ubatch,
            "max_seqs": most,
        }
        for (weights, kv, flash), unified, (ubatch, most) in product(
            kinds, (True, False), ((512, 64), (2048, 64), (512, 16))
        )
    ]
