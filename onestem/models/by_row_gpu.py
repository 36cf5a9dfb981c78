"""Products of a GPU whose rows have the same bits beside any other rows.

cuBLAS cuts the columns of some weights where rows are few, and walks them in one order otherwise.
At load each number of rows that steps have (`ROWS`) is compared with the largest, with and without
a graph's capture. A product then has one of those that agree, padded if need be. What would be
padded is multiplied by our own kernels if their bits are the same: a few rows where a weight
streams, and where the first number is beyond `PADDED_TO`, all fewer ones. Or else they multiply any
number of rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from onestem.errors import UnsupportedError
from onestem.models.by_row import INTEGERS, aligned, in_parts, made_up
from onestem.ops.triton.few_rows import ANY_ROWS, FEW_ROWS, rows_product, streamed_tiles
from onestem.ops.triton.tiled import Tiles

# Of a GPU's graphs; steps of more rows have multiples of 256.
GRAPH_ROWS = (
    1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256,
    320, 384, 448, 512, 640, 768, 896, 1024, 1152, 1280, 1408, 1536, 1792, 2048,
)  # fmt: skip
ROWS = (*GRAPH_ROWS, *range(2304, 8193, 256))

# Up to here rows are padded: so many take cuBLAS as long as our kernel takes for fewer.
PADDED_TO = 320

# Values of a result that is tried out at most: no more rows of a weight with more outputs.
MOST_VALUES = 1 << 28

Multiply = Callable[[Tensor], Tensor]
Candidates = Sequence[tuple[int, tuple[Tiles, ...]]]
Own = tuple[tuple[float, Tiles], ...]


def padded_rows(rows: int) -> int:
    """The number of rows that a step of `rows` has."""
    return next((number for number in ROWS if number >= rows), rows)


@dataclass(frozen=True)
class Form:
    """How products with a weight are computed.

    Attributes:
        numbers: of rows that the library is given, ascending.
        own: maximum rows, and tiles with which our kernel multiplies up to those.
    """

    numbers: tuple[int, ...]
    own: Own = ()

    def tiles(self, rows: int) -> Tiles | None:
        """Tiles for a number of rows; None: the library's."""
        return next((tiles for most, tiles in self.own if rows <= most), None)


def choose_form(
    library: Multiply,
    own: Callable[[Tensor, Tiles], Tensor],
    row: Tensor,
    ladder: Sequence[int],
    streamed: Candidates = (),
) -> Form | None:
    """The form in which `row` `[1, in_features]` of `made_up` has the same bits at all numbers of
    rows; None: there is none. streamed: tiles that are better than padding."""
    tried = dict(zip(ladder, _bits(library, row, ladder), strict=True))
    want = tried[ladder[-1]]
    numbers = tuple(rows for rows, bits in tried.items() if want and bits == want)

    def with_tiles(tiles: Tiles) -> Multiply:
        return lambda x: own(x, tiles)

    def agreeing(candidates: Candidates, want: bytes | None, below: float) -> Own:
        """Tiles of our kernels that give these bits."""
        found, least = [], 0
        for most, some_tiles in candidates:
            some = [rows for rows in ladder if least < rows <= most and rows < below]
            alike = (one for one in some_tiles if set(_bits(with_tiles(one), row, some)) == {want})
            if some and (tiles := next(alike, None)):
                found.append((min(most, below - 1), tiles))
                least = most
        return tuple(found)

    if numbers and numbers[0] <= PADDED_TO:
        return Form(numbers, agreeing(streamed, want, numbers[0]))
    few, most = (*streamed, *FEW_ROWS), FEW_ROWS[-1][0]
    if numbers:
        form = Form(numbers, agreeing(few, want, numbers[0]))
        if all(form.tiles(rows) for rows in ladder if rows < numbers[0] and rows <= most):
            return form
    some = [rows for rows in ladder if rows > most] or ladder[-1:]
    (want, *others) = set(_bits(with_tiles(ANY_ROWS), row, some))
    if want and not others:
        form = Form((), agreeing(few, want, math.inf))
        if all(form.tiles(rows) for rows in ladder if rows <= most):
            return Form((), (*form.own, (math.inf, ANY_ROWS)))
    return Form(numbers) if numbers else None


def _bits(multiply: Multiply, row: Tensor, ladder: Sequence[int]) -> list[bytes | None]:
    """The bits of the row at each number of rows; None: not all rows have the same."""
    rows = row.repeat(ladder[-1], 1)

    def tried(numbers: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        found = []
        for number in numbers:
            result = multiply(rows[:number])
            bits = result.view(INTEGERS[result.itemsize])
            found.append((bits[0].clone(), (bits == bits[0]).all()))
        return found

    found = tried(ladder)
    if row.is_cuda:
        few = [number for number in ladder if number <= GRAPH_ROWS[-1]]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = tried(few)
        graph.replay()
        found[: len(few)] = [
            (bits, alike & same & (bits == again).all())
            for (bits, alike), (again, same) in zip(found, captured, strict=False)
        ]
    return [bits.cpu().numpy().tobytes() if bool(alike) else None for bits, alike in found]


def library_product(x: Tensor, weight: Tensor, bias: Tensor | None, *, wide: bool) -> Tensor:
    """cuBLAS's product, in x's dtype or, if `wide`, in float32."""
    if wide and x.dtype != torch.float32:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return F.linear(x, weight, bias)


@functools.cache
def form_of(
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    biased: bool,
    wide: bool,
    offset: int,
) -> Form:
    """The form for weights of a shape `[out_features, in_features]`, whose memory begins `offset`
    bytes from a multiple of `ALIGNED`.

    Raises:
        UnsupportedError: there is none.
    """
    row, weight, bias = made_up(*shape, dtype, offset, device)
    added = bias if biased else None
    ladder = [rows for rows in ROWS if rows * max(shape) <= MOST_VALUES]
    made = choose_form(
        lambda x: library_product(x, weight, added, wide=wide),
        lambda x, tiles: rows_product(x, weight, added, tiles, torch.float32 if wide else dtype),
        row,
        ladder,
        streamed_tiles(shape, dtype, device, offset),
    )
    if made is None:
        raise UnsupportedError(
            f"products with a weight {shape[0]} x {shape[1]} in {dtype} have other bits at each "
            f"number of rows on {device} (torch {torch.__version__}): leave deterministic out"
        )
    return made


def product(x: Tensor, weight: Tensor, bias: Tensor | None, form: Form, *, wide: bool) -> Tensor:
    """x `[n, in_features]` times the weight, in its form."""
    tiles = form.tiles(len(x))
    if tiles is not None:
        dtype = torch.float32 if wide else x.dtype
        return rows_product(aligned(x), weight, bias, tiles, dtype)
    return in_parts(
        lambda part: library_product(part, weight, bias, wide=wide), x, form.numbers, ROWS[-1]
    )
