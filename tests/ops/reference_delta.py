"""The gated delta rule and its convolution, row by row in float64: what is correct."""

from __future__ import annotations

import torch
from torch import Tensor

from onestem.ops import StateRows


def listed(rows: StateRows) -> list[tuple[int, ...]]:
    return list(zip(*(x.tolist() for x in vars(rows).values()), strict=True))


def reference_conv(
    x: Tensor, weight: Tensor, states: Tensor, rows: StateRows
) -> tuple[Tensor, Tensor]:
    """Results and states after it, in float64."""
    x, weight, before = x.double(), weight.double(), states.double()
    out, after, keep = torch.zeros_like(x), before.clone(), weight.shape[1] - 1
    for first, count, _, source, target in listed(rows):
        if count == 0:
            continue
        old = torch.zeros_like(before[target]) if source < 0 else before[source]
        inputs = torch.cat((old, x[first : first + count]))
        for row in range(count):
            total = (inputs[row : row + keep + 1] * weight.T).sum(0)
            out[first + row] = total / (1 + (-total).exp())
        after[target] = inputs[count:]
    return out, after


def reference_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    states: Tensor,
    rows: StateRows,
) -> tuple[Tensor, Tensor]:
    """Results and states after it, in float64."""
    q, k, v, decay, beta, before = (x.double() for x in (q, k, v, decay, beta, states))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q = q / k.shape[2] ** 0.5
    out, after, group = torch.zeros_like(v), before.clone(), v.shape[1] // k.shape[1]
    for first, count, _, source, target in listed(rows):
        if count == 0:
            continue
        state = torch.zeros_like(before[target]) if source < 0 else before[source].clone()
        for row in range(first, first + count):
            for head in range(v.shape[1]):
                s, key = state[head], k[row, head // group]
                s *= decay[row, head].exp()
                s += torch.outer(key, beta[row, head] * (v[row, head] - key @ s))
                out[row, head] = q[row, head // group] @ s
        after[target] = state
    return out, after
