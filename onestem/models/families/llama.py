"""Llama and its kin: RMSNorm, RoPE, a gated MLP.

Llama 2 and 3, CodeLlama, Yi, Mistral, Ministral, Qwen2 and Qwen3; and what differs from them in a
few fields: Ministral 3, Granite, GLM-4 (arXiv 2406.12793), Phi-3 and 4 (arXiv 2404.14219), SmolLM3,
OLMo 2 and 3.
"""

from __future__ import annotations

from dataclasses import replace

from onestem.models.description import Description, LayerRotary, LongRope, QueryGrowth, Rotary
from onestem.models.families.shared import (
    layer_windows,
    rotary,
    rotary_by_window,
    sizes,
    text_fields,
    window_rotaries,
    windowed_kinds,
)
from onestem.models.fields import Fields

_MISTRALS = ("MistralForCausalLM", "MinistralForCausalLM")

PHI3_TRAINED_POSITIONS = 4096  # before scaling, where the file does not say


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
    if fields.values.get("head_dim") is not None:
        head_dim = fields.positive("head_dim")
    common = sizes(fields, architecture, tied=tied, head_dim=head_dim)
    max_positions = fields.positive("max_position_embeddings")
    if positions is None:
        positions = rotary(fields, common["head_dim"], max_positions, turned, theta)
    return Description(
        **common,
        intermediate_size=fields.positive("intermediate_size"),
        num_kv_heads=fields.positive("num_key_value_heads", common["num_q_heads"]),
        positions=positions,
        max_position_embeddings=max_positions,
        norm_eps=fields.number("rms_norm_eps", norm_eps),
    )


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


def read_ministral3(fields: Fields, architecture: str) -> Description:
    """Description of Ministral 3: queries grow with their position where the file says so."""
    fields.refuse_others(sliding_window=None)
    rope = fields.within("rope_parameters" if fields.mapping("rope_parameters") else "rope_scaling")
    if not rope.values:
        raise fields.wrong("rope_parameters", "an object")
    common = plain(fields, architecture, head_dim=128, norm_eps=1e-5)
    beta = rope.optional_number("llama_4_scaling_beta")
    if beta is None:
        return common
    positions = rope.positive("original_max_position_embeddings")
    return replace(common, query_growth=QueryGrowth(beta, positions))


def read_image_model(fields: Fields, architecture: str) -> Description:
    """Description of the text part of a model that reads images: of Ministral 3, or of Mistral
    Small 3.1."""
    text = text_fields(fields)
    kind = text.values.get("model_type")
    if kind not in ("mistral", "ministral3"):
        raise text.unsupported("model_type", "mistral, ministral3")
    family = read_ministral3 if kind == "ministral3" else read
    found = family(text, "Ministral3ForCausalLM" if kind == "ministral3" else "MistralForCausalLM")
    # The outer fields decide, but a checkpoint with its own head overrides them.
    tied = fields.boolean("tie_word_embeddings", True)
    return replace(found, architecture=architecture, tie_embeddings=tied)


def read_granite(fields: Fields, architecture: str) -> Description:
    """Description of Granite 3 and 4 without experts: factors of embeddings, scores, logits and of
    what a layer adds."""
    bias = fields.boolean("attention_bias", False)
    return replace(
        plain(fields, architecture),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        score_scale=fields.number("attention_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        logit_scale=1 / fields.number("logits_scaling", 1.0),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.boolean("mlp_bias", False),
    )


def read_glm(fields: Fields, architecture: str) -> Description:
    """Description of GLM-4: half of each head's dimensions turn, in pairs of neighbours."""
    common = plain(fields, architecture, head_dim=128, turned=0.5, norm_eps=1.5625e-07)
    assert isinstance(common.positions, Rotary)
    return replace(
        common,
        positions=replace(common.positions, interleaved=True),
        qkv_bias=fields.boolean("attention_bias", True),
    )


def read_phi3(fields: Fields, architecture: str) -> Description:
    """Description of Phi-3, 3.5 and 4: LongRoPE, and in Phi-4-mini RoPE over a part of each head. A
    window that no position reaches is left out."""
    fields.refuse_others(attention_bias=False)
    if fields.values.get("original_max_position_embeddings") is None:
        given = {**fields.values, "original_max_position_embeddings": PHI3_TRAINED_POSITIONS}
        fields = Fields(given, fields.source)
    common = plain(fields, architecture, turned=1.0, norm_eps=1e-5)
    assert isinstance(common.positions, Rotary)
    if not isinstance(common.positions.scaling, LongRope | None):
        raise fields.unsupported("rope_scaling", "longrope, or none")
    window = fields.positive("sliding_window", common.max_position_embeddings)
    if window >= common.max_position_embeddings:  # as in the files with 131,072 positions
        return common
    return replace(common, sliding_windows=(window,) * common.num_layers)


def read_smollm3(fields: Fields, architecture: str) -> Description:
    """Description of SmolLM3: layers whose `no_rope_layers` is 0 have no RoPE, and may have a
    window."""
    common = plain(fields, architecture, theta=2e6, tied=True)
    num_layers = common.num_layers
    turns = fields.values.get("no_rope_layers")
    if turns is None:
        every = fields.positive("no_rope_layer_interval", 4)
        turns = [int((layer + 1) % every != 0) for layer in range(num_layers)]
    right = isinstance(turns, list) and all(turn in (0, 1) for turn in turns)
    if not right or len(turns) != num_layers:
        raise fields.wrong("no_rope_layers", f"a list of {num_layers} numbers, 0 or 1")
    windows = common.sliding_windows
    if fields.boolean("use_sliding_window", False):
        window = fields.optional_integer("sliding_window")
        kinds = ["sliding_attention" if window and not turn else "full_attention" for turn in turns]
        windows = layer_windows(fields, window, kinds)
    bias = fields.boolean("attention_bias", False)
    return replace(
        common,
        positions=LayerRotary(tuple(common.rotaries[0] if turn else None for turn in turns)),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.boolean("mlp_bias", False),
        sliding_windows=windows,
    )


def read_olmo2(fields: Fields, architecture: str, positions: Rotary | None = None) -> Description:
    """Description of OLMo 2 (arXiv 2501.00656): norms only after attention and MLP, and over all
    queries and all keys. `positions`: RoPE that was read already."""
    bias = fields.boolean("attention_bias", False)
    common = plain(fields, architecture, norm_eps=1e-5, positions=positions)
    return replace(common, qkv_bias=bias, o_bias=bias, qk_norm_of_all=True)


def read_olmo3(fields: Fields, architecture: str) -> Description:
    """Description of OLMo 3: windows in three of four layers, whose RoPE is not stretched."""
    head_dim = fields.head_dim("hidden_size", "num_attention_heads")
    full, windowed = window_rotaries(
        fields, head_dim, fields.positive("max_position_embeddings"), theta=500000.0
    )
    common = read_olmo2(fields, architecture, full)
    window = fields.positive("sliding_window", 4096)
    windows = layer_windows(fields, window, windowed_kinds(common.num_layers, 4))
    positions = rotary_by_window(windows, full, windowed)
    return replace(common, sliding_windows=windows, positions=positions)
