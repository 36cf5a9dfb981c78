"""Operations between a layer's matrix products: norms, rotary embedding with KV write, the gate."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onestem.errors import ConfigError
from onestem.ops.kv import write_kv
from onestem.ops.rounding import BothRows, RoundedRows, rounded_rows


class Angles(NamedTuple):
    """Rotary angles of a step's rows: cosines and sines, float32 `[num_rows, head_dim / 2]`."""

    cos: Tensor
    sin: Tensor


class Queries(NamedTuple):
    """Queries of a step whose rows see runs elsewhere than they were stored
    (`AttentionPlan.moved`).

    Attributes:
        sources: int64 `[num_queries]`, the row of each.
        angles: of their positions.
    """

    sources: Tensor
    angles: Angles


@dataclass(frozen=True, eq=False)
class Heads:
    """How a fused projection divides into heads: q, then k, then v.

    Attributes:
        num_kv_heads: 0: only queries; keys and values are another layer's.
        q_norm, k_norm: `[head_dim]`, weights of an RMSNorm over each head before the rotation
            (Qwen3), of the rows' dtype or float32; or None.
        eps: of those norms.
        sinks: float32 `[num_q_heads]`, a further logit in each head's softmax, of a key without a
            value (gpt-oss), or None.
        v_norm: RMSNorm over each value head, without a weight (Gemma 4).
        value_is_key: no v: values are k, before norm and rotation (Gemma 4).
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 1e-6
    sinks: Tensor | None = None
    v_norm: bool = False
    value_is_key: bool = False

    @property
    def num_value_heads(self) -> int:
        """Heads of v in the projection."""
        return 0 if self.value_is_key else self.num_kv_heads

    @property
    def num_projected(self) -> int:
        """All heads in the projection."""
        return self.num_q_heads + self.num_kv_heads + self.num_value_heads


@dataclass(frozen=True)
class LayerOps:
    """Layer operations in PyTorch; devices with kernels have subclasses. Arithmetic is float32, and
    each result is rounded once."""

    name: str = "torch"

    def add_rms_norm(
        self, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float
    ) -> Tensor:
        """Add `delta` to `hidden` `[n, hidden_size]` in place (rounded to its dtype); return
        `RMSNorm(hidden) * weight`, `[n, hidden_size]`. `weight`: hidden's dtype, or float32."""
        if delta is not None:
            hidden += delta
        return _rms_norm(hidden, weight, eps)

    def rounded_rms_norm(
        self, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
    ) -> RoundedRows:
        """`add_rms_norm`, the result rounded once more, to 8 bits (`rounded_rows`)."""
        return rounded_rows(self.add_rms_norm(hidden, delta, weight, eps), dtype)

    def rope_write(
        self,
        qkv: Tensor,
        heads: Heads,
        angles: Angles,
        slots: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        *,
        queries: Queries | None = None,
    ) -> Tensor:
        """Norm and rotate the heads of `qkv` `[n, num_projected * head_dim]`, write k and v to
        `slots` (int64 `[n]`, page * page_size + place) of the pages, and return q
        `[n, num_q_heads, head_dim]`, or those of `queries`. Pair i of a head is
        `(x[i], x[i + head_dim / 2])`."""
        q, k, v = rotated(qkv, heads, angles)
        if heads.num_kv_heads:
            write_kv(k_pages, slots, k)
            write_kv(v_pages, slots, v)
        return q if queries is None else self._asked(qkv, heads, queries, k_pages, v_pages)

    def _asked(
        self, qkv: Tensor, heads: Heads, queries: Queries, k_pages: Tensor, v_pages: Tensor
    ) -> Tensor:
        rows = qkv[:, : heads.num_q_heads * heads.head_dim].index_select(0, queries.sources)
        alone, none = replace(heads, num_kv_heads=0), queries.sources.new_zeros(len(rows))
        return self.rope_write(rows, alone, queries.angles, none, k_pages, v_pages)

    def both_rms_norm(
        self, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
    ) -> BothRows:
        """`add_rms_norm`, and the same as `rounded_rms_norm` gives it."""
        plain = self.add_rms_norm(hidden, delta, weight, eps)
        return BothRows(plain, rounded_rows(plain, dtype))

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """`silu(gate) * up` of `[n, 2 * size]`, gate first: `[n, size]`."""
        gate, up = _halves(gate_up)
        return F.silu(gate).mul_(up)

    def rounded_silu_mul(self, gate_up: Tensor, dtype: torch.dtype) -> RoundedRows:
        """`silu_mul`, the result rounded once more, to 8 bits."""
        return rounded_rows(self.silu_mul(gate_up), dtype)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """`silu_mul` with GELU (tanh approximation) instead of SiLU."""
        gate, up = _halves(gate_up)
        return self.gelu(gate, "tanh").mul_(up)

    def gelu(self, x: Tensor, approximate: str) -> Tensor:
        """GELU of x `[n, size]`; `approximate`: tanh or none."""
        return F.gelu(x, approximate=approximate)

    def share_sinks(self, out: Tensor, lse: Tensor, sinks: Tensor) -> None:
        """Add `sinks` `[num_q_heads]` to attention `out` `[n, num_q_heads, head_dim]` in place;
        `lse` is the log-sum-exp of its scores, float32 `[n, num_q_heads]`. A sink adds to the
        denominator alone, so this is exact after any implementation."""
        out *= self.sigmoid(lse - sinks)[..., None]

    def sigmoid(self, x: Tensor) -> Tensor:
        """Of x `[n, size]`."""
        return torch.sigmoid(x)


def rotated(qkv: Tensor, heads: Heads, angles: Angles) -> tuple[Tensor, Tensor, Tensor]:
    """q `[n, num_q_heads, head_dim]` and k `[n, num_kv_heads, head_dim]` of `qkv`, as `rope_write`
    takes it, normed and rotated; and v, not rotated."""
    check_halves("head_dim", heads.head_dim)
    split = qkv.view(len(qkv), heads.num_projected, heads.head_dim)
    counts = (heads.num_q_heads, heads.num_kv_heads, heads.num_value_heads)
    q, k, v = split.split(counts, dim=1)
    v = k if heads.value_is_key else v
    return (
        _rotate(_head_norm(q, heads.q_norm, heads.eps), angles),
        _rotate(_head_norm(k, heads.k_norm, heads.eps), angles),
        F.rms_norm(v, (heads.head_dim,), eps=heads.eps) if heads.v_norm else v,
    )


def check_halves(name: str, size: int) -> None:
    """Raise `ConfigError` if a size that is split into halves is odd."""
    if size % 2:
        raise ConfigError(f"{name} is {size}, expected an even number: it is split into halves")


def add_layer_norm(
    hidden: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> Tensor:
    """Add `delta` to `hidden` `[n, hidden_size]` in place; return its LayerNorm, of the same shape.

    PyTorch on every device: there is no kernel for it."""
    if delta is not None:
        hidden += delta
    return F.layer_norm(hidden, weight.shape, weight, bias, eps)


def _halves(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    check_halves("the width of gate and up", gate_up.shape[-1])
    gate, up = gate_up.chunk(2, dim=-1)
    return gate, up


def _head_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return x if weight is None else _rms_norm(x, weight, eps)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)


def _rotate(x: Tensor, angles: Angles) -> Tensor:
    """x `[n, num_heads, head_dim]` rotated by the rows' angles; contiguous."""
    cos, sin = angles.cos[:, None, :], angles.sin[:, None, :]
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    half = x.shape[-1] // 2
    turned[..., :half] = (first * cos).addcmul_(second, sin, value=-1)
    turned[..., half:] = (second * cos).addcmul_(first, sin)
    return turned
