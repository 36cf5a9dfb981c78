"""What a family's layers have and Llama's do not: each, taken out, shows in its log-probabilities.

So the comparison with transformers (`test_models_decoder.py`) would see it missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from onestem.models.config import ModelConfig
from onestem.models.decoder import Decoder, Layer
from onestem.models.description import LayerRotary, Rotary
from onestem.models.linear import Activation
from onestem.models.mlp import ExpertLayer, SortedBlocks, clamped_swiglu
from onestem.models.weights import load_decoder
from onestem.ops import DeltaOps
from tests.models.dense import log_probabilities, prompt
from tests.models.tiny import SENSITIVITY

IDS = prompt(90, 270)

Changes = Callable[[ModelConfig], dict[str, Any]]


def _windows(config: ModelConfig) -> dict[str, Any]:
    assert any(config.sliding_windows)
    return {"sliding_windows": (None,) * config.num_layers}


def _first_rotary(config: ModelConfig) -> dict[str, Any]:
    """The last layer's in all."""
    assert len(set(config.rotaries)) == 2
    return {"positions": LayerRotary((config.rotaries[-1],) * config.num_layers)}


def _of_rotary(**changes: Any) -> Changes:
    def change(rotary: Rotary | None) -> Rotary | None:
        return rotary and replace(rotary, **changes)

    return lambda config: {"positions": LayerRotary(tuple(map(change, config.rotaries)))}


def _one_base(config: ModelConfig) -> dict[str, Any]:
    """The last layer's in all, over heads of their own size."""
    assert len({rotary.theta for rotary in config.rotaries}) == 2
    return _of_rotary(theta=config.rotaries[-1].theta)(config)


def _other_keys(config: ModelConfig) -> dict[str, Any]:
    """A layer reads keys and values of another layer than it does."""
    heads = list(config.heads)
    assert heads[3].kv_layer == 2
    heads[3] = replace(heads[3], kv_layer=0)
    return {"layer_heads": tuple(heads)}


def _of_scaling(**changes: Any) -> Changes:
    def change(config: ModelConfig) -> dict[str, Any]:
        assert isinstance(config.positions, Rotary)
        scaling: Any = config.positions.scaling
        return {"positions": replace(config.positions, scaling=replace(scaling, **changes))}

    return change


def _without(**changes: Any) -> Changes:
    def change(config: ModelConfig) -> dict[str, Any]:
        assert all(getattr(config, name) != value for name, value in changes.items())
        return changes

    return change


# What is taken out of the configuration before weights are read.
CONFIGS: list[tuple[str, str, Changes]] = [
    ("gemma2", "windows", _windows),
    ("gemma2", "softcap of scores", _without(score_softcap=None)),
    ("gemma2", "softcap of logits", _without(logit_softcap=None)),
    ("gemma2", "scale of scores", _without(score_scale=None)),
    ("gemma2", "scale of embeddings", _without(embedding_scale=1.0)),
    ("gemma2", "offset of norms", _without(norm_offset=0.0)),
    ("gemma2", "activation", _without(mlp="silu_gated")),
    ("gemma3", "windows", _windows),
    ("gemma3", "second RoPE base", _first_rotary),
    ("gemma3", "RoPE scaling", _of_rotary(scaling=None)),
    ("gemma3", "scale of scores", _without(score_scale=None)),
    ("gemma4", "windows", _windows),
    ("gemma4", "softcap of logits", _without(logit_softcap=None)),
    ("gemma4", "scale of scores", _without(score_scale=None)),
    ("gemma4", "scale of embeddings", _without(embedding_scale=1.0)),
    ("gemma4", "activation", _without(mlp="silu_gated")),
    ("gemma4", "norm of values", _without(v_norm=False)),
    ("gemma4", "second RoPE base", _one_base),
    ("gemma4", "pairs that stay", _of_rotary(scaling=None)),
    ("gemma4_image", "whose keys are read", _other_keys),
    ("phi3", "windows", _windows),
    ("phi4_mini", "partial RoPE", _of_rotary(dim=16, scaling=None)),
    ("phi4_mini", "long factors", _of_scaling(original_max_position_embeddings=2048)),
    ("phi4_mini", "attention factor", _of_scaling(attention_factor=1.0)),
    ("qwen2_yarn", "RoPE scaling", _of_rotary(scaling=None)),
    ("qwen2_yarn", "attention factor", _of_scaling(attention_factor=1.0)),
    ("qwen2_yarn", "ramp", _of_scaling(beta_fast=2.0)),
    ("olmo3", "windows", _windows),
    ("olmo3", "second RoPE", _first_rotary),
    ("smollm3", "layers without RoPE", lambda config: {"positions": config.rotaries[0]}),
    ("granite", "embedding multiplier", _without(embedding_scale=1.0)),
    ("granite", "attention multiplier", _without(score_scale=None)),
    ("granite", "residual multiplier", _without(residual_scale=1.0)),
    ("granite", "logits scaling", _without(logit_scale=1.0)),
    ("glm4", "interleaved pairs", _of_rotary(interleaved=False)),
    ("glm4", "partial RoPE", _of_rotary(dim=32)),
    ("ministral3", "growth of queries", _without(query_growth=None)),
    ("mixtral", "windows", _windows),
    ("gpt_oss", "windows", _windows),
    ("gpt_oss", "ramp", _of_scaling(beta_fast=2.0)),
    ("olmoe", "clipping", _without(qkv_clip=None)),
    ("qwen3_5", "offset of norms", _without(norm_offset=0.0)),
    ("qwen3_5", "partial RoPE", _of_rotary(dim=32)),
]

# What is taken out of every layer.
LAYERS: list[tuple[str, str]] = [
    *(("gemma2", norm) for norm in ("input_norm", "output_norm", "post_norm", "down_norm")),
    *(("gemma3", norm) for norm in ("output_norm", "down_norm", "heads")),
    *(("gemma4", part) for part in ("input_norm", "output_norm", "post_norm", "down_norm")),
    *(("gemma4", part) for part in ("heads", "scalar")),
    ("gemma4_image", "vectors"),
    *(("glm4", norm) for norm in ("output_norm", "down_norm")),
    *(("olmo2", norm) for norm in ("output_norm", "down_norm", "qk_norms")),
]


@pytest.fixture(scope="module")
def whole(tiny: Callable[[str], Path]) -> Callable[[str], Decoder]:
    return cache(lambda family: load_decoder(tiny(family), dtype=torch.float32, device="cpu"))


@pytest.mark.parametrize(
    ("family", "changes"),
    [(family, changes) for family, _, changes in CONFIGS],
    ids=[f"{family}: {part}" for family, part, _ in CONFIGS],
)
def test_what_a_configuration_says_shows(
    family: str,
    changes: Changes,
    tiny: Callable[[str], Path],
    whole: Callable[[str], Decoder],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = whole(family).config
    without = replace(config, **changes(config))
    monkeypatch.setattr(ModelConfig, "from_directory", lambda _: without)
    decoder = load_decoder(tiny(family), dtype=torch.float32, device="cpu")
    assert _moved(decoder, whole(family)) > SENSITIVITY


@pytest.mark.parametrize(("family", "norm"), LAYERS)
def test_every_norm_shows(family: str, norm: str, whole: Callable[[str], Decoder]) -> None:
    decoder = whole(family)
    layers = []
    for layer in decoder.layers:
        assert getattr(layer, norm) is not None
        bare = replace(layer.heads, q_norm=None, k_norm=None) if norm == "heads" else None
        assert bare is None or layer.heads.q_norm is not None
        layers.append(replace(layer, **{norm: bare}))
    assert _moved(_of_layers(decoder, layers), decoder) > SENSITIVITY


def _of_layers(decoder: Decoder, layers: list[Layer]) -> Decoder:
    parts = (decoder.embedding, layers, decoder.norm, decoder.head, decoder.num_parameters)
    return Decoder(decoder.config, *parts, vectors=decoder.vectors)


def _without_sinks(layer: Layer) -> Layer:
    assert layer.heads is not None
    assert layer.heads.sinks is not None
    return replace(layer, heads=replace(layer.heads, sinks=None))


def _experts(**changes: Any) -> Callable[[Layer], Layer]:
    """Of a layer that has them: fields of `ExpertLayer`, or else of `Experts`."""

    def change(layer: Layer) -> Layer:
        if layer.beside is not None:
            whole = replace(layer, mlp=layer.beside.experts, beside=None)
            return replace(layer, beside=replace(layer.beside, experts=change(whole).mlp))
        if not isinstance(layer.mlp, ExpertLayer):
            return layer
        own = {field.name for field in fields(ExpertLayer)}
        routing = {name: value for name, value in changes.items() if name not in own}
        others = {name: value for name, value in changes.items() if name not in routing}
        experts = replace(layer.mlp.experts, **routing)
        assert experts != layer.mlp.experts or others
        assert all(getattr(layer.mlp, name) is not None for name in others)
        return replace(layer, mlp=replace(layer.mlp, experts=experts, **others))

    return change


def _without_clamp(layer: Layer) -> Layer:
    assert isinstance(layer.mlp, ExpertLayer)
    assert isinstance(layer.mlp.products, SortedBlocks)
    loose = Activation("loose", partial(clamped_swiglu, alpha=1.702, limit=1e9))
    return replace(
        layer, mlp=replace(layer.mlp, products=replace(layer.mlp.products, activation=loose))
    )


class _NoConvolution(DeltaOps):
    def causal_conv(self, x: Any, weight: Any, states: Any, rows: Any) -> Any:
        return torch.nn.functional.silu(x * weight[:, -1])


class _NoDecay(DeltaOps):
    def gates(self, *args: Any) -> Any:
        decay, beta = super().gates(*args)
        return torch.zeros_like(decay), beta


class _FullStrength(DeltaOps):
    def gates(self, *args: Any) -> Any:
        decay, beta = super().gates(*args)
        return decay, torch.ones_like(beta)


class _NoGate(DeltaOps):
    def gated_norm(self, x: Any, weight: Any, z: Any, eps: float) -> Any:
        return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


class _NoNorm(DeltaOps):
    def gated_norm(self, x: Any, weight: Any, z: Any, eps: float) -> Any:
        return x * weight * torch.nn.functional.silu(z)


DELTA: list[type[DeltaOps]] = [_NoConvolution, _NoDecay, _FullStrength, _NoGate, _NoNorm]


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("ops", DELTA)
def test_every_part_of_the_delta_rule_shows(
    family: str, ops: type[DeltaOps], whole: Callable[[str], Decoder]
) -> None:
    decoder = whole(family)
    layers = [
        replace(layer, delta=layer.delta and replace(layer.delta, ops=ops()))
        for layer in decoder.layers
    ]
    assert _moved(_of_layers(decoder, layers), decoder) > SENSITIVITY


def test_lengths_of_keys_and_queries_show(
    whole: Callable[[str], Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = whole("qwen3_5")
    torch_ops = [
        replace(layer, delta=layer.delta and replace(layer.delta, ops=DeltaOps()))
        for layer in decoder.layers
    ]
    before = log_probabilities(decoder, IDS)
    monkeypatch.setattr("onestem.ops.delta._unit", lambda x: x.float() / 64)
    after = log_probabilities(_of_layers(decoder, torch_ops), IDS)
    assert (after - before).abs().max() > SENSITIVITY


def test_the_gate_of_attention_shows(whole: Callable[[str], Decoder]) -> None:
    decoder = whole("qwen3_5")

    class Ungated(Decoder):
        def _attention(
            self, index: int, layer: Layer, normed: Any, growth: Any, angles: Any, attend: Any
        ) -> Any:
            heads = layer.heads
            assert heads is not None
            columns = heads.num_projected * heads.head_dim
            qkv = layer.qkv(normed)[:, :columns].contiguous()
            return attend(index, qkv, heads, angles).flatten(1)

    parts = (decoder.embedding, decoder.layers, decoder.norm, decoder.head)
    ungated = Ungated(decoder.config, *parts, decoder.num_parameters)
    assert _moved(ungated, decoder) > SENSITIVITY


def _weight_of_ones(name: str) -> Callable[[Layer], Layer]:
    """Of a norm of experts beside an MLP."""

    def change(layer: Layer) -> Layer:
        beside = layer.beside
        assert beside is not None
        return replace(
            layer, beside=replace(beside, **{name: torch.ones_like(getattr(beside, name))})
        )

    return change


# What is taken out of every layer that has it.
PARTS: list[tuple[str, str, Callable[[Layer], Layer]]] = [
    ("gpt_oss", "sinks", _without_sinks),
    ("gpt_oss", "clamp", _without_clamp),
    ("gpt_oss", "normalisation", _experts(normalized=False)),
    ("mixtral", "normalisation", _experts(normalized=False)),
    ("qwen3_moe", "normalisation", _experts(normalized=False)),
    ("olmoe", "scores as they are", _experts(normalized=True)),
    # Normalised scores do not show in Gemma 4: the norm behind takes out any factor.
    ("gemma4_moe", "scales of experts", _experts(expert_scales=None)),
    ("gemma4_moe", "experts", lambda layer: replace(layer, beside=None)),
    *(
        ("gemma4_moe", norm, _weight_of_ones(norm))
        for norm in ("router_norm", "input_norm", "output_norm", "mlp_norm")
    ),
    ("qwen3_next", "scores as they are", _experts(normalized=True)),
    ("qwen3_5_moe", "normalisation", _experts(normalized=False)),
    ("qwen3_5_moe", "shared expert", _experts(shared=None)),
    ("qwen3_5_moe", "its gate", _experts(shared_gate=None)),
    ("qwen2_moe", "shared expert", _experts(shared=None)),
    ("qwen2_moe", "its gate", _experts(shared_gate=None)),
    ("glm4_moe", "shared expert", _experts(shared=None)),
    ("glm4_moe", "correction", _experts(correction=None)),
    ("glm4_moe", "groups", _experts(num_groups=1, top_groups=1)),
    ("glm4_moe", "scale", _experts(scale=1.0)),
    ("glm4_moe", "sigmoid", _experts(scores="softmax")),
    ("glm4_moe", "normalisation", _experts(normalized=False)),
]


@pytest.mark.parametrize(
    ("family", "change"),
    [(family, change) for family, _, change in PARTS],
    ids=[f"{family}: {part}" for family, part, _ in PARTS],
)
def test_every_part_of_experts_shows(
    family: str, change: Callable[[Layer], Layer], whole: Callable[[str], Decoder]
) -> None:
    decoder = whole(family)
    layers = [change(layer) for layer in decoder.layers]
    assert _moved(_of_layers(decoder, layers), decoder) > SENSITIVITY


def _moved(decoder: Decoder, right: Decoder) -> float:
    return (log_probabilities(decoder, IDS) - log_probabilities(right, IDS)).abs().max().item()
