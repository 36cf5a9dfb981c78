"""Phi-1, 1.5 and 2: LayerNorm, RoPE over a part of each head, attention and MLP side by side."""

from __future__ import annotations

from onestem.models.description import Description
from onestem.models.families.shared import gelu, rotary
from onestem.models.fields import Fields
from onestem.models.names import Role, TensorNames

__all__ = ["names", "read"]


def read(fields: Fields, architecture: str) -> Description:
    """Description of Phi-1, 1.5 and 2: biases everywhere, and a part of each head turns."""
    fields.refuse_others(qk_layernorm=False)
    num_q_heads = fields.positive("num_attention_heads")
    num_layers = fields.positive("num_hidden_layers")
    max_position_embeddings = fields.positive("max_position_embeddings")
    head_dim = fields.head_dim("hidden_size", "num_attention_heads")
    return Description(
        architecture=architecture,
        vocab_size=fields.positive("vocab_size"),
        hidden_size=fields.positive("hidden_size"),
        intermediate_size=fields.positive("intermediate_size"),
        num_layers=num_layers,
        num_q_heads=num_q_heads,
        num_kv_heads=fields.positive("num_key_value_heads", num_q_heads),
        head_dim=head_dim,
        positions=rotary(fields, head_dim, max_position_embeddings, factor=0.5),
        max_position_embeddings=max_position_embeddings,
        norm="layer",
        norm_eps=fields.number("layer_norm_eps", 1e-5),
        norm_bias=True,
        block="parallel",
        mlp=gelu(fields, "hidden_act", "gelu_new"),
        tie_embeddings=fields.boolean("tie_word_embeddings", False),
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        head_bias=True,
        sliding_windows=(None,) * num_layers,
        initializer_range=fields.number("initializer_range", 0.02),
    )


def names(description: Description) -> TensorNames:
    """One norm for attention and MLP."""
    names = {
        Role.EMBEDDING: "model.embed_tokens",
        Role.INPUT_NORM: "input_layernorm",
        Role.Q: "self_attn.q_proj",
        Role.K: "self_attn.k_proj",
        Role.V: "self_attn.v_proj",
        Role.OUTPUT: "self_attn.dense",
        Role.UP: "mlp.fc1",
        Role.DOWN: "mlp.fc2",
        Role.NORM: "model.final_layernorm",
        Role.HEAD: "lm_head",
    }
    return TensorNames(names, layer="model.layers.{}.", prefix="model.")
