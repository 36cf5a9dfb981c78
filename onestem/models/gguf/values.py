"""The numbers of GGUF tensors."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from onestem.errors import WeightsError
from onestem.models.gguf.file import RawTensor
from onestem.models.spread import spread

DAMAGED = "the file is damaged, get it again"

CHUNK = 1 << 20  # numbers that a thread turns at a time
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def values_of(raw: RawTensor, dtype: torch.dtype) -> Tensor:
    """A tensor's numbers, of its shape. Beside them a few chunks of float32 are in memory.

    Blocks are turned into float32 as their format says, and these are rounded to `dtype`.

    Raises:
        WeightsError: blocks have scales that are not finite, or the file cannot be read.
    """
    out = torch.empty(raw.shape, dtype=dtype)
    rows = out.view(raw.num_rows, raw.shape[-1])

    def turn(span: tuple[int, int]) -> None:
        rows[slice(*span)] = _numbers(raw, *span)

    spread(turn, spans_of(raw))
    return out


def spans_of(raw: RawTensor, multiple: int = 1) -> Iterator[tuple[int, int]]:
    """Rows that a thread turns at a time, of a number of rows that is a multiple but at the end."""
    step = max(1, CHUNK // raw.shape[-1] // multiple) * multiple
    for first in range(0, raw.num_rows, step):
        yield first, min(first + step, raw.num_rows)


def _numbers(raw: RawTensor, first: int, stop: int) -> Tensor:
    blocks = raw.blocks(first, stop)
    if raw.kind in FLOATS:
        return torch.from_numpy(blocks).view(FLOATS[raw.kind])
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    with np.errstate(invalid="ignore", over="ignore"):
        numbers = torch.from_numpy(dequantize(blocks, GGMLQuantizationType[raw.kind]))
    if not numbers.isfinite().all():
        raise WeightsError(f"{raw.file}: {raw.name} has scales that are not finite: {DAMAGED}")
    return numbers
