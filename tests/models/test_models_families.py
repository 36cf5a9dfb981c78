"""What each family reads from config.json: its forms, its defaults, and what it refuses by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.falcon.modeling_falcon import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from onestem.errors import ConfigError, UnsupportedError
from onestem.models.builder import qkv_order
from onestem.models.config import ModelConfig
from onestem.models.description import Alibi, ClampedSwiglu, Experts, Learned, Rotary

FALCON: dict[str, Any] = {
    "architectures": ["FalconForCausalLM"],
    "vocab_size": 65024,
    "hidden_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
}
MPT: dict[str, Any] = {
    "architectures": ["MptForCausalLM"],
    "vocab_size": 50432,
    "d_model": 64,
    "n_heads": 4,
    "n_layers": 2,
    "max_seq_len": 2048,
}
PHI: dict[str, Any] = {
    "architectures": ["PhiForCausalLM"],
    "vocab_size": 51200,
    "hidden_size": 160,
    "intermediate_size": 640,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 2048,
}
GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 50257,
    "n_embd": 64,
    "n_head": 4,
    "n_layer": 2,
    "n_positions": 1024,
}
MIXTRAL: dict[str, Any] = {
    **{name: PHI[name] for name in ("vocab_size", "hidden_size", "intermediate_size")},
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 2),
    "architectures": ["MixtralForCausalLM"],
    "max_position_embeddings": 2048,
}
QWEN_MOE = {**MIXTRAL, "architectures": ["Qwen3MoeForCausalLM"]}
GLM_MOE = {**MIXTRAL, "architectures": ["Glm4MoeForCausalLM"]}
GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "rope_parameters": {
        f"{kind}_attention": {"rope_type": "default", "rope_theta": 1e4}
        for kind in ("full", "sliding")
    },
}
GPT_OSS = {
    **MIXTRAL,
    "architectures": ["GptOssForCausalLM"],
    "num_local_experts": 4,
    "rope_scaling": {"rope_type": "yarn", "factor": 32, "original_max_position_embeddings": 4096},
}
QWEN_NEXT = {**QWEN_MOE, "architectures": ["Qwen3NextForCausalLM"]}


def _read(path: Path, config: dict[str, Any], **changes: Any) -> ModelConfig:
    (path / "config.json").write_text(json.dumps({**config, **changes}))
    return ModelConfig.from_directory(path)


@pytest.mark.parametrize(
    ("fields", "kv_heads", "block"),
    [
        ({}, 1, "parallel"),
        ({"num_kv_heads": 6}, 1, "parallel"),  # as files of the 7B have it
        ({"multi_query": False, "parallel_attn": False}, 6, "sequential"),
        ({"new_decoder_architecture": True, "num_kv_heads": 2}, 2, "parallel_two_norms"),
        ({"new_decoder_architecture": True}, 6, "parallel_two_norms"),
        (
            {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
            2,
            "parallel",
        ),
    ],
)
def test_forms_of_falcon(tmp_path: Path, fields: dict[str, Any], kv_heads: int, block: str) -> None:
    config = _read(tmp_path, FALCON, **fields)
    assert (config.num_kv_heads, config.block) == (kv_heads, block)
    assert (config.head_dim, config.intermediate_size) == (16, 384)
    assert config.positions == Rotary(16)
    assert (config.norm, config.norm_eps, config.norm_bias) == ("layer", 1e-5, True)
    assert (config.tie_embeddings, config.qkv_bias, config.mlp) == (True, False, "gelu")
    assert config.max_position_embeddings == 2048


def test_mpt_phi_and_gpt2(tmp_path: Path) -> None:
    mpt = _read(tmp_path, MPT, learned_pos_emb=True, attn_config={"alibi_bias_max": 16})
    assert mpt.positions == Alibi((2**-4.0, 2**-8.0, 2**-12.0, 2**-16.0))
    assert (mpt.norm, mpt.norm_bias, mpt.qkv_bias, mpt.qkv_clip) == ("layer", False, False, None)
    assert (mpt.intermediate_size, mpt.mlp, mpt.tie_embeddings) == (256, "gelu", True)
    clipped = _read(tmp_path, MPT, attn_config={"clip_qkv": 6, "alibi": True}, expansion_ratio=2)
    assert (clipped.qkv_clip, clipped.intermediate_size) == (6.0, 128)
    assert _read(tmp_path, MPT, architectures=["MPTForCausalLM"]).num_kv_heads == 4

    phi = _read(tmp_path, PHI, partial_rotary_factor=0.4, rope_theta=5e4)
    assert phi.positions == Rotary(32, 5e4)
    assert (phi.block, phi.mlp, phi.head_bias) == ("parallel", "gelu_tanh", True)
    assert _read(tmp_path, PHI).positions == Rotary(40)
    new = {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.2}}
    assert _read(tmp_path, PHI, **new).positions == Rotary(16)

    gpt2 = _read(tmp_path, GPT2)
    assert (gpt2.positions, gpt2.max_position_embeddings) == (Learned(), 1024)
    assert (gpt2.block, gpt2.mlp, gpt2.intermediate_size) == ("sequential", "gelu_tanh", 256)
    assert (gpt2.qkv_bias, gpt2.o_bias, gpt2.mlp_bias, gpt2.head_bias) == (True, True, True, False)
    assert _read(tmp_path, GPT2, n_inner=100, activation_function="gelu").intermediate_size == 100


def test_experts(tmp_path: Path) -> None:
    mixtral = _read(tmp_path, MIXTRAL).experts
    assert mixtral == Experts(num=8, top_k=2, intermediate_size=640, layers=(True, True))
    assert _read(tmp_path, MIXTRAL).norm_eps == 1e-5
    qwen = _read(tmp_path, QWEN_MOE, decoder_sparse_step=2, num_experts=16).experts
    assert (qwen.num, qwen.layers, qwen.normalized) == (16, (False, True), False)
    assert _read(tmp_path, QWEN_MOE, num_local_experts=16).experts.num == 16
    assert _read(tmp_path, QWEN_MOE, mlp_only_layers=[1]).experts.layers == (True, False)
    glm = _read(tmp_path, GLM_MOE, first_k_dense_replace=2, n_shared_experts=3)
    assert (glm.experts.layers, glm.experts.shared_size) == ((False, False), 3 * 1408)
    assert (glm.experts.scores, glm.experts.correction) == ("sigmoid", True)
    assert glm.positions == Rotary(40)
    oss = _read(tmp_path, GPT_OSS, head_dim=64, quantization_config={"quant_method": "mxfp4"})
    assert oss.experts.mxfp4
    assert oss.experts.clamp == ClampedSwiglu(1.702, 7.0)
    assert (oss.sliding_windows, oss.head_dim, oss.sinks) == ((128, None), 64, True)
    assert not _read(tmp_path, GPT_OSS).experts.mxfp4


@pytest.mark.parametrize(
    ("config", "fields", "words"),
    [
        (FALCON, {"activation": "relu"}, ["activation", "relu", "gelu_new"]),
        (FALCON, {"multi_query": False, "num_kv_heads": 2}, ["num_kv_heads", "2", "6"]),
        (FALCON, {"num_ln_in_parallel_attn": 2}, ["num_ln_in_parallel_attn", "2", "1"]),
        (
            FALCON,
            {"new_decoder_architecture": True, "parallel_attn": False},
            ["parallel_attn", "False", "True"],
        ),
        (
            FALCON,
            {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 3},
            ["num_ln_in_parallel_attn", "3", "1, 2"],
        ),
        (FALCON, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["dynamic", "linear"]),
        (FALCON, {"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5", "1.0"]),
        (MPT, {"no_bias": False}, ["no_bias", "False", "True"]),
        (MPT, {"norm_type": "rmsnorm"}, ["norm_type", "rmsnorm", "low_precision_layernorm"]),
        (MPT, {"logit_scale": "inv_sqrt_d_model"}, ["logit_scale", "inv_sqrt_d_model"]),
        (MPT, {"attn_config": {"alibi": False}}, ["attn_config", "alibi", "False"]),
        (MPT, {"attn_config": {"softmax_scale": 0.1}}, ["attn_config", "softmax_scale", "0.1"]),
        (MPT, {"attn_config": {"qk_ln": True}}, ["attn_config", "qk_ln", "True"]),
        (MPT, {"attn_config": {"prefix_lm": True}}, ["attn_config", "prefix_lm"]),
        (
            MPT,
            {"attn_config": {"attn_type": "multiquery_attention"}},
            ["attn_config", "attn_type", "multihead_attention"],
        ),
        (PHI, {"qk_layernorm": True}, ["qk_layernorm", "True", "False"]),
        (PHI, {"hidden_act": "silu"}, ["hidden_act", "silu", "gelu_new"]),
        (PHI, {"hidden_act": ["gelu"]}, ["hidden_act", "['gelu']", "gelu_new"]),
        (GPT2, {"scale_attn_weights": False}, ["scale_attn_weights", "False", "True"]),
        (
            GPT2,
            {"scale_attn_by_inverse_layer_idx": True},
            ["scale_attn_by_inverse_layer_idx", "True", "False"],
        ),
        (GPT2, {"add_cross_attention": True}, ["add_cross_attention", "True", "False"]),
        (GPT2, {"activation_function": "relu"}, ["activation_function", "relu", "gelu_new"]),
        (MIXTRAL, {"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        (GEMMA3, {"rope_scaling": {"type": "linear", "factor": 8}}, ["rope_scaling", "put it in"]),
        (QWEN_MOE, {"use_sliding_window": True}, ["use_sliding_window", "True", "False"]),
        (
            MIXTRAL,
            {"quantization_config": {"quant_method": "mxfp4"}},
            ["quantization_config", "mxfp4", "gptq"],
        ),
        (GPT_OSS, {"layer_types": ["chunked"] * 2}, ["layer_types", "chunked", "full_attention"]),
        (QWEN_NEXT, {"layer_types": [["full_attention"]]}, ["layer_types", "linear_attention"]),
    ],
)
def test_what_is_not_computed_is_refused(
    tmp_path: Path, config: dict[str, Any], fields: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(UnsupportedError) as error:
        _read(tmp_path, config, **fields)
    for word in [*words, "config.json"]:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("config", "fields", "words"),
    [
        (FALCON, {"hidden_size": 100}, ["hidden_size", "100", "num_attention_heads (6)"]),
        (FALCON, {"new_decoder_architecture": True, "num_kv_heads": 4}, ["6", "(4)"]),
        (FALCON, {"alibi": "yes"}, ["alibi", "'yes'", "true or false"]),
        (MPT, {"d_model": 66}, ["d_model", "66", "n_heads (4)"]),
        (MPT, {"attn_config": {"clip_qkv": 1e300}}, ["clip_qkv", "1e+300", "float32"]),
        (MPT, {"n_heads": None}, ["n_heads", "None", "positive integer"]),
        (MPT, {"attn_config": [1]}, ["attn_config", "[1]", "object"]),
        (MPT, {"attn_config": {"clip_qkv": -1}}, ["clip_qkv", "-1", "positive"]),
        (PHI, {"partial_rotary_factor": 0.44}, ["partial_rotary_factor", "35 of 80", "even"]),
        (PHI, {"partial_rotary_factor": 1.5}, ["partial_rotary_factor", "1.5", "at most 1"]),
        (GPT2, {"n_positions": 0}, ["n_positions", "0", "positive integer"]),
        (MIXTRAL, {"num_experts_per_tok": 9}, ["num_experts_per_tok", "9", "1 to 8"]),
        (QWEN_MOE, {"mlp_only_layers": 3}, ["mlp_only_layers", "3", "a list"]),
        (GLM_MOE, {"n_group": 3}, ["128", "3 groups"]),
        (GLM_MOE, {"n_group": 2, "topk_group": 3}, ["3 groups", "there are 2"]),
        (GPT_OSS, {"rope_scaling": None}, ["rope_scaling", "None", "published with"]),
    ],
)
def test_what_makes_no_sense_is_named(
    tmp_path: Path, config: dict[str, Any], fields: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        _read(tmp_path, config, **fields)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("heads", [1, 2, 4, 6, 12, 16, 32, 40, 71, 112])
def test_slopes_are_those_of_transformers(tmp_path: Path, heads: int) -> None:
    for bias_max in (8, 16):
        expected = -build_mpt_alibi_tensor(heads, 2, bias_max)[:, 0, 0]
        found = torch.tensor(Alibi.of_heads(heads, bias_max).slopes)
        torch.testing.assert_close(found, expected, atol=0, rtol=1e-6)
    sizes = {"num_attention_heads": heads, "hidden_size": 16 * heads}
    positions = _read(tmp_path, FALCON, alibi=True, **sizes).positions
    assert isinstance(positions, Alibi)
    # Its second position has each slope itself; 16 is the head's size.
    expected = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1] / 4
    torch.testing.assert_close(torch.tensor(positions.slopes), expected, atol=0, rtol=0)


def test_order_of_fused_rows(tmp_path: Path) -> None:
    """Written out for the smallest heads: two dimensions each."""
    sizes = {"hidden_size": 8, "num_attention_heads": 4}
    new = {"new_decoder_architecture": True, "num_kv_heads": 2}
    order = qkv_order(_read(tmp_path, FALCON, **sizes, **new))
    heads = [0, 1, 4, 5, 2, 6, 3, 7]  # stored: q q k v, q q k v
    assert order == [2 * head + i for head in heads for i in (0, 1)]
    old = qkv_order(_read(tmp_path, FALCON, **sizes, multi_query=False))
    heads = [0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11]  # stored: q k v four times
    assert old == [2 * head + i for head in heads for i in (0, 1)]
    assert qkv_order(_read(tmp_path, FALCON, **sizes)) is None
    assert qkv_order(_read(tmp_path, MPT)) is None
    assert qkv_order(_read(tmp_path, PHI, partial_rotary_factor=1.0)) is None
    # One head of eight, of which four turn: pairs (0, 2) and (1, 3) come four apart.
    small = {"hidden_size": 8, "num_attention_heads": 1}
    turned = [0, 1, 4, 5, 2, 3, 6, 7]
    plain = list(range(16, 24))
    assert qkv_order(_read(tmp_path, PHI, **small)) == [*turned, *(8 + i for i in turned), *plain]
