"""What `quantization_config` may say, and what is refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from onestem.errors import ConfigError, UnsupportedError
from onestem.models.fields import Fields
from onestem.models.quantization import Quantization, Scheme, read_quantization
from tests.models.quantised import FORMATS

INT4 = FORMATS["packed int4"].config
FP8 = FORMATS["fp8 per channel"].config
GPTQ = FORMATS["gptq"].config
AWQ = FORMATS["awq"].config
BLOCK = FORMATS["fp8 in blocks"].config


def _read(config: dict[str, Any]) -> Quantization:
    found = read_quantization(Fields({"quantization_config": config}, "config.json"))
    assert found is not None
    return found


def _with(config: dict[str, Any], *path: str, value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(config)
    at = changed
    for name in path[:-1]:
        at = at[name]
    at[path[-1]] = copy.deepcopy(value)
    return changed


def test_none() -> None:
    assert read_quantization(Fields({}, "config.json")) is None
    assert read_quantization(Fields({"quantization_config": None}, "config.json")) is None


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("fp8 per tensor", Scheme(storage="float8", rows=None, rounds_rows=True)),
        ("fp8 in blocks", Scheme(storage="float8", rows=24, columns=40, rounds_rows=True)),
        ("int8", Scheme(storage="int8", rounds_rows=True)),
        ("int8 without rounding of rows", Scheme(storage="int8")),
        ("packed int4", Scheme(storage="packed", bits=4, columns=32)),
        ("packed int4, zero points", Scheme(storage="packed", bits=4, columns=32, symmetric=False)),
        ("gptq", Scheme(storage="gptq", bits=4, columns=32, symmetric=False, zero_offset=1)),
        ("awq", Scheme(storage="awq", bits=4, columns=32, symmetric=False)),
    ],
)
def test_schemes(name: str, scheme: Scheme) -> None:
    assert _read(FORMATS[name].config).scheme("model.layers.0.mlp.up_proj") == scheme


def test_other_names_of_the_same() -> None:
    old = {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM"}
    assert _read(old).schemes[0][1].columns == 64
    assert _read({**GPTQ, "group_size": -1}).schemes[0][1].columns is None
    assert _read({**BLOCK, "fmt": "e4m3", "scale_fmt": "ue8m0"}).method == "fp8"


def test_groups_of_modules_have_schemes_of_their_own() -> None:
    config = _with(INT4, "config_groups", "group_1", value=FP8["config_groups"]["group_0"])
    config["config_groups"]["group_1"] |= {
        "targets": ["re:.*down_proj$", "model.layers.0.mlp.up_proj"],
        "format": "float-quantized",
    }
    found = _read(config)
    schemes = [
        found.scheme(f"model.layers.{name}")
        for name in ("3.mlp.down_proj", "0.mlp.up_proj", "1.mlp.up_proj")
    ]
    assert [one.storage for one in schemes if one] == ["float8", "float8", "packed"]
    alone = _with(INT4, "config_groups", "group_0", "targets", value=["re:.*q_proj"])
    assert _read(alone).scheme("model.layers.1.mlp.up_proj") is None


GROUP = ("config_groups", "group_0")
REFUSED = {
    "method": ({"quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes', supported: comp"),
    "none": ({"bits": 4}, "quant_method is None"),
    "kv": (_with(INT4, "kv_cache_scheme", value={"num_bits": 8}), "kv_cache_scheme is"),
    "format": (_with(INT4, "format", value="nvfp4-pack-quantized"), "format is 'nvfp4"),
    "bits": (_with(INT4, *GROUP, "weights", "num_bits", value=3), "is 3, supported: 4 or 8"),
    "float4": (_with(FP8, *GROUP, "weights", "num_bits", value=4), "num_bits is 4, supported: 8"),
    "strategy": (_with(FP8, *GROUP, "weights", "strategy", value="token"), "strategy is 'token'"),
    "zeros": (_with(FP8, *GROUP, "weights", "symmetric", value=False), "symmetric is False"),
    "rows": (_with(INT4, *GROUP, "input_activations", value={"num_bits": 8}), "input_act"),
    "row bits": (_with(FP8, *GROUP, "input_activations", "num_bits", value=4), "num_bits is 4"),
    "row type": (_with(FP8, *GROUP, "input_activations", "type", value="int"), "type is 'int'"),
    "row zeros": (_with(FP8, *GROUP, "input_activations", "symmetric", value=False), "is False"),
    "outputs": (_with(FP8, *GROUP, "output_activations", value={"x": 8}), "output_act"),
    "sparse": ({**INT4, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config is"),
    "turned": ({**INT4, "transform_config": {"groups": {}, "x": 1}}, "transform_config is"),
    "gptq bits": ({**GPTQ, "bits": 2}, "bits is 2, supported: 4 or 8"),
    "gptq format": ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
    "marlin": ({**GPTQ, "is_marlin_format": True}, "is_marlin_format is True"),
    "dynamic": ({**GPTQ, "dynamic": {"x": {"bits": 8}}}, "dynamic is"),
    "awq bits": ({**AWQ, "bits": 8}, "bits is 8, supported: 4"),
    "awq version": ({**AWQ, "version": "gemv"}, "version is 'gemv', supported: gemm"),
    "e5m2": ({**BLOCK, "fmt": "e5m2"}, "fmt is 'e5m2'"),
    "scheme": ({**BLOCK, "activation_scheme": "none"}, "activation_scheme is 'none'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_others_are_refused_by_name(case: str) -> None:
    config, words = REFUSED[case]
    with pytest.raises(UnsupportedError, match=f"config.json: quantization_config.*{words}"):
        _read(config)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**BLOCK, "weight_block_size": [128]}, "weight_block_size is .128., expected two"),
        ({**GPTQ, "group_size": 0}, "group_size is 0, expected a positive integer"),
        ({**INT4, "config_groups": {}}, "config_groups is {}, expected an object of groups"),
        (_with(INT4, *GROUP, "targets", value="Linear"), "targets is 'Linear', expected a list"),
        (_with(INT4, *GROUP, "targets", value=["re:("]), "targets is .'re:.'., expected a list"),
        (_with(INT4, *GROUP, value=5), "config_groups: group_0 is 5, expected an object"),
    ],
)
def test_what_makes_no_sense_is_named(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        _read(config)
