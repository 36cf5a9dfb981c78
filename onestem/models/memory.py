"""Memory of one cached token, from a model's config alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onestem.errors import ConfigError

MIB = 1 << 20


@dataclass(frozen=True)
class TokenMemory:
    """MiB of keys and values of one token.

    Attributes:
        all_heads: as in Prompt Cache's table 2, with a key and a value for each query head:
            `2 * layers * hidden size * bytes`.
        kv_heads: with the KV heads that the model has (GQA, MQA): what is stored.
    """

    all_heads: float
    kv_heads: float


def token_memory(config: Mapping[str, Any], *, num_bytes: int = 2) -> TokenMemory:
    """Memory of a token, from the values in a `config.json`.

    Args:
        num_bytes: size of one number; 2 for 16-bit types.

    Raises:
        ConfigError: a size is missing.
    """
    layers = _size(config, "num_hidden_layers", "n_layer", "n_layers")
    hidden = _size(config, "hidden_size", "n_embd", "d_model")
    heads = _size(config, "num_attention_heads", "n_head", "n_heads")
    head_dim = config.get("head_dim") or hidden // heads
    per_value = 2 * layers * num_bytes / MIB
    return TokenMemory(per_value * hidden, per_value * _num_kv_heads(config, heads) * head_dim)


def _num_kv_heads(config: Mapping[str, Any], heads: int) -> int:
    if config.get("model_type") in ("falcon", "RefinedWeb", "RefinedWebModel"):
        # Falcon's older architecture does not use the number of KV heads that its files give.
        if config.get("new_decoder_architecture") or "n_head_kv" in config:
            return int(config.get("num_kv_heads") or config.get("n_head_kv") or heads)
        return 1 if config.get("multi_query") else heads
    attention = config.get("attn_config") or {}  # MPT
    return int(config.get("num_key_value_heads") or attention.get("kv_n_heads") or heads)


def _size(config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        if isinstance(config.get(name), int) and config[name] > 0:
            return int(config[name])
    raise ConfigError(f"config.json has none of {', '.join(names)}: it is of no known decoder")
