"""Phi-3, Phi-3.5 and Phi-4 (arXiv 2404.14219): as Llama, with fused projections, RoPE over a part
of each head (Phi-4-mini) and LongRoPE."""

from __future__ import annotations

from dataclasses import replace

from onestem.models.description import Description, LongRope, Rotary
from onestem.models.families import llama
from onestem.models.fields import Fields
from onestem.models.names import Role, TensorNames

__all__ = ["names", "read"]


TRAINED_POSITIONS = 4096  # before scaling, where the file does not say


def read(fields: Fields, architecture: str) -> Description:
    """Description of Phi-3 and 4. A window that no position reaches is left out."""
    fields.refuse_others(attention_bias=False)
    if fields.values.get("original_max_position_embeddings") is None:
        given = {**fields.values, "original_max_position_embeddings": TRAINED_POSITIONS}
        fields = Fields(given, fields.source)
    common = llama.plain(fields, architecture, turned=1.0, norm_eps=1e-5)
    assert isinstance(common.positions, Rotary)
    if not isinstance(common.positions.scaling, LongRope | None):
        raise fields.unsupported("rope_scaling", "longrope, or none")
    window = fields.positive("sliding_window", common.max_position_embeddings)
    if window >= common.max_position_embeddings:  # as in the files with 131,072 positions
        return common
    return replace(common, sliding_windows=(window,) * common.num_layers)


def names(description: Description) -> TensorNames:
    """As in `llama`, with q, k and v in one projection, and gate and up in another."""
    fused: dict[Role, str | None] = dict.fromkeys((Role.Q, Role.K, Role.V, Role.GATE))
    fused |= {Role.QKV: "self_attn.qkv_proj", Role.UP: "mlp.gate_up_proj"}
    return llama.names(description).having(fused)
