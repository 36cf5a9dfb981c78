"""The weights of a decoder layer by their features. Nothing but the standard library: an engine's
own environment reads it, too."""

from __future__ import annotations

from typing import Any

__all__ = ["layer_products"]


def layer_products(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Name -> in and out features of each of a layer's weights."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim", hidden // heads)
    qkv = (heads + 2 * config["num_key_value_heads"]) * head_dim
    return {
        "qkv": (hidden, qkv),
        "output": (heads * head_dim, hidden),
        "up": (hidden, 2 * inner),
        "down": (inner, hidden),
    }
