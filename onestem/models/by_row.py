"""Products whose rows have the same bits beside any other rows.

oneDNN and MKL choose the order of a product's sums by its shape, so by its number of rows too. Here
a few numbers of rows are tried out, and products are computed at those that agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

# Numbers of rows that are tried out; of a large weight those up to a piece, which is as fast as the
# whole. Of one with fewer elements pieces take up to 1.13 times as long.
LADDER = (*range(1, 9), *range(16, 65, 8), 128, 256, 512, 1024)
PIECE, LARGE = 256, 1 << 26

# Up to here rows are padded: such products wait for the weights.
PADDED_TO = 64

# Bytes at which torch's memory on a CPU begins.
ALIGNED = 64

# Rows of a made-up weight that differ.
DISTINCT = 61

# About what rounding leaves of its sums.
SMALL = 2**-13

INTEGERS = {2: torch.int16, 4: torch.int32}


def made_up(
    out_features: int,
    in_features: int,
    dtype: torch.dtype,
    offset: int = 0,
    device: torch.device | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers whose products show the order of their sums: a row `[1, in_features]`, a weight
    `[out_features, in_features]` and a bias `[out_features]`.

    Each term of a sum is there twice, with both signs, at random places. The exact sums are 0, so
    what is left is the rounding of partial sums, in all bits of a result. The bias is as small.

    Args:
        offset: of the weight's memory, in bytes, from a multiple of `ALIGNED`.
    """
    generator = torch.Generator().manual_seed(0)
    places = torch.randperm(in_features, generator=generator)
    half = in_features // 2

    def values(rows: int) -> Tensor:
        powers = torch.randint(-4, 5, (rows, half), generator=generator).float().exp2()
        there = (torch.randn(rows, half, generator=generator) * powers).to(dtype)
        found = torch.zeros(rows, in_features, dtype=dtype)
        found[:, places[:half]] = found[:, places[half : 2 * half]] = there
        return found

    row, distinct = values(1), values(min(out_features, DISTINCT))
    row[:, places[half:]] *= -1
    shift = offset // dtype.itemsize
    distinct = distinct.to(device)
    memory = torch.empty(shift + out_features * in_features, dtype=dtype, device=device)
    weight = memory[shift:].view(out_features, in_features)
    for first in range(0, out_features, len(distinct)):
        weight[first : first + len(distinct)] = distinct[: out_features - first]
    bias = torch.randn(out_features, generator=generator) * SMALL
    return row.to(device), weight, bias.to(device, dtype)


def numbers_alike(multiply: Callable[[Tensor], Tensor], row: Tensor, most: int) -> tuple[int, ...]:
    """The numbers of rows up to `most`, ascending, at which `multiply` gives `row` `[1,
    in_features]` the same bits at every place. Where there are several such groups: the largest."""
    found: dict[bytes, list[int]] = {}
    for rows in (number for number in LADDER if number <= most):
        result = multiply(row.repeat(rows, 1))
        bits = result.view(INTEGERS[result.itemsize])
        if bool((bits == bits[0]).all()):
            found.setdefault(bits[0].numpy().tobytes(), []).append(rows)
    largest = max(found.values(), key=len)
    return tuple(largest)


def in_parts(
    multiply: Callable[[Tensor], Tensor],
    x: Tensor,
    numbers: Sequence[int],
    padded_to: int = PADDED_TO,
) -> Tensor:
    """`multiply(x)`, with `x` `[n, in_features]` in parts of one of the `numbers` of rows each, as
    `numbers_alike` returns them; the last is filled up. Up to `padded_to` rows it always is."""
    if len(x) in numbers:
        return multiply(aligned(x))
    if not len(x):
        return multiply(x)
    parts, first = [], 0
    for taken, rows in cuts(len(x), numbers, padded_to):
        part = aligned(x[first : first + taken])
        part = _padded(part, rows) if rows > taken else part
        parts.append(multiply(part)[:taken])
        first += taken
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def cuts(
    rows: int, numbers: Sequence[int], padded_to: int = PADDED_TO
) -> Iterator[tuple[int, int]]:
    """How `rows` are divided: how many are taken, and the number that they are padded to."""
    while rows:
        above = next((number for number in numbers if number >= rows), None)
        below = max((number for number in numbers if number <= rows), default=None)
        if above is not None and (
            below is None or above <= padded_to or above - rows <= above // 8
        ):
            yield rows, above
            return
        assert below is not None
        yield below, below
        rows -= below


def _padded(x: Tensor, rows: int) -> Tensor:
    """With zeros; on a GPU with what is there, since no row reads another, and zeros are a launch
    more."""
    if not x.is_cuda:
        return F.pad(x, (0, 0, 0, rows - len(x)))
    padded = x.new_empty(rows, x.shape[1])
    padded[: len(x)] = x
    return padded


def aligned(x: Tensor) -> Tensor:
    """`x`, contiguous, at a multiple of `ALIGNED`."""
    x = x.contiguous()
    return x if x.data_ptr() % ALIGNED == 0 else x.clone()
