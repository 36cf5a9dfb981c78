"""GLM-4 (arXiv 2406.12793): as Llama, with RoPE over half of each head, in neighbouring pairs.

Models of 2025 (`Glm4ForCausalLM`) also have norms after attention and MLP.
"""

from __future__ import annotations

from dataclasses import replace

from onestem.models.description import Description, Rotary, TensorNames
from onestem.models.families import llama
from onestem.models.fields import Fields

__all__ = ["names", "read"]


def read(fields: Fields, architecture: str) -> Description:
    common = llama.plain(fields, architecture, head_dim=128, turned=0.5, norm_eps=1.5625e-07)
    assert isinstance(common.positions, Rotary)
    return replace(
        common,
        positions=replace(common.positions, interleaved=True),
        qkv_bias=fields.boolean("attention_bias", True),
    )


def names(description: Description) -> TensorNames:
    of_llama = replace(llama.names(description), up=("mlp.gate_up_proj",))
    if description.architecture == "GlmForCausalLM":
        return of_llama
    return replace(of_llama, output_norm="post_self_attn_layernorm", down_norm="post_mlp_layernorm")
