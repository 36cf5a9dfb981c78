"""Products of rows with weights of 8 and 4 bits in C++ (`csrc/linear.h` has the layout)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from onestem.errors import ConfigError
from onestem.ops.cpu.extension import DTYPES, checked_isa, native
from onestem.ops.cpu.huge import room_for

BLOCK, PAIR = 16, 32  # outputs
CHUNK = {8: 64, 4: 128}  # inputs

# Maximum inputs whose products fit in sums of 32 bits.
MOST_INPUTS = 1 << 16

# Addresses of numbers that are not there.
NONE = (0, 0, 0, 0)

# Columns that share a scale; larger groups are cut.
GROUPS = {8: (64, 32, 16), 4: (128, 64, 32)}

# A number for each group as parts `[out, groups]` times `supers[out, groups / each]`.
TwoLevels: TypeAlias = tuple[Tensor, Tensor, int]


@dataclass(frozen=True, eq=False)
class Numbers:
    """A number for each output and group.

    Attributes:
        values: of 32 or 16 bits `[out / 16][groups][16]` (of channels `[out]`); int8 in two levels.
        supers: float16 `[out / 16][groups / each][16]`; None: one level.
        each: groups of a super-block, a power of 2.
    """

    values: Tensor
    supers: Tensor | None = None
    each: int = 1

    @staticmethod
    def of(given: Tensor | TwoLevels, step: int, repeats: int) -> Numbers:
        """Numbers `[out, groups]`, each `repeats` times, filled up to `step` groups. Two levels
        become one unless they fit those of the kernels."""
        if isinstance(given, tuple):
            parts, supers, each = given
            fits = supers.dtype == torch.float16 and each.bit_count() == repeats == 1
            if fits and (parts.dtype == torch.int8 or int(parts.max()) < 128):
                held = _of_groups(supers, max(1, step // each))
                return Numbers(_of_groups(parts.view(torch.int8), step), held, each)
            given = parts.float() * supers.float().repeat_interleave(each, dim=1)
        return Numbers(_of_groups(given.repeat_interleave(repeats, dim=1), step))

    def changed(self, change: Callable[[Tensor], Tensor]) -> Numbers:
        """With each tensor changed."""
        supers = None if self.supers is None else change(self.supers)
        return Numbers(change(self.values), supers, self.each)

    def rows(self, at: Tensor) -> Tensor:
        """float32 `[n, groups]` of the outputs `at` (int64 `[n]`)."""
        block, lane = at // BLOCK, at % BLOCK
        values = self.values[block, :, lane].float()
        if self.supers is None:
            return values
        return values * self.supers[block, :, lane].float().repeat_interleave(self.each, dim=1)

    @property
    def address(self) -> tuple[int, int, int, int]:
        """As the extension takes it."""
        kind = DTYPES.get(self.values.dtype, 0)
        supers = 0 if self.supers is None else self.supers.data_ptr()
        return self.values.data_ptr(), supers, kind, self.each.bit_length() - 1

    def tensors(self) -> list[Tensor]:
        """All tensors held."""
        return [self.values, *([] if self.supers is None else [self.supers])]


@dataclass(frozen=True, eq=False)
class CpuCodes:
    """A weight of integers, as the C++ products take it.

    With a scale per channel (8 bits), each row of the input is rounded to int8 by its own maximum,
    and sums are exact. With groups it depends on the instruction set. AVX-512 with VNNI rounds
    rows of 16 bits to int8 by the maximum of each group, as AMX does those of float16. All else
    keeps 16 bits, but more than 6 rows of bfloat16 with AMX, which meet the weight's values in
    bfloat16.

    Attributes:
        codes: int32, `[out / 16][chunk][16 outputs][16]`; of groups `[..][16][16 outputs]`.
        zeros: uint8 `[out / 16][groups][16]`; None: all are `zero`, or there are minimums.
        minimums: what is added to a group's weights; None: nothing.
        table: uint8 `[16]`: what codes of 4 bits stand for, before `zero` is taken off.
        bits, group: bits of a code, and columns that share a scale (0: all).
        out_features, in_features: of the weight.
        isa: instruction set; None: the one in use.
    """

    codes: Tensor
    scales: Numbers
    bits: int
    group: int
    out_features: int
    in_features: int
    zeros: Tensor | None = None
    zero: int = 0
    minimums: Numbers | None = None
    table: Tensor | None = None
    isa: str | None = None

    @staticmethod
    def takes8(size: int) -> bool:
        """Whether sums over `size` inputs are exact."""
        return size <= MOST_INPUTS

    @staticmethod
    def takes_groups(size: int, group: int, bits: int) -> bool:
        """Whether there are products for groups of `group` of `size` columns."""
        return bits in GROUPS and size % group == group % GROUPS[bits][-1] == 0

    @staticmethod
    def of8(codes: Tensor, scales: Tensor, isa: str | None = None) -> CpuCodes:
        """A weight with a scale per channel: codes int8 `[out, in]`, scales float32 `[out]`."""
        out, size = codes.shape
        shifted = codes.view(torch.uint8) ^ 128
        packed = _in_blocks(_padded(shifted, CHUNK[8]), 1, 3)
        return CpuCodes(packed, Numbers(_padded_rows(scales.float())), 8, 0, out, size, isa=isa)

    @staticmethod
    def of_groups(
        codes: Tensor,
        scales: Tensor | TwoLevels,
        group: int,
        *,
        bits: int = 4,
        zeros: Tensor | None = None,
        minimums: Tensor | TwoLevels | None = None,
        table: tuple[int, ...] | None = None,
        isa: str | None = None,
    ) -> CpuCodes:
        """A weight in groups: `value * scales + minimums`, where the value is `codes - zeros` or
        `table[codes]`.

        Args:
            codes: uint8 below `2 ** bits`, `[out, in]`.
            scales, minimums: of 32 or 16 bits `[out, in / group]`, or in two levels.
            zeros: int16 from 0 to 256, likewise; not with minimums or a table.
            table: 16 whole numbers that differ by less than 256.
        """
        (out, size), chunk = codes.shape, CHUNK[bits]
        cut = next(one for one in GROUPS[bits] if group % one == 0)
        numbers = partial(Numbers.of, step=chunk // cut, repeats=group // cut)
        held, zero = None, 0
        if zeros is not None:
            zero = int(zeros[0, 0])
            if not bool((zeros == zero).all()):
                if int(zeros.max()) < 256:
                    of_cuts = zeros.repeat_interleave(group // cut, dim=1)
                    held = _of_groups(of_cuts.to(torch.uint8), chunk // cut)
                else:
                    assert isinstance(scales, Tensor)
                    minimums, zero = -zeros * scales.float(), 0
        values = None
        if table is not None:
            zero = -min(table)
            values = torch.tensor([one + zero for one in table], dtype=torch.uint8)
        return CpuCodes(
            _in_blocks(_padded(codes, chunk) if bits == 8 else _words(codes), 3, 1),
            numbers(scales),
            bits,
            cut,
            out,
            size,
            held,
            zero,
            None if minimums is None else numbers(minimums),
            values,
            isa,
        )

    def changed(self, change: Callable[[Tensor], Tensor]) -> CpuCodes:
        """With each tensor changed, but for the table."""
        least = self.minimums
        return replace(
            self,
            codes=change(self.codes),
            scales=self.scales.changed(change),
            zeros=None if self.zeros is None else change(self.zeros),
            minimums=None if least is None else least.changed(change),
        )

    def widened(self, out: int) -> CpuCodes:
        """Room for `out` rows in groups; `put` fills it."""
        blocks = 2 * -(-out // PAIR)
        wider = self.changed(lambda one: room_for((blocks, *one.shape[1:]), one.dtype))
        return replace(wider, out_features=out)

    def put(self, first: int, rows: CpuCodes) -> None:
        """Have `rows` from row `first` on, a multiple of `PAIR`."""
        for mine, theirs in zip(self.tensors(), rows.tensors(), strict=True):
            if mine.dim() > 1:  # no table
                at = first // BLOCK
                mine[at : at + len(theirs)] = theirs

    def rows(self, at: Tensor) -> Tensor:
        """float32 `[n, in]`: the rows `at` (int64 `[n]`) of a weight in groups."""
        block, lane = at // BLOCK, at % BLOCK
        codes = self.codes[block, :, :, lane].view(torch.uint8)
        if self.bits == 4:
            codes = torch.stack([codes.view(torch.int16) >> n & 15 for n in (0, 4, 8, 12)], dim=2)
        codes = codes.flatten(1)
        values = codes.float() if self.table is None else self.table[codes.int()].float()
        values = values.unflatten(1, (-1, self.group))
        zeros = None if self.zeros is None else self.zeros[block, :, lane].float()
        values = (values - (self.zero if zeros is None else zeros[..., None])).mul_(
            self.scales.rows(at)[..., None]
        )
        if self.minimums is not None:
            values += self.minimums.rows(at)[..., None]
        return values.flatten(1)[:, : self.in_features]

    def product(self, x: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        """x `[n, in]` times the transposed weight, plus the bias: `[n, out]`.

        Args:
            bias: float32 `[out]`.
            out: for the result, in any of `DTYPES`, rows at any distance; default: of x's dtype.
        """
        x = x.contiguous()
        here = x.is_cpu and x.dtype in DTYPES
        if not here or x.dim() != 2 or x.shape[1] != self.in_features:
            raise ConfigError(
                f"got {x.dtype} {list(x.shape)} on {x.device}, expected rows of "
                f"{self.in_features} in {', '.join(map(str, DTYPES))} on the CPU"
            )
        rows, chunks = x.shape[0], self.codes.shape
        y = x.new_empty(rows, self.out_features) if out is None else out
        if out is not None and (
            not (out.is_cpu and out.dim() == 2 and out.stride(1) == 1 and out.dtype in DTYPES)
            or out.shape != (rows, self.out_features)
        ):
            raise ConfigError(
                f"got out {out.dtype} {list(out.shape)} on {out.device}, expected "
                f"[{rows}, {self.out_features}], contiguous rows, on the CPU"
            )
        native().multiply_codes(
            checked_isa(self.isa),
            (DTYPES[x.dtype], DTYPES[y.dtype]),
            x.data_ptr(),
            y.data_ptr(),
            y.stride(0),
            rows,
            self.in_features,
            self.out_features,
            self.codes.data_ptr(),
            self.scales.address,
            NONE if self.minimums is None else self.minimums.address,
            0 if self.zeros is None else self.zeros.data_ptr(),
            self.zero,
            0 if self.table is None else self.table.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            self.bits,
            self.group,
            chunks[0] // 2,
            chunks[1],
            torch.get_num_threads(),
        )
        return y

    def tensors(self) -> list[Tensor]:
        """All tensors held, for counting bytes."""
        more = [one for one in (self.zeros, self.table) if one is not None]
        numbers = [self.scales, *([] if self.minimums is None else [self.minimums])]
        return [self.codes, *more, *(one for held in numbers for one in held.tensors())]


def _words(codes: Tensor) -> Tensor:
    """Codes of 4 bits in words: 32 of a chunk hold its four times 32 inputs."""
    words = _padded(codes, CHUNK[4]).unflatten(1, (-1, 4, 32)).short()
    words = words[:, :, 0] | words[:, :, 1] << 4 | words[:, :, 2] << 8 | words[:, :, 3] << 12
    return words.flatten(1).view(torch.uint8)


def _padded(codes: Tensor, chunk: int) -> Tensor:
    """Codes padded to whole blocks of rows and chunks of columns."""
    out, size = codes.shape
    by = (0, -size % chunk, 0, -out % PAIR)
    return F.pad(codes, by) if any(by) else codes


def _padded_rows(values: Tensor) -> Tensor:
    return F.pad(values, (0, -len(values) % PAIR)).contiguous()


def _in_blocks(codes: Tensor, *order: int) -> Tensor:
    """`[out, bytes]` -> words `[out / 16, chunks, 16, 16]`; order: of outputs (1) and words (3)."""
    words = codes.contiguous().view(torch.int32).unflatten(1, (-1, 16)).unflatten(0, (-1, BLOCK))
    return words.permute(0, 2, *order).contiguous()


def _of_groups(values: Tensor, step: int) -> Tensor:
    """`[out, groups]` -> `[out / 16, groups, 16]`, whole chunks; 0 where there is no group."""
    out, groups = values.shape
    padded = F.pad(values, (0, -groups % step, 0, -out % PAIR))
    return padded.unflatten(0, (-1, BLOCK)).transpose(1, 2).contiguous()
