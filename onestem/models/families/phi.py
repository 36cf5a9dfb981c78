"""Phi-1, 1.5 and 2: LayerNorm, RoPE over a part of each head, attention and MLP side by side."""

from __future__ import annotations

from onestem.models.description import Description
from onestem.models.families import llama
from onestem.models.families.shared import gelu, rotary, sizes
from onestem.models.fields import Fields
from onestem.models.names import Role, TensorNames

__all__ = ["names", "read"]


def read(fields: Fields, architecture: str) -> Description:
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


def names(description: Description) -> TensorNames:
    """As in `llama`, with one norm for attention and MLP, which has no gate."""
    return llama.names(description).having(
        {
            Role.OUTPUT: "self_attn.dense",
            Role.POST_NORM: None,
            Role.GATE: None,
            Role.UP: "mlp.fc1",
            Role.DOWN: "mlp.fc2",
            Role.NORM: "model.final_layernorm",
        }
    )
