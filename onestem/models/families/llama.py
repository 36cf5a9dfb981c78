"""Llama 2 and 3, CodeLlama, Yi, Mistral, Ministral, Qwen2 and Qwen3: RMSNorm, RoPE, a gated MLP."""

from __future__ import annotations

from dataclasses import replace

from onestem.models.description import Description, Rotary
from onestem.models.families.shared import layer_windows, rotary
from onestem.models.fields import Fields
from onestem.models.names import Role, TensorNames

__all__ = ["names", "plain", "read"]

_MISTRALS = ("MistralForCausalLM", "MinistralForCausalLM")


def read(fields: Fields, architecture: str) -> Description:
    """Description of Llama, Mistral, Ministral, Qwen2 and Qwen3."""
    qwen3 = architecture == "Qwen3ForCausalLM"
    common = plain(fields, architecture, head_dim=128 if qwen3 else None)
    qkv_bias, o_bias = _attention_biases(fields, architecture)
    return replace(
        common,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=architecture == "LlamaForCausalLM" and fields.boolean("mlp_bias", False),
        qk_norm=qwen3,
        sliding_windows=_sliding_windows(fields, architecture, common.num_layers),
    )


def plain(
    fields: Fields,
    architecture: str,
    *,
    head_dim: int | None = None,
    turned: float | None = None,
    theta: float = 10000.0,
    norm_eps: float = 1e-6,
    tied: bool = False,
    positions: Rotary | None = None,
) -> Description:
    """The common base of many families: no biases, no windows. Arguments are defaults for fields
    that the file leaves out; `turned`: see `rotary`. `positions`: RoPE that was read already."""
    fields.refuse_others(hidden_act="silu")
    num_q_heads = fields.positive("num_attention_heads")
    num_layers = fields.positive("num_hidden_layers")
    if fields.values.get("head_dim") is not None:
        head_dim = fields.positive("head_dim")
    elif head_dim is None:
        head_dim = fields.head_dim("hidden_size", "num_attention_heads")
    max_positions = fields.positive("max_position_embeddings")
    if positions is None:
        positions = rotary(fields, head_dim, max_positions, turned, theta)
    return Description(
        architecture=architecture,
        vocab_size=fields.positive("vocab_size"),
        hidden_size=fields.positive("hidden_size"),
        intermediate_size=fields.positive("intermediate_size"),
        num_layers=num_layers,
        num_q_heads=num_q_heads,
        num_kv_heads=fields.positive("num_key_value_heads", num_q_heads),
        head_dim=head_dim,
        positions=positions,
        max_position_embeddings=max_positions,
        norm_eps=fields.number("rms_norm_eps", norm_eps),
        tie_embeddings=fields.boolean("tie_word_embeddings", tied),
        sliding_windows=(None,) * num_layers,
        initializer_range=fields.number("initializer_range", 0.02),
    )


def names(description: Description) -> TensorNames:
    """Names that most families use."""
    names = {
        Role.EMBEDDING: "model.embed_tokens",
        Role.INPUT_NORM: "input_layernorm",
        Role.Q: "self_attn.q_proj",
        Role.K: "self_attn.k_proj",
        Role.V: "self_attn.v_proj",
        Role.OUTPUT: "self_attn.o_proj",
        Role.POST_NORM: "post_attention_layernorm",
        Role.GATE: "mlp.gate_proj",
        Role.UP: "mlp.up_proj",
        Role.DOWN: "mlp.down_proj",
        Role.NORM: "model.norm",
        Role.HEAD: "lm_head",
    }
    if description.qk_norm or description.qk_norm_of_all:
        names |= {Role.Q_NORM: "self_attn.q_norm", Role.K_NORM: "self_attn.k_norm"}
    return TensorNames(names, layer="model.layers.{}.", prefix="model.")


def _attention_biases(fields: Fields, architecture: str) -> tuple[bool, bool]:
    """(QKV has a bias, the output projection has a bias)."""
    if architecture == "Qwen2ForCausalLM":
        return True, False
    if architecture in _MISTRALS:
        return False, False
    bias = fields.boolean("attention_bias", False)
    return bias, bias


def _sliding_windows(fields: Fields, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    if architecture == "LlamaForCausalLM":
        windows: tuple[int | None, ...] = (None,) * num_layers
    elif architecture in _MISTRALS:
        window = _window(fields)
        kind = "full_attention" if window is None else "sliding_attention"
        return layer_windows(fields, window, [kind] * num_layers)
    else:
        windows = _qwen_windows(fields, num_layers)
    _check_layer_types(fields, windows)
    return windows


def _window(fields: Fields) -> int | None:
    """The window. Mistral's own default is 4096; an explicit null means none."""
    if "sliding_window" in fields.values and fields.values["sliding_window"] is None:
        return None
    return fields.positive("sliding_window", 4096)


def _qwen_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Windows only with `use_sliding_window`: per `layer_types`, or from `max_window_layers` on."""
    if not fields.boolean("use_sliding_window", False):
        return (None,) * num_layers
    window = _window(fields)
    if fields.values.get("layer_types") is not None:
        return layer_windows(fields, window, ())
    first = fields.optional_integer("max_window_layers")
    first = 28 if first is None else first
    return tuple(window if layer >= first else None for layer in range(num_layers))


def _check_layer_types(fields: Fields, windows: tuple[int | None, ...]) -> None:
    """Refuse `layer_types` that contradict the windows."""
    types = fields.values.get("layer_types")
    if types is None:
        return
    expected = ["full_attention" if window is None else "sliding_attention" for window in windows]
    if types != expected:
        raise fields.unsupported("layer_types", f"{expected}, as the other fields say")
