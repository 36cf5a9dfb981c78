"""Products with quantised weights, and which of them a device has.

| weight | NVIDIA GPU | CPU |
|---|---|---|
| `Channels`, float8 | rows rounded to float8, `torch._scaled_mm` with a scale per row and channel (bfloat16, from compute capability 8.9 on) | in the model's dtype |
| `Channels`, int8 | rows rounded to int8, `torch._int_mm` | rows rounded to int8, oneDNN, where its sums are exact (VNNI, AMX) |
| `Groups` | Triton up to `MANY_ROWS` rows, above it the weight is written out and multiplied by cuBLAS (16-bit dtypes) | 4 bits in bfloat16: torch's 4-bit product up to `FEW_ROWS` rows, above it a copy in the model's dtype where memory allows; others in the model's dtype |

"In the model's dtype": the weight is converted when it is loaded. What a product does to its rows is
done to each by itself.
"""  # noqa: E501

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import get_args

import torch
from torch import Tensor

from onestem.models.formats.held import Channels, Groups, Weight, dense, joined, ordered
from onestem.models.formats.rounding import rounded_weight
from onestem.models.linear import Layout, Linear, Projection, choose_layout
from onestem.models.quantization import Scheme
from onestem.ops.dispatch import resolve_rounding
from onestem.options import Quantize

__all__ = ["FEW_ROWS", "MANY_ROWS", "Target", "kinds_of", "projection", "row_bytes"]

# Rows up to which four bits of a weight are multiplied as they are: on a CPU, on a GPU.
FEW_ROWS = 4
MANY_ROWS = 256

# Of weights that torch's 4-bit product on a CPU takes.
CPU_GROUPS = (256, 128, 64, 32)

# `torch._int_mm` on a GPU takes more rows than this.
INT_MM_ROWS = 16


@dataclass(frozen=True)
class Target:
    """What a model's products are made for.

    Attributes:
        dtype: of what they multiply.
        layout: of weights that are not quantised.
        copies: whether there is room for them beside the quantised ones.
    """

    dtype: torch.dtype
    device: torch.device
    layout: Layout
    copies: bool = False


def projection(
    parts: Sequence[Weight], bias: Tensor | None, order: Tensor | None, target: Target
) -> Projection:
    """Projections of the same input as one.

    Args:
        parts: one behind the other.
        bias: `[out_features]`, in the order of results.
        order: int64 `[out_features]`: which row of the parts gives each result; None: as they are.
    """
    whole = joined(parts)
    if whole is not None:
        return _product(whole if order is None else ordered(whole, order), bias, target)
    return _Parts([_product(part, None, target) for part in parts], bias, order)


def kinds_of(device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """How weights of each format that they can be rounded to are multiplied on a device."""
    target = Target(dtype, device, choose_layout(dtype, device))
    zeros = torch.zeros(128, 128, dtype=dtype, device=device)
    return {
        form: projection([rounded_weight(zeros, form, "")], None, None, target).kind
        for form in get_args(Quantize)
    }


def row_bytes(form: Scheme | Quantize, size: int, target: Target) -> float:
    """Bytes of one row of a weight in a format, in all copies that its product holds: of some rows
    that are made here."""
    some = 128
    if isinstance(form, Scheme):
        weight = _empty(form, some, size, target.device)
    else:
        zeros = torch.zeros(some, size, dtype=target.dtype, device=target.device)
        weight = rounded_weight(zeros, form, "a layer")
    product = projection([weight], None, None, target)
    return sum(tensor.nbytes for tensor in product.tensors()) / some


def _empty(scheme: Scheme, out: int, size: int, device: torch.device) -> Channels | Groups:
    floats = scheme.storage == "float8"
    if scheme.rounds_rows and scheme.columns is None:
        kind = torch.float8_e4m3fn if floats else torch.int8
        return Channels(
            torch.zeros(out, size, device=device).to(kind), torch.ones(out, device=device)
        )
    group = scheme.columns or size
    scales = torch.ones(out, -(-size // group), device=device)
    zeros = torch.zeros_like(scales, dtype=torch.int16)
    zeros[0] = not scheme.symmetric  # those that differ are kept
    kind = torch.float8_e4m3fn if floats else torch.uint8
    codes = torch.zeros(out, size, device=device).to(kind)
    return Groups(codes, scales, None if floats else zeros, group, scheme.bits)


def _product(weight: Weight, bias: Tensor | None, target: Target) -> Projection:
    if isinstance(weight, Channels):
        for kind in (_Float8, _Int8Gpu, _Int8Cpu):
            if kind.takes(weight, target):
                return kind(weight, bias)
    if isinstance(weight, Groups):
        if _PackedGpu.takes(weight, target):
            return _PackedGpu(weight, bias)
        if _PackedCpu.takes(weight, target):
            return _PackedCpu(weight, bias, target)
    made = Linear(dense(weight, target.dtype), bias, target.layout)
    made.kind = (
        f"{made.kind}, from {_kind(weight)}" if not isinstance(weight, Tensor) else made.kind
    )
    return made


def _kind(weight: Channels | Groups) -> str:
    """As a person is told."""
    floats = weight.codes.is_floating_point()
    if isinstance(weight, Channels):
        return "fp8 per channel" if floats else "int8 per channel"
    return f"{'fp8' if floats else f'int{weight.bits}'} in groups of {weight.group}"


class _Quantized(ABC):
    """What these products have in common."""

    scratch_bytes = 0

    def __init__(self, weight: Channels | Groups, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.codes.shape
        self.bias = bias
        self.kind = _kind(weight)
        self.rounded = resolve_rounding(weight.codes.device)

    def pieces(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x,)

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """See `Projection`."""

    @abstractmethod
    def held(self) -> list[Tensor]:
        """All tensors but the bias."""

    def tensors(self) -> list[Tensor]:
        return self.held() + ([] if self.bias is None else [self.bias])


class _Float8(_Quantized):
    """float8 by float8 on a GPU; sums as its tensor cores make them, scaled in float32."""

    def __init__(self, weight: Channels, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self.kind += ", rows in fp8"
        self.codes = weight.codes
        self.scales = weight.scales[None, :]

    @staticmethod
    def takes(weight: Channels, target: Target) -> bool:
        codes = weight.codes
        if not codes.is_cuda or codes.dtype != torch.float8_e4m3fn:
            return False
        new = torch.cuda.get_device_capability(codes.device) >= (8, 9)
        aligned = codes.shape[0] % 16 == codes.shape[1] % 16 == 0
        return new and aligned and target.dtype == torch.bfloat16

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) == 0:
            return x.new_empty(0, self.out_features)
        codes, scales = self.rounded(x, torch.float8_e4m3fn)
        return torch._scaled_mm(
            codes,
            self.codes.t(),
            scales,
            self.scales,
            bias=self.bias,
            out_dtype=x.dtype,
            use_fast_accum=True,
        )

    def held(self) -> list[Tensor]:
        return [self.codes, self.scales]


class _Int8Gpu(_Quantized):
    """int8 by int8 on a GPU: exact sums, scaled in float32."""

    def __init__(self, weight: Channels, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self.kind += ", rows in int8"
        self.codes = weight.codes
        self.scales = weight.scales

    @staticmethod
    def takes(weight: Channels, target: Target) -> bool:
        codes = weight.codes
        aligned = codes.shape[0] % 8 == codes.shape[1] % 8 == 0
        return codes.is_cuda and codes.dtype == torch.int8 and aligned

    def __call__(self, x: Tensor) -> Tensor:
        codes, scales = self.rounded(x, torch.int8)
        lacking = INT_MM_ROWS + 1 - len(x)
        if lacking > 0:
            codes = torch.cat([codes, codes.new_zeros(lacking, codes.shape[1])])
        sums = torch._int_mm(codes, self.codes.t())[: len(x)]
        return _scaled(sums, scales, self.scales, self.bias, x.dtype)

    def held(self) -> list[Tensor]:
        return [self.codes, self.scales]


class _Int8Cpu(_Quantized):
    """int8 by int8 through oneDNN: exact sums, scaled in float32."""

    def __init__(self, weight: Channels, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self.kind += ", rows in int8"
        self.scales = weight.scales
        self.packed = torch.ops.onednn.qlinear_prepack(weight.codes, None)
        self.ones = torch.ones(self.out_features)
        self.zeros = torch.zeros(self.out_features, dtype=torch.int32)

    @staticmethod
    def takes(weight: Channels, target: Target) -> bool:
        codes = weight.codes
        return codes.device.type == "cpu" and codes.dtype == torch.int8 and _sums_int8_exactly()

    def __call__(self, x: Tensor) -> Tensor:
        codes, scales = self.rounded(x, torch.int8)
        sums = _int8_product(codes, self.packed, self.ones, self.zeros)
        return _scaled(sums, scales, self.scales, self.bias, x.dtype)

    def held(self) -> list[Tensor]:
        return [self.packed, self.scales, self.ones, self.zeros]


def _int8_product(codes: Tensor, packed: Tensor, ones: Tensor, zeros: Tensor) -> Tensor:
    """float32 sums. oneDNN's fast products take unsigned rows: codes are shifted by 128, and the
    shift is a zero point."""
    shifted = codes.view(torch.uint8) ^ 128
    sums: Tensor = torch.ops.onednn.qlinear_pointwise(
        shifted, 1.0, 128, packed, ones, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return sums


@functools.cache
def _sums_int8_exactly() -> bool:
    """Whether oneDNN's int8 products are exact on this CPU: without VNNI they add pairs in 16 bits,
    which overflow. Tried, not guessed."""
    weight = torch.full((16, 64), 127, dtype=torch.int8)
    weight[::2] = -127
    codes = torch.full((2, 64), 127, dtype=torch.int8)
    codes[1] = -127
    try:
        packed = torch.ops.onednn.qlinear_prepack(weight, None)
        sums = _int8_product(codes, packed, torch.ones(16), torch.zeros(16, dtype=torch.int32))
    except (AttributeError, RuntimeError):
        return False
    return torch.equal(sums, codes.float() @ weight.float().t())


def _scaled(
    sums: Tensor, rows: Tensor, columns: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Sums `[n, out_features]` with the scales of both factors, rounded once."""
    result = (sums * rows).mul_(columns)
    return (result if bias is None else result.add_(bias)).to(dtype)


class _PackedGpu(_Quantized):
    """Weights in groups through `onestem.ops.triton.formats`; rows are not rounded."""

    def __init__(self, weight: Groups, bias: Tensor | None) -> None:
        from onestem.ops.triton.formats import PackedGroups

        super().__init__(weight, bias)
        self.order = weight.order
        self.packed = PackedGroups.of(
            weight.codes, weight.scales, weight.zeros, weight.group, weight.bits
        )
        self.scratch_bytes = 2 * self.out_features * self.in_features

    @staticmethod
    def takes(weight: Groups, target: Target) -> bool:
        if not weight.codes.is_cuda or target.dtype == torch.float32 or not find_spec("triton"):
            return False
        from onestem.ops.triton.formats import PackedGroups

        floats = weight.codes.is_floating_point()
        new = torch.cuda.get_device_capability(weight.codes.device) >= (
            (8, 9) if floats else (8, 0)
        )
        return new and PackedGroups.takes(weight.codes.shape[1], weight.group, weight.bits)

    def __call__(self, x: Tensor) -> Tensor:
        x = x.contiguous() if self.order is None else x[:, self.order]
        if len(x) <= MANY_ROWS:
            return self.packed.product(x, self.bias)
        return torch.nn.functional.linear(x, self.packed.dense(x.dtype), self.bias)

    def held(self) -> list[Tensor]:
        return self.packed.tensors() + ([] if self.order is None else [self.order])


class _PackedCpu(_Quantized):
    """4 bits in groups on a CPU, scales and zero points in bfloat16."""

    def __init__(self, weight: Groups, bias: Tensor | None, target: Target) -> None:
        super().__init__(weight, bias)
        assert weight.zeros is not None
        self.order = weight.order
        self.group = next(size for size in CPU_GROUPS if weight.group % size == 0)
        self.packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.codes.int(), 1)
        # The product is of (code - 8) * scale + zero.
        zeros = (8 - weight.zeros) * weight.scales
        both = torch.stack([weight.scales, zeros], dim=-1).to(target.dtype).transpose(0, 1)
        repeats = weight.codes.shape[1] // self.group // len(both)
        self.scales = both.repeat_interleave(repeats, dim=0).contiguous()
        self.copy = self._copied(weight, bias, target) if target.copies else None
        if self.copy is not None:
            self.kind += f", a copy {self.copy.kind}"

    @staticmethod
    def takes(weight: Groups, target: Target) -> bool:
        codes = weight.codes
        here = codes.device.type == "cpu" and weight.bits == 4 and target.dtype == torch.bfloat16
        whole = codes.shape[0] % 16 == codes.shape[1] % weight.group == weight.group % 32 == 0
        return here and whole and hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu")

    @staticmethod
    def _copied(weight: Groups, bias: Tensor | None, target: Target) -> Linear:
        return Linear(weight.dense().to(target.dtype), bias, target.layout)

    def __call__(self, x: Tensor) -> Tensor:
        if self.copy is not None and len(x) > FEW_ROWS:
            return self.copy(x)
        x = x.contiguous() if self.order is None else x[:, self.order]
        product = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x, self.packed, self.group, self.scales
        )
        return product if self.bias is None else product.add_(self.bias)

    def pieces(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x,) if self.copy is None else self.copy.pieces(x)

    def held(self) -> list[Tensor]:
        held = [self.packed, self.scales] + ([] if self.order is None else [self.order])
        return held + ([] if self.copy is None else self.copy.tensors())


class _Parts:
    """Projections of the same input whose formats differ, one product each."""

    def __init__(
        self, products: Sequence[Projection], bias: Tensor | None, order: Tensor | None
    ) -> None:
        self.products = tuple(products)
        self.bias, self.order = bias, order
        self.in_features = products[0].in_features
        self.out_features = sum(product.out_features for product in products)
        self.scratch_bytes = max(product.scratch_bytes for product in products)
        self.kind = "; ".join(dict.fromkeys(product.kind for product in products))

    def __call__(self, x: Tensor) -> Tensor:
        y = torch.cat([product(x) for product in self.products], dim=1)
        y = y if self.order is None else y[:, self.order]
        return y if self.bias is None else y.add_(self.bias)

    def pieces(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x,)

    def tensors(self) -> list[Tensor]:
        held = [tensor for product in self.products for tensor in product.tensors()]
        return held + [tensor for tensor in (self.bias, self.order) if tensor is not None]
