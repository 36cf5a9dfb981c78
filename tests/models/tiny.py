"""Tiny random models, one for each thing that a family does differently.

Their weights are scaled so that attention carries the answer: at contexts of some 90 tokens, hiding
one key from one row in one layer moves some log-probability of that row by more than 1e-2. A test
that compares log-probabilities with a tighter tolerance thus sees every key that is lost, doubled
or shown to the wrong row. (Greedy tokens of a random model would hardly react.)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

__all__ = ["FAMILIES", "SENSITIVITY", "VOCAB_SIZE", "load_oracle", "make_tiny"]

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

_FALCON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
# Of which each row takes two; in some layers, where a family has that.
_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 48, "num_experts_per_tok": 2, "head_dim": 16}
_MPT: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "d_model": 64, "n_heads": 4, "n_layers": 2}

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
    "phi": (
        "Phi",
        {"hidden_size": 128, "num_key_value_heads": 4, "partial_rotary_factor": 0.4},
    ),
    "phi_tied": ("Phi", {"hidden_act": "gelu", "tie_word_embeddings": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": 40}),
    "qwen2_moe": (
        "Qwen2Moe",
        {**_EXPERTS, "num_experts": 5, "shared_expert_intermediate_size": 40},
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            **_EXPERTS,
            "num_experts": 6,
            "norm_topk_prob": True,
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
        },
    ),
    "olmoe": (
        "Olmoe",
        {"num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 4.0},
    ),
    "gpt_oss": (
        "GptOss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "sliding_window": 32,
            "swiglu_limit": 0.5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 8.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            **_EXPERTS,
            "n_routed_experts": 6,
            "n_group": 3,
            "topk_group": 2,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.5,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    ),
}

_GEMMA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "sliding_window": 20,
    "tie_word_embeddings": True,
}
_GEMMA3: dict[str, Any] = {
    **_GEMMA,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
_GEMMA4: dict[str, Any] = {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1e3,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "final_logit_softcapping": 6.0,
    "tie_word_embeddings": True,
}
# As 31B and 26B-A4B are, and as E2B and E4B are.
_GEMMA4_LARGE: dict[str, Any] = {
    **_GEMMA4,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}
_GEMMA4_SMALL: dict[str, Any] = {
    **_GEMMA4,
    "num_hidden_layers": 5,
    "layer_types": [
        f"{kind}_attention" for kind in ["sliding", "full", "sliding", "sliding", "full"]
    ],
    "hidden_size_per_layer_input": 16,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "num_key_value_heads": 1,
}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 256,
}
# One position, so that transformers takes the long factors for every prompt, as we do.
_LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + 0.1 * i for i in range(6)],
    "long_factor": [1.0 + 2.0 * i for i in range(6)],
    "original_max_position_embeddings": 1,
    "attention_factor": 1.3,
    "partial_rotary_factor": 0.75,
}
_GRANITE: dict[str, Any] = {
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.4,
    "residual_multiplier": 0.6,
    "logits_scaling": 2.0,
}
_MINISTRAL3: dict[str, Any] = {
    "head_dim": 32,
    "rope_parameters": {
        **_YARN,
        "original_max_position_embeddings": 32,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "llama_4_scaling_beta": 0.3,
    },
}
_DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    # Results of heads may be near zero: a small epsilon would make much of rounding.
    "rms_norm_eps": 1e-2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
_DELTA_MOE: dict[str, Any] = {
    **_DELTA,
    **_EXPERTS,
    "head_dim": 32,
    "num_experts": 6,
    "shared_expert_intermediate_size": 40,
}
_SPECS |= {
    # The last layer has the delta rule.
    "qwen3_next": (
        "Qwen3Next",
        {
            **_DELTA_MOE,
            "layer_types": [f"{kind}_attention" for kind in ["linear", "full", "linear", "linear"]],
            "mlp_only_layers": [1],
            "norm_topk_prob": False,
        },
    ),
    "qwen3_next_dense": (
        "Qwen3Next",
        {
            **_DELTA,
            "num_experts": 0,
            "layer_types": [f"{kind}_attention" for kind in ["linear", "full", "linear", "linear"]],
            "linear_key_head_dim": 24,
            "linear_value_head_dim": 72,  # several vectors and some of another one
        },
    ),
    "qwen3_5": ("Qwen3_5", _DELTA),
    "qwen3_5_moe": ("Qwen3_5Moe", _DELTA_MOE),
    "qwen2_yarn": ("Qwen2", {"rope_parameters": _YARN}),
    "phi3": ("Phi3", {"sliding_window": 24}),
    "phi4_mini": (
        "Phi3",
        {
            "tie_word_embeddings": True,
            "rope_parameters": _LONGROPE,
            "original_max_position_embeddings": 1,
        },
    ),
    "olmo2": ("Olmo2", {}),
    "olmo3": (
        "Olmo3",
        {
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": _YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0]}),
    "granite": ("Granite", {**_GRANITE, "num_hidden_layers": 3}),
    "glm": ("Glm", {"head_dim": 32}),
    "glm4": ("Glm4", {"head_dim": 32}),
    "ministral": (
        "Ministral",
        {
            "head_dim": 32,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "ministral3": ("Ministral3", _MINISTRAL3),
    "gemma2": (
        "Gemma2",
        {**_GEMMA, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 6.0},
    ),
    "gemma3": ("Gemma3", _GEMMA3),
    "gemma4": ("Gemma4", _GEMMA4_LARGE),
    "gemma4_moe": (
        "Gemma4",
        {
            **_GEMMA4_LARGE,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 48,
        },
    ),
}

# The text parts of those that read images too, of which all else is as small as it can be.
_IMAGE_SPECS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma4_image": ("Gemma4", "gemma4_vision", _GEMMA4_SMALL),
    "qwen3_5_image": (
        "Qwen3_5",
        "qwen3_5_vision",
        {**_DELTA, "tie_word_embeddings": True},
    ),
    "gemma3_image": ("Gemma3", "siglip_vision_model", _GEMMA3),
    "mistral3_image": (
        "Mistral3",
        "pixtral",
        {**_MINISTRAL3, "model_type": "ministral3", "tie_word_embeddings": False},
    ),
}
_VISION: dict[str, Any] = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "depth": 1,
    "num_heads": 1,
    "out_hidden_size": 64,
    "image_size": 16,
    "patch_size": 8,
}

# Those whose configurations share no names with `_BASE`: (architecture, all of it).
_OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon": ("Falcon", _FALCON),
    "falcon_40b": (
        "Falcon",
        {
            **_FALCON,
            "new_decoder_architecture": True,
            "num_attention_heads": 8,
            "num_kv_heads": 2,
            "bias": True,
        },
    ),
    "falcon_11b": (
        "Falcon",
        {
            **_FALCON,
            "new_decoder_architecture": True,
            "num_ln_in_parallel_attn": 1,
            "num_kv_heads": 2,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500042.0},
        },
    ),
    "falcon_rw": (
        "Falcon",
        {**_FALCON, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
    ),
    "mpt": ("Mpt", _MPT),
    "mpt_clip": ("Mpt", {**_MPT, "d_model": 96, "n_heads": 6, "attn_config": {"clip_qkv": 3.0}}),
    "gpt2": (
        "GPT2",
        {"vocab_size": VOCAB_SIZE, "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 128},
    ),
}

FAMILIES: tuple[str, ...] = (*_SPECS, *_IMAGE_SPECS, *_OTHERS)

# Standard deviations by the end of a parameter's module name. Queries and keys are small enough
# that no key's share of a softmax vanishes, values and outputs large enough that a small share of
# them is felt, and the head steep enough to show it.
_QUERY_KEY, _VALUE = 0.09, 0.5
_FUSED = ("query_key_value", "Wqkv", "c_attn", "qkv_proj")
_OUTPUT = ("o_proj", "dense", "out_proj", "attn.c_proj")
_SCALES = {
    **dict.fromkeys(("q_proj", "k_proj"), _QUERY_KEY),
    "v_proj": _VALUE,
    "linear_attn.out_proj": 0.05,
    **dict.fromkeys(_OUTPUT, 0.3),
    **dict.fromkeys(("gate_proj", "up_proj", "gate_up_proj", "dense_h_to_4h", "fc1", "c_fc"), 0.1),
    **dict.fromkeys(("down_proj", "dense_4h_to_h", "fc2", "mlp.c_proj"), 0.1),
    **dict.fromkeys(("embed_tokens", "word_embeddings", "wte", "lm_head"), 0.5),
    "wpe": 0.3,
    **dict.fromkeys(("in_proj_qkv", "conv1d"), 1.0),
    "in_proj_qkvz": 0.3,
    "in_proj_z": 0.1,
    **dict.fromkeys(("in_proj_b", "in_proj_a", "in_proj_ba"), 0.2),
    # Routers: scores of experts differ clearly, and none is next to nothing.
    **dict.fromkeys(("mlp.gate", "mlp.router", "shared_expert_gate"), 0.1),
    "router.proj": 1.0,
    **dict.fromkeys(("embed_tokens_per_layer", "per_layer_model_projection"), 0.5),
    **dict.fromkeys(("per_layer_input_gate", "per_layer_projection"), 0.2),
}


def make_tiny(
    family: str,
    path: str | Path,
    *,
    seed: int = 0,
    max_shard_size: str | None = None,
    changes: Mapping[str, Any] | None = None,
) -> Path:
    """Write a tiny model of `family` to the directory `path` (float32) and return it.

    `max_shard_size` ("50KB") splits the weights over several files with an index. `changes`: other
    fields of its configuration.
    """
    model = _model(family, seed, changes or {})
    _scale(model, seed)
    options = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    model.save_pretrained(path, **options)
    return Path(path)


def load_oracle(path: str | Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model of a directory."""
    (architecture,) = json.loads((Path(path) / "config.json").read_text())["architectures"]
    images = architecture.endswith("ForConditionalGeneration")
    kind = transformers.AutoModelForImageTextToText if images else transformers.AutoModelForCausalLM
    # Its eager attention adds Falcon's ALiBi twice (once more in the mask).
    attention = "sdpa" if architecture.startswith("Falcon") else "eager"
    return kind.from_pretrained(path, dtype=dtype, attn_implementation=attention).eval()


def _model(family: str, seed: int, changes: Mapping[str, Any]) -> Any:
    if family in _IMAGE_SPECS:
        return _image_model(family, seed)
    if family in _OTHERS:
        architecture, fields = _OTHERS[family]
        fields = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, **fields}
    else:
        architecture, own = _SPECS[family]
        fields = {**_BASE, **own}
    fields |= changes
    text = "Text" if architecture in ("Gemma3", "Gemma4", "Qwen3_5", "Qwen3_5Moe") else ""
    config = getattr(transformers, f"{architecture}{text}Config")(**fields)
    suffix = "LMHeadModel" if architecture == "GPT2" else "ForCausalLM"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return getattr(transformers, f"{architecture}{suffix}")(config)


def _image_model(family: str, seed: int) -> Any:
    architecture, vision, changes = _IMAGE_SPECS[family]
    config = getattr(transformers, f"{architecture}Config")(
        text_config={**_BASE, **changes},
        vision_config={"model_type": vision, **_VISION},
        mm_tokens_per_image=1,
        tie_word_embeddings=changes["tie_word_embeddings"],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return getattr(transformers, f"{architecture}ForConditionalGeneration")(config)


@torch.no_grad()
def _scale(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        module, _, part = name.rpartition(".")
        last = module.rpartition(".")[2]
        if "vision" in module or "visual" in module or "multi_modal_projector." in name:
            continue
        if last == "router":
            parameter.uniform_(0.7, 1.3, generator=generator)
        elif part == "sinks":
            parameter.uniform_(0.0, 2.0, generator=generator)
        elif part == "A_log":  # a state lasts for some 30 to 300 tokens
            parameter.uniform_(0.003, 0.03, generator=generator).log_()
        elif part == "dt_bias":
            parameter.uniform_(-1.0, 1.0, generator=generator)
        elif part == "bias" or last == "experts":
            parameter.normal_(0.0, 0.1, generator=generator)
        elif "norm" in last or last.startswith("ln_"):
            parameter.uniform_(0.7, 1.3, generator=generator)
            if type(model).__name__.startswith(("Qwen3Next", "Qwen3_5")):
                parameter -= 0.0 if module.endswith("linear_attn.norm") else 1.0
            if type(model).__name__.startswith("Gemma"):
                # Against a residual of scaled embeddings.
                parameter *= 4.0 if last.startswith("post_") else 1.0
                if type(model).__name__.startswith("Gemma4"):
                    parameter *= 0.12 if last == "q_norm" else 1.0  # scores are not scaled
                else:
                    parameter -= 1.0  # as they are stored
        elif last in _FUSED:
            parameter.normal_(0.0, 1.0, generator=generator)
            rows = _fused_deviations(model.config)
            parameter *= rows if last == "c_attn" else rows[:, None]
        else:
            parameter.normal_(0.0, _deviation(module), generator=generator)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0.0, 0.1, generator=generator)
        elif name.endswith("layer_scalar"):
            buffer.uniform_(0.7, 1.3, generator=generator)


def _deviation(module: str) -> float:
    """Later attention outputs stand against a larger residual and are scaled up with it."""
    own = next(scale for end, scale in _SCALES.items() if f".{module}".endswith(f".{end}"))
    depth = next((int(part) for part in module.split(".") if part.isdigit()), 0)
    return own * (1.0 + 0.5 * depth if module.endswith(_OUTPUT) else 1.0)


def _fused_deviations(config: Any) -> torch.Tensor:
    """Of each row of a projection that holds q, k and v: by KV head in Falcon, else in turn."""
    heads, groups = config.num_attention_heads, 1
    if isinstance(config, transformers.FalconConfig):
        multi_query = config.multi_query and not config.new_decoder_architecture
        groups = 1 if multi_query else config.num_kv_heads
        small = heads // groups + 1
        line = [_QUERY_KEY] * small + [_VALUE]
    else:
        small = getattr(config, "num_key_value_heads", None) or heads
        line = [_QUERY_KEY] * (heads + small) + [_VALUE] * small
    return torch.tensor(line * groups).repeat_interleave(config.hidden_size // heads)
