"""The numbers of GGUF tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from onestem.errors import WeightsError
from onestem.models.gguf.file import RawTensor
from onestem.threads import usable_cores

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

    def turn(first: int, stop: int) -> None:
        rows[first:stop] = _numbers(raw, first, stop)

    in_pieces(raw, turn)
    return out


def in_pieces(raw: RawTensor, visit: Callable[[int, int], None]) -> None:
    """Call `visit` with spans of a tensor's rows, from several threads."""
    inference = torch.is_inference_mode_enabled()

    def turn(span: tuple[int, int]) -> None:
        with torch.inference_mode(inference):  # a thread does not have its caller's mode
            visit(*span)

    spans = list(_spans(raw))
    if len(spans) == 1:
        turn(spans[0])
        return
    with ThreadPoolExecutor(usable_cores()) as pool:
        for _ in pool.map(turn, spans):
            pass


def _spans(raw: RawTensor) -> Iterator[tuple[int, int]]:
    step = max(1, CHUNK // raw.shape[-1])
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
