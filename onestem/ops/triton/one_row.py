"""Products of one row with 4-bit weights in groups, written in Gluon.

One row waits more than it computes: for a launch, for the memory's first bytes, for other programs'
sums. So a program here computes 16 outputs at a time over all columns, which its warps divide, and
waits for no other program. It loads its first weights before the launch before it has ended
(`dependent`), and always has two chunks of columns under way. Each thread loads codes straight into
the registers from which the tensor cores multiply them (`mma.m16n8k16`: 16 outputs, 8 rows of x, 16
columns). The 8 rows of x are the same one.

Thread t of a warp holds, of rows `t // 4` and `t // 4 + 8` of the weight, four words of 32 bits
from each half of a plane (`TiledGroups.codes`): those from `4 * (t % 4)`; and the same columns of
x. A product sums over columns, so their order may be that of the words.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from onestem.ops.triton.dependent import dependent_launch
from onestem.ops.triton.versions import copy_async, viewed

if TYPE_CHECKING:
    from onestem.ops.triton.tiled import TiledGroups

__all__ = ["one_row_product"]

OUTPUTS: gl.constexpr = gl.constexpr(16)  # of a tile
WARPS = 8  # of a program


def _two_products(place: int, is_first: bool, kind: str, base: str, one: str) -> str:
    """PTX: unpacks the codes at a place of 4 + 4 words, see `tiled._unpacking`, and multiplies.

    $4 to $7 are words of the upper row, $8 to $11 of the lower, and $12 to $15 those of x. Zero
    points are $20 and $22. The sums before are $16 to $19; the first products have none.
    """
    lines = [".reg .b32 one, low<4>, high<4>;", f"mov.b32 one, {one};"]
    for i in range(4):
        for name, word, zero in ("low", 4 + i, 20), ("high", 8 + i, 22):
            lines += [
                f"shr.u32 {name}{i}, ${word}, {4 * place};",
                f"lop3.b32 {name}{i}, {name}{i}, 0x000f000f, {base}, 0xea;",
                f"fma.rn.{kind}x2 {name}{i}, {name}{i}, one, ${zero};",
            ]
    for i in 0, 2:
        before = [f"${j}" for j in (range(4) if i else range(16, 20))]
        sums = ", ".join(["0f00000000"] * 4 if is_first and i == 0 else before)
        lines.append(
            f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{$0, $1, $2, $3}}, "
            f"{{low{i}, high{i}, low{i + 1}, high{i + 1}}}, {{${12 + i}, ${13 + i}}}, {{{sums}}};"
        )
    return "{ " + " ".join(lines) + " }"


def _each_place(kind: str, base: str, one: str) -> tuple[str, ...]:
    """By place; those of first products come after the others."""
    return tuple(
        _two_products(place, is_first, kind, base, one)
        for is_first in (False, True)
        for place in range(4)
    )


BF16: gl.constexpr = gl.constexpr(_each_place("bf16", "0x43004300", "0x3f803f80"))
FP16: gl.constexpr = gl.constexpr(_each_place("f16", "0x64006400", "0x3c003c00"))
OPERANDS: gl.constexpr = gl.constexpr(",".join(["=&f"] * 4 + ["r"] * 12 + ["f"] * 4 + ["r"] * 4))


@gluon.jit
def _words(at, there, HALVES: gl.constexpr):
    """The words of a chunk, of the upper and the lower row, by half. They are read once, so they
    need no place in the first cache."""
    LOWER: gl.constexpr = 128 * HALVES
    # No other value: whatever stands in the registers, a scale of 0 follows.
    upper = gl.load(at, there, cache_modifier=".cg")
    lower = gl.load(at + LOWER, there, cache_modifier=".cg")
    if HALVES == 1:
        return upper, lower
    else:  # noqa: RET505 - one of these is compiled
        return (
            upper,
            lower,
            gl.load(at + 16, there, cache_modifier=".cg"),
            gl.load(at + LOWER + 16, there, cache_modifier=".cg"),
        )


@gluon.jit
def _of_groups(at, there, GROUPS: gl.constexpr):
    """Scales or zero points of a chunk's groups."""
    if GROUPS == 1:
        return (gl.load(at, there, 0),)
    elif GROUPS == 2:  # noqa: RET505 - one of these is compiled
        return gl.load(at, there, 0), gl.load(at + 64, there, 0)
    else:
        return (
            gl.load(at, there, 0),
            gl.load(at + 64, there, 0),
            gl.load(at + 128, there, 0),
            gl.load(at + 192, there, 0),
        )


@gluon.jit
def _load(
    code_at, scale_at, zero_at, unit, units, num_programs, CHUNKS: gl.constexpr,
    ZERO: gl.constexpr, HALVES: gl.constexpr, GROUPS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Words, scales and zero points of a unit: a tile's turn, in which each warp has a chunk."""
    TURNS: gl.constexpr = (CHUNKS + WARPS - 1) // WARPS
    tile = gl.program_id(0) + unit // TURNS * num_programs
    block = (tile // 4).to(gl.int64) * CHUNKS
    four: gl.constexpr = gl.SliceLayout(1, code_at.type.layout)
    chunk = unit % TURNS * WARPS + gl.arange(0, 32 * WARPS, four) // 32
    there = ((chunk < CHUNKS) & (unit < units))[:, None]
    at = block * (1024 * HALVES) + tile % 4 * (256 * HALVES)
    words = _words(code_at + (at + chunk * (1024 * HALVES))[:, None], there, HALVES)
    chunk = gl.convert_layout(chunk, gl.SliceLayout(1, scale_at.type.layout), assert_trivial=True)
    there = ((chunk < CHUNKS) & (unit < units))[:, None]
    at = (block * (64 * GROUPS) + tile % 4 * 16 + chunk * (64 * GROUPS))[:, None]
    scales = _of_groups(scale_at + at, there, GROUPS)
    # Scales stand for zero points that are not read.
    zeros = scales if ZERO >= 0 else _of_groups(zero_at + at, there, GROUPS)
    return words, scales, zeros


@gluon.jit
def _stage(
    x, staged, size, TURNS: gl.constexpr, PARTS: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """Copy x to shared memory: `[turn, part, warp, 16 words]`, where a chunk's parts are halves of
    planes."""
    NUM: gl.constexpr = PARTS * WARPS * 16
    lines = viewed(staged, gl.int32, [TURNS, NUM], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    i = gl.arange(0, NUM, gl.BlockedLayout([4], [32], [WARPS], [0]))
    warp, part = i // 16 % WARPS, i // (16 * WARPS)
    for turn in gl.static_range(TURNS):
        column = (turn * WARPS + warp) * (PARTS * 16) + part * 16 + i % 16
        copy_async(lines.index(turn), x + column, column < size // 2)
    async_copy.commit_group()
    async_copy.wait_group(0)


@gluon.jit
def _twice(one):
    """`[threads, 2]` (upper and lower row) as `[threads, 4]`, in the places of the sums."""
    four: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [one.shape[0] // 32, 1], [1, 0])
    twice = gl.reshape(gl.join(one, one), [one.shape[0], 4])
    return gl.convert_layout(twice, four, assert_trivial=True)


@gluon.jit
def _products(
    upper, lower, staged, part, zero, ASM: gl.constexpr, IS_BF16: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """`part` and the products of one place of the words of half a plane."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 8, 4], [WARPS, 1, 1], [2, 1, 0])
    value, _ = gl.broadcast(staged.load(layout), gl.zeros([WARPS, 8, 16], gl.int32, layout))
    value = gl.reshape(value, [32 * WARPS, 4])
    value = gl.convert_layout(value, part.type.layout, assert_trivial=True)
    return gl.inline_asm_elementwise(
        BF16[ASM] if IS_BF16 else FP16[ASM],
        OPERANDS,
        [upper, lower, value, part, zero],
        gl.float32,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def _add_unit(
    total, loaded, staged, turn, dtype: gl.constexpr, ZERO: gl.constexpr, HALVES: gl.constexpr,
    GROUPS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """`total` and the products of what `_load` gave."""
    is_bf16: gl.constexpr = dtype == gl.bfloat16
    # What unpacking adds to codes: see `tiled._unpacking`.
    base: gl.constexpr = -128 if is_bf16 else -1024
    words, scales, zeros = loaded
    for group in gl.static_range(GROUPS):
        if ZERO >= 0:
            zero = gl.full(total.shape, base - ZERO, gl.float32, total.type.layout)
        else:
            zero = _twice(base - zeros[group]).to(gl.float32)
        zero = zero.to(dtype).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
        zero = zero | (zero << 16)
        part = gl.zeros_like(total)
        for place in gl.static_range(group * 4 // GROUPS, (group + 1) * 4 // GROUPS):
            for half in gl.static_range(HALVES):
                part = _products(
                    words[2 * half], words[2 * half + 1],
                    staged.index(turn * (4 * HALVES) + (place * HALVES + half)), part, zero,
                    place + 4 * (half == 0 and place == group * 4 // GROUPS), is_bf16, WARPS,
                )  # fmt: skip
        total += part * _twice(scales[group].to(gl.float32))
    return total


@gluon.jit
def _store(total, bias, out, tile, num_out, HAS_BIAS: gl.constexpr, WARPS: gl.constexpr):
    """Sum of all warps' sums of a tile, rounded."""
    across: gl.constexpr = gl.BlockedLayout([WARPS, 1], [1, 32], [1, WARPS], [1, 0])
    result = gl.sum(gl.convert_layout(gl.reshape(total, [WARPS, 128]), across), 0)
    # Of lane i // 4: sums of two rows of x, of the upper and of the lower output.
    i = gl.arange(0, 128, result.type.layout)
    n = tile * OUTPUTS + i // 16 + i % 4 // 2 * 8
    inside = (n < num_out) & (i % 16 // 4 == 0) & (i % 2 == 0)
    if HAS_BIAS:
        result += gl.load(bias + n, inside, 0.0).to(gl.float32)
    gl.store(out + n, result.to(out.dtype.element_ty), inside)


@gluon.jit(do_not_specialize=("num_tiles",))
def _one_row(
    x, codes, scales, zeros, bias, out, num_out, num_tiles, size,
    CHUNKS: gl.constexpr, ZERO: gl.constexpr, HALVES: gl.constexpr, GROUPS: gl.constexpr,
    HAS_BIAS: gl.constexpr, DEPENDENT: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Program i: tiles i, i + the number of programs, and so on, of 16 outputs. Warp w takes a
    tile's chunks w, w + WARPS, and so on. x and codes are read as words of 32 bits."""
    TURNS: gl.constexpr = (CHUNKS + WARPS - 1) // WARPS
    dtype: gl.constexpr = out.dtype.element_ty
    four: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    two: gl.constexpr = gl.BlockedLayout([1, 2], [32, 1], [WARPS, 1], [1, 0])
    if DEPENDENT:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r", [], gl.int32, False, 1
        )
    lane = gl.arange(0, 32 * WARPS, gl.SliceLayout(1, four)) % 32
    i = gl.arange(0, 4, gl.SliceLayout(0, four))
    code_at = codes + (lane // 4 * (16 * HALVES) + lane % 4 * 4)[:, None] + i[None, :]
    lane = gl.arange(0, 32 * WARPS, gl.SliceLayout(1, two)) % 32
    group_at = (lane // 4)[:, None] + 8 * gl.arange(0, 2, gl.SliceLayout(0, two))[None, :]
    scale_at, zero_at = scales + group_at, zeros + group_at
    first, step = gl.program_id(0), gl.num_programs(0)
    units = (num_tiles - first + step - 1) // step * TURNS
    even = _load(
        code_at, scale_at, zero_at, 0, units, step, CHUNKS, ZERO, HALVES, GROUPS, WARPS
    )  # fmt: skip
    odd = _load(
        code_at, scale_at, zero_at, 1, units, step, CHUNKS, ZERO, HALVES, GROUPS, WARPS
    )  # fmt: skip
    if DEPENDENT:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.b32 $0, 0;", "=r", [], gl.int32, False, 1
        )
    shape: gl.constexpr = [TURNS * 4 * HALVES, WARPS, 1, 16]
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    staged = gl.allocate_shared_memory(gl.int32, shape, flat)
    _stage(x, staged, size, TURNS, 4 * HALVES, WARPS)
    total = gl.zeros([32 * WARPS, 4], gl.float32, four)
    # Two units a round: words that were copied to other registers would be waited for at once.
    for unit in range(0, units, 2):
        total = _add_unit(total, even, staged, unit % TURNS, dtype, ZERO, HALVES, GROUPS, WARPS)
        if unit % TURNS == TURNS - 1:
            tile = first + unit // TURNS * step
            _store(total, bias, out, tile, num_out, HAS_BIAS, WARPS)
            total = gl.zeros_like(total)
        even = _load(
            code_at, scale_at, zero_at, unit + 2, units, step, CHUNKS, ZERO, HALVES, GROUPS, WARPS
        )  # fmt: skip
        behind = unit + 1
        total = _add_unit(total, odd, staged, behind % TURNS, dtype, ZERO, HALVES, GROUPS, WARPS)
        if behind % TURNS == TURNS - 1:
            tile = first + behind // TURNS * step
            _store(total, bias, out, tile, num_out, HAS_BIAS, WARPS)
            total = gl.zeros_like(total)
        odd = _load(
            code_at, scale_at, zero_at, unit + 3, units, step, CHUNKS, ZERO, HALVES, GROUPS, WARPS
        )  # fmt: skip


def one_row_product(
    x: Tensor, weight: TiledGroups, bias: Tensor | None, out: Tensor, sms: int
) -> None:
    """x `[1, size]`, contiguous, of 16 bits -> out `[1, num_out]`: what
    `TiledGroups.takes_one_row` takes. Sums are float32, and weights are not rounded."""
    _, chunks, _, plane = weight.codes.shape
    num_tiles = triton.cdiv(weight.num_out, OUTPUTS.value)
    # A third program has room, and shortens only what takes several tiles.
    programs = (3 if num_tiles > 6 * sms else 2) * sms
    _one_row[(min(num_tiles, programs),)](
        x.view(torch.int32),
        weight.codes.view(torch.int32),
        weight.scales,
        weight.zeros,
        out if bias is None else bias,
        out,
        weight.num_out,
        num_tiles,
        weight.size,
        CHUNKS=chunks,
        ZERO=weight.zero,
        HALVES=plane // 32,
        GROUPS=weight.scales.shape[2],
        HAS_BIAS=bias is not None,
        WARPS=WARPS,
        num_warps=WARPS,
        **dependent_launch(x.device),
    )
