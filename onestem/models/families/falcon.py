"""Falcon (arXiv 2311.16867): LayerNorm, few KV heads, attention and MLP side by side.

Three forms: 7B (one KV head, one norm), 40B and 11B (`new_decoder_architecture`: a KV head per
group, two norms or one), and RW (ALiBi, biases, one after the other).
"""

from __future__ import annotations

import struct
from typing import Literal

from onestem.models.description import Alibi, Description, Rotary
from onestem.models.families.shared import gelu, rotary, sizes
from onestem.models.fields import Fields
from onestem.models.names import Role, TensorNames

__all__ = ["names", "read"]

Block = Literal["sequential", "parallel", "parallel_two_norms"]

_NORMS: dict[Block, dict[Role, str]] = {
    "sequential": {
        Role.INPUT_NORM: "input_layernorm",
        Role.POST_NORM: "post_attention_layernorm",
    },
    "parallel": {Role.INPUT_NORM: "input_layernorm"},
    "parallel_two_norms": {Role.INPUT_NORM: "ln_attn", Role.POST_NORM: "ln_mlp"},
}


def read(fields: Fields, architecture: str) -> Description:
    """Description of all three forms, with the defaults of transformers."""
    max_positions = fields.positive("max_position_embeddings", 2048)
    bias = fields.boolean("bias", False)
    common = sizes(fields, architecture, tied=True)
    return Description(
        **common,
        intermediate_size=fields.positive("ffn_hidden_size", 4 * common["hidden_size"]),
        num_kv_heads=_num_kv_heads(fields),
        positions=_positions(fields, common["head_dim"], max_positions),
        max_position_embeddings=max_positions,
        norm="layer",
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        norm_bias=True,
        block=_block(fields),
        mlp=gelu(fields, "activation", "gelu"),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
    )


def names(description: Description) -> TensorNames:
    """One projection for q, k and v by KV head, and the norms of the form."""
    names = {
        Role.EMBEDDING: "transformer.word_embeddings",
        Role.QKV: "self_attention.query_key_value",
        Role.OUTPUT: "self_attention.dense",
        Role.UP: "mlp.dense_h_to_4h",
        Role.DOWN: "mlp.dense_4h_to_h",
        Role.NORM: "transformer.ln_f",
        Role.HEAD: "lm_head",
        **_NORMS[description.block],
    }
    return TensorNames(names, layer="transformer.h.{}.", prefix="transformer.", grouped=True)


def _num_kv_heads(fields: Fields) -> int:
    """KV heads. Only the new form uses `num_kv_heads`: the 7B's files give it, but have one."""
    num_q_heads = fields.positive("num_attention_heads")
    if fields.boolean("new_decoder_architecture", False):
        return fields.positive("num_kv_heads", num_q_heads)
    if fields.boolean("multi_query", True):
        return 1
    fields.refuse_others(num_kv_heads=num_q_heads)
    return num_q_heads


def _block(fields: Fields) -> Block:
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


def _positions(fields: Fields, head_dim: int, max_position_embeddings: int) -> Rotary | Alibi:
    if not fields.boolean("alibi", False):
        return rotary(fields, head_dim, max_position_embeddings)
    slopes = Alibi.of_heads(fields.positive("num_attention_heads")).slopes
    # Falcon scales scores and biases together. Its slopes are bfloat16 numbers; their products with
    # positions, which its own code rounds to bfloat16 too, are kept exact here.
    return Alibi(tuple(_bfloat16(slope) / head_dim**0.5 for slope in slopes))


def _bfloat16(value: float) -> float:
    """Rounded to bfloat16, ties to even."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    bits += 0x7FFF + (bits >> 16 & 1)
    (rounded,) = struct.unpack("<f", struct.pack("<I", bits & 0xFFFF0000))
    return float(rounded)
