"""Llama 2 and 3, CodeLlama, Yi, Mistral, Qwen2 and Qwen3: RMSNorm, RoPE, a gated MLP."""

from __future__ import annotations

from onestem.models.description import Description, TensorNames
from onestem.models.families.shared import rotary
from onestem.models.fields import Fields

__all__ = ["names", "read"]


def read(fields: Fields, architecture: str) -> Description:
    num_q_heads = fields.positive("num_attention_heads")
    num_layers = fields.positive("num_hidden_layers")
    max_position_embeddings = fields.positive("max_position_embeddings")
    head_dim = _head_dim(fields, architecture)
    fields.refuse_others(hidden_act="silu")
    qkv_bias, o_bias = _attention_biases(fields, architecture)
    return Description(
        architecture=architecture,
        vocab_size=fields.positive("vocab_size"),
        hidden_size=fields.positive("hidden_size"),
        intermediate_size=fields.positive("intermediate_size"),
        num_layers=num_layers,
        num_q_heads=num_q_heads,
        num_kv_heads=fields.positive("num_key_value_heads", num_q_heads),
        head_dim=head_dim,
        positions=rotary(fields, head_dim, max_position_embeddings),
        max_position_embeddings=max_position_embeddings,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        tie_embeddings=fields.boolean("tie_word_embeddings", False),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=architecture == "LlamaForCausalLM" and fields.boolean("mlp_bias", False),
        qk_norm=architecture == "Qwen3ForCausalLM",
        sliding_windows=_sliding_windows(fields, architecture, num_layers),
        initializer_range=fields.number("initializer_range", 0.02),
    )


def names(description: Description) -> TensorNames:
    return TensorNames(
        embedding="model.embed_tokens",
        layer="model.layers.{}.",
        input_norm="input_layernorm",
        qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        output="self_attn.o_proj",
        post_norm="post_attention_layernorm",
        up=("mlp.gate_proj", "mlp.up_proj"),
        down="mlp.down_proj",
        norm="model.norm",
        prefix="model.",
        qk_norm=("self_attn.q_norm", "self_attn.k_norm") if description.qk_norm else (),
    )


def _head_dim(fields: Fields, architecture: str) -> int:
    if fields.values.get("head_dim") is not None:
        return fields.positive("head_dim")
    if architecture == "Qwen3ForCausalLM":
        return 128
    return fields.head_dim("hidden_size", "num_attention_heads")


def _attention_biases(fields: Fields, architecture: str) -> tuple[bool, bool]:
    """(QKV has a bias, the output projection has a bias)."""
    if architecture == "Qwen2ForCausalLM":
        return True, False
    if architecture == "MistralForCausalLM":
        return False, False
    bias = fields.boolean("attention_bias", False)
    return bias, bias


def _sliding_windows(fields: Fields, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    if architecture == "LlamaForCausalLM":
        windows: tuple[int | None, ...] = (None,) * num_layers
    elif architecture == "MistralForCausalLM":
        windows = (_window(fields),) * num_layers
    else:
        windows = _qwen_windows(fields, num_layers)
    _check_layer_types(fields, windows)
    return windows


def _window(fields: Fields) -> int | None:
    """Mistral's own default is 4096; an explicit null means no window."""
    if "sliding_window" in fields.values and fields.values["sliding_window"] is None:
        return None
    return fields.positive("sliding_window", 4096)


def _qwen_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Windows only with `use_sliding_window`: per `layer_types`, or from `max_window_layers` on."""
    if not fields.boolean("use_sliding_window", False):
        return (None,) * num_layers
    window = _window(fields)
    types = fields.values.get("layer_types")
    if types is not None:
        if not isinstance(types, list):
            raise fields.wrong("layer_types", "a list with an entry per layer")
        return tuple(window if kind == "sliding_attention" else None for kind in types)
    first = fields.optional_integer("max_window_layers")
    first = 28 if first is None else first
    return tuple(window if layer >= first else None for layer in range(num_layers))


def _check_layer_types(fields: Fields, windows: tuple[int | None, ...]) -> None:
    """`layer_types`, where given, must say what the windows say."""
    types = fields.values.get("layer_types")
    if types is None:
        return
    expected = ["full_attention" if window is None else "sliding_attention" for window in windows]
    if types != expected:
        raise fields.unsupported("layer_types", f"{expected}, as the other fields say")
