"""Operations of layers with a gated delta rule in C++ (`csrc/kernels/delta.h`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onestem.errors import ConfigError, UnsupportedError
from onestem.ops.cpu.extension import DTYPES, checked_isa, native
from onestem.ops.cpu.layers import sigmoid
from onestem.ops.delta import DeltaOps, PartRows, check_conv, check_delta, check_norm


@dataclass(frozen=True)
class CpuDelta(DeltaOps):
    """`DeltaOps` in C++, with as many threads as torch uses. A row's bits depend on its inputs and
    on the rows before it alone.

    Args:
        isa: instruction set, by default the one in use.
    """

    name: str = "cpu"
    isa: str | None = None

    def causal_conv(self, x: Tensor, weight: Tensor, states: Tensor, rows: PartRows) -> Tensor:
        """See `DeltaOps`."""
        check_conv(x, weight, states)
        _check_kind(x, weight)
        weight, out = weight.t().contiguous(), rows.memory(x)
        inside = native().causal_conv(
            checked_isa(self.isa),
            DTYPES[x.dtype],
            rows.parts.numpy(),
            x.data_ptr(),
            x.stride(0),
            weight.data_ptr(),
            weight.dtype == torch.float32,
            states.data_ptr(),
            len(states),
            out.data_ptr(),
            *x.shape,
            len(weight),
            torch.get_num_threads(),
        )
        return _inside(inside, out)

    def gates(self, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
        """See `DeltaOps`. PyTorch's softplus and sigmoid depend on a value's place."""
        steps = a.float() + dt_bias
        # e^x overflows from 88.7 on, where the result is x.
        soft = torch.minimum(steps.exp().log1p_(), steps.clamp_min_(88.0))
        return soft.mul_(-a_log.exp()), sigmoid(b)

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
        """See `DeltaOps`."""
        check_delta(q, k, v, decay, beta, states)
        _check_kind(v)
        out = rows.memory(v)
        inside = native().delta_rule(
            checked_isa(self.isa),
            DTYPES[v.dtype],
            rows.parts.numpy(),
            [x.data_ptr() for x in (q, k, v)],
            [x.stride(0) for x in (q, k, v)],
            decay.data_ptr(),
            beta.data_ptr(),
            states.data_ptr(),
            len(states),
            out.data_ptr(),
            len(v),
            [k.shape[1], *states.shape[1:]],
            torch.get_num_threads(),
        )
        return _inside(inside, out)

    def gated_norm(self, x: Tensor, weight: Tensor, z: Tensor, eps: float) -> Tensor:
        """See `DeltaOps`."""
        check_norm(x, weight, z)
        _check_kind(x, weight)
        out = x.new_empty(x.shape)
        native().gated_norm(
            checked_isa(self.isa),
            DTYPES[x.dtype],
            x.data_ptr(),
            x.stride(0),
            z.data_ptr(),
            z.stride(0),
            weight.data_ptr(),
            weight.dtype == torch.float32,
            out.data_ptr(),
            *x.shape,
            eps,
            torch.get_num_threads(),
        )
        return out


def _check_kind(x: Tensor, weight: Tensor | None = None) -> None:
    """Check that there are kernels for rows and their weight."""
    kinds = (x.dtype, torch.float32)
    if x.dtype not in DTYPES or not x.is_cpu or (weight is not None and weight.dtype not in kinds):
        raise UnsupportedError(
            f"operations 'cpu' got {x.dtype} on {x.device}"
            + ("" if weight is None else f" and weights of {weight.dtype}")
            + ", expected float32, bfloat16 or float16 on the CPU, with weights of that or float32"
        )


def _inside(inside: bool, out: Tensor) -> Tensor:
    if not inside:
        raise ConfigError("rows of states: a row or a slot is not there")
    return out
