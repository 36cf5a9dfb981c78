"""GPT-2, MPT, Falcon and Phi: decoders with LayerNorm, most of them with biases.

GPT-2 has learned positions, and weights stored as `[in_features, out_features]`. MPT has ALiBi and
no biases. Falcon (arXiv 2311.16867) has few KV heads, and attention and MLP side by side. Its three
forms are 7B (one KV head, one norm), 40B and 11B (`new_decoder_architecture`: a KV head per group,
two norms or one), and RW (ALiBi, biases, one after the other). Phi-1, 1.5 and 2 have RoPE over a
part of each head, and attention and MLP side by side.
"""

from __future__ import annotations

from typing import Literal

from onestem.models.description import Alibi, Description, Learned, Rotary
from onestem.models.families.shared import gelu, rotary, sizes
from onestem.models.fields import Fields

Block = Literal["sequential", "parallel", "parallel_two_norms"]


def read_gpt2(fields: Fields, architecture: str) -> Description:
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


def read_mpt(fields: Fields, architecture: str) -> Description:
    """Description of MPT, which has ALiBi and no biases."""
    attention = fields.within("attn_config")
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


def read_falcon(fields: Fields, architecture: str) -> Description:
    """Description of all three forms, with the defaults of transformers."""
    max_positions = fields.positive("max_position_embeddings", 2048)
    bias = fields.boolean("bias", False)
    common = sizes(fields, architecture, tied=True)
    return Description(
        **common,
        intermediate_size=fields.positive("ffn_hidden_size", 4 * common["hidden_size"]),
        num_kv_heads=_falcon_kv_heads(fields),
        positions=_falcon_positions(fields, common["head_dim"], max_positions),
        max_position_embeddings=max_positions,
        norm="layer",
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        norm_bias=True,
        block=_falcon_block(fields),
        mlp=gelu(fields, "activation", "gelu"),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
    )


def _falcon_kv_heads(fields: Fields) -> int:
    """KV heads. Only the new form uses `num_kv_heads`: the 7B's files give it, but have one."""
    num_q_heads = fields.positive("num_attention_heads")
    if fields.boolean("new_decoder_architecture", False):
        return fields.positive("num_kv_heads", num_q_heads)
    if fields.boolean("multi_query", True):
        return 1
    fields.refuse_others(num_kv_heads=num_q_heads)
    return num_q_heads


def _falcon_block(fields: Fields) -> Block:
    parallel = fields.boolean("parallel_attn", True)
    if not fields.boolean("new_decoder_architecture", False):
        if parallel:
            fields.refuse_others(num_ln_in_parallel_attn=1)
        return "parallel" if parallel else "sequential"
    fields.refuse_others(parallel_attn=True)
    norms = fields.positive("num_ln_in_parallel_attn", 2)
    if norms not in (1, 2):
        raise fields.unsupported("num_ln_in_parallel_attn", "1, 2")
    return "parallel_two_norms" if norms == 2 else "parallel"


def _falcon_positions(fields: Fields, head_dim: int, max_positions: int) -> Rotary | Alibi:
    if not fields.boolean("alibi", False):
        return rotary(fields, head_dim, max_positions)
    import torch

    slopes = torch.tensor(Alibi.of_heads(fields.positive("num_attention_heads")).slopes)
    # Falcon scales scores and biases together. Its slopes are bfloat16 numbers; their products with
    # positions, which its own code rounds to bfloat16 too, are kept exact here.
    return Alibi(tuple(slope / head_dim**0.5 for slope in slopes.bfloat16().tolist()))


def read_phi(fields: Fields, architecture: str) -> Description:
    """Description of Phi-1, 1.5 and 2: biases everywhere, and a part of each head turns."""
    fields.refuse_others(qk_layernorm=False)
    max_positions = fields.positive("max_position_embeddings")
    common = sizes(fields, architecture, tied=False)
    return Description(
        **common,
        intermediate_size=fields.positive("intermediate_size"),
        num_kv_heads=fields.positive("num_key_value_heads", common["num_q_heads"]),
        positions=rotary(fields, common["head_dim"], max_positions, factor=0.5),
        max_position_embeddings=max_positions,
        norm="layer",
        norm_eps=fields.number("layer_norm_eps", 1e-5),
        norm_bias=True,
        block="parallel",
        mlp=gelu(fields, "hidden_act", "gelu_new"),
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        head_bias=True,
    )
