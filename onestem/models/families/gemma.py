"""Gemma 2 (arXiv 2408.00118) and the text part of Gemma 3 (arXiv 2503.19786).

Both have norms before and after attention and MLP, and windows in most layers. Gemma 2 has
softcaps, Gemma 3 one RoPE base for layers with a window and one for those without.
"""

from __future__ import annotations

from dataclasses import replace

from onestem.models.description import Description, Rotary
from onestem.models.families import llama
from onestem.models.families.shared import (
    IMAGE_MODEL,
    layer_windows,
    rotary,
    rotary_by_window,
    text_fields,
    window_rotaries,
    windowed_kinds,
)
from onestem.models.fields import Fields
from onestem.models.names import Role, TensorNames

__all__ = ["BOTH_NORMS", "common", "names", "read_gemma2", "read_gemma3", "softcap"]

# Of attention and MLP, before and after each.
BOTH_NORMS = {
    Role.INPUT_NORM: "input_layernorm",
    Role.OUTPUT_NORM: "post_attention_layernorm",
    Role.POST_NORM: "pre_feedforward_layernorm",
    Role.DOWN_NORM: "post_feedforward_layernorm",
}


def read_gemma2(fields: Fields, architecture: str) -> Description:
    """Description of Gemma 2. It has softcaps unless the file says null."""
    base = _read(fields, architecture, vocab_size=256000, max_position_embeddings=8192, every=2)
    return replace(
        base,
        positions=rotary(fields, base.head_dim, base.max_position_embeddings),
        score_softcap=softcap(fields, "attn_logit_softcapping", 50.0),
        logit_softcap=softcap(fields, "final_logit_softcapping", 30.0),
    )


def read_gemma3(fields: Fields, architecture: str) -> Description:
    """Description of Gemma 3's text part: a RoPE for each kind of layer, and norms over heads."""
    fields = text_fields(fields)
    if fields.values.get("attn_logit_softcapping") is not None:
        # transformers reads this field and does not apply it.
        raise fields.unsupported("attn_logit_softcapping", "None, as in all of Gemma 3")
    if architecture == "Gemma3ForConditionalGeneration":  # nor this one in models that read images
        fields.refuse_others(final_logit_softcapping=None)
    every = fields.positive("sliding_window_pattern", 6)
    base = _read(
        fields, architecture, vocab_size=262208, max_position_embeddings=131072, every=every
    )
    full, windowed = window_rotaries(
        fields,
        base.head_dim,
        base.max_position_embeddings,
        theta=1e6,
        windowed_theta=fields.number("rope_local_base_freq", 10000.0),
    )
    return replace(
        base,
        positions=rotary_by_window(base.sliding_windows, full, windowed),
        logit_softcap=softcap(fields, "final_logit_softcapping", None),
        qk_norm=True,
    )


def names(description: Description) -> TensorNames:
    """As in `llama`, with norms on both sides of attention and MLP."""
    names = llama.names(description).having(BOTH_NORMS)
    if description.architecture == "Gemma3ForConditionalGeneration":
        return replace(names, **IMAGE_MODEL)
    return names


def common(
    fields: Fields,
    architecture: str,
    windows: tuple[int | None, ...],
    *,
    num_layers: int,
    vocab_size: int,
    max_position_embeddings: int,
) -> Description:
    """What Gemma 2, 3 and 4 have in common. Files leave out values that equal the defaults."""
    fields.refuse_others(hidden_activation="gelu_pytorch_tanh")
    hidden_size = fields.positive("hidden_size", 2304)
    head_dim = fields.positive("head_dim", 256)
    bias = fields.boolean("attention_bias", False)
    return Description(
        architecture=architecture,
        vocab_size=fields.positive("vocab_size", vocab_size),
        hidden_size=hidden_size,
        intermediate_size=fields.positive("intermediate_size", 9216),
        num_layers=num_layers,
        num_q_heads=fields.positive("num_attention_heads", 8),
        num_kv_heads=fields.positive("num_key_value_heads", 4),
        head_dim=head_dim,
        positions=Rotary(head_dim),
        max_position_embeddings=fields.positive("max_position_embeddings", max_position_embeddings),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        mlp="gelu_tanh_gated",
        embedding_scale=hidden_size**0.5,
        tie_embeddings=fields.boolean("tie_word_embeddings", True),
        qkv_bias=bias,
        o_bias=bias,
        sliding_windows=windows,
        initializer_range=fields.number("initializer_range", 0.02),
    )


def _read(
    fields: Fields, architecture: str, *, vocab_size: int, max_position_embeddings: int, every: int
) -> Description:
    """Of Gemma 2 and 3. `every`: each `every`-th layer sees all, where the file does not say."""
    fields.refuse_others(use_bidirectional_attention=False)
    num_layers = fields.positive("num_hidden_layers", 26)
    window = fields.positive("sliding_window", 4096)
    of_all = common(
        fields,
        architecture,
        layer_windows(fields, window, windowed_kinds(num_layers, every)),
        num_layers=num_layers,
        vocab_size=vocab_size,
        max_position_embeddings=max_position_embeddings,
    )
    scale = fields.number("query_pre_attn_scalar", 256.0) ** -0.5
    return replace(of_all, norm_offset=1.0, score_scale=scale)


def softcap(fields: Fields, name: str, default: float | None) -> float | None:
    """A softcap: None where the file says null, `default` where it says nothing."""
    if name in fields.values and fields.values[name] is None:
        return None
    return default if name not in fields.values else fields.number(name)
