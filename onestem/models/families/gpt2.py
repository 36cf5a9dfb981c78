"""GPT-2: LayerNorm, learned positions, weights stored as `[in_features, out_features]`."""

from __future__ import annotations

from onestem.models.description import Description, Learned, TensorNames
from onestem.models.families.shared import gelu
from onestem.models.fields import Fields

__all__ = ["names", "read"]


def read(fields: Fields, architecture: str) -> Description:
    fields.refuse_others(
        scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False
    )
    hidden_size = fields.positive("n_embd")
    num_heads = fields.positive("n_head")
    num_layers = fields.positive("n_layer")
    return Description(
        architecture=architecture,
        vocab_size=fields.positive("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.positive("n_inner", 4 * hidden_size),
        num_layers=num_layers,
        num_q_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=fields.head_dim("n_embd", "n_head"),
        positions=Learned(),
        max_position_embeddings=fields.positive("n_positions"),
        norm="layer",
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        norm_bias=True,
        mlp=gelu(fields, "activation_function", "gelu_new"),
        tie_embeddings=fields.boolean("tie_word_embeddings", True),
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        sliding_windows=(None,) * num_layers,
        initializer_range=fields.number("initializer_range", 0.02),
    )


def names(description: Description) -> TensorNames:
    return TensorNames(
        embedding="transformer.wte",
        positions="transformer.wpe",
        layer="transformer.h.{}.",
        input_norm="ln_1",
        qkv=("attn.c_attn",),
        output="attn.c_proj",
        post_norm="ln_2",
        up=("mlp.c_fc",),
        down="mlp.c_proj",
        norm="transformer.ln_f",
        prefix="transformer.",
        transposed=True,
        ignored=(".attn.bias", ".attn.masked_bias"),
    )
