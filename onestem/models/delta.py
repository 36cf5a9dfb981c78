"""A layer's gated delta rule, in place of attention: all but the products around it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from onestem.models.description import DeltaRule
from onestem.models.linear import Projection
from onestem.ops import DeltaOps, PartRows
from onestem.ops.rounding import Rows


class LayerStates(NamedTuple):
    """A layer's states, in slots, and which rows of a step continue which.

    Attributes:
        inputs: `[slots, width - 1, channels]`: the last inputs of the convolution.
        matrices: float32 `[slots, num_value_heads, key_dim, value_dim]`.
    """

    inputs: Tensor
    matrices: Tensor
    rows: PartRows


# The states of a layer, by its index.
StatesOf = Callable[[int], LayerStates]


@dataclass(frozen=True, eq=False)
class DeltaLayer:
    """The delta rule of one layer, after the product that gives q, k, v and z.

    Attributes:
        rates: hidden_size -> b and a of all value heads.
        filter: `[channels, width]`, of the convolution over q, k and v.
        decay, step: float32 `[num_value_heads]`, the logarithm of each head's rate, and what is
            added to a.
        norm: float32 `[value_dim]`, of the norm over each value head, with `eps`.
    """

    rule: DeltaRule
    rates: Projection
    filter: Tensor
    decay: Tensor
    step: Tensor
    norm: Tensor
    eps: float
    ops: DeltaOps

    def __call__(self, normed: Rows, projected: Tensor, states: LayerStates) -> Tensor:
        """normed `[num_rows, hidden_size]` and its q, k, v and z, in this order -> the heads' gated
        results, `[num_rows, num_value_heads * value_dim]`. The states are rewritten."""
        rule, ops = self.rule, self.ops
        mixed, z = projected.split((rule.channels, rule.sizes[2]), dim=1)
        b, a = self.rates(normed).split(rule.num_value_heads, dim=1)
        decay, beta = ops.gates(a, b, self.decay, self.step)
        mixed = ops.causal_conv(mixed, self.filter, states.inputs, states.rows)
        q, k, v = mixed.split(rule.sizes, dim=1)
        q, k = (x.unflatten(1, (rule.num_key_heads, rule.key_dim)) for x in (q, k))
        values = rule.num_value_heads, rule.value_dim
        out = ops.delta_rule(
            q, k, v.unflatten(1, values), decay, beta, states.matrices, states.rows
        )
        return ops.gated_norm(out, self.norm, z.unflatten(1, values), self.eps).flatten(1)
