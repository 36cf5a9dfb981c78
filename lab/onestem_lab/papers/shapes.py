"""Shapes of the papers' models, at a scale."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["scaled"]

LEAST_VOCABULARY = 512


def scaled(config: Mapping[str, Any], scale: float) -> dict[str, Any]:
    """A config with layers, heads, inner size (in 32s, which formats of 4 bits take) and vocabulary
    scaled, at least one of each. The size of heads and the query heads per KV head stay."""
    if scale == 1:
        return dict(config)

    def part(name: str, least: int = 1) -> int:
        return max(least, round(config[name] * scale))

    heads = config["num_attention_heads"]
    group = heads // (config.get("num_key_value_heads") or heads)
    kv_heads = max(1, round(heads // group * scale))
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return {
        **config,
        "num_hidden_layers": part("num_hidden_layers"),
        "num_attention_heads": kv_heads * group,
        "num_key_value_heads": kv_heads,
        "hidden_size": kv_heads * group * head_dim,
        "intermediate_size": max(head_dim, 32 * round(config["intermediate_size"] * scale / 32)),
        "vocab_size": part("vocab_size", LEAST_VOCABULARY),
    }
