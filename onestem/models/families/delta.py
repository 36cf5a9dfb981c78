"""Qwen3-Next, Qwen3.5 and 3.6: a gated delta rule in three of four layers, and gated attention in
the others; with an MLP or with experts."""

from __future__ import annotations

from dataclasses import replace

from onestem.models.description import DeltaRule, Description, Experts
from onestem.models.families import experts, llama
from onestem.models.families.shared import rotary, text_fields
from onestem.models.fields import Fields

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
    kinds, known = fields.values.get("layer_types"), ("linear_attention", "full_attention")
    if kinds is None:
        linear = [(layer + 1) % every != 0 for layer in range(num_layers)]
    elif isinstance(kinds, list) and all(kind in known for kind in kinds):
        linear = [kind == "linear_attention" for kind in kinds]
    else:
        raise fields.unsupported("layer_types", f"a list of {' and '.join(known)}")
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
