"""Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, GLM-4.5 and gpt-oss: decoders as in `llama`, with
experts."""

from __future__ import annotations

from dataclasses import replace

from onestem.models.description import ClampedSwiglu, Description, Experts
from onestem.models.families import llama
from onestem.models.families.shared import layer_windows
from onestem.models.fields import Fields


def read_mixtral(fields: Fields, architecture: str) -> Description:
    """Description of Mixtral: experts in every layer, and one window for all or none."""
    num_layers = fields.positive("num_hidden_layers")
    experts = Experts(
        num=fields.positive("num_local_experts", 8),
        top_k=fields.positive("num_experts_per_tok", 2),
        intermediate_size=fields.positive("intermediate_size"),
        layers=(True,) * num_layers,
    )
    window = None
    if fields.values.get("sliding_window") is not None:
        window = fields.positive("sliding_window")
    common = llama.plain(fields, architecture, theta=1e6, norm_eps=1e-5)
    return replace(common, experts=experts, sliding_windows=(window,) * num_layers)


def read_qwen(fields: Fields, architecture: str) -> Description:
    """Qwen2-MoE has a shared expert and biases of q, k and v; Qwen3-MoE has norms over heads."""
    fields.refuse_others(use_sliding_window=False)
    newer = architecture == "Qwen3MoeForCausalLM"
    # `num_local_experts` is what transformers writes.
    num = "num_local_experts" if "num_local_experts" in fields.values else "num_experts"
    experts = Experts(
        num=fields.positive(num, 128 if newer else 60),
        top_k=fields.positive("num_experts_per_tok", 8 if newer else 4),
        intermediate_size=fields.positive("moe_intermediate_size", 768 if newer else 1408),
        layers=sparse_layers(fields),
        normalized=fields.boolean("norm_topk_prob", False),
        shared_size=0 if newer else fields.positive("shared_expert_intermediate_size", 5632),
        shared_gate=not newer,
    )
    bias = fields.boolean("attention_bias" if newer else "qkv_bias", not newer)
    return replace(
        llama.plain(fields, architecture),
        experts=experts,
        qkv_bias=bias,
        o_bias=newer and bias,
        qk_norm=newer,
    )


def sparse_layers(fields: Fields) -> tuple[bool, ...]:
    """Layers of a Qwen model that have experts."""
    dense = fields.values.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise fields.wrong("mlp_only_layers", "a list of layers")
    step = fields.positive("decoder_sparse_step", 1)
    layers = range(fields.positive("num_hidden_layers"))
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in layers)


def read_glm4(fields: Fields, architecture: str) -> Description:
    """Description of GLM-4.5: experts after the first layers, in groups, chosen by corrected
    sigmoids, and a shared one."""
    num_layers = fields.positive("num_hidden_layers")
    dense = fields.optional_integer("first_k_dense_replace")
    dense = 1 if dense is None else dense
    size = fields.positive("moe_intermediate_size", 1408)
    experts = Experts(
        num=fields.positive("n_routed_experts", 128),
        top_k=fields.positive("num_experts_per_tok", 8),
        intermediate_size=size,
        layers=tuple(layer >= dense for layer in range(num_layers)),
        scores="sigmoid",
        normalized=fields.boolean("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", 1.0),
        correction=True,
        num_groups=fields.positive("n_group", 1),
        top_groups=fields.positive("topk_group", 1),
        shared_size=size * fields.positive("n_shared_experts", 1),
    )
    return replace(
        llama.plain(fields, architecture, turned=0.5, norm_eps=1e-5),
        experts=experts,
        qkv_bias=fields.boolean("attention_bias", False),
        qk_norm=fields.boolean("use_qk_norm", False),
    )


def read_olmoe(fields: Fields, architecture: str) -> Description:
    """Description of OLMoE: norms over all heads at once, and clipped q, k and v."""
    num_layers = fields.positive("num_hidden_layers")
    experts = Experts(
        num=fields.positive("num_experts", 64),
        top_k=fields.positive("num_experts_per_tok", 8),
        intermediate_size=fields.positive("intermediate_size"),
        layers=(True,) * num_layers,
        normalized=fields.boolean("norm_topk_prob", False),
    )
    bias = fields.boolean("attention_bias", False)
    clip = fields.values.get("clip_qkv")
    return replace(
        llama.plain(fields, architecture, norm_eps=1e-5),
        experts=experts,
        qkv_bias=bias,
        o_bias=bias,
        qkv_clip=None if clip is None else fields.number("clip_qkv"),
        qk_norm=True,
        qk_norm_of_all=True,
    )


def read_gpt_oss(fields: Fields, architecture: str) -> Description:
    """Description of gpt-oss: biases, sinks, clamped experts that may be in mxfp4, and windows in
    every second layer."""
    num_layers = fields.positive("num_hidden_layers")
    if not (fields.mapping("rope_parameters") or fields.mapping("rope_scaling")):
        raise fields.wrong("rope_scaling", "an object, which gpt-oss is published with")
    quantization = fields.within("quantization_config")
    if quantization.values.get("quant_method") not in (None, "mxfp4"):
        raise quantization.unsupported("quant_method", "mxfp4, or weights as they are")
    experts = Experts(
        num=fields.positive("num_local_experts"),
        top_k=fields.positive("num_experts_per_tok", 4),
        intermediate_size=fields.positive("intermediate_size"),
        layers=(True,) * num_layers,
        bias=True,
        clamp=ClampedSwiglu(
            fields.number("swiglu_alpha", 1.702), fields.number("swiglu_limit", 7.0)
        ),
        mxfp4=bool(quantization.values),
    )
    bias = fields.boolean("attention_bias", True)
    default = ["full_attention" if i % 2 else "sliding_attention" for i in range(num_layers)]
    return replace(
        llama.plain(fields, architecture, head_dim=64, theta=150000.0, norm_eps=1e-5),
        experts=experts,
        sliding_windows=layer_windows(fields, fields.positive("sliding_window", 128), default),
        qkv_bias=bias,
        o_bias=bias,
        sinks=True,
    )
