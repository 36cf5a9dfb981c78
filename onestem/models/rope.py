"""Rotary position embedding in the half-split layout: pair i of a head is (x[i], x[i + d/2]).

Pairs that RoPE leaves out turn by an angle of zero, so that one operation serves all families. To
that end, the pairs of a partial or interleaved rotation are moved half a head apart when weights
are read (`rotary_order`). Scores do not depend on the order of dimensions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from onestem.models.description import (
    Description,
    LongRope,
    Proportional,
    RopeScaling,
    Rotary,
    Yarn,
)
from onestem.ops import Angles


def rotary_order(head_dim: int, rotary: Rotary | None) -> list[int]:
    """The dimension of a checkpoint's head at each place: pair i of those that turn moves to
    (x[i], x[i + head_dim / 2])."""
    if rotary is None:
        return list(range(head_dim))
    dim = rotary.dim
    first, second = range(dim // 2), range(dim // 2, dim)
    if rotary.interleaved:
        first, second = range(0, dim, 2), range(1, dim, 2)
    rest, still = range(dim, head_dim), (head_dim - dim) // 2
    return [*first, *rest[:still], *second, *rest[still:]]


def _inverse_frequencies(head_dim: int, rotary: Rotary | None, max_positions: int) -> Tensor:
    """Angle per position of each pair: [head_dim / 2] float32, on the CPU; 0: no rotation."""
    frequencies = torch.zeros(head_dim // 2)
    if rotary is not None:
        turning = _turning_frequencies(rotary, max_positions)
        frequencies[: rotary.dim // 2] = turning
    return frequencies


def _turning_frequencies(rotary: Rotary, max_positions: int) -> Tensor:
    """[rotary.dim / 2] float32."""
    exponents = torch.arange(0, rotary.dim, 2, dtype=torch.float32) / rotary.dim
    powers = rotary.theta**exponents
    frequencies = 1.0 / powers
    scaling = rotary.scaling
    if scaling is None:
        return frequencies
    if isinstance(scaling, LongRope):
        long = max_positions > scaling.original_max_position_embeddings
        factors = torch.tensor(scaling.long if long else scaling.short, dtype=torch.float32)
        return 1.0 / (factors * powers)
    if isinstance(scaling, Proportional):
        frequencies[scaling.pairs :] = 0
        return frequencies / scaling.factor
    if isinstance(scaling, Yarn):
        kept = _kept_by_yarn(rotary, scaling)
        return 1.0 / (scaling.factor * powers) * (1 - kept) + frequencies * kept
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


def _kept_by_yarn(rotary: Rotary, scaling: Yarn) -> Tensor:
    """Share of each frequency that is not divided: [rotary.dim / 2], from 1 down to 0."""

    def pair_that_turns(times: float) -> float:
        """Index of the pair that turns this often within the positions of training; a fraction
        between pairs."""
        turn = scaling.original_max_position_embeddings / (times * 2 * math.pi)
        return rotary.dim * math.log(turn) / (2 * math.log(rotary.theta))

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary.dim - 1)
    width = high - low or 0.001
    pairs = torch.arange(rotary.dim // 2, dtype=torch.float32)
    return 1 - ((pairs - low) / width).clamp(0.0, 1.0)


def _attention_factors(head_dim: int, rotary: Rotary | None) -> Tensor | None:
    """Factor of each pair's cosine and sine: [head_dim / 2] float32, 1 for pairs that do not turn;
    None: all are 1."""
    if rotary is None or not isinstance(rotary.scaling, Yarn | LongRope):
        return None
    factors = torch.ones(head_dim // 2)
    factors[: rotary.dim // 2] = rotary.scaling.attention_factor
    return factors


class Rope:
    """Angles of a step's positions, computed once for each kind of RoPE that the layers have.

    They are computed rather than gathered from a table: a step needs a few thousand cosines, and a
    table for 131,072 positions would take 128 MiB.
    """

    def __init__(self, config: Description, device: torch.device) -> None:
        sizes = (heads.head_dim for heads in config.heads)
        layers = list(zip(sizes, config.rotaries, strict=True))
        kinds, most = list(dict.fromkeys(layers)), config.max_position_embeddings
        self._frequencies = [_inverse_frequencies(*kind, most).to(device) for kind in kinds]
        factors = [_attention_factors(*kind) for kind in kinds]
        self._factors = [None if some is None else some.to(device) for some in factors]
        self._kind_of = [kinds.index(layer) for layer in layers]

    def angles(self, positions: Tensor) -> list[Angles]:
        """Angles of positions `[num_rows]` int64, for each layer."""
        column = positions.to(torch.float32)[:, None]
        kinds = []
        for frequencies, factors in zip(self._frequencies, self._factors, strict=True):
            angle = column * frequencies
            cos, sin = angle.cos(), angle.sin()
            if factors is not None:
                cos, sin = cos * factors, sin * factors
            kinds.append(Angles(cos, sin))
        return [kinds[kind] for kind in self._kind_of]
