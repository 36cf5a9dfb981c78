"""GPT-2: LayerNorm, learned positions, weights stored as `[in_features, out_features]`."""

from __future__ import annotations

from onestem.models.description import Description, Learned
from onestem.models.families.shared import gelu, sizes
from onestem.models.fields import Fields
from onestem.models.names import Role, TensorNames

__all__ = ["names", "read"]


def read(fields: Fields, architecture: str) -> Description:
    """Description of GPT-2. Attention that scales its scores by layer is refused."""
    fields.refuse_others(
        scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False
    )
    return Description(
        **sizes(fields, architecture, tied=True, names=("n_embd", "n_layer", "n_head")),
        intermediate_size=fields.positive("n_inner", 4 * fields.positive("n_embd")),
        num_kv_heads=fields.positive("n_head"),
        positions=Learned(),
        max_position_embeddings=fields.positive("n_positions"),
        norm="layer",
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        norm_bias=True,
        mlp=gelu(fields, "activation_function", "gelu_new"),
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
    )


def names(description: Description) -> TensorNames:
    """Its weights are stored as `[in_features, out_features]`."""
    names = {
        Role.EMBEDDING: "transformer.wte",
        Role.POSITIONS: "transformer.wpe",
        Role.INPUT_NORM: "ln_1",
        Role.QKV: "attn.c_attn",
        Role.OUTPUT: "attn.c_proj",
        Role.POST_NORM: "ln_2",
        Role.UP: "mlp.c_fc",
        Role.DOWN: "mlp.c_proj",
        Role.NORM: "transformer.ln_f",
        Role.HEAD: "lm_head",
    }
    return TensorNames(
        names,
        layer="transformer.h.{}.",
        prefix="transformer.",
        transposed=True,
        ignored=(".attn.bias", ".attn.masked_bias"),
    )
