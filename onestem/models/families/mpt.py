"""MPT: LayerNorm without bias, ALiBi, one head of keys and values per query head."""

from __future__ import annotations

from onestem.models.description import Alibi, Description
from onestem.models.families.shared import gelu, sizes
from onestem.models.fields import Fields
from onestem.models.names import Role, TensorNames

__all__ = ["names", "read"]


def read(fields: Fields, architecture: str) -> Description:
    """Description of MPT, which has ALiBi and no biases."""
    attention = Fields(fields.mapping("attn_config"), f"{fields.source}: attn_config")
    _refuse_what_changes_the_model(fields, attention)
    num_heads, clip = fields.positive("n_heads"), attention.optional_number("clip_qkv")
    return Description(
        **sizes(fields, architecture, tied=True, names=("d_model", "n_layers", "n_heads")),
        intermediate_size=fields.positive("expansion_ratio", 4) * fields.positive("d_model"),
        num_kv_heads=num_heads,
        positions=Alibi.of_heads(num_heads, attention.number("alibi_bias_max", 8.0)),
        max_position_embeddings=fields.positive("max_seq_len"),
        norm="layer",
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        mlp=gelu(fields, "activation", "gelu"),
        qkv_clip=None if not clip else attention.number("clip_qkv"),
    )


def names(description: Description) -> TensorNames:
    """One projection for q, k and v, in this order."""
    names = {
        Role.EMBEDDING: "transformer.wte",
        Role.INPUT_NORM: "norm_1",
        Role.QKV: "attn.Wqkv",
        Role.OUTPUT: "attn.out_proj",
        Role.POST_NORM: "norm_2",
        Role.UP: "ffn.up_proj",
        Role.DOWN: "ffn.down_proj",
        Role.NORM: "transformer.norm_f",
        Role.HEAD: "lm_head",
    }
    return TensorNames(names, layer="transformer.blocks.{}.", prefix="transformer.")


def _refuse_what_changes_the_model(fields: Fields, attention: Fields) -> None:
    """`learned_pos_emb` is not checked: files of models without such a tensor set it, and ALiBi
    overrides it."""
    fields.refuse_others(no_bias=True, logit_scale=None)
    fields.one_of("norm_type", "layernorm", "low_precision_layernorm")
    attention.refuse_others(
        softmax_scale=None,
        attn_type="multihead_attention",
        alibi=True,
        prefix_lm=False,
        qk_ln=False,
        qk_gn=False,
        rope=False,
        attn_uses_sequence_id=False,
        sliding_window_size=-1,
    )
