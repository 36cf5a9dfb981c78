"""Qwen3-Next, Qwen3.5 and 3.6: a gated delta rule in three of four layers, and gated attention in
the others; with an MLP or with experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from onestem.models.description import DeltaRule, Description, Experts
from onestem.models.families import experts, llama
from onestem.models.families.shared import IMAGE_MODEL, rotary, text_fields
from onestem.models.fields import Fields
from onestem.models.names import Role, TensorNames

TURNED = 0.25  # of each head's dimensions, where the file does not say


def read(fields: Fields, architecture: str) -> Description:
    """Description of the text part, with the defaults of transformers."""
    outer, fields = fields, text_fields(fields)
    fields.refuse_others(attention_bias=False, attn_output_gate=True, mamba_ssm_dtype="float32")
    routed = _experts(fields, architecture)
    if routed is not None and fields.values.get("intermediate_size") is None:
        given = {**fields.values, "intermediate_size": routed.intermediate_size}
        fields = Fields(given, fields.source)
    head_dim, positions = 256, fields.positive("max_position_embeddings", 32768)
    if fields.values.get("head_dim") is not None:
        head_dim = fields.positive("head_dim")
    common = llama.plain(
        fields,
        architecture,
        head_dim=head_dim,
        positions=rotary(fields, head_dim, positions, TURNED),
    )
    tied = outer.boolean("tie_word_embeddings", common.tie_embeddings)
    return replace(
        common,
        tie_embeddings=tied,
        experts=routed,
        norm_offset=1.0,
        qk_norm=True,
        output_gate=True,
        delta=_delta_rule(fields, common.num_layers),
    )


def _delta_rule(fields: Fields, num_layers: int) -> DeltaRule:
    every = fields.positive("full_attention_interval", 4)
    kinds = fields.values.get("layer_types")
    if kinds is None:
        linear = [(layer + 1) % every != 0 for layer in range(num_layers)]
    elif isinstance(kinds, list) and set(kinds) <= {"linear_attention", "full_attention"}:
        linear = [kind == "linear_attention" for kind in kinds]
    else:
        raise fields.unsupported("layer_types", "a list of linear_attention and full_attention")
    if len(linear) != num_layers:
        raise fields.wrong("layer_types", f"a list of {num_layers} layers")
    return DeltaRule(
        layers=tuple(linear),
        num_key_heads=fields.positive("linear_num_key_heads", 16),
        num_value_heads=fields.positive("linear_num_value_heads", 32),
        key_dim=fields.positive("linear_key_head_dim", 128),
        value_dim=fields.positive("linear_value_head_dim", 128),
        width=fields.positive("linear_conv_kernel_dim", 4),
    )


def _experts(fields: Fields, architecture: str) -> Experts | None:
    older = architecture == "Qwen3NextForCausalLM"
    if not older and not architecture.startswith("Qwen3_5Moe"):
        return None
    if fields.values.get("num_experts") == 0:
        return None
    layers = (True,) * fields.positive("num_hidden_layers")
    num, top_k = (512, 10) if older else (256, 8)
    return Experts(
        num=fields.positive("num_experts", num),
        top_k=fields.positive("num_experts_per_tok", top_k),
        intermediate_size=fields.positive("moe_intermediate_size", 512),
        layers=experts.sparse_layers(fields) if older else layers,
        normalized=fields.boolean("norm_topk_prob", True) if older else True,
        shared_size=fields.positive("shared_expert_intermediate_size", 512),
        shared_gate=True,
    )


_NAMES: dict[Role, str | None] = {
    Role.DELTA_QKV: "linear_attn.in_proj_qkv",
    Role.DELTA_Z: "linear_attn.in_proj_z",
    Role.DELTA_B: "linear_attn.in_proj_b",
    Role.DELTA_A: "linear_attn.in_proj_a",
    Role.DELTA_FILTER: "linear_attn.conv1d",
    Role.DELTA_DECAY: "linear_attn.A_log",
    Role.DELTA_STEP: "linear_attn.dt_bias",
    Role.DELTA_NORM: "linear_attn.norm.weight",
    Role.DELTA_OUTPUT: "linear_attn.out_proj",
}
_FUSED: dict[Role, str | None] = {
    **dict.fromkeys((Role.DELTA_QKV, Role.DELTA_Z, Role.DELTA_B, Role.DELTA_A)),
    Role.DELTA_QKVZ: "linear_attn.in_proj_qkvz",
    Role.DELTA_BA: "linear_attn.in_proj_ba",
}


def names(description: Description) -> TensorNames:
    """As in `llama` and `experts`, and of the delta rule. What predicts tokens after the next one,
    and what reads images, is not computed."""
    of_experts = {} if description.experts is None else experts.SHARED_NAMES
    fused = _FUSED if description.architecture == "Qwen3NextForCausalLM" else {}
    image: dict[str, Any] = {**IMAGE_MODEL, "beside": ("mtp.", "model.visual.", "visual.")}
    return replace(llama.names(description).having({**_NAMES, **fused, **of_experts}), **image)
