"""A quantised weight, between the file that it is read from and the product that uses it.

Each stored format becomes one of few values here, in the order of the decoder's rows. So parts with
scales of their own can be fused, and products need not know the file format. Weights of 16 or 32
bits are rounded to a format when they are loaded, each to the nearest code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from onestem.models.cuts import Span
from onestem.models.ranks import ALONE, Ranks
from onestem.models.spread import spread
from onestem.ops.rounding import rounded_rows, row_tops
from onestem.options import Quantize

INT4_GROUPS = (128, 64, 32)

_CODES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


@dataclass(frozen=True, eq=False)
class Channels:
    """`weight[o, i] = codes[o, i] * scales[o]`, in products that round their rows likewise.

    Attributes:
        codes: float8_e4m3fn or int8 `[out_features, in_features]`.
        scales: float32 `[out_features]`.
    """

    codes: Tensor
    scales: Tensor

    def rows(self, at: Tensor) -> Channels:
        """The rows `at` (int64)."""
        return Channels(self.codes[at], self.scales[at])

    @property
    def in_features(self) -> int:
        """Inputs, one for each column."""
        return self.codes.shape[1]

    def dense(self) -> Tensor:
        """float32 `[out_features, in_features]`."""
        return self.codes.float() * self.scales[:, None]


@dataclass(frozen=True, eq=False)
class Levels:
    """A number for each group, in two levels: `parts[o, g] * supers[o, g // each]`, which is exact
    in float32 (llama.cpp's K formats).

    Attributes:
        parts: uint8 or int8 `[out_features, num_groups]`.
        supers: float16 or float32 `[out_features, num_groups / each]`.
        each: groups of a super-block.
    """

    parts: Tensor
    supers: Tensor
    each: int

    def float(self) -> Tensor:
        """float32 `[out_features, num_groups]`."""
        return self.parts.float() * self.supers.float().repeat_interleave(self.each, dim=1)

    def by_rows(self, change: Callable[[Tensor], Tensor]) -> Levels:
        """With both levels changed, each of which has a row for each output."""
        return replace(self, parts=change(self.parts), supers=change(self.supers))

    def columns(self, at: Tensor) -> Levels:
        """The groups `at` (int64)."""
        supers = at // self.each

        def is_whole(each: int) -> bool:
            starts = supers[::each].repeat_interleave(each)
            return self.each % each == len(at) % each == 0 and torch.equal(starts, supers)

        each = next(each for each in range(self.each, 0, -1) if is_whole(each))
        return Levels(self.parts[:, at], self.supers[:, supers[::each]], each)

    @staticmethod
    def joined(parts: Sequence[Levels]) -> Levels:
        """Those of several weights of the same groups, one after the other."""
        return replace(
            parts[0],
            parts=torch.cat([part.parts for part in parts]),
            supers=torch.cat([part.supers for part in parts]),
        )


# A number for each row and group of columns, [out_features, num_groups].
OfGroups: TypeAlias = Tensor | Levels


@dataclass(frozen=True, eq=False)
class Groups:
    """`weight[o, i] = value * scales[o, g] + minimums[o, g]` with `g = i // group`, where the value
    is `codes[o, i] - zeros[o, g]`, or `table[codes[o, i]]`.

    Attributes:
        codes: float8_e4m3fn, or uint8 below `2 ** bits`: `[out_features, columns]`.
        scales: of 32 or 16 bits `[out_features, num_groups]`, or in two levels.
        zeros: int16 `[out_features, num_groups]`; None: all 0 (float8, and where there are
            minimums or a table).
        group: columns that share a scale; the last group may be shorter.
        bits: of a code.
        order: int64 `[columns]`: column i is for input `order[i]`; None: for input i. More columns
            than inputs are possible: the extra ones have weight 0.
        minimums: as scales; None: all 0.
        table: whole numbers from -127 to 127, one for each code (MXFP4); None: codes are numbers.
        name: of the format, for people.
    """

    codes: Tensor
    scales: OfGroups
    zeros: Tensor | None
    group: int
    bits: int = 8
    order: Tensor | None = None
    minimums: OfGroups | None = None
    table: tuple[int, ...] | None = None
    name: str = ""

    def rows(self, at: Tensor) -> Groups:
        """The rows `at` (int64)."""
        return self._by_rows(lambda one: one[at])

    def to(self, device: torch.device) -> Groups:
        """The same on a device."""
        return self._by_rows(lambda one: one.to(device))

    def filled(self, rows: int) -> Groups:
        """With rows that are 0 at the end, so that there are `rows`."""
        lacking = rows - len(self.codes)
        return self._by_rows(lambda one: F.pad(one, (0, 0, 0, lacking))) if lacking else self

    def _by_rows(self, change: Callable[[Tensor], Tensor]) -> Groups:
        """With all tensors changed, each of which has a row for each output."""
        of_groups = self._of_groups(
            lambda one: one.by_rows(change) if isinstance(one, Levels) else change(one)
        )
        return replace(self, codes=change(self.codes), **of_groups)

    def columns(self, at: Tensor) -> dict[str, Any]:
        """Scales, zero points and minimums of the groups `at` (int64), by the fields' names."""
        return self._of_groups(
            lambda one: one.columns(at) if isinstance(one, Levels) else one[:, at]
        )

    def _of_groups(self, change: Callable[[Any], Any]) -> dict[str, Any]:
        named = {"scales": self.scales, "zeros": self.zeros, "minimums": self.minimums}
        return {name: None if one is None else change(one) for name, one in named.items()}

    @property
    def in_features(self) -> int:
        """Inputs, which may be fewer than columns (`order`)."""
        return self.codes.shape[1] if self.order is None else int(self.order.max()) + 1

    def dense(self) -> Tensor:
        """float32 `[out_features, in_features]`, columns in the order of inputs."""
        if self.table is None:
            weight = self.codes.float()
        else:
            table = torch.tensor(self.table, dtype=torch.float32, device=self.codes.device)
            weight = table[self.codes.int()]
        if self.zeros is not None:
            weight -= self._by_column(self.zeros.float())
        weight *= self._by_column(self.scales.float())
        if self.minimums is not None:
            weight += self._by_column(self.minimums.float())
        if self.order is None:
            return weight
        inputs = weight.new_zeros(len(weight), self.in_features)
        return inputs.index_add_(1, self.order, weight)

    def _by_column(self, values: Tensor) -> Tensor:
        return values.repeat_interleave(self.group, dim=1)[:, : self.codes.shape[1]]


@dataclass(frozen=True, eq=False)
class Pieces:
    """A weight in groups that is read some rows at a time, so that little of it is in memory in
    the form between its file's and its product's.

    Attributes:
        like: one row, whose numbers mean nothing.
        parts: of each piece, in their order: its rows, and what reads their groups.
    """

    like: Groups
    parts: tuple[tuple[int, Callable[[], Groups]], ...]

    @property
    def out_features(self) -> int:
        """Rows of all pieces."""
        return sum(rows for rows, _ in self.parts)

    def visit(self, take: Callable[[int, Groups], None]) -> None:
        """Call `take` with the first row and the groups of each piece, from several threads."""
        starts = accumulate((rows for rows, _ in self.parts), initial=0)
        spread(lambda one: take(one[0], one[1][1]()), zip(starts, self.parts, strict=False))

    def whole(self) -> Groups:
        """All groups."""
        found: dict[int, Groups] = {}
        self.visit(found.__setitem__)
        whole = joined([found[first] for first in sorted(found)])
        assert isinstance(whole, Groups)
        return whole

    def rows(self, at: Tensor) -> Groups:
        """The rows `at` (int64)."""
        return self.whole().rows(at)

    def to(self, device: torch.device) -> Groups | Pieces:
        """The same on a device."""
        return self if device.type == "cpu" else self.whole().to(device)

    def dense(self) -> Tensor:
        """float32 `[out_features, in_features]`."""
        return self.whole().dense()


# A Tensor is a weight as it is, [out_features, in_features].
Weight: TypeAlias = Tensor | Channels | Groups | Pieces


def dense(weight: Weight, dtype: torch.dtype) -> Tensor:
    """`[out_features, in_features]` in a dtype: rounded once, from float32."""
    return (weight if isinstance(weight, Tensor) else weight.dense()).to(dtype)


def ordered(weight: Weight, at: Tensor) -> Weight:
    """The weight's rows `at` (int64)."""
    return weight[at] if isinstance(weight, Tensor) else weight.rows(at)


def of_columns(weight: Groups, span: Span, size: int) -> Groups:
    """The columns `span` of a weight of `size` columns. Its codes are those of the span already,
    its scales and zero points those of all groups. A span that divides groups has smaller ones."""
    start, stop = span
    whole = weight.group
    if start // whole == (stop - 1) // whole:
        group = stop - start  # all have one scale
    elif start % whole == 0 and (stop % whole == 0 or stop == size):
        group = whole
    else:
        group = math.gcd(start, stop, whole)
    at = torch.arange(start, stop, group, device=weight.codes.device) // whole
    return replace(weight, group=group, **weight.columns(at))


def joined(parts: Sequence[Weight]) -> Weight | None:
    """Weights of the same inputs, concatenated by rows; None: they are of different kinds."""
    if len(parts) == 1:
        return parts[0]
    if all(isinstance(part, Tensor) for part in parts):
        return torch.cat([part for part in parts if isinstance(part, Tensor)])
    channels = [part for part in parts if isinstance(part, Channels)]
    if len(channels) == len(parts) and len({part.codes.dtype for part in channels}) == 1:
        codes = torch.cat([part.codes for part in channels])
        return Channels(codes, torch.cat([part.scales for part in channels]))
    likes = [part.like if isinstance(part, Pieces) else part for part in parts]
    groups = [like for like in likes if isinstance(like, Groups)]
    if len(groups) < len(parts) or not all(_alike(groups[0], one) for one in groups):
        return None
    pieces = [part for part in parts if isinstance(part, Pieces)]
    if len(pieces) == len(parts):
        return Pieces(groups[0], tuple(one for part in pieces for one in part.parts))
    groups = [
        part.whole() if isinstance(part, Pieces) else one
        for part, one in zip(parts, groups, strict=True)
    ]
    named = {
        name: _joined_numbers([getattr(part, name) for part in groups])
        for name in ("scales", "zeros", "minimums")
    }
    return replace(groups[0], codes=torch.cat([part.codes for part in groups]), **named)


def _joined_numbers(parts: Sequence[Any]) -> Any:
    if parts[0] is None:
        return None
    return Levels.joined(parts) if isinstance(parts[0], Levels) else torch.cat(list(parts))


def _alike(one: Groups, other: Groups) -> bool:
    if _shape(one) != _shape(other):
        return False
    if one.order is None or other.order is None:
        return one.order is other.order
    return torch.equal(one.order, other.order)


def _shape(weight: Groups) -> tuple[Any, ...]:
    """What weights have in common that can be joined by rows."""
    return (
        weight.group, weight.bits, weight.codes.dtype, weight.table, weight.name,
        *map(_layout, (weight.scales, weight.zeros, weight.minimums)),
    )  # fmt: skip


def _layout(numbers: OfGroups | None) -> Any:
    if isinstance(numbers, Levels):
        return numbers.parts.dtype, numbers.supers.dtype, numbers.each
    return None if numbers is None else numbers.dtype


def rounded_weight(weight: Tensor, form: Quantize, ranks: Ranks = ALONE) -> Weight:
    """Round a weight `[out_features, in_features]`, unless the format does not take its width.

    fp8 and int8 have a scale per channel, and products round their rows likewise. int4 is
    symmetric, in groups of 128 columns (64 or 32 where the width is no multiple). It takes widths
    that are multiples of 32.

    Args:
        ranks: each has some of the columns, in their order. Scales are those of the whole weight;
            a group that is divided becomes smaller ones of the same scale.
    """
    if form == "int4":
        return _int4(weight, ranks)
    tops = ranks.gather(row_tops(weight).t().contiguous()).view(ranks.size, -1).t()
    codes, scales = rounded_rows(weight, _CODES[form], tops)
    return Channels(codes, scales[:, 0].contiguous())


def _int4(weight: Tensor, ranks: Ranks) -> Weight:
    width = torch.tensor([[float(weight.shape[1])]], device=weight.device)
    widths = list(map(int, ranks.gather(width)[0].tolist()))
    size, start = sum(widths), sum(widths[: ranks.rank])
    group = next((group for group in INT4_GROUPS if size % group == 0), None)
    if group is None:
        return weight
    stop = start + weight.shape[1]
    # Groups that the span divides are filled up with zeros.
    before, first, last = start % group, start // group, -(-stop // group)
    values = F.pad(weight.float(), (before, -stop % group)).unflatten(1, (-1, group))
    scales = weight.new_zeros(len(weight), size // group, dtype=torch.float32)
    scales[:, first:last] = values.abs().amax(2)
    scales = ranks.gather(scales.view(1, -1)).view(ranks.size, *scales.shape).amax(0)
    # Codes are -8 to 7; the largest value is half a step away from its code.
    scales = torch.where(scales == 0, 1.0, scales / 7.5)
    codes = (values / scales[:, first:last, None]).round_().clamp_(-8, 7).add_(8).to(torch.uint8)
    codes = codes.flatten(1)[:, before : before + weight.shape[1]].contiguous()
    zeros = torch.full_like(scales, 8, dtype=torch.int16)
    return of_columns(Groups(codes, scales, zeros, group, 4), (start, stop), size)
