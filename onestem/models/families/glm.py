"""GLM-4 (arXiv 2406.12793): as Llama, with RoPE over half of each head, in neighbouring pairs.

Models of 2025 (`Glm4ForCausalLM`) also have norms after attention and MLP.
"""

from __future__ import annotations

from dataclasses import replace

from onestem.models.description import Description, Rotary
from onestem.models.families import llama
from onestem.models.fields import Fields
from onestem.models.names import Role, TensorNames

__all__ = ["names", "read"]


def read(fields: Fields, architecture: str) -> Description:
    """Description of GLM-4: half of each head's dimensions turn, in pairs of neighbours."""
    common = llama.plain(fields, architecture, head_dim=128, turned=0.5, norm_eps=1.5625e-07)
    assert isinstance(common.positions, Rotary)
    return replace(
        common,
        positions=replace(common.positions, interleaved=True),
        qkv_bias=fields.boolean("attention_bias", True),
    )


def names(description: Description) -> TensorNames:
    """As in `llama`, with gate and up in one projection; the models of 2025 have more norms."""
    fused = llama.names(description).having({Role.GATE: None, Role.UP: "mlp.gate_up_proj"})
    if description.architecture == "GlmForCausalLM":
        return fused
    return fused.having(
        {Role.OUTPUT_NORM: "post_self_attn_layernorm", Role.DOWN_NORM: "post_mlp_layernorm"}
    )
