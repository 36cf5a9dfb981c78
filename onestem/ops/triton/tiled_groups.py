"""Products with weights of 4 bits, 8 bits and float8 in groups of columns, as in
`onestem.ops.triton.tiled`.

Codes are exact in the dtype of x, so the tensor cores multiply codes, and each group's sum is
scaled in float32: no weight is rounded. Where groups have minimums, the tensor cores also add x up,
and these sums are multiplied by the minimums. For many rows it is faster to write the weight out
once (`TiledGroups.dense`) and multiply that. For one see `onestem.ops.triton.one_row`.

A number of a group in two levels is a byte times the number of a super-block. A chunk's four bytes
are one word, so a chunk is read with few loads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

from onestem.ops.experts import E2M1
from onestem.ops.triton.tiled import (
    Packing,
    Tiles,
    counters_of,
    divided,
    fitting,
    in_blocks,
    in_words,
    multiply,
    num_sms,
    store_tile,
    sum_parts,
    tile_of,
)

# Rows of a weight whose codes of a chunk are adjacent.
_ROWS = tl.constexpr(64)


def _unpacking(kind: str, base: str, one: str) -> tuple[str, ...]:
    """PTX for each of four places in two words (`$1`): puts four bits below those of a power of two
    (`base`), and adds a number (`$2`). Much cheaper than a conversion; no compiler finds it."""
    return tuple(
        f"{{ .reg .b32 t, one; shr.u32 t, $1, {4 * place}; mov.b32 one, {one}; "
        f"lop3.b32 t, t, 0x000f000f, {base}, 0xea; fma.rn.{kind}x2 $0, t, one, $2; }}"
        for place in range(4)
    )


UNPACK_BF16 = tl.constexpr(_unpacking("bf16", "0x43004300", "0x3f803f80"))  # 128, 1
UNPACK_FP16 = tl.constexpr(_unpacking("f16", "0x64006400", "0x3c003c00"))  # 1024, 1

# Likewise for two places of 8 bits. bfloat16 has too few bits for a power of two above them, so
# they pass through float32, whose lower half is 0 then.
BYTES_BF16 = tl.constexpr(
    tuple(
        f"{{ .reg .b32 t, s; prmt.b32 t, $1, 0x4b000000, 0x754{place}; "
        f"prmt.b32 s, $1, 0x4b000000, 0x754{place + 2}; "
        "add.rn.f32 t, t, $2; add.rn.f32 s, s, $3; prmt.b32 $0, t, s, 0x7632; }"
        for place in range(2)
    )
)
BYTES_FP16 = tl.constexpr(
    tuple(
        f"{{ .reg .b32 t; prmt.b32 t, $1, 0x64646464, 0x4{place + 2}4{place}; "
        "add.rn.f16x2 $0, t, $2; }"
        for place in range(2)
    )
)
_BASE_OF_BYTES = tl.constexpr(8388608.0)  # 2 ** 23, 0x4b000000


def _moved(kind: str, bits: int, left: int, sign: int, mask: str, power: str) -> tuple[str, ...]:
    """PTX for each place of floats in two words (`$1`): moves exponent and mantissa to the end of
    the exponent and the start of the mantissa, a sign to its own place, and multiplies by a power
    of two. To convert float8 to bfloat16, number by number, is slower."""
    shifts = [left - bits * place for place in range(16 // bits)]
    return tuple(
        f"{{ .reg .b32 t, s, z; {'shl.b32' if shift > 0 else 'shr.u32'} t, $1, {abs(shift)}; "
        f"shl.b32 s, t, {sign}; and.b32 t, t, {mask}; lop3.b32 t, s, 0x80008000, t, 0xea; "
        f"mov.b32 s, {power}; mov.b32 z, 0x80008000; fma.rn.{kind}x2 $0, t, s, z; }}"
        for shift in shifts
    )


E4M3_BF16 = tl.constexpr(_moved("bf16", 8, 4, 4, "0x07f007f0", "0x7b807b80"))  # 2 ** 120
E4M3_FP16 = tl.constexpr(_moved("f16", 8, 7, 1, "0x3f803f80", "0x5c005c00"))  # 2 ** 8
E2M1_BF16 = tl.constexpr(_moved("bf16", 4, 6, 6, "0x01c001c0", "0x7f007f00"))  # 2 ** 127
E2M1_FP16 = tl.constexpr(_moved("f16", 4, 9, 3, "0x0e000e00", "0x78007800"))  # 2 ** 15


@triton.jit
def _values(codes, zero, dtype: tl.constexpr, PLACE: tl.constexpr, PACKING: tl.constexpr):
    """Codes at PLACE in words, less their zero points, or what they stand for, exact in `dtype`."""
    ASM: tl.constexpr = PACKING.asm and dtype != tl.float32
    IS_BF16: tl.constexpr = dtype == tl.bfloat16
    if ASM and (PACKING.is_float or PACKING.is_e2m1):
        if IS_BF16:
            TO_BF16: tl.constexpr = E4M3_BF16 if PACKING.is_float else E2M1_BF16
            value = tl.inline_asm_elementwise(
                TO_BF16[PLACE], "=r,r", [codes], tl.bfloat16, is_pure=True, pack=2
            )
        else:
            TO_FP16: tl.constexpr = E4M3_FP16 if PACKING.is_float else E2M1_FP16
            value = tl.inline_asm_elementwise(
                TO_FP16[PLACE], "=r,r", [codes], tl.float16, is_pure=True, pack=2
            )
    elif PACKING.is_float:
        byte = (codes >> (8 * PLACE)).to(tl.uint8)
        value = byte.to(tl.float8e4nv, bitcast=True).to(dtype)
    elif PACKING.bits == 8:
        if not ASM:
            value = ((codes >> (8 * PLACE) & 255) - zero[:, None]).to(dtype)
        elif IS_BF16:
            less = (-_BASE_OF_BYTES - zero.to(tl.float32))[:, None]
            value = tl.inline_asm_elementwise(
                BYTES_BF16[PLACE], "=r,r,r,r", [codes, less], tl.bfloat16, is_pure=True, pack=2
            )
        else:
            less = (-1024 - zero).to(dtype)[:, None]
            value = tl.inline_asm_elementwise(
                BYTES_FP16[PLACE], "=r,r,r", [codes, less], tl.float16, is_pure=True, pack=2
            )
    elif PACKING.is_e2m1:
        word = codes.to(tl.int32) >> (4 * PLACE)
        bits = (word << 22) & 0x01C00000 | (word << 28) & -2147483648
        value = (bits.to(tl.float32, bitcast=True) * 1.7014118346046923e38).to(dtype)  # 2**127
    elif ASM:
        UNPACK: tl.constexpr = UNPACK_BF16 if IS_BF16 else UNPACK_FP16
        BASE: tl.constexpr = 128 if IS_BF16 else 1024
        less = (-BASE - zero).to(dtype)[:, None]
        value = tl.inline_asm_elementwise(
            UNPACK[PLACE], "=r,r,r", [codes, less], less.dtype, is_pure=True, pack=2
        )
    else:
        value = ((codes >> (4 * PLACE) & 15) - zero[:, None]).to(dtype)
    return value


@triton.jit
def _zero_of(zeros, at, ZERO: tl.constexpr):
    """Zero points `[BLOCK_N]` of a group."""
    if ZERO >= 0:
        zero = tl.full(at.shape, ZERO, tl.int16)
    else:
        zero = tl.load(zeros + at).to(tl.int16)
    return zero


@triton.jit
def _numbers_of(scales, others, at, above, chunk, PACKING: tl.constexpr):
    """What `_number` makes a chunk's scales and minimums of, `[BLOCK_N]` each.

    at, above: of a line's first chunk, and its first super-block."""
    GROUPS: tl.constexpr = PACKING.groups
    LINES: tl.constexpr = PACKING.lines
    KINDS: tl.constexpr = PACKING.kinds
    found = ()
    for line in tl.static_range(LINES):
        # Triton has no unpacking.
        found = found + (tl.load(scales + at + (chunk * LINES + line) * _ROWS),)  # type: ignore[assignment]  # noqa: RUF005
    if PACKING.span:
        place = chunk // PACKING.span * KINDS
        for kind in tl.static_range(KINDS):
            found = found + (tl.load(others + above + (place + kind) * _ROWS),)  # type: ignore[assignment]  # noqa: RUF005
    elif PACKING.has_minimums:
        for group in tl.static_range(GROUPS):
            found = found + (tl.load(others + at + (chunk * GROUPS + group) * _ROWS),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def _number(found, group: tl.constexpr, KIND: tl.constexpr, PACKING: tl.constexpr):
    """Scales (KIND 0) or minimums (1) of a group, float32 `[BLOCK_N]`."""
    if PACKING.span:
        # A byte in the mantissa of 2 ** 23: no conversion.
        bits = (found[KIND] >> (8 * group)) & 255 | 0x4B000000
        part = bits.to(tl.float32, bitcast=True) - (_BASE_OF_BYTES + 128)
        number = part * found[PACKING.kinds + KIND].to(tl.float32)
    else:
        number = found[KIND * PACKING.groups + group].to(tl.float32)
    return number


@triton.jit
def sums_of(
    x_at,
    inside,
    codes,
    scales,
    others,
    inputs,
    block,
    n,
    first,
    last,
    num_chunks,
    size,
    dtype: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PACKING: tl.constexpr,
    ORDERED: tl.constexpr,
):
    """Sums `[BLOCK_N, BLOCK_M]` over chunks `first` to `last` of columns: of outputs n (int32), in
    blocks of the packed weight (int64), times rows that begin at x_at, where `inside`. ORDERED:
    `inputs` has each column's place in the rows."""
    PLANE: tl.constexpr = PACKING.plane
    GROUPS: tl.constexpr = PACKING.groups
    PLACES: tl.constexpr = PACKING.places
    IN_WORD: tl.constexpr = PACKING.in_word
    WORDS: tl.constexpr = PLACES // IN_WORD
    SHAPE: tl.constexpr = (BLOCK_N, BLOCK_M)
    LEFT: tl.constexpr = (BLOCK_N, PLANE)
    j = tl.arange(0, PLANE)
    line = block * num_chunks
    code_at = codes + (line * (_ROWS * PLANE * WORDS) + n % _ROWS * PLANE)[:, None] + j[None, :]
    if PACKING.whole:
        line = block
    at, above = line * (_ROWS * PACKING.lines) + n % _ROWS, line
    if PACKING.span:
        above = block * tl.cdiv(num_chunks, PACKING.span) * (_ROWS * PACKING.kinds) + n % _ROWS
    row_at = x_at[None, :]
    if not ORDERED:
        row_at += j[:, None]
    total = tl.zeros(SHAPE, tl.float32)
    # Scales are loaded a chunk before their use, so nothing waits for them.
    following = _numbers_of(scales, others, at, above, 0 if PACKING.whole else first, PACKING)
    for chunk in range(first, last):
        numbers = following
        of_chunk = 0 if PACKING.whole else chunk
        if not PACKING.whole:
            following = _numbers_of(
                scales, others, at, above, tl.minimum(chunk + 1, last - 1), PACKING
            )
        for group in tl.static_range(GROUPS):
            zero = _zero_of(others, at + (of_chunk * GROUPS + group) * _ROWS, PACKING.zero)
            part = tl.zeros(SHAPE, tl.float32)
            if PACKING.has_minimums:
                sums = tl.zeros(SHAPE, tl.float32)
            for place in tl.static_range(group * PLACES // GROUPS, (group + 1) * PLACES // GROUPS):
                column = (chunk * PLACES + place) * PLANE
                mask = inside[None, :]
                if not PACKING.even:
                    mask = mask & (column + j < size)[:, None]
                if ORDERED:
                    place_at = row_at + tl.load(inputs + column + j)[:, None]
                else:
                    place_at = row_at + column
                right = tl.load(place_at, mask=mask, other=0.0)
                if place % IN_WORD == 0:
                    at_word = chunk * WORDS + place // IN_WORD
                    word = tl.load(code_at + at_word * (_ROWS * PLANE))
                left = _values(word, zero, dtype, place % IN_WORD, PACKING)
                part = tl.dot(left, right, part, input_precision="ieee")
                if PACKING.has_minimums:
                    # Columns of x added up, in each row: the places of `part`.
                    ones = tl.full(LEFT, 1.0, dtype)
                    sums = tl.dot(ones, right, sums, input_precision="ieee")
            total += part * _number(numbers, group, 0, PACKING)[:, None]
            if PACKING.has_minimums:
                total += sums * _number(numbers, group, 1, PACKING)[:, None]
    return total


@triton.jit(do_not_specialize=("num_rows", "num_chunks", "chunks"))
def _groups_product(
    x,
    codes,
    scales,
    others,
    bias,
    out,
    parts,
    counters,
    num_rows,
    num_out,
    size,
    num_chunks,
    chunks,
    PACKING: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TILES: tl.constexpr,
):
    """Program (tile, part): the sum of a tile over `chunks` chunks of columns."""
    m, n = tile_of(num_rows, num_out, TILES)
    in_n, in_m = n < num_out, m < num_rows
    block = tl.minimum(n // _ROWS, (num_out - 1) // _ROWS).to(tl.int64)
    first = tl.program_id(1) * chunks
    last = tl.minimum(first + chunks, num_chunks)
    x_at = x + m.to(tl.int64) * size
    total = sums_of(
        x_at, in_m, codes, scales, others, others, block, n, first, last, num_chunks, size,
        x.dtype.element_ty, TILES.out, TILES.rows, PACKING, False,
    )  # fmt: skip
    inside = in_n[:, None] & in_m[None, :]
    is_last = True
    if TILES.split > 1:
        total, is_last = sum_parts(total, parts, counters, inside, TILES)
    if is_last:
        store_tile(total, bias, out, n, m, num_out, inside, HAS_BIAS)


@triton.jit
def _groups_dense(
    codes,
    scales,
    others,
    out,
    num_out,
    size,
    num_chunks,
    PACKING: tl.constexpr,
):
    """Program (chunk, rows): writes a block of the weight out."""
    PLANE: tl.constexpr = PACKING.plane
    GROUPS: tl.constexpr = PACKING.groups
    PLACES: tl.constexpr = PACKING.places
    IN_WORD: tl.constexpr = PACKING.in_word
    WORDS: tl.constexpr = PLACES // IN_WORD
    # Codes are exact in 16 bits.
    dtype: tl.constexpr = out.dtype.element_ty
    row, j = tl.arange(0, _ROWS), tl.arange(0, PLANE)
    block = tl.program_id(1).to(tl.int64)
    line = block * num_chunks
    first = (line + tl.program_id(0)) * (WORDS * _ROWS)
    chunk = tl.program_id(0)
    if PACKING.whole:
        line, chunk = block, 0
    at, above = line * (_ROWS * PACKING.lines) + row, line
    if PACKING.span:
        above = block * tl.cdiv(num_chunks, PACKING.span) * (_ROWS * PACKING.kinds) + row
    numbers = _numbers_of(scales, others, at, above, chunk, PACKING)
    code_at = codes + (first + row)[:, None] * PLANE + j[None, :]
    n = tl.program_id(1) * _ROWS + row
    to = out + n.to(tl.int64)[:, None] * size + j[None, :]
    for place in tl.static_range(PLACES):
        group_at = at + (chunk * GROUPS + place * GROUPS // PLACES) * _ROWS
        zero = _zero_of(others, group_at, PACKING.zero)
        if place % IN_WORD == 0:
            word = tl.load(code_at + place // IN_WORD * (_ROWS * PLANE))
        value = _values(word, zero, dtype, place % IN_WORD, PACKING).to(tl.float32)
        value *= _number(numbers, place * GROUPS // PLACES, 0, PACKING)[:, None]
        if PACKING.has_minimums:
            value += _number(numbers, place * GROUPS // PLACES, 1, PACKING)[:, None]
        column = (tl.program_id(0) * PLACES + place) * PLANE
        inside = (n < num_out)[:, None]
        if not PACKING.even:
            inside = inside & (column + j < size)[None, :]
        tl.store(to + column, value.to(dtype), mask=inside)


class Levels(Protocol):
    """A number for each group in two levels: `parts[o, g] * supers[o, g // each]`."""

    @property
    def parts(self) -> Tensor:
        """uint8 or int8 `[num_out, num_groups]`."""

    @property
    def supers(self) -> Tensor:
        """Of 16 or 32 bits `[num_out, num_groups / each]`."""

    @property
    def each(self) -> int:
        """Groups of a super-block."""

    def columns(self, at: Tensor) -> Levels:
        """The groups `at` (int64)."""

    def float(self) -> Tensor:
        """float32 `[num_out, num_groups]`."""


Numbers: TypeAlias = Tensor | Levels


@dataclass(frozen=True, eq=False)
class TiledGroups:
    """A weight `[num_out, size]` as the kernels read it: consecutive blocks of 64 rows and a chunk
    of columns.

    Attributes:
        codes: words, int16 (`in_words`): `[blocks, chunks, words of a chunk's row * 64, plane]`.
        scales: `[blocks, chunks, groups of a chunk, 64]`, of 16 bits if these hold them exactly;
            one chunk for all if all columns are one group of 8 bits. In two levels int32 `[blocks,
            chunks, kinds, 64]`: four bytes, 128 more than the parts of a chunk's scales and of its
            minimums.
        others: minimums, like scales; or zero points, int32, if groups have their own: wide enough
            for asynchronous copies; or numbers of super-blocks, float16
            `[blocks, super-blocks, kinds, 64]`; or else scales again.
    """

    codes: Tensor
    scales: Tensor
    others: Tensor
    packing: Packing
    num_out: int
    size: int
    counters: Tensor

    @staticmethod
    def takes(size: int, group: int, bits: int) -> bool:
        """Whether a width can be packed with a size of groups."""
        return bits in (4, 8) and (group % 16 == 0 or group >= size)

    @staticmethod
    def of(
        codes: Tensor,
        scales: Numbers,
        zeros: Tensor | None,
        minimums: Numbers | None,
        group: int,
        bits: int,
        table: Sequence[int] | None = None,
    ) -> TiledGroups:
        """Pack a weight. Groups of 16 columns, and tables other than that of e2m1, take 8 bits.

        Args:
            codes: `[num_out, size]`, not packed.
            scales, zeros, minimums: `[num_out, num_groups]`, or in two levels; None: 0.
            table: whole numbers of 8 bits that codes stand for; None: they stand for themselves.
        """
        assert zeros is None or table is minimums is None
        num_out, size = codes.shape
        zero, many = _zero_points(zeros)
        # Planes of words have 32 columns.
        in_4 = bits == 4 and (group % 32 == 0 or group >= size)
        if table is not None and not (in_4 and tuple(table) == E2M1):
            known = torch.tensor(table, device=codes.device) + 128
            codes, zero, table, in_4 = known.to(torch.uint8)[codes.int()], 128, None, False
        is_float, values = codes.is_floating_point(), codes.view(torch.uint8)
        plane = _plane(group if group < size else 0)
        packing = Packing(
            4 if in_4 else 8,
            is_float=is_float,
            plane=plane,
            groups=0,  # below
            zero=zero,
            even=False,
            asm=codes.is_cuda and not (is_float and bool((values & 127 == 127).any())),
            has_minimums=minimums is not None,
            is_e2m1=table is not None,
            whole=not in_4 and group >= size,
        )
        chunk = plane * packing.places
        raw = in_blocks(values, chunk)
        raw = raw.unflatten(3, (-1, plane * packing.in_word)).transpose(2, 3).flatten(2, 3)
        raw = in_words(raw, packing.in_word)
        # The group of each stretch of columns with one group, by its first column.
        width = math.gcd(group, chunk) if group < size else chunk
        end = width if packing.whole else raw.shape[1] * chunk
        begins = torch.arange(0, end, width, device=codes.device)
        groups = (begins // group).clamp_(max=-(-size // group) - 1)
        packed, others, span = _packed(scales, minimums, many, groups, chunk // width)
        packing = replace(packing, groups=chunk // width, even=size % chunk == 0, span=span)
        return TiledGroups(raw, packed, others, packing, num_out, size, counters_of(codes.device))

    def tensors(self) -> list[Tensor]:
        """All tensors held, for counting bytes."""
        return [self.codes, self.scales] + ([] if self.others is self.scales else [self.others])

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight `[num_out, size]` in `dtype`, each value rounded once."""
        out = torch.empty(self.num_out, self.size, dtype=dtype, device=self.codes.device)
        blocks, chunks = self.codes.shape[:2]
        _groups_dense[(chunks, blocks)](
            self.codes,
            self.scales,
            self.others,
            out,
            self.num_out,
            self.size,
            chunks,
            PACKING=self.packing,
            num_warps=4,
        )
        return out

    def product(self, x: Tensor, bias: Tensor | None, tiles: Tiles | None = None) -> Tensor:
        """x `[num_rows, size]`, contiguous -> `[num_rows, num_out]` in x's dtype. Sums are float32,
        and weights are not rounded."""
        rows = len(x)
        out = torch.empty(rows, self.num_out, dtype=x.dtype, device=x.device)
        if rows == 0:
            return out
        if tiles is None and self.takes_one_row(x):
            return self._of_row(x, bias, out)
        if tiles is None:
            tiles = self.tiles(rows, num_sms(x.device))
            columns = self.codes[0, 0].nbytes // _ROWS.value
            stage = tiles.out * columns + tiles.rows * self.columns() * x.itemsize
            tiles = fitting(tiles, stage, x.device)
        chunks = self.codes.shape[1]
        return multiply(
            _groups_product,
            (x, self.codes, self.scales, self.others),
            self,
            bias,
            out,
            tiles,
            torch.float32,
            (chunks, chunks),
            PACKING=self.packing,
        )

    def tiles(self, rows: int, sms: int) -> Tiles:
        """Tiles for `rows` rows on `sms` multiprocessors."""
        chosen = next(tiles for most, tiles in _GROUP_TILES if rows <= most)
        return divided(self, chosen, rows, sms)

    def takes_one_row(self, x: Tensor) -> bool:
        """Whether `one_row_product` multiplies `x`: it copies it to shared memory, 16 bytes at a
        time."""
        packing = self.packing
        codes = packing.bits == 4 and not packing.is_e2m1
        if not (x.is_cuda and len(x) == 1 and codes and x.itemsize == 2):
            return False
        fits = self.size % 8 == 0 and self.size <= _LARGEST_ROW
        return fits and torch.cuda.get_device_capability(x.device) >= (8, 0)

    def takes_gated_row(self, x: Tensor) -> bool:
        """Whether `gated_row` takes `x`: a tile has as many outputs of the gate as of `up`."""
        return self.num_out % 128 == 0 and self.takes_one_row(x)

    def gated_row(self, x: Tensor, bias: Tensor | None, gate: Literal["silu", "gelu"]) -> Tensor:
        """gate(first half) * second half of what `product` gives for one row, rounded as it is:
        x `[1, size]`, contiguous -> `[1, num_out / 2]`. `gelu` is the approximation by tanh."""
        out = torch.empty(1, self.num_out // 2, dtype=x.dtype, device=x.device)
        return self._of_row(x, bias, out, gate)

    def _of_row(
        self,
        x: Tensor,
        bias: Tensor | None,
        out: Tensor,
        gate: Literal["silu", "gelu"] | None = None,
    ) -> Tensor:
        from onestem.ops.triton.one_row import one_row_product

        factors = self.codes, self.scales, self.others, self.packing
        one_row_product(x, *factors, bias, out, num_sms(x.device), gate)
        return out

    def columns(self, tiles: Tiles | None = None) -> int:
        """Columns of a chunk."""
        return self.packing.columns


# Columns of a row that leaves shared memory for another program.
_LARGEST_ROW = 32768
# Maximum rows, and the tiles for them; `split` is programs per multiprocessor. Larger tiles have
# more sums than registers.
_GROUP_TILES = (
    (16, Tiles(64, 16, 4, 4, 4)),
    (32, Tiles(64, 32, 2, 4, 4)),
    (math.inf, Tiles(64, 64, 2, 4, 3)),
)


def _plane(group: int) -> int:
    """Columns that are multiplied at once and share a scale. 0: there is one group."""
    return next(plane for plane in (64, 32, 16) if group % plane == 0)


def _zero_points(zeros: Tensor | None) -> tuple[int, Tensor | None]:
    """The one of all groups, or -1 and those of each."""
    first = 0 if zeros is None else int(zeros.flatten()[0])
    return (first, None) if zeros is None or bool((zeros == first).all()) else (-1, zeros)


def _packed(
    scales: Numbers, minimums: Numbers | None, zeros: Tensor | None, groups: Tensor, count: int
) -> tuple[Tensor, Tensor, int]:
    """`scales`, `others` and `span` of stretches of columns of these groups, `count` in a chunk."""
    numbers = [scales] if minimums is None else [scales, minimums]
    levels = [one.columns(groups) for one in numbers if not isinstance(one, Tensor)]
    if zeros is None and len(levels) == len(numbers) and _in_chunks(levels, count):
        words = [_lines((one.parts.int() + 128).to(torch.uint8), 4) for one in levels]
        supers = _narrowed(torch.cat([one.supers for one in levels])).chunk(len(levels))
        above = torch.cat([_lines(one, 1) for one in supers], 2)
        return torch.cat(words, 2), above, levels[0].each // 4
    flat = [_narrowed(one.float())[:, groups] for one in numbers]
    flat += [] if zeros is None else [zeros[:, groups].int()]
    lines = [_lines(one, count) for one in flat]
    return lines[0], lines[-1], 0


def _in_chunks(levels: Sequence[Levels], count: int) -> bool:
    """Whether each chunk has four numbers of one super-block, whose parts are bytes with a sign."""
    each = levels[0].each
    if count != 4 or each % 4 or any(one.each != each for one in levels):
        return False
    return all(-128 <= int(part) < 128 for one in levels for part in one.parts.aminmax())


def _lines(values: Tensor, count: int) -> Tensor:
    """`[num_out, numbers]` -> `[blocks, chunks, count, 64]`; four bytes become a word."""
    blocks = in_blocks(values, count)
    blocks = blocks.view(torch.int32) if values.dtype == torch.uint8 else blocks
    return blocks.transpose(2, 3).contiguous()


def _narrowed(scales: Tensor) -> Tensor:
    """Numbers in 16 bits if nothing is lost: each product reads them."""
    for dtype in (torch.bfloat16, torch.float16):
        narrow = scales.to(dtype)
        if torch.equal(narrow.float(), scales.float()):
            return narrow
    return scales.float()
