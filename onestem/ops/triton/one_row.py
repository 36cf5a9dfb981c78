"""Products of one row with 4-bit weights in groups, written in Gluon.

One row waits more than it computes: for a launch, for the memory's first bytes, for other programs'
sums. So a program here computes 16 outputs at a time over all columns, which its warps divide, and
waits for no other program. It loads its first weights before the launch before it has ended
(`dependent`), and then has two chunks of columns under way. Each thread loads codes straight into
the registers from which the tensor cores multiply them (`mma.m16n8k16`: 16 outputs, 8 rows of x, 16
columns). The 8 rows of x are the same one, so that each sum has 8 places. A program keeps those of
8 tiles of 16 outputs there, and its warps add theirs up once for all of them.

Of a gated MLP, a tile has 8 outputs of the gate and 8 of `up`, whose product is stored: the gate
needs no launch of its own.

Thread t of a warp holds, of rows `t // 4` and `t // 4 + 8` of the weight, four words of 32 bits
from each half of a plane (`TiledGroups.codes`): those from `4 * (t % 4)`; and the same columns of
x. A product sums over columns, so their order may be that of the words.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from onestem.ops.triton.dependent import dependent_launch
from onestem.ops.triton.layers import gate_value
from onestem.ops.triton.sizes import cdiv
from onestem.ops.triton.tiled import Packing
from onestem.ops.triton.versions import barrier, viewed

WARPS = 8  # of a program


def _two_products(place: int, masks: str, base: str, shifts: tuple[int, ...], kind: str) -> str:
    """PTX: puts the codes at a place of 4 + 4 words below those bits of 16 that make a code four of
    a mantissa, so that it becomes 16 + code, and multiplies.

    $4 to $7 are words of the upper row, $8 to $11 of the lower, and $12 to $15 those of x. $16 to
    $19 are the sums before.
    """
    shift = shifts[place]
    way = f"shl.b32 {{0}}, {{1}}, {shift};" if shift > 0 else f"shr.u32 {{0}}, {{1}}, {-shift};"
    lines = [".reg .b32 low<4>, high<4>;"]
    for i in range(4):
        for name, word in (f"low{i}", f"${4 + i}"), (f"high{i}", f"${8 + i}"):
            lines += [way.format(name, word), f"lop3.b32 {name}, {name}, {masks}, {base}, 0xea;"]
    for i in 0, 2:
        before = ", ".join(f"${j}" for j in (range(4) if i else range(16, 20)))
        lines.append(
            f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{$0, $1, $2, $3}}, "
            f"{{low{i}, high{i}, low{i + 1}, high{i + 1}}}, {{${12 + i}, ${13 + i}}}, {{{before}}};"
        )
    return "{ " + " ".join(lines) + " }"


def _each_place(masks: str, base: str, shifts: tuple[int, ...], kind: str) -> tuple[str, ...]:
    return tuple(_two_products(place, masks, base, shifts, kind) for place in range(4))


BF16: gl.constexpr = gl.constexpr(_each_place("0x00780078", "0x41804180", (3, -1, -5, -9), "bf16"))
FP16: gl.constexpr = gl.constexpr(_each_place("0x03c003c0", "0x4c004c00", (6, 2, -2, -6), "f16"))
BASE: gl.constexpr = gl.constexpr(16)
OPERANDS: gl.constexpr = gl.constexpr(",".join(["=&f"] * 4 + ["r"] * 12 + ["f"] * 4))


@gluon.jit
def _words(at, there, HALVES: gl.constexpr, LOWER: gl.constexpr):
    """The words of a chunk, of the upper and the lower row, by half. They are read once, so they
    need no place in the first cache."""
    found = ()
    for half in gl.static_range(HALVES):
        # No other value where nothing is: whatever is in the registers, its scale is 0.
        upper = gl.load(at + 16 * half, there, cache_modifier=".cg")
        lower = gl.load(at + LOWER + 16 * half, there, cache_modifier=".cg")
        # Triton has no unpacking.
        found = found + (upper, lower)  # type: ignore[assignment]  # noqa: RUF005
    return found


@gluon.jit
def _of_groups(at, there, GROUPS: gl.constexpr):
    """Numbers of a chunk's groups, or of its super-block."""
    found = ()
    for group in gl.static_range(GROUPS):
        found = found + (gl.load(at + 64 * group, there, 0),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@gluon.jit
def _load(
    code_at, scale_at, other_at, unit, units, num_programs, CHUNKS: gl.constexpr,
    PACKING: gl.constexpr, APART: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Words, scales and `others` of a unit: a tile's turn, in which each warp has a chunk.

    APART: blocks of 64 outputs from the gate to `up`; 0: there is no gate.
    """
    TURNS: gl.constexpr = (CHUNKS + WARPS - 1) // WARPS
    HALVES: gl.constexpr = PACKING.plane // 32
    LINES: gl.constexpr = PACKING.lines
    tile = gl.program_id(0) + unit // TURNS * num_programs
    ROWS: gl.constexpr = 8 if APART else 16  # that follow each other
    LOWER: gl.constexpr = APART * CHUNKS * 64 if APART else 8
    blocks = (tile // (64 // ROWS)).to(gl.int64)
    block = blocks * CHUNKS
    row = tile % (64 // ROWS) * ROWS
    four: gl.constexpr = gl.SliceLayout(1, code_at.type.layout)
    chunk = unit % TURNS * WARPS + gl.arange(0, 32 * WARPS, four) // 32
    there = ((chunk < CHUNKS) & (unit < units))[:, None]
    at = block * (1024 * HALVES) + row * (16 * HALVES)
    at = code_at + (at + chunk * (1024 * HALVES))[:, None]
    words = _words(at, there, HALVES, LOWER * (16 * HALVES))
    chunk = gl.convert_layout(chunk, gl.SliceLayout(1, scale_at.type.layout), assert_trivial=True)
    there = ((chunk < CHUNKS) & (unit < units))[:, None]
    at = (block * (64 * LINES) + row + chunk * (64 * LINES))[:, None]
    scales = _of_groups(scale_at + at, there, LINES)
    if PACKING.span:
        SUPERS: gl.constexpr = (CHUNKS + PACKING.span - 1) // PACKING.span
        above = blocks * SUPERS + chunk // PACKING.span
        at = (above * (64 * PACKING.kinds) + row)[:, None]
        others = _of_groups(other_at + at, there, PACKING.kinds)
    elif PACKING.has_minimums or PACKING.zero < 0:
        others = _of_groups(other_at + at, there, LINES)
    else:
        others = scales  # not read
    return words, scales, others


@gluon.jit
def _row(x, size, block, TURNS: gl.constexpr, PARTS: gl.constexpr, WARPS: gl.constexpr):
    """Words of x `[turn, part, warp, 16]`, where a chunk's parts are halves of planes."""
    order: gl.constexpr = [3, 2, 1, 0]
    deep: gl.constexpr = gl.BlockedLayout([1, 1, 1, 4], [1, 8, 1, 4], [1, 1, WARPS, 1], order)
    of_turn: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, deep)))
    of_part: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, deep)))
    of_warp: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, deep)))
    of_word: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, deep)))
    turn = block * TURNS + gl.arange(0, TURNS, of_turn)[:, None, None, None]
    part = gl.arange(0, PARTS, of_part)[None, :, None, None]
    warp = gl.arange(0, WARPS, of_warp)[None, None, :, None]
    i = gl.arange(0, 16, of_word)[None, None, None, :]
    column = ((turn * WARPS + warp) * PARTS + part) * 16 + i
    return gl.load(x + column, column < size // 2, 0)


@gluon.jit
def _stage(words, staged, sums, dtype: gl.constexpr, GROUPS: gl.constexpr):
    """Copy what `_row` gave to shared memory, and sums of its groups, `[turn, group, warp]`."""
    turns: gl.constexpr = words.shape[0]
    low = (words & 0xFFFF).to(gl.int16).to(dtype, bitcast=True).to(gl.float32)
    high = (words >> 16).to(gl.int16).to(dtype, bitcast=True).to(gl.float32)
    by_part = gl.sum(low + high, 3)
    shape: gl.constexpr = [turns, GROUPS, words.shape[1] // GROUPS, words.shape[2]]
    staged.store(words)
    sums.store(gl.sum(gl.reshape(by_part, shape), 2))


@gluon.jit
def _twice(one):
    """`[threads, 2]` (upper and lower row) as `[threads, 4]`, in the places of the sums."""
    four: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [one.shape[0] // 32, 1], [1, 0])
    twice = gl.reshape(gl.join(one, one), [one.shape[0], 4])
    return gl.convert_layout(twice, four, assert_trivial=True)


@gluon.jit
def _of_warp(shared, like, THREADS: gl.constexpr, WARPS: gl.constexpr):
    """From shared memory `[warp, 1, 1 or 16]`: what each thread needs, `[threads, 4]`."""
    threads: gl.constexpr = [1, 32 // THREADS, THREADS]
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 4], threads, [WARPS, 1, 1], [2, 1, 0])
    shape: gl.constexpr = [WARPS, 32 // THREADS, 4 * THREADS]
    value, _ = gl.broadcast(shared.load(layout), gl.zeros(shape, shared.dtype, layout))
    value = gl.reshape(value, [32 * WARPS, 4])
    return gl.convert_layout(value, like.type.layout, assert_trivial=True)


@gluon.jit
def _number(scales, others, group: gl.constexpr, KIND: gl.constexpr, PACKING: gl.constexpr):
    """Scales (KIND 0) or minimums (1) of a group, in the places of the sums."""
    if PACKING.span:
        # As in `tiled_groups`.
        bits = (scales[KIND] >> (8 * group)) & 255 | 0x4B000000
        number = (bits.to(gl.float32, bitcast=True) - 8388736.0) * others[KIND].to(gl.float32)
    elif KIND == 1:
        number = others[group].to(gl.float32)
    else:
        number = scales[group].to(gl.float32)
    return _twice(number)


@gluon.jit
def _add_unit(
    total, loaded, staged, sums, turn, dtype: gl.constexpr, PACKING: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """`total` and the products of what `_load` gave."""
    words, scales, others = loaded
    HALVES: gl.constexpr = PACKING.plane // 32
    GROUPS: gl.constexpr = PACKING.groups
    PRODUCTS: gl.constexpr = BF16 if dtype == gl.bfloat16 else FP16
    for group in gl.static_range(GROUPS):
        # The sum of what each code has too much, times x.
        if PACKING.zero >= 0:
            zero = gl.full(total.shape, -BASE - PACKING.zero, gl.float32, total.type.layout)
        else:
            zero = _twice((-BASE - others[group]).to(gl.float32))
        summed = _of_warp(sums.index(turn * GROUPS + group), total, 1, WARPS)
        part = zero * summed
        for place in gl.static_range(group * 4 // GROUPS, (group + 1) * 4 // GROUPS):
            for half in gl.static_range(HALVES):
                line = staged.index((turn * 4 + place) * HALVES + half)
                part = gl.inline_asm_elementwise(
                    PRODUCTS[place],
                    OPERANDS,
                    [words[2 * half], words[2 * half + 1], _of_warp(line, total, 4, WARPS), part],
                    gl.float32,
                    is_pure=True,
                    pack=4,
                )
        total += part * _number(scales, others, group, 0, PACKING)
        if PACKING.has_minimums:
            total += summed * _number(scales, others, group, 1, PACKING)
    return total


@gluon.jit
def _store(
    kept, bias, out, first, step, num_tiles, num_out, HAS_BIAS: gl.constexpr, APART: gl.constexpr,
    GELU: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Sums of all warps of 8 tiles, rounded; of gate and up, what they give."""
    across: gl.constexpr = gl.BlockedLayout([WARPS, 1], [1, 32], [1, WARPS], [1, 0])
    result = gl.sum(gl.convert_layout(gl.reshape(kept, [WARPS, 128]), across), 0)
    i = gl.arange(0, 128, result.type.layout)
    tile = first + (i // 4 % 4 * 2 + i % 2) * step
    lower = i % 4 // 2
    if APART:
        n = tile * 8 + i // 16
        at = n + lower * (64 * APART)
    else:
        n = tile * 16 + i // 16 + lower * 8
        at = n
    inside = (tile < num_tiles) & (n < num_out)
    if HAS_BIAS:
        result += gl.load(bias + at, inside, 0.0).to(gl.float32)
    result = result.to(out.dtype.element_ty)
    if APART:
        gate = result.to(gl.float32)
        up = gl.inline_asm_elementwise(
            "shfl.sync.bfly.b32 $0, $1, 2, 31, 0xffffffff;", "=f,f", [gate], gl.float32, False, 1
        )
        result = (gate_value(gate, GELU) * up).to(out.dtype.element_ty)
        inside = inside & (lower == 0)
    gl.store(out + n, result, inside)


@gluon.jit(do_not_specialize=("num_tiles",))
def _one_row(
    x, codes, scales, others, bias, out, num_out, num_tiles, size,
    CHUNKS: gl.constexpr, PACKING: gl.constexpr, HAS_BIAS: gl.constexpr, APART: gl.constexpr,
    GELU: gl.constexpr, DEPENDENT: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Program i: tiles i, i + the number of programs, and so on, of 16 outputs. Warp w takes a
    tile's chunks w, w + WARPS, and so on. x and codes are read as words of 32 bits."""
    TURNS: gl.constexpr = (CHUNKS + WARPS - 1) // WARPS
    HALVES: gl.constexpr = PACKING.plane // 32
    GROUPS: gl.constexpr = PACKING.groups
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
    upper, lower = (lane // 4)[:, None], gl.arange(0, 2, gl.SliceLayout(0, two))[None, :]
    LOWER: gl.constexpr = APART * CHUNKS * 64 * PACKING.lines if APART else 8
    scale_at = scales + (upper + LOWER * lower)
    if PACKING.span:
        SUPERS: gl.constexpr = (CHUNKS + PACKING.span - 1) // PACKING.span
        ABOVE: gl.constexpr = APART * SUPERS * 64 * PACKING.kinds if APART else 8
        other_at = others + (upper + ABOVE * lower)
    else:
        other_at = others + (upper + LOWER * lower)
    first, step = gl.program_id(0), gl.num_programs(0)
    units = (num_tiles - first + step - 1) // step * TURNS
    first_unit = _load(code_at, scale_at, other_at, 0, units, step, CHUNKS, PACKING, APART, WARPS)
    if DEPENDENT:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.b32 $0, 0;", "=r", [], gl.int32, False, 1
        )
    BLOCK: gl.constexpr = TURNS if TURNS <= 2 else 4
    BLOCKS: gl.constexpr = (TURNS + BLOCK - 1) // BLOCK
    # Loads end in the order in which they began: those of x between the units'.
    row = (_row(x, size, 0, BLOCK, 4 * HALVES, WARPS),)
    for block in gl.static_range(1, BLOCKS):
        # Triton knows no other way.
        row = row + (_row(x, size, block, BLOCK, 4 * HALVES, WARPS),)  # type: ignore[assignment]  # noqa: RUF005
    second_unit = _load(code_at, scale_at, other_at, 1, units, step, CHUNKS, PACKING, APART, WARPS)
    loaded = (first_unit, second_unit)
    four_deep: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    staged = gl.allocate_shared_memory(gl.int32, [BLOCKS, BLOCK, 4 * HALVES, WARPS, 16], four_deep)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    sums = gl.allocate_shared_memory(gl.float32, [BLOCKS, BLOCK, GROUPS, WARPS], flat)
    for block in gl.static_range(BLOCKS):
        _stage(row[block], staged.index(block), sums.index(block), dtype, GROUPS)
    staged = viewed(staged, gl.int32, [BLOCKS * BLOCK * 4 * HALVES, WARPS, 1, 16], flat)
    sums = viewed(sums, gl.float32, [BLOCKS * BLOCK * GROUPS, WARPS, 1, 1], flat)
    total = gl.zeros([32 * WARPS, 4], gl.float32, four)
    barrier()
    # All rows of x are one: of its sums each place keeps those of another tile, of 8 (`_store`).
    kept = gl.zeros_like(total)
    place = (gl.arange(0, 32 * WARPS, gl.SliceLayout(1, four)) % 4 * 2)[:, None] + (i % 2)[None, :]
    # Two units a round: words that were copied to other registers would be waited for at once.
    for unit in range(0, units, 2):
        for ahead in gl.static_range(2):
            at = unit + ahead
            turn = at % TURNS
            # The first condition is known to the compiler.
            if TURNS % 2 == 0 or ahead == 0:  # noqa: SIM114
                total = _add_unit(total, loaded[ahead], staged, sums, turn, dtype, PACKING, WARPS)
            elif at < units:
                total = _add_unit(total, loaded[ahead], staged, sums, turn, dtype, PACKING, WARPS)
            following = _load(
                code_at, scale_at, other_at, at + 2, units, step, CHUNKS, PACKING, APART, WARPS
            )
            loaded = (following, loaded[1]) if ahead == 0 else (loaded[0], following)
            if turn == TURNS - 1:
                number = at // TURNS
                kept = gl.where(place == number % 8, total, kept)
                total = gl.zeros_like(total)
                if (number % 8 == 7) | (at == units - 1):
                    tile = first + number // 8 * (8 * step)
                    _store(
                        kept, bias, out, tile, step, num_tiles, num_out,
                        HAS_BIAS, APART, GELU, WARPS,
                    )  # fmt: skip


def one_row_product(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    others: Tensor,
    packing: Packing,
    bias: Tensor | None,
    out: Tensor,
    sms: int,
    gate: Literal["silu", "gelu"] | None = None,
) -> None:
    """x `[1, size]`, contiguous, of 16 bits -> out `[1, num_out]`: what `TiledGroups.takes_one_row`
    takes. Sums are float32, and weights are not rounded.

    Args:
        codes, scales, others, packing: as in `TiledGroups`.
        gate: of the first half of the products, which multiplies the second half: out is
            `[1, num_out / 2]`, of which 64 must be a divisor.
    """
    num_out, size = out.shape[1], x.shape[1]
    num_tiles = cdiv(num_out, 16 if gate is None else 8)
    _one_row[(min(num_tiles, 2 * sms),)](
        x.view(torch.int32),
        codes.view(torch.int32),
        scales,
        others,
        out if bias is None else bias,
        out,
        num_out,
        num_tiles,
        size,
        CHUNKS=codes.shape[1],
        PACKING=packing,
        HAS_BIAS=bias is not None,
        APART=0 if gate is None else num_out // 64,
        GELU=gate == "gelu",
        WARPS=WARPS,
        num_warps=WARPS,
        **dependent_launch(x.device),
    )
