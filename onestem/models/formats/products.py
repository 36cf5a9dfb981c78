"""Products with quantised weights, and which of them a device has.

| weight | NVIDIA GPU | CPU |
|---|---|---|
| `Channels`, float8 | rows rounded to float8, Triton up to `FLOAT8_ROWS` rows, above it `torch._scaled_mm` with a scale per row and channel (bfloat16, from compute capability 8.9 on) | in the model's dtype |
| `Channels`, int8 | rows rounded to int8, Triton | rows rounded to int8, `onestem.ops.cpu.linear` |
| `Groups` | Triton up to `GROUPS_ROWS` or `MINIMUMS_ROWS` rows, above it the weight is written out and multiplied by cuBLAS (16-bit dtypes) | whole numbers through `onestem.ops.cpu.linear` (16-bit dtypes); float8 in the model's dtype |

Those in Triton are in `onestem.ops.triton.tiled` and `tiled_groups`.

"In the model's dtype": the weight is converted when it is loaded. A CPU does so for all formats
where the extension is not built. A product treats each of its rows by itself.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from typing import Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from onestem.models.formats.held import (
    Channels,
    Groups,
    Levels,
    OfGroups,
    Pieces,
    Weight,
    dense,
    joined,
    ordered,
    rounded_weight,
)
from onestem.models.linear import (
    MAPPED_BYTES,
    Activation,
    Layout,
    Linear,
    Projection,
    choose_layout,
)
from onestem.models.ranks import ALONE, Ranks
from onestem.ops.cpu import DTYPES, CpuCodes, is_built
from onestem.ops.cpu.huge import settled
from onestem.ops.cpu.linear import PAIR, TwoLevels
from onestem.ops.dispatch import resolve_rounding
from onestem.ops.rounding import RoundedRows, Rows, rounded_rows, row_tops
from onestem.options import Quantize

# Maximum rows of Triton's products. Above it float8 goes to cuBLAS, and weights in groups are
# written out for it: earlier those with minimums or scales in two levels, which cost more.
FLOAT8_ROWS, GROUPS_ROWS, MINIMUMS_ROWS = 32, 256, 128


@dataclass(frozen=True)
class Target:
    """What a model's products are made for.

    Attributes:
        dtype: of the rows that they multiply.
        layout: of weights that are not quantised.
        deterministic: bits of their products' rows do not depend on other rows.
    """

    dtype: torch.dtype
    device: torch.device
    layout: Layout
    deterministic: bool = False

    @property
    def has_kernels(self) -> bool:
        """Whether Triton's kernels are used, as in `resolve_layers`."""
        return self.device.type == "cuda" and find_spec("triton") is not None

    def multiplies(self, floats: bool) -> bool:
        """Whether a GPU has products of float8 weights, or else of whole numbers."""
        least = (8, 9) if floats else (8, 0)
        return self.has_kernels and torch.cuda.get_device_capability(self.device) >= least


def projection(
    parts: Sequence[Weight],
    bias: Tensor | None,
    order: Tensor | None,
    target: Target,
    ranks: Ranks = ALONE,
) -> Projection:
    """Fuse projections of the same input into one.

    Args:
        parts: weights, in the order of their rows.
        bias: `[out_features]`, in the order of results.
        order: int64 `[out_features]`: the row of the parts for each result; None: as they are.
        ranks: each has some of the inputs. On a CPU rows are rounded by the maximum of whole rows;
            a GPU would take a fifth longer for a decode, and rounds each part by its own.
    """
    whole = joined(parts)
    if whole is not None:
        return _product(whole if order is None else ordered(whole, order), bias, target, ranks)
    return _Parts([_product(part, None, target, ranks) for part in parts], bias, order)


def kinds_of(device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """How a device multiplies weights of each format that they can be rounded to."""
    target = Target(dtype, device, choose_layout(dtype, device))
    zeros = torch.zeros(128, 128, dtype=dtype, device=device)
    return {
        form: projection([rounded_weight(zeros, form)], None, None, target).kind
        for form in get_args(Quantize)
    }


def takes_groups(weight: Groups, target: Target) -> bool:
    """Whether the device and dtype have a product for a weight in groups."""
    return GpuGroups.takes(weight, target) or CpuProduct.takes(weight, target)


def _product(
    weight: Weight, bias: Tensor | None, target: Target, ranks: Ranks = ALONE
) -> Projection:
    if isinstance(weight, Channels):
        if all_take(GpuChannels.takes(weight, target), ranks, target.device):
            return GpuChannels(weight, bias, target)
        if all_take(CpuProduct.takes(weight, target), ranks, target.device):
            if ranks.size == 1:
                return CpuProduct(weight, bias, target)
            return CpuPart(weight, bias, target, ranks)
    if isinstance(weight, Pieces):
        if CpuProduct.takes(weight.like, target):
            return CpuProduct(weight, bias, target)
        weight = weight.whole()
    if isinstance(weight, Groups):
        if GpuGroups.takes(weight, target):
            return GpuGroups(weight, bias, target)
        if CpuProduct.takes(weight, target):
            return CpuProduct(weight, bias, target)
    made = Linear(
        dense(weight, target.dtype), bias, target.layout, deterministic=target.deterministic
    )
    if not isinstance(weight, Tensor):
        made.kind += f", from {_kind(weight)}"
    return made


def all_take(here: bool, ranks: Ranks, device: torch.device) -> bool:
    """Whether every rank's part is: what one does not round is rounded by none."""
    if ranks.size == 1:
        return here
    return bool(ranks.gather(torch.tensor([[float(here)]], device=device)).all())


def _kind(weight: Channels | Groups) -> str:
    """The format's name, for people."""
    if isinstance(weight, Groups) and weight.name:
        return weight.name
    floats = weight.codes.is_floating_point()
    if isinstance(weight, Channels):
        return "fp8 per channel" if floats else "int8 per channel"
    return f"{'fp8' if floats else f'int{weight.bits}'} in groups of {weight.group}"


class _Quantized(Projection):
    """What these products have in common."""

    def __init__(self, weight: Channels | Groups, bias: Tensor | None, target: Target) -> None:
        self.dtype = target.dtype
        self.out_features, self.in_features = len(weight.codes), weight.in_features
        self.bias = bias
        self.code_dtype = weight.codes.dtype
        self.kind = _kind(weight)
        self.round_rows = resolve_rounding(weight.codes.device)

    def rounded(self, x: Rows) -> RoundedRows:
        """`x`, rounded to the dtype of the codes if it is not yet."""
        return x if isinstance(x, RoundedRows) else self.round_rows(x, self.code_dtype)


class GpuChannels(_Quantized):
    """float8 by float8, or int8 by int8, on a GPU. Tensor cores sum float8; int8 sums are exact.
    Both are scaled in float32."""

    def __init__(self, weight: Channels, bias: Tensor | None, target: Target) -> None:
        from onestem.ops.triton.tiled import TiledChannels

        super().__init__(weight, bias, target)
        self.rounds = weight.codes.dtype
        self.is_float = self.rounds == torch.float8_e4m3fn
        self.kind += f", rows in {'fp8' if self.is_float else 'int8'}"
        self.packed = TiledChannels(weight.codes, weight.scales)
        self.column_scales = weight.scales[None, :]

    @staticmethod
    def takes(weight: Channels, target: Target) -> bool:
        """Whether the device and dtype have this product for the weight."""
        floats, (out, size) = weight.codes.is_floating_point(), weight.codes.shape
        takes_dtype = not floats or target.dtype == torch.bfloat16
        return target.multiplies(floats) and takes_dtype and out % 16 == size % 16 == 0

    def __call__(self, x: Rows) -> Tensor:
        codes, scales = rows = self.rounded(x)
        if not self.is_float or len(codes) <= FLOAT8_ROWS:
            return self.packed.product(rows, self.bias, self.dtype)
        return torch._scaled_mm(
            codes,
            self.packed.codes.t(),
            scales,
            self.column_scales,
            bias=self.bias,
            out_dtype=self.dtype,
            use_fast_accum=True,
        )

    def tensors(self) -> list[Tensor]:
        """See `held_tensors`: counters belong to the device, and column scales are a view."""
        bias = [] if self.bias is None else [self.bias]
        return [self.packed.codes, self.packed.scales, *bias]


# Activations that one row takes in one launch with `up`.
_GATES: dict[str, Literal["silu", "gelu"]] = {"silu_gated": "silu", "gelu_tanh_gated": "gelu"}


class GpuGroups(_Quantized):
    """Weights in groups through Triton; rows are not rounded."""

    def __init__(self, weight: Groups, bias: Tensor | None, target: Target) -> None:
        from onestem.ops.triton.tiled_groups import TiledGroups

        super().__init__(weight, bias, target)
        self.order = weight.order
        costs_more = weight.minimums is not None or isinstance(weight.scales, Levels)
        self.most = MINIMUMS_ROWS if costs_more else GROUPS_ROWS
        numbers = weight.scales, weight.zeros, weight.minimums
        self.packed = TiledGroups.of(
            weight.codes, *numbers, weight.group, weight.bits, weight.table
        )
        self.scratch_bytes = 2 * weight.codes.numel()

    @staticmethod
    def takes(weight: Groups, target: Target) -> bool:
        """Whether the device and dtype have this product for the weight."""
        if target.dtype == torch.float32 or not target.multiplies(weight.codes.is_floating_point()):
            return False
        from onestem.ops.triton.tiled_groups import TiledGroups

        return TiledGroups.takes(weight.codes.shape[1], weight.group, weight.bits)

    def __call__(self, x: Tensor) -> Tensor:
        x = self._ordered(x)
        if len(x) <= self.most:
            return self.packed.product(x, self.bias)
        return F.linear(x, self.packed.dense(x.dtype), self.bias)

    def activated(self, x: Tensor, activation: Activation) -> Tensor:
        """See `Projection`: one row of a gated MLP in one launch."""
        gate = _GATES.get(activation.name)
        if gate is None or not self.packed.takes_gated_row(x):
            return activation(self(x))
        return self.packed.gated_row(self._ordered(x), self.bias, gate)

    def _ordered(self, x: Tensor) -> Tensor:
        return x.contiguous() if self.order is None else x[:, self.order]


def packed_groups(weight: Groups | Pieces) -> CpuCodes:
    """A weight in groups as a CPU's products take it, without its order of inputs."""
    if isinstance(weight, Pieces):
        if any(rows % PAIR for rows, _ in weight.parts[:-1]):
            return packed_groups(weight.whole())
        made = _packed(weight.like).widened(weight.out_features)
        weight.visit(lambda first, groups: made.put(first, _packed(groups)))
        return made
    return _packed(weight).changed(settled)


def _packed(weight: Groups) -> CpuCodes:
    least = weight.minimums
    return CpuCodes.of_groups(
        weight.codes,
        _levels(weight.scales),
        weight.group,
        bits=weight.bits,
        zeros=weight.zeros,
        minimums=None if least is None else _levels(least),
        table=weight.table,
    )


def _levels(numbers: OfGroups) -> Tensor | TwoLevels:
    if isinstance(numbers, Levels):
        return numbers.parts, numbers.supers, numbers.each
    return numbers


class CpuProduct(_Quantized):
    """Whole numbers per channel and in groups on a CPU, through `onestem.ops.cpu.linear`."""

    def __init__(
        self, weight: Channels | Groups | Pieces, bias: Tensor | None, target: Target
    ) -> None:
        like = weight.like if isinstance(weight, Pieces) else weight
        super().__init__(like, bias, target)
        self.order = None
        if isinstance(weight, Channels):
            self.kind += ", rows in int8"
            self.packed = CpuCodes.of8(weight.codes, weight.scales).changed(settled)
        else:
            self.order = None if isinstance(like, Channels) else like.order
            self.packed = packed_groups(weight)
        self.out_features = self.packed.out_features
        self.bias = None if bias is None else bias.float()

    @staticmethod
    def takes(weight: Channels | Groups, target: Target) -> bool:
        """Whether the device and dtype have this product for the weight."""
        codes = weight.codes
        if codes.device.type != "cpu" or target.dtype not in DTYPES or not is_built():
            return False
        if isinstance(weight, Channels):
            return codes.dtype == torch.int8 and CpuCodes.takes8(codes.shape[1])
        # Rows of float32 would lose half of their bits.
        if target.dtype == torch.float32 or codes.dtype != torch.uint8:
            return False
        return CpuCodes.takes_groups(codes.shape[1], weight.group, weight.bits)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """See `Projection`. `out`: for the result, in place of a new tensor."""
        x = x if self.order is None else x[:, self.order]
        return self.packed.product(x, self.bias, out)

    def pieces(self, x: Tensor) -> tuple[Tensor, ...]:
        """See `Projection`: as few as glibc would not map again for each result."""
        fit = MAPPED_BYTES // (self.out_features * x.itemsize) or 1
        return (x,) if len(x) <= fit else x.split(-(-len(x) // -(-len(x) // fit)))


class CpuPart(_Quantized):
    """8 bits per channel on a CPU, where each rank has some of the inputs.

    Rows are rounded by the maximum of whole rows, and ranks sum whole numbers: what is scaled after
    that has the bits of one device's product. Rank 0 returns it and the others zeros, so that the
    sum over ranks that follows changes nothing.
    """

    def __init__(self, weight: Channels, bias: Tensor | None, target: Target, ranks: Ranks) -> None:
        super().__init__(weight, bias, target)
        self.ranks = ranks
        self.kind += ", rows in int8"
        # The product rounds its rows too, by their maximum. It is 127 in one input more.
        packed = CpuCodes.of8(F.pad(weight.codes, (0, 1)), torch.ones_like(weight.scales))
        self.packed = packed.changed(settled)
        self.scales = weight.scales

    def __call__(self, x: Tensor) -> Tensor:
        codes, scales = rounded_rows(x, self.code_dtype, self.ranks.gather(row_tops(x)))
        sums = self.packed.product(F.pad(codes.float(), (0, 1), value=127.0), None)
        y = self.ranks.sum(sums).mul_(scales).mul_(self.scales)
        if self.ranks.rank:
            return torch.zeros_like(y, dtype=x.dtype)
        return (y if self.bias is None else y.add_(self.bias)).to(x.dtype)


class _Parts(Projection):
    """Projections of the same input whose formats differ, one product each.

    Those of a CPU add the bias before they round, and write rows where they belong: such steps can
    be recorded (`onestem.ops.cpu.recorded`).
    """

    def __init__(
        self, products: Sequence[Projection], bias: Tensor | None, order: Tensor | None
    ) -> None:
        self.products = tuple(products)
        self.bias, self.order = bias, order
        of_cpu = [one for one in products if isinstance(one, CpuProduct)]
        self.own = of_cpu if order is None and len(of_cpu) == len(products) else []
        ends = np.cumsum([0, *(one.out_features for one in self.own)]).tolist()
        self.spans = list(pairwise(ends))
        if self.own and bias is not None:
            for product, (first, end) in zip(self.own, self.spans, strict=True):
                product.bias = bias[first:end].float()
            self.bias = None
        self.in_features = products[0].in_features
        self.out_features = sum(product.out_features for product in products)
        self.scratch_bytes = max(product.scratch_bytes for product in products)
        self.amx = any(product.amx for product in products)
        self.kind = "; ".join(dict.fromkeys(product.kind for product in products))

    def __call__(self, x: Tensor) -> Tensor:
        if self.own:
            y = x.new_empty(len(x), self.out_features)
            for product, (first, end) in zip(self.own, self.spans, strict=True):
                product(x, y[:, first:end])
            return y
        y = torch.cat([product(x) for product in self.products], dim=1)
        y = y if self.order is None else y[:, self.order]
        return y if self.bias is None else y.add_(self.bias)
