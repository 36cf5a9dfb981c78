"""OLMo 2 (arXiv 2501.00656) and 3: norms only after attention and MLP, and over all queries and all
keys. OLMo 3 has windows in three of four layers, whose RoPE is not stretched."""

from __future__ import annotations

from dataclasses import replace

from onestem.models.description import Description, Rotary
from onestem.models.families import llama
from onestem.models.families.shared import (
    layer_windows,
    rotary_by_window,
    window_rotaries,
    windowed_kinds,
)
from onestem.models.fields import Fields
from onestem.models.names import Role, TensorNames

__all__ = ["names", "read_olmo2", "read_olmo3"]


def read_olmo2(fields: Fields, architecture: str, positions: Rotary | None = None) -> Description:
    """Description of OLMo 2. `positions`: RoPE that was read already."""
    bias = fields.boolean("attention_bias", False)
    common = llama.plain(fields, architecture, norm_eps=1e-5, positions=positions)
    return replace(common, qkv_bias=bias, o_bias=bias, qk_norm_of_all=True)


def read_olmo3(fields: Fields, architecture: str) -> Description:
    """Description of OLMo 3, whose layers with a window have a RoPE of their own."""
    head_dim = fields.head_dim("hidden_size", "num_attention_heads")
    full, windowed = window_rotaries(
        fields, head_dim, fields.positive("max_position_embeddings"), theta=500000.0
    )
    common = read_olmo2(fields, architecture, full)
    window = fields.positive("sliding_window", 4096)
    windows = layer_windows(fields, window, windowed_kinds(common.num_layers, 4))
    positions = rotary_by_window(windows, full, windowed)
    return replace(common, sliding_windows=windows, positions=positions)


def names(description: Description) -> TensorNames:
    """As in `llama`, with norms after attention and MLP alone."""
    return llama.names(description).having(
        {
            Role.INPUT_NORM: None,
            Role.OUTPUT_NORM: "post_attention_layernorm",
            Role.POST_NORM: None,
            Role.DOWN_NORM: "post_feedforward_layernorm",
        }
    )
