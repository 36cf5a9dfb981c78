"""What is read from config.json and generation_config.json, and what is refused by name."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from onestem.errors import ConfigError, UnsupportedError
from onestem.models.config import GenerationDefaults, ModelConfig
from onestem.models.description import RopeScaling, Rotary
from onestem.models.families import FAMILIES

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
}


def _directory(path: Path, config: object, generation: object = None) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def _read(path: Path, **changes: Any) -> ModelConfig:
    return ModelConfig.from_directory(_directory(path, {**LLAMA, **changes}))


def test_absent_fields_have_the_family_s_values(tmp_path: Path) -> None:
    assert _read(tmp_path) == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=32000,
        hidden_size=64,
        intermediate_size=96,
        num_layers=3,
        num_q_heads=4,
        num_kv_heads=4,
        head_dim=16,
        positions=Rotary(16, theta=10000.0, scaling=None),
        max_position_embeddings=4096,
        norm="rms",
        norm_eps=1e-6,
        norm_bias=False,
        block="sequential",
        mlp="silu_gated",
        tie_embeddings=False,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        head_bias=False,
        qkv_clip=None,
        qk_norm=False,
        sliding_windows=(None, None, None),
        torch_dtype="float32",
        bos_token_id=None,
        eos_token_ids=(),
    )


LLAMA3 = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("fields", "theta", "scaling"),
    [
        ({"rope_theta": 5e5, "rope_scaling": None}, 5e5, None),
        ({"rope_theta": 1000000}, 1e6, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1e6, None),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, 1e4, RopeScaling("linear", 4.0)),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            5e5,
            RopeScaling("llama3", 32.0, 1.0, 4.0, 8192),
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
            5e5,
            RopeScaling("llama3", 32.0, 1.0, 4.0, 8192),
        ),
    ],
)
def test_rope_in_old_and_new_files(
    tmp_path: Path, fields: dict[str, Any], theta: float, scaling: RopeScaling | None
) -> None:
    assert _read(tmp_path, **fields).positions == Rotary(16, theta, scaling)


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 8}, (8, 8, 8)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, (None,) * 3),
        ({"architectures": ["MistralForCausalLM"]}, (4096,) * 3),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8}, (None,) * 3),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 8,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            (None, 8, 8),
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (8, None, 8),
        ),
    ],
)
def test_sliding_windows(
    tmp_path: Path, fields: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert _read(tmp_path, **fields).sliding_windows == windows


def test_biases_and_norms_by_family(tmp_path: Path) -> None:
    qwen2 = _read(tmp_path, architectures=["Qwen2ForCausalLM"])
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.mlp_bias, qwen2.qk_norm) == (
        True,
        False,
        False,
        False,
    )
    qwen3 = _read(tmp_path, architectures=["Qwen3ForCausalLM"])
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 128)
    llama = _read(tmp_path, attention_bias=True, mlp_bias=True)
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias) == (True, True, True)


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_dtype_under_both_names(tmp_path: Path, name: str) -> None:
    assert _read(tmp_path, **{name: "bfloat16"}).torch_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"architectures": ["BloomForCausalLM"]}, ["BloomForCausalLM", "LlamaForCausalLM"]),
        ({"architectures": ["Gemma3nForCausalLM"]}, ["residual streams", "nearest", "Gemma3"]),
        ({"architectures": ["GraniteMoeForCausalLM"]}, ["experts", "GraniteForCausalLM"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["dynamic", "llama3"]),
        ({"rope_parameters": {"rope_type": "ntk", "factor": 4.0}}, ["ntk", "yarn", "shared"]),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, ["rope_parameters"]),
        (
            {
                "rope_parameters": {"rope_theta": 1e6},
                "rope_scaling": {"type": "linear", "factor": 2.0},
            },
            ["rope_scaling", "linear", "rope_parameters: put it in there"],
        ),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ({"is_causal": False}, ["is_causal", "False", "True"]),
        ({"text_config": {"is_causal": False}}, ["is_causal", "False", "True"]),
        ({"quantization_config": {"quant_method": "hqq"}}, ["quant_method", "hqq", "gptq"]),
        ({"torch_dtype": "float8_e4m3fn"}, ["torch_dtype", "float8_e4m3fn", "bfloat16"]),
        ({"layer_types": ["sliding_attention"] * 3}, ["layer_types", "full_attention"]),
    ],
)
def test_what_is_not_computed_is_refused(
    tmp_path: Path, fields: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(UnsupportedError) as error:
        _read(tmp_path, **fields)
    for word in [*words, "config.json"]:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"architectures": None}, ["architectures", "None"]),
        ({"architectures": []}, ["architectures", "[]"]),
        ({"hidden_size": "64"}, ["hidden_size", "'64'", "positive integer"]),
        ({"hidden_size": 66}, ["hidden_size", "66", "(4)"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "0"]),
        ({"num_hidden_layers": True}, ["num_hidden_layers", "True"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads", "4", "(3)"]),
        ({"head_dim": 15}, ["head_dim", "15", "even"]),
        ({"rms_norm_eps": "small"}, ["rms_norm_eps", "'small'"]),
        ({"tie_word_embeddings": 1}, ["tie_word_embeddings", "1"]),
        ({"rope_scaling": "linear"}, ["rope_scaling", "'linear'"]),
        ({"rope_scaling": {"type": "linear"}}, ["factor", "missing"]),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}},
            ["high_freq_factor"],
        ),
        ({"rope_scaling": {"rope_type": "longrope"}}, ["short_factor", "missing"]),
        (
            {"rope_scaling": {"type": "su", "short_factor": [1, 0], "long_factor": [1, 1]}},
            ["short_factor[1] is 0", "positive"],
        ),
        (
            {"rope_scaling": {"type": "su", "short_factor": [1, 1], "long_factor": [1]}},
            ["short_factor has 2 numbers", "expected 8"],
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 1}},
            ["beta_fast", "more than beta_slow"],
        ),
        ({"eos_token_id": "</s>"}, ["eos_token_id", "'</s>'"]),
        ({"rope_theta": math.nan}, ["rope_theta", "nan", "finite"]),
        ({"rope_parameters": {"rope_theta": 1.0}}, ["rope_theta", "1.0", "more than 1"]),
        ({"rope_theta": -math.inf}, ["rope_theta", "-inf", "finite"]),
        ({"rms_norm_eps": 10**400}, ["rms_norm_eps", "finite"]),
        ({"rope_theta": 1e300}, ["rope_theta", "1e+300", "float32"]),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": 2**31},
            ["sliding_window", "2147483648", "2147483647"],
        ),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "layer_types": ["full_attention"],
            },
            ["layer_types", "1 layers", "3"],
        ),
    ],
)
def test_what_makes_no_sense_is_named(
    tmp_path: Path, fields: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        _read(tmp_path, **fields)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    "name", ["architectures", "vocab_size", "hidden_size", "num_hidden_layers"]
)
def test_missing_fields_are_named(tmp_path: Path, name: str) -> None:
    config = {key: value for key, value in LLAMA.items() if key != name}
    with pytest.raises(ConfigError, match=f"{name} is missing"):
        ModelConfig.from_directory(_directory(tmp_path, config))


@pytest.mark.parametrize("count", [4097, 2**31, 10**30])
@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("LlamaForCausalLM", "num_hidden_layers"),
        ("GPT2LMHeadModel", "n_layer"),
        ("MptForCausalLM", "n_layers"),
        ("MixtralForCausalLM", "num_local_experts"),
        ("Qwen3MoeForCausalLM", "num_experts"),
        ("Glm4MoeForCausalLM", "n_routed_experts"),
    ],
)
def test_more_than_any_model_has_is_refused_at_once(
    tmp_path: Path, architecture: str, name: str, count: int
) -> None:
    config = {**LLAMA, "architectures": [architecture], name: count}
    with pytest.raises(ConfigError, match=f"json: {name} is {count}, limit is 4096"):
        ModelConfig.from_directory(_directory(tmp_path, config))
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {name: count}}
    with pytest.raises(ConfigError, match=f"text_config: {name} is {count}, limit is 4096"):
        ModelConfig.from_directory(_directory(tmp_path, outer))


def test_no_directory_no_json_no_object(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        ModelConfig.from_directory(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        ModelConfig.from_directory(tmp_path)
    with pytest.raises(ConfigError, match="holds list"):
        ModelConfig.from_directory(_directory(tmp_path, []))


def test_ends_are_those_of_both_configurations(tmp_path: Path) -> None:
    config = {**LLAMA, "bos_token_id": 1, "eos_token_id": 2}
    assert ModelConfig.from_directory(_directory(tmp_path, config)).eos_token_ids == (2,)
    assert GenerationDefaults.from_directory(tmp_path) == GenerationDefaults(eos_token_ids=(2,))
    _directory(tmp_path, config, {"bos_token_id": 5, "eos_token_id": [7, 8, 9]})
    read = ModelConfig.from_directory(tmp_path)
    assert (read.bos_token_id, read.eos_token_ids) == (5, (7, 8, 9, 2))
    defaults = GenerationDefaults.from_directory(tmp_path)
    assert defaults.eos_token_ids == (7, 8, 9, 2)
    assert defaults.ends([2, 4, 10], 10) == (7, 8, 9, 2, 4)


def test_ends_that_are_no_tokens_are_told(tmp_path: Path, caplog) -> None:
    size = LLAMA["vocab_size"]
    _directory(tmp_path, LLAMA, {"eos_token_id": [size, 2, size + 7]})
    assert GenerationDefaults.from_directory(tmp_path).eos_token_ids == (2,)
    told = f"eos_token_id has {size}, {size + 7}, and the model has {size} tokens"
    assert f"generation_config.json: {told}: left out" in caplog.text
    for config, generation in (
        (LLAMA, {"eos_token_id": size}),
        ({**LLAMA, "eos_token_id": -1}, {}),
    ):
        caplog.clear()
        _directory(tmp_path, config, generation)
        assert GenerationDefaults.from_directory(tmp_path).eos_token_ids == ()
        assert f"and the model has {size} tokens: left out" in caplog.text


def test_generation_defaults(tmp_path: Path) -> None:
    generation = {
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
        "repetition_penalty": 1.05,
    }
    assert GenerationDefaults.from_directory(
        _directory(tmp_path, LLAMA, generation)
    ) == GenerationDefaults(temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.05)
    # `do_sample` alone says nothing about the temperature.
    _directory(tmp_path, LLAMA, {"do_sample": False})
    assert GenerationDefaults.from_directory(tmp_path) == GenerationDefaults()
    _directory(tmp_path, LLAMA, {"temperature": "hot"})
    with pytest.raises(ConfigError, match="temperature is 'hot'"):
        GenerationDefaults.from_directory(tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("temperature", -1, "from 0 to 100"),
        ("top_p", 0, "above 0"),
        ("min_p", 1.5, "from 0 to 1"),
        ("top_k", -5, "at least -1"),
        ("repetition_penalty", 0, "from 1e-6"),
        ("temperature", math.nan, "finite"),
    ],
)
def test_defaults_that_no_request_could_ask_for(tmp_path, name, value, words) -> None:
    _directory(tmp_path, LLAMA, {name: value})
    with pytest.raises(ConfigError, match=rf"generation_config.json: {name} is .*{words}"):
        GenerationDefaults.from_directory(tmp_path)


def test_config_imports_no_torch() -> None:
    code = "import sys, onestem.models.config; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_architecture_is_in_the_docs() -> None:
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    assert [name for name in FAMILIES if f"`{name}`" not in text] == []
