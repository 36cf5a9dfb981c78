"""The gated delta rule: attention with a state of fixed size in place of keys and values; and the
other operations of such a layer: a causal convolution, gates, and a gated norm.

A head's state S `[dk, dv]` takes a row (q, k, v, decay g, strength beta) so:

    S <- e^g S;  S <- S + k (beta (v - S^T k))^T;  out = S^T q

(Gated Delta Networks, arXiv 2412.06464). Many rows are taken in chunks: within one, the corrections
`beta (v - S^T k)` solve a triangular system, and all else is products of matrices.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from onestem.arrays import ragged
from onestem.errors import ConfigError
from onestem.ops.copies import on_device
from onestem.ops.state_rows import CHUNK, FEW_ROWS, StateRows

NORM_EPS = 1e-6  # of the L2 norm of q and k


@dataclass(frozen=True, eq=False)
class PartRows:
    """`StateRows` on a device, for all layers of a step.

    Attributes:
        parts: int32 `[num_parts, 5]`: `StateRows.table`.
        chunks, scans: as `StateRows.chunks` gives them.
        num_rows: in all parts; -1: not known to the host.
    """

    parts: Tensor
    chunks: Tensor
    scans: Tensor
    num_rows: int = -1
    _zeros: dict[tuple[torch.Size, torch.dtype], Tensor] = field(default_factory=dict)

    @staticmethod
    def of(rows: StateRows, device: torch.device) -> PartRows:
        """Copied to a device, without waiting for it."""
        tables = (rows.table(), *rows.chunks())
        words = on_device(np.concatenate([table.ravel() for table in tables]), device)
        pieces = words.split([table.size for table in tables])
        parts, chunks, scans = (x.view(t.shape) for x, t in zip(pieces, tables, strict=True))
        return PartRows(parts, chunks, scans, int(rows.count.sum()))

    @staticmethod
    def decodes(parts: Tensor) -> PartRows:
        """Of a table on a device whose parts have at most `FEW_ROWS` rows each; it may be filled
        again between replays of a graph."""
        return PartRows(parts, parts.new_empty(0, 2), parts.new_empty(0, 3))

    def memory(self, x: Tensor) -> Tensor:
        """For results of x's shape. Where rows may be in no part it is zeros, and the same memory
        for all layers: each writes the same rows, when the results before it have been read."""
        if self.num_rows == len(x):
            return torch.empty(x.shape, dtype=x.dtype, device=x.device)
        kind = x.shape, x.dtype
        if kind not in self._zeros:
            self._zeros[kind] = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
        return self._zeros[kind]

    @cached_property
    def listed(self) -> np.ndarray:
        """The parts that are no padding, on the host."""
        table = self.parts.cpu().numpy()
        return table[table[:, 1] > 0]


@dataclass(frozen=True)
class DeltaOps:
    """The operations in PyTorch; devices with kernels have subclasses. Arithmetic is float32, and
    each result is rounded once. Rows of the arguments may be parts of wider ones: any stride
    between rows, none within. Results of rows that are in no part are zeros."""

    name: str = "torch"

    def causal_conv(self, x: Tensor, weight: Tensor, states: Tensor, rows: PartRows) -> Tensor:
        """SiLU of each channel's convolution over a row and those before it.

        Args:
            x: `[n, channels]`.
            weight: `[channels, width]`, the last for the row itself; x's dtype or float32. Kernels
                copy it unless its transpose has no gaps.
            states: `[slots, width - 1, channels]`, x's dtype: the rows before a part; read, and
                written in place.

        Returns:
            `[n, channels]`, x's dtype.
        """
        check_conv(x, weight, states)
        keep, parts = weight.shape[1] - 1, rows.listed
        before = states[torch.from_numpy(parts[:, 3]).long().clamp_min(0).to(x.device)]
        before[torch.from_numpy(parts[:, 3] < 0).to(x.device)] = 0
        inputs = torch.cat((x, before.flatten(0, 1)))

        def places(part: np.ndarray, offset: np.ndarray) -> Tensor:
            """Rows of `inputs` `[.., width]`: that at `offset` in a part, and those before it."""
            back = offset[:, None] + np.arange(-keep, 1)
            old = len(x) + part[:, None] * keep + keep + back
            new = parts[part, 0][:, None] + back
            return torch.from_numpy(np.where(back < 0, old, new)).to(x.device)

        index = np.arange(len(parts))
        part = np.repeat(index, parts[:, 1])
        offset = ragged(np.zeros_like(index), parts[:, 1])
        taps, last = places(part, offset), places(index, parts[:, 1])[:, :-1]
        sums = sum(inputs[taps[:, i]].float() * weight[:, i].float() for i in range(keep + 1))
        out = rows.memory(x)
        out[taps[:, -1]] = F.silu(torch.as_tensor(sums)).to(x.dtype)
        states[torch.from_numpy(parts[:, 4]).long().to(x.device)] = inputs[last]
        return out

    def gates(self, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
        """Decay `-exp(a_log) * softplus(a + dt_bias)` and strength `sigmoid(b)`, float32
        `[n, num_heads]`, of a and b `[n, num_heads]`, and float32 `[num_heads]`."""
        return F.softplus(a.float() + dt_bias).mul_(-a_log.exp()), torch.sigmoid(b.float())

    def delta_rule(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        beta: Tensor,
        states: Tensor,
        rows: PartRows,
    ) -> Tensor:
        """The gated delta rule over the parts of a step.

        Args:
            q, k: `[n, key_heads, dk]`; here each head is divided by its length
                (`x * rsqrt(sum(x^2) + 1e-6)`), and q by `sqrt(dk)`.
            v: `[n, value_heads, dv]`; value head h has key head `h // (value_heads / key_heads)`.
            decay, beta: float32 `[n, value_heads]`; decays are logarithms, not above 0.
            states: float32 `[slots, value_heads, dk, dv]`, read, and written in place.

        Returns:
            `[n, value_heads, dv]`, v's dtype.
        """
        check_delta(q, k, v, decay, beta, states)
        out = rows.memory(v)
        parts = rows.listed
        few = parts[parts[:, 1] <= FEW_ROWS]
        if len(few):
            _row_by_row(q, k, v, decay, beta, states, few, out)
        for first, count, position, source, target in parts[parts[:, 1] > FEW_ROWS].tolist():
            here = slice(first, first + count)
            lead = position % CHUNK
            before = torch.zeros_like(states[target]) if source < 0 else states[source]
            args = (x[here] for x in (q, k, v, decay, beta))
            values, states[target] = _in_chunks(before, lead, *args)
            out[here] = values.to(v.dtype)
        return out

    def gated_norm(self, x: Tensor, weight: Tensor, z: Tensor, eps: float) -> Tensor:
        """`RMSNorm(x) * weight * silu(z)` over the last axis of x and z `[n, num_heads, dv]`;
        weight `[dv]`, x's dtype or float32."""
        check_norm(x, weight, z)
        wide = F.rms_norm(x.float(), weight.shape, weight.float(), eps)
        return wide.mul_(F.silu(z.float())).to(x.dtype)


def _unit(x: Tensor) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + NORM_EPS)


def _row_by_row(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    states: Tensor,
    parts: np.ndarray,
    out: Tensor,
) -> None:
    """The recurrent form: row i of all parts at once."""
    parts = parts[np.argsort(-parts[:, 1], kind="stable")]
    first, _, _, source, target = torch.from_numpy(parts).long().to(v.device).unbind(1)
    state = states[source.clamp_min(0)]
    state[source < 0] = 0
    group = v.shape[1] // k.shape[1]
    for i in range(int(parts[0, 1])):
        live = int((parts[:, 1] > i).sum())
        at, s = first[:live] + i, state[:live]
        unit_q, unit_k = (_unit(x[at]).repeat_interleave(group, 1)[..., None] for x in (q, k))
        s *= decay[at].exp()[..., None, None]
        change = (v[at].float() - (s * unit_k).sum(2)) * beta[at][..., None]
        s += unit_k * change[:, :, None]
        out[at] = ((s * unit_q).sum(2) * k.shape[2] ** -0.5).to(out.dtype)
    states[target] = state


def _in_chunks(
    state: Tensor, lead: int, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """The chunked form of one part that begins at place `lead` of a chunk: float32
    `[rows, value_heads, dv]`, and the state after it. What a chunk lacks is filled with rows that
    neither decay nor change the state."""
    rows, heads = v.shape[:2]
    group = heads // k.shape[1]

    def chunked(x: Tensor) -> Tensor:
        """`[heads, chunks, CHUNK, ..]`"""
        fill = (0, 0) * (x.dim() - 1)
        x = F.pad(x, (*fill, lead, -(lead + rows) % CHUNK))
        return x.unflatten(0, (-1, CHUNK)).movedim(2, 0)

    unit_k = chunked(_unit(k)).repeat_interleave(group, 0)
    unit_q = chunked(_unit(q) * k.shape[2] ** -0.5).repeat_interleave(group, 0)
    strength = chunked(beta)[..., None]
    total = chunked(decay).cumsum(-1)
    between = total[..., :, None] - total[..., None, :]
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=v.device).triu(1)
    between = between.masked_fill(later, -torch.inf).exp()  # hidden first: e^x could overflow
    keys = unit_k.transpose(-1, -2)
    system = strength * (unit_k @ keys) * between
    right = torch.cat((chunked(v.float()), unit_k * total.exp()[..., None]), -1) * strength
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    values, reads = solved.split((v.shape[2], k.shape[2]), -1)
    seen, weights = unit_q * total.exp()[..., None], (unit_q @ keys) * between
    left = keys * (total[..., -1:] - total).exp()[..., None, :]
    fade = total[..., -1].exp()[..., None, None]
    out = torch.empty_like(values)
    for i in range(out.shape[1]):
        change = values[:, i] - reads[:, i] @ state
        out[:, i] = seen[:, i] @ state + weights[:, i] @ change
        state = fade[:, i] * state + left[:, i] @ change
    return out.flatten(1, 2)[:, lead : lead + rows].transpose(0, 1), state


def check_conv(x: Tensor, weight: Tensor, states: Tensor) -> None:
    """Raise `ConfigError` unless the arguments of `causal_conv` fit together."""
    shape = (len(states), weight.shape[1] - 1, x.shape[1])
    if weight.shape[0] != x.shape[1] or states.shape != shape or states.dtype != x.dtype:
        raise ConfigError(
            f"inputs are {x.dtype} {tuple(x.shape)}, weights {tuple(weight.shape)}, their states "
            f"{states.dtype} {tuple(states.shape)}, expected {x.dtype} {shape}"
        )
    _check_layout(states)
    if x.stride(1) != 1:
        raise ConfigError("expected inputs whose rows have no gaps")


def check_delta(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, states: Tensor
) -> None:
    """Raise `ConfigError` unless the arguments of `delta_rule` fit together."""
    heads, shape = v.shape[1], (len(states), v.shape[1], k.shape[2], v.shape[2])
    if q.shape != k.shape or heads % k.shape[1] or not q.dtype == k.dtype == v.dtype:
        raise ConfigError(
            f"q, k and v are {q.dtype} {tuple(q.shape)}, {k.dtype} {tuple(k.shape)} and {v.dtype} "
            f"{tuple(v.shape)}, expected q like k and a multiple of their heads"
        )
    if states.shape != shape or any(x.dtype != torch.float32 for x in (states, decay, beta)):
        raise ConfigError(
            f"states are {states.dtype} {tuple(states.shape)}, expected float32 {shape}, with "
            "decays and strengths of float32"
        )
    _check_layout(decay, beta, states)
    _check_heads(q, k, v)


def check_norm(x: Tensor, weight: Tensor, z: Tensor) -> None:
    """Raise `ConfigError` unless the arguments of `gated_norm` fit together."""
    if x.shape != z.shape or x.dtype != z.dtype or weight.shape != x.shape[2:]:
        raise ConfigError(
            f"got {x.dtype} {tuple(x.shape)}, gates {z.dtype} {tuple(z.shape)} and weights "
            f"{tuple(weight.shape)}, expected gates alike and a weight for each of a head"
        )
    _check_layout(weight)
    _check_heads(x, z)


def _check_heads(*tensors: Tensor) -> None:
    for x in tensors:
        if x.stride(2) != 1 or (x.shape[1] > 1 and x.stride(1) != x.shape[2]):
            raise ConfigError(f"heads of a row {tuple(x.shape[1:])} are not neighbours")


def _check_layout(*tensors: Tensor) -> None:
    if not all(x.is_contiguous() for x in tensors):
        raise ConfigError("expected states, weights, decays and strengths without gaps")
