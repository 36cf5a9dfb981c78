"""Tiny random models, one for each thing that a family does differently.

Their weights are scaled so that attention carries the answer: at contexts of some 90 tokens, hiding
one key from one row in one layer moves some log-probability of that row by more than 1e-2. A test
that compares log-probabilities with a tighter tolerance thus sees every key that is lost, doubled
or shown to the wrong row. (Greedy tokens of a random model would hardly react.)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

__all__ = ["FAMILIES", "SENSITIVITY", "VOCAB_SIZE", "make_tiny"]

VOCAB_SIZE = 288

# What hiding one key moves at least, in the largest change of a log-probability of the row.
SENSITIVITY = 1e-2

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # Short, so that all three branches of the scaling differ within a test's context.
    "original_max_position_embeddings": 64,
}

# family -> (architecture, what differs from `_BASE`)
_SPECS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_mha_tied": ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama_llama3_rope": ("Llama", {"rope_parameters": _LLAMA3_ROPE}),
    "llama_linear_rope": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama_biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_head_dim": ("Llama", {"head_dim": 32, "num_key_value_heads": 1}),
    "codellama": (
        "Llama",
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "num_key_value_heads": 4,
            "vocab_size": 272,
        },
    ),
    "yi": (
        "Llama",
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e6},
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
        },
    ),
    "mistral": ("Mistral", {"sliding_window": 24}),
    "mistral_no_window": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2_windows": (
        "Qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 20,
            "max_window_layers": 1,
            "num_hidden_layers": 3,
        },
    ),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3_tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
}

FAMILIES: tuple[str, ...] = tuple(_SPECS)

# Standard deviations by the end of a parameter's module name. Queries and keys are small enough
# that no key's share of a softmax vanishes, values and outputs large enough that a small share of
# them is felt, and the head steep enough to show it.
_SCALES = {
    "q_proj": 0.09,
    "k_proj": 0.09,
    "v_proj": 0.5,
    "o_proj": 0.3,
    "gate_proj": 0.1,
    "up_proj": 0.1,
    "down_proj": 0.1,
    "embed_tokens": 0.5,
    "lm_head": 0.5,
}


def make_tiny(
    family: str, path: str | Path, *, seed: int = 0, max_shard_size: str | None = None
) -> Path:
    """Write a tiny model of `family` to the directory `path` (float32) and return it.

    `max_shard_size` ("50KB") splits the weights over several files with an index.
    """
    architecture, changes = _SPECS[family]
    config = getattr(transformers, f"{architecture}Config")(**{**_BASE, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{architecture}ForCausalLM")(config)
    _scale(model, seed)
    options = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    model.save_pretrained(path, **options)
    return Path(path)


@torch.no_grad()
def _scale(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        module = name.split(".")[-2]
        if name.endswith(".bias"):
            parameter.normal_(0.0, 0.1, generator=generator)
        elif "norm" in module:
            parameter.uniform_(0.7, 1.3, generator=generator)
        else:
            scale = _SCALES[module] * _depth_factor(name)
            parameter.normal_(0.0, scale, generator=generator)


def _depth_factor(name: str) -> float:
    """Later attention outputs stand against a larger residual and are scaled up with it."""
    parts = name.split(".")
    return 1.0 + 0.5 * int(parts[2]) if parts[-2] == "o_proj" else 1.0
