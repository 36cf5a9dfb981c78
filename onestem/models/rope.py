"""Rotary position embedding in the half-split layout: pair i of a head is (x[i], x[i + d/2]).

A head that turns in part, or not at all, turns its other pairs by an angle of zero, so that one
operation serves all families. For that the pairs of a partial rotation are brought half a head
apart when weights are read (`rotary_order`); scores do not depend on the order of dimensions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from onestem.models.description import Description, RopeScaling, Rotary
from onestem.ops import Angles

__all__ = ["Rope", "inverse_frequencies", "rotary_order"]


def rotary_order(head_dim: int, rotary_dim: int) -> list[int]:
    """Which dimension of a checkpoint's head stands at each place: pair i of the `rotary_dim` that
    turn, (x[i], x[i + rotary_dim / 2]) there, comes to (x[i], x[i + head_dim / 2])."""
    turned, still = rotary_dim // 2, (head_dim - rotary_dim) // 2
    first, second = range(turned), range(turned, rotary_dim)
    rest = range(rotary_dim, head_dim)
    return [*first, *rest[:still], *second, *rest[still:]]


def inverse_frequencies(config: Description) -> Tensor:
    """Angle per position of each pair: [head_dim / 2] float32, on the CPU; 0: it stays."""
    frequencies = torch.zeros(config.head_dim // 2)
    if isinstance(config.positions, Rotary):
        frequencies[: config.positions.dim // 2] = _turning_frequencies(config.positions)
    return frequencies


def _turning_frequencies(rotary: Rotary) -> Tensor:
    """[rotary.dim / 2] float32."""
    exponents = torch.arange(0, rotary.dim, 2, dtype=torch.float32) / rotary.dim
    frequencies = 1.0 / (rotary.theta**exponents)
    scaling = rotary.scaling
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

    def __init__(self, config: Description, device: torch.device) -> None:
        self.frequencies = inverse_frequencies(config).to(device)  # [head_dim / 2] float32

    def angles(self, positions: Tensor) -> Angles:
        """Of positions `[num_rows]` int64."""
        angle = positions.to(torch.float32)[:, None] * self.frequencies
        return Angles(angle.cos(), angle.sin())
