"""A device's measured rates of matrix products and of memory, from which floors are computed."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from onestem.cost.timing import events_ms
from onestem_lab.timing import least_seconds

__all__ = ["Rates", "measure_rates", "product_rate", "reading_rate"]

SQUARES = (512, 1024, 2048, 4096)  # small ones stay in the caches, large ones amortise more
SLOW_SECONDS = 0.2  # the next size takes eight times as long
PACKED_ROWS, PACKED_SIZE = 256, 4096
READ_BYTES = 256 << 20


@dataclass(frozen=True)
class Rates:
    """A device's rates in this run: products in FLOP/s; memory in bytes/s, of a copy, read and
    written (GPU), or of reading (CPU)."""

    flops: float
    bytes: float

    def better(self, other: Rates) -> Rates:
        """The higher of each: a ceiling is what was reached at any time."""
        return Rates(max(self.flops, other.flops), max(self.bytes, other.bytes))


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """The rate of products (see `product_rate`; on a GPU a square one of 8192) and of memory."""
    if device.type == "cuda":
        return _gpu_rates(device, dtype)
    return Rates(product_rate(dtype), reading_rate())


def reading_rate() -> float:
    """Bytes/s at which a CPU reads memory."""
    memory = torch.ones(READ_BYTES // 4, device="cpu")
    return memory.nbytes / least_seconds(memory.sum)


def product_rate(dtype: torch.dtype) -> float:
    """FLOP/s of a CPU: the best of square products and of a packed linear of 256 rows, in `dtype`
    or in float32. Where a processor emulates 16 bits, float32 is faster and as good."""
    kinds = {torch.float32, dtype if _multiplies(dtype) else torch.float32}
    return max(max(_square_rate(kind), _packed_rate(kind)) for kind in kinds)


def _multiplies(dtype: torch.dtype) -> bool:
    """Whether products in a dtype have kernels; without them, one of 2048^3 may take minutes."""
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return True


def _square_rate(kind: torch.dtype) -> float:
    """FLOP/s of an n^3 product at the fastest n. Sizes that would take about a second are left
    out."""
    best = 0.0
    for size in SQUARES:
        a, b = (torch.randn(size, size, dtype=kind, device="cpu") for _ in range(2))
        seconds = least_seconds(lambda a=a, b=b: a @ b)  # type: ignore[misc]
        best = max(best, 2 * size**3 / seconds)
        if seconds > SLOW_SECONDS:
            break
    return best


def _packed_rate(kind: torch.dtype) -> float:
    """FLOP/s of rows times a packed square weight; 0 if oneDNN does not pack it."""
    if not torch.backends.mkldnn.is_available() or not _multiplies(kind):
        return 0.0
    rows = torch.randn(PACKED_ROWS, PACKED_SIZE, dtype=kind, device="cpu")
    weight = torch.randn(PACKED_SIZE, PACKED_SIZE, dtype=kind, device="cpu")
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 64)
    multiply = torch.ops.mkldnn._linear_pointwise
    seconds = least_seconds(lambda: multiply(rows, packed, None, "none", [], ""))
    return 2 * PACKED_ROWS * PACKED_SIZE**2 / seconds


def _gpu_rates(
    device: torch.device, dtype: torch.dtype, size: int = 8192, copy_bytes: int = 2 << 30
) -> Rates:
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    source = torch.empty(copy_bytes, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    product = _median_seconds(lambda: torch.mm(a, b, out=out))
    copy = _median_seconds(lambda: target.copy_(source))
    return Rates(2 * size**3 / product, 2 * copy_bytes / copy)


def _median_seconds(call: Callable[[], object]) -> float:
    events_ms(call, 3)
    return statistics.median(events_ms(call, 15)) / 1e3
