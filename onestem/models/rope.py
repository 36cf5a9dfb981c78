"""Rotary position embedding in the half-split layout: pair i of a head is (x[i], x[i + d/2])."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from onestem.models.config import ModelConfig, RopeScaling
from onestem.ops import Angles

__all__ = ["Rope", "inverse_frequencies"]


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Angle per position of each pair: [head_dim / 2] float32, on the CPU."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    return _llama3_frequencies(frequencies, scaling)


def _llama3_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Long wavelengths divided by the factor, short ones kept, a ramp between: [head_dim / 2]."""
    trained = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = trained * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


class Rope:
    """Angles of a step's positions, computed once and used by every layer.

    They are computed rather than gathered from a table: a step needs a few thousand cosines, and a
    table for 131,072 positions would take 128 MiB.
    """

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self.frequencies = inverse_frequencies(config).to(device)  # [head_dim / 2] float32

    def angles(self, positions: Tensor) -> Angles:
        """Of positions `[num_rows]` int64."""
        angle = positions.to(torch.float32)[:, None] * self.frequencies
        return Angles(angle.cos(), angle.sin())
