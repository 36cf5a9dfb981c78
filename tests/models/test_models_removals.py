"""What a family's layers have and Llama's do not: each, taken out, shows in its log-probabilities.

So the comparison with transformers (`test_models_decoder.py`) would see it missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from onestem.models.config import LayerRotary, ModelConfig, Rotary
from onestem.models.decoder import Decoder
from onestem.models.weights import load_decoder
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
]

# What is taken out of every layer.
LAYERS: list[tuple[str, str]] = [
    *(("gemma2", norm) for norm in ("input_norm", "output_norm", "post_norm", "down_norm")),
    *(("gemma3", norm) for norm in ("output_norm", "down_norm", "heads")),
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
    parts = (decoder.embedding, layers, decoder.norm, decoder.head, decoder.num_parameters)
    assert _moved(Decoder(decoder.config, *parts), decoder) > SENSITIVITY


def _moved(decoder: Decoder, right: Decoder) -> float:
    return (log_probabilities(decoder, IDS) - log_probabilities(right, IDS)).abs().max().item()
