"""`config.json` in the forms in which makers publish it, older and newer: what is read is what
transformers reads. Sizes of layers are the models' own; factors of LongRoPE are made up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.olmo3.modeling_olmo3 import Olmo3RotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from onestem.errors import ConfigError, UnsupportedError
from onestem.models.config import GenerationDefaults, ModelConfig
from onestem.models.rope import Rope
from onestem.models.tensors import Tensors

GEMMA3_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}
GEMMA3_1B: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "vocab_size": 262144,
}
_GEMMA4_ROPE = {
    "full_attention": {
        "partial_rotary_factor": 0.25,
        "rope_theta": 1000000.0,
        "rope_type": "proportional",
    },
    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
}
GEMMA4_E2B: dict[str, Any] = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "audio_config": {"model_type": "gemma4_audio"},
    "dtype": "bfloat16",
    "eos_token_id": [1, 106],
    "model_type": "gemma4",
    "text_config": {
        "attention_k_eq_v": False,
        "enable_moe_block": False,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1536,
        "hidden_size_per_layer_input": 256,
        "intermediate_size": 6144,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
        "max_position_embeddings": 131072,
        "model_type": "gemma4_text",
        "moe_intermediate_size": None,
        "num_attention_heads": 8,
        "num_experts": None,
        "num_global_key_value_heads": None,
        "num_hidden_layers": 35,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 20,
        "rms_norm_eps": 1e-06,
        "rope_parameters": _GEMMA4_ROPE,
        "sliding_window": 512,
        "tie_word_embeddings": True,
        "use_bidirectional_attention": None,
        "use_double_wide_mlp": True,
        "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144,
    },
    "vision_config": {"model_type": "gemma4_vision"},
}
GEMMA4_26B: dict[str, Any] = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "dtype": "bfloat16",
    "model_type": "gemma4",
    "text_config": {
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_size": 2816,
        "hidden_size_per_layer_input": 0,
        "intermediate_size": 2112,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
        "max_position_embeddings": 262144,
        "model_type": "gemma4_text",
        "moe_intermediate_size": 704,
        "num_attention_heads": 16,
        "num_experts": 128,
        "num_global_key_value_heads": 2,
        "num_hidden_layers": 30,
        "num_key_value_heads": 8,
        "num_kv_shared_layers": 0,
        "rope_parameters": _GEMMA4_ROPE,
        "sliding_window": 1024,
        "top_k_experts": 8,
        "use_bidirectional_attention": "vision",
    },
    "vision_config": {"model_type": "gemma4_vision"},
}
GEMMA2_2B: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"],
    "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 256000,
}
PHI3_MINI_128K: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "model_type": "phi3",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "long_factor": [1.0 + i for i in range(48)],
        "short_factor": [1.0 + 0.01 * i for i in range(48)],
        "type": "longrope",
    },
    "rope_theta": 10000.0,
    "sliding_window": 262144,
    "tie_word_embeddings": False,
    "vocab_size": 32064,
}
QWEN25_YARN: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rope_scaling": {
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
        "type": "yarn",
    },
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
OLMO3_7B: dict[str, Any] = {
    "architectures": ["Olmo3ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 65536,
    "model_type": "olmo3",
    "num_attention_heads": 32,
    "num_hidden_layers": 8,
    "num_key_value_heads": 32,
    "rope_scaling": {
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "yarn",
    },
    "rope_theta": 500000,
    "sliding_window": 4096,
    "vocab_size": 100278,
}
SMOLLM3_3B: dict[str, Any] = {
    "architectures": ["SmolLM3ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "layer_types": ["full_attention"] * 8,
    "max_position_embeddings": 65536,
    "model_type": "smollm3",
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0, 1, 1, 1, 0],
    "num_attention_heads": 16,
    "num_hidden_layers": 8,
    "num_key_value_heads": 4,
    "rope_scaling": None,
    "rope_theta": 5000000.0,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 128256,
}
MISTRAL_SMALL_31: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "image_token_index": 10,
    "model_type": "mistral3",
    "text_config": {
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 32768,
        "max_position_embeddings": 131072,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000000.0,
        "sliding_window": None,
        "vocab_size": 131072,
    },
    "vision_config": {"hidden_size": 1024, "model_type": "pixtral"},
}
GRANITE_2B: dict[str, Any] = {
    "architectures": ["GraniteForCausalLM"],
    "attention_bias": False,
    "attention_multiplier": 0.015625,
    "embedding_multiplier": 12.0,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "logits_scaling": 8.0,
    "max_position_embeddings": 131072,
    "model_type": "granite",
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "residual_multiplier": 0.22,
    "rope_theta": 10000000.0,
    "tie_word_embeddings": True,
    "vocab_size": 49155,
}
PUBLISHED = {
    "gemma-3-4b": (GEMMA3_4B, Gemma3RotaryEmbedding),
    "gemma-3-1b": (GEMMA3_1B, Gemma3RotaryEmbedding),
    "gemma-4-e2b": (GEMMA4_E2B, Gemma4TextRotaryEmbedding),
    "gemma-4-26b-a4b": (GEMMA4_26B, Gemma4TextRotaryEmbedding),
    "gemma-2-2b": (GEMMA2_2B, LlamaRotaryEmbedding),
    "phi-3-mini-128k": (PHI3_MINI_128K, Phi3RotaryEmbedding),
    "phi-3 by defaults": (
        {
            name: value
            for name, value in {**PHI3_MINI_128K, "max_position_embeddings": 8192}.items()
            if name != "original_max_position_embeddings"
        },
        Phi3RotaryEmbedding,
    ),
    "qwen2.5-7b with YaRN": (QWEN25_YARN, LlamaRotaryEmbedding),
    "YaRN without truncation": (
        {**QWEN25_YARN, "rope_scaling": {**QWEN25_YARN["rope_scaling"], "truncate": None}},
        LlamaRotaryEmbedding,
    ),
    "olmo-3-7b": (OLMO3_7B, Olmo3RotaryEmbedding),
    "smollm3-3b": (SMOLLM3_3B, LlamaRotaryEmbedding),
    "mistral-small-3.1": (MISTRAL_SMALL_31, LlamaRotaryEmbedding),
    "granite-3.3-2b": (GRANITE_2B, LlamaRotaryEmbedding),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_files_are_read_as_transformers_reads_them(name: str, tmp_path: Path) -> None:
    values, rotary = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(values))
    found = ModelConfig.from_directory(tmp_path)
    outer = transformers.AutoConfig.from_pretrained(tmp_path)
    want = outer.get_text_config()
    want.allow_global_per_layer_attribute_access = True
    head_dim = getattr(want, "head_dim", None) or want.hidden_size // want.num_attention_heads
    assert (found.vocab_size, found.hidden_size) == (want.vocab_size, want.hidden_size)
    assert (found.num_layers, found.intermediate_size) == (
        want.num_hidden_layers,
        want.intermediate_size,
    )
    heads = (want.num_attention_heads, want.num_key_value_heads, head_dim)
    assert (found.num_q_heads, found.num_kv_heads, found.head_dim) == heads
    assert found.norm_eps == want.rms_norm_eps
    assert found.tie_embeddings == outer.tie_word_embeddings
    assert list(found.sliding_windows) == _windows(want)
    _compare_angles(found, want, rotary)


@pytest.mark.parametrize("layers", [None, 3, 60])
def test_gemma_4_needs_a_kind_for_each_layer(layers: int | None, tmp_path: Path) -> None:
    text = {**GEMMA4_E2B["text_config"], "num_hidden_layers": layers}
    (tmp_path / "config.json").write_text(json.dumps({**GEMMA4_E2B, "text_config": text}))
    with pytest.raises(ConfigError, match=f"layer_types is .*expected a list of {layers or 30}"):
        ModelConfig.from_directory(tmp_path)


def test_gemma_3_with_images_has_no_softcap(tmp_path: Path) -> None:
    text = {**GEMMA3_4B["text_config"], "final_logit_softcapping": 30.0}
    (tmp_path / "config.json").write_text(json.dumps({**GEMMA3_4B, "text_config": text}))
    with pytest.raises(UnsupportedError, match=r"final_logit_softcapping is 30\.0"):
        ModelConfig.from_directory(tmp_path)


@pytest.mark.parametrize("values", [GEMMA4_E2B, GEMMA4_26B], ids=["e2b", "26b-a4b"])
def test_gemma_4_is_made_of_what_transformers_has(values: dict[str, Any], tmp_path: Path) -> None:
    """Its tensors by name and shape, and as written again by transformers."""
    (tmp_path / "config.json").write_text(json.dumps(values))
    found = ModelConfig.from_directory(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path).text_config
    with torch.device("meta"):
        model = transformers.Gemma4ForCausalLM(config)
    want = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    del want["lm_head.weight"]  # the embedding
    assert Tensors(found).shapes == want
    config.architectures = ["Gemma4ForCausalLM"]
    config.save_pretrained(tmp_path)
    written = ModelConfig.from_directory(tmp_path)
    assert "per_layer_config" in json.loads((tmp_path / "config.json").read_text())
    assert replace(written, architecture=found.architecture, **DTYPE_AND_ENDS) == replace(
        found, **DTYPE_AND_ENDS
    )


# What the outer part of a file says.
DTYPE_AND_ENDS: dict[str, Any] = {"torch_dtype": "", "eos_token_ids": (), "bos_token_id": None}


def _windows(want: Any) -> list[int | None]:
    everywhere = want.model_type == "phi3"
    default = ["sliding_attention" if everywhere else "full_attention"] * want.num_hidden_layers
    kinds = getattr(want, "layer_types", None) or default
    size = getattr(want, "sliding_window", None)
    if size is not None and size >= want.max_position_embeddings:
        size = None
    return [size if kind == "sliding_attention" else None for kind in kinds]


def _compare_angles(found: ModelConfig, want: Any, rotary: Any) -> None:
    """Cosines and sines of each layer at positions that scaling changes."""
    positions = torch.tensor([0, 1, 77, 4097, 30000])
    theirs, ours = rotary(want), Rope(found, torch.device("cpu")).angles(positions)
    turning = getattr(want, "no_rope_layers", None) or [1] * found.num_layers
    kinds = getattr(want, "layer_types", None) if hasattr(theirs, "layer_types") else None
    for layer, angles in enumerate(ours):
        kind = [] if kinds is None else [kinds[layer]]
        if turning[layer]:
            cos, sin = theirs(torch.zeros(1), positions[None], *kind)
            half = cos.shape[-1] // 2
            torch.testing.assert_close(angles.cos, cos[0, :, :half], atol=1e-6, rtol=0)
            torch.testing.assert_close(angles.sin, sin[0, :, :half], atol=1e-6, rtol=0)
        else:
            assert torch.equal(angles.cos, torch.ones_like(angles.cos))


def test_what_these_files_mean(tmp_path: Path) -> None:
    def read(values: dict[str, Any]) -> ModelConfig:
        (tmp_path / "config.json").write_text(json.dumps(values))
        return ModelConfig.from_directory(tmp_path)

    gemma = read(GEMMA3_4B)
    assert gemma.sliding_windows[:7] == (1024,) * 5 + (None, 1024)
    assert (gemma.num_q_heads, gemma.num_kv_heads, gemma.head_dim) == (8, 4, 256)
    first = gemma.first_layers(6)
    assert (first.num_layers, first.sliding_windows) == (6, gemma.sliding_windows[:6])
    assert first.rotaries == gemma.rotaries[:6]
    assert len(set(first.rotaries)) == 2
    assert (gemma.torch_dtype, gemma.eos_token_ids) == ("bfloat16", (1, 106))
    e2b = read(GEMMA4_E2B)
    assert e2b.kv_layers[15:20] == (13,) * 4 + (14,)
    assert e2b.kv_layers[:15] == tuple(range(15))
    assert e2b.kv_values_per_token == 2 * (12 * 256 + 3 * 512)
    assert (e2b.mlp_size(14), e2b.mlp_size(15)) == (6144, 12288)
    assert e2b.head_shapes == ((256, 8), (512, 8))
    experts = read(GEMMA4_26B)
    assert experts.head_shapes == ((256, 2), (512, 8))
    assert experts.kv_values_per_token == 2 * (25 * 8 * 256 + 5 * 2 * 512)
    assert not any(heads.value_is_key for heads in experts.heads[:5])
    assert experts.heads[5].value_is_key
    assert experts.first_layers(6).heads == experts.heads[:6]
    gemma2 = read(GEMMA2_2B)
    assert (gemma2.score_softcap, gemma2.logit_softcap) == (50.0, 30.0)
    without = {k: v for k, v in GEMMA2_2B.items() if k != "final_logit_softcapping"}
    assert read(without).logit_softcap == 30.0
    assert read({**GEMMA2_2B, "final_logit_softcapping": None}).logit_softcap is None
    text = {**MISTRAL_SMALL_31["text_config"], "eos_token_id": 2, "dtype": "bfloat16"}
    mistral = read({**MISTRAL_SMALL_31, "text_config": text})
    assert (mistral.torch_dtype, mistral.eos_token_ids) == ("bfloat16", (2,))
    assert GenerationDefaults.from_directory(tmp_path).eos_token_ids == (2,)
    # YaRN gives positions that the file's own number leaves out.
    assert read(QWEN25_YARN).max_position_embeddings == 131072
    # The first files of Phi-3 had another name for it.
    older = {**PHI3_MINI_128K["rope_scaling"], "type": "su"}
    assert read({**PHI3_MINI_128K, "rope_scaling": older}) == read(PHI3_MINI_128K)
    granite = read(GRANITE_2B)
    assert (granite.embedding_scale, granite.residual_scale) == (12.0, 0.22)
    assert (granite.score_scale, granite.logit_scale) == (1 / 64, 1 / 8)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"use_bidirectional_attention": "all"}, ["use_bidirectional_attention is 'all'"]),
        ({"vocab_size_per_layer_input": 9}, ["vocab_size_per_layer_input is 9", "262144"]),
        ({"hidden_size_per_layer_input": -1}, ["hidden_size_per_layer_input is -1"]),
        ({"num_kv_shared_layers": 35}, ["num_kv_shared_layers is 35", "0 to 34"]),
        ({"num_kv_shared_layers": 31}, ["num_kv_shared_layers is 31", "keys of its own"]),
        ({"per_layer_config": {"4": {"num_attention_heads": 4}}}, ["4: num_attention_heads is 4"]),
        ({"per_layer_config": {"35": {}}}, ["per_layer_config"]),
        ({"per_layer_config": {"4": {"head_dim": 8}}}, ["one head_dim in layers of full"]),
        ({"per_layer_config": {"34": {"num_key_value_heads": 2}}}, ["layer 34", "layer 14's"]),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, ["sliding_attention"]),
        ({"rope_scaling": {"factor": 2}}, ["rope_scaling"]),
        ({"enable_moe_block": True}, ["num_experts is None", "positive"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads is 8", "(3)"]),
    ],
)
def test_what_gemma_4_does_not_have_is_named(
    fields: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    text = {**GEMMA4_E2B["text_config"], **fields}
    (tmp_path / "config.json").write_text(json.dumps({**GEMMA4_E2B, "text_config": text}))
    with pytest.raises((ConfigError, UnsupportedError)) as error:
        ModelConfig.from_directory(tmp_path)
    for word in words:
        assert word in str(error.value)
