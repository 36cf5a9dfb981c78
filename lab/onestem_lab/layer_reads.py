"""What reading the weights of a layer takes, a launch for each product: `onestem_lab.layer`."""

# mypy: allow-untyped-defs
from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from onestem.cost.timing import graph_ms
from onestem.ops.triton.tiled import num_sms

__all__ = ["reading_us"]

# Programs per multiprocessor, and words of 32 bits that one has under way at a time.
WAYS = ((2, 4096), (4, 2048), (4, 4096), (8, 1024), (8, 2048))


@triton.jit
def _read(words, sums, num, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.int32)
    i = tl.arange(0, BLOCK)
    for at in tl.range(tl.program_id(0) * BLOCK, num, tl.num_programs(0) * BLOCK, num_stages=4):
        total += tl.load(words + at + i, mask=at + i < num, other=0)
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))


def reading_us(weights: Sequence[Sequence[Tensor]]) -> float:
    """Microseconds of a layer, by layer its products' weights: the fastest way of some."""
    device = weights[0][0].device
    sums = torch.empty(8 * num_sms(device), dtype=torch.int32, device=device)

    def way(programs: int, block: int) -> Callable[[], None]:
        def call() -> None:
            for layer in weights:
                for weight in layer:
                    words = weight.reshape(-1).view(torch.int32)
                    _read[(programs * num_sms(device),)](words, sums, len(words), BLOCK=block)

        return call

    return 1e3 * min(graph_ms(way(*one), repeat=3) for one in WAYS) / len(weights)
