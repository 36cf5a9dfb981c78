"""Mixture of experts in Triton: routing, the order of rows by expert, and the experts' products.

Nothing here reads a number from the device: launches depend on the number of rows alone, so all of
it is in a CUDA graph. No row is dropped and no expert has a capacity.

    route      a program per row: scores, and the highest of them
    sort_rows  a program per expert: counts the rows before it, then lists its own in order
    up         tiles of an expert's rows, gathered from x: activation(gate, up)
    down       tiles of these results; their products times scores are stored by row, `top_k` for
               each
    summed     a row's results, and what is beside them

Tiles are not listed anywhere: each program finds its own from the number of rows of each expert.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from onestem.ops.experts import Beside, GroupedWeight
from onestem.ops.triton.dependent import dependent_launch, wait_for_launch
from onestem.ops.triton.layers import gate_value
from onestem.ops.triton.sizes import cdiv, power_of_2
from onestem.ops.triton.tiled import Tiles

_SORT_BLOCK, _SUM_BLOCK = 4096, 1024


# Maximum average rows of an expert, and the tiles of `up` (which has two weights, so twice the
# outputs) and of `down` for them.
_TILES = (
    (1, Tiles(32, 16), Tiles(64, 16)),
    (10, Tiles(64, 16), Tiles(128, 16)),
    (24, Tiles(64, 32, stages=3), Tiles(128, 32, stages=3)),
    (56, Tiles(64, 64, columns=64), Tiles(128, 64, columns=64)),
    (
        math.inf,
        Tiles(128, 128, warps=8, stages=3, columns=64),
        Tiles(128, 128, warps=8, columns=64),
    ),
)
# For float32, which takes twice the memory and is rare.
_WIDE = Tiles(32, 32, stages=2, columns=32)
_WIDE_TILES = ((math.inf, _WIDE, _WIDE),)


def choose_tiles(
    table: Iterable[tuple[float, Tiles, Tiles]], rows: int, num: int
) -> tuple[Tiles, Tiles]:
    """Tiles of `up` and of `down` if `num` experts have `rows` rows in all."""
    return next((up, down) for most, up, down in table if rows <= most * num)


@triton.jit
def _route_kernel(
    logits, correction, scores, chosen, num, scale,
    SIGMOID: tl.constexpr, NORMALIZED: tl.constexpr, CORRECTED: tl.constexpr, TOP_K: tl.constexpr,
    DEPENDENT: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    wait_for_launch(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    e, place = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    inside = e < num
    x = tl.load(logits + row * num + e, mask=inside, other=float("-inf"))
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-x))
    else:
        score = tl.exp(x - tl.max(x, 0))
        score = score / tl.sum(score, 0)
    rank = score
    if CORRECTED:
        rank += tl.load(correction + e, mask=inside, other=0.0)
    rank = tl.where(inside, rank, float("-inf"))
    taken = tl.zeros([BLOCK_K], tl.float32)
    experts = tl.zeros([BLOCK_K], tl.int32)
    for i in tl.static_range(TOP_K):
        # A row of NaN takes some experts too: the lists below must hold valid experts.
        best = tl.minimum(tl.argmax(rank, 0), num - 1)
        taken = tl.where(place == i, tl.sum(tl.where(e == best, score, 0.0), 0), taken)
        experts = tl.where(place == i, best, experts)
        rank = tl.where(e == best, float("-inf"), rank)
    if NORMALIZED:
        taken = taken / tl.sum(taken, 0)
    to = row * TOP_K + place
    tl.store(scores + to, taken * scale, mask=place < TOP_K)
    tl.store(chosen + to, experts, mask=place < TOP_K)


def route(
    logits: Tensor,
    correction: Tensor | None,
    *,
    top_k: int,
    sigmoid: bool,
    normalized: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """logits float32 `[n, num]` -> scores float32 and experts int32, `[n, top_k]` each, highest
    first; see `Experts`."""
    rows, num = logits.shape
    scores = torch.empty(rows, top_k, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(rows, top_k, dtype=torch.int32, device=logits.device)
    if rows:
        _route_kernel[(rows,)](
            logits, logits if correction is None else correction, scores, chosen, num, scale,
            SIGMOID=sigmoid, NORMALIZED=normalized, CORRECTED=correction is not None, TOP_K=top_k,
            BLOCK_K=power_of_2(top_k), BLOCK_E=power_of_2(num),
            num_warps=1, **dependent_launch(logits.device),
        )  # fmt: skip
    return scores, chosen


@triton.jit
def _sort_kernel(
    chosen, order, ends, total, DEPENDENT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    wait_for_launch(DEPENDENT)
    expert = tl.program_id(0)
    block = tl.arange(0, BLOCK)
    before = tl.zeros([BLOCK], tl.int32)
    for start in range(0, total, BLOCK):
        at = start + block
        before += (tl.load(chosen + at, mask=at < total, other=expert) < expert).to(tl.int32)
    place = tl.sum(before, 0)
    for start in range(0, total, BLOCK):
        at = start + block
        mine = (tl.load(chosen + at, mask=at < total, other=-1) == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(mine, 0) - 1, at, mask=mine > 0)
        place += tl.sum(mine, 0)
    tl.store(ends + expert, place)


def sort_rows(chosen: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """chosen `[n, top_k]`, 0 to num - 1 -> order int32 `[n * top_k]`: places in `chosen` by expert,
    rising within an expert; ends int32 `[num]`: the end of each expert's places in `order`."""
    total = chosen.numel()
    order = torch.empty(total, dtype=torch.int32, device=chosen.device)
    ends = torch.empty(num, dtype=torch.int32, device=chosen.device)
    block = min(_SORT_BLOCK, max(16, power_of_2(total)))
    options = dependent_launch(chosen.device)
    _sort_kernel[(num,)](chosen, order, ends, total, BLOCK=block, num_warps=4, **options)
    return order, ends


@triton.jit
def expert_tile(ends, tile, num, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr):
    """(expert, its tile's first place, its end); an expert of `num` or more: no such tile."""
    e = tl.arange(0, BLOCK_E)
    end = tl.load(ends + e, mask=e < num, other=0)
    begin = tl.load(ends + e - 1, mask=(e > 0) & (e < num), other=0)
    tiles = (end - begin + BLOCK_M - 1) // BLOCK_M
    last = tl.cumsum(tiles, 0)
    expert = tl.sum((last <= tile).to(tl.int32), 0)
    own = e == expert
    first = tl.sum(tl.where(own, begin + (tile - last + tiles) * BLOCK_M, 0), 0)
    return expert, first, tl.sum(tl.where(own, end, 0), 0)


@triton.jit
def gated(gate, up, alpha, limit, CLAMPED: tl.constexpr, GELU: tl.constexpr):
    """What an expert makes of a gate's products and those of `up`; see `GroupedExperts`."""
    if CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
    if GELU:
        value = gate_value(gate, True) * up
    else:
        value = gate / (1.0 + tl.exp(-alpha * gate)) * up
    return value


@triton.jit
def _load_weight(values, line, inside, k, size, BLOCK_K: tl.constexpr):
    """Columns k to k + BLOCK_K of some lines: [BLOCK_K, BLOCK_N]."""
    column = k + tl.arange(0, BLOCK_K)
    at = line[None, :] * size + column[:, None]
    return tl.load(values + at, mask=(column < size)[:, None] & inside[None, :], other=0.0)


@triton.jit
def _load_rows(x, row, inside, k, size, BLOCK_K: tl.constexpr):
    """Columns k to k + BLOCK_K of some rows: [BLOCK_M, BLOCK_K]."""
    column = k + tl.arange(0, BLOCK_K)
    mask = inside[:, None] & (column < size)[None, :]
    return tl.load(x + row.to(tl.int64)[:, None] * size + column[None, :], mask=mask, other=0.0)


@triton.jit
def _up_kernel(
    x, order, ends, values, bias, out, num, top_k, hidden, inner, alpha, limit,
    CLAMPED: tl.constexpr, GELU: tl.constexpr, PRECISION: tl.constexpr,
    BIAS: tl.constexpr, BLOCK_E: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    BLOCK_M: tl.constexpr = TILES.rows
    BLOCK_N: tl.constexpr = TILES.out
    BLOCK_K: tl.constexpr = TILES.columns
    expert, first, end = expert_tile(ends, tl.program_id(1), num, BLOCK_E, BLOCK_M)
    if expert < num:
        place = first + tl.arange(0, BLOCK_M)
        inside = place < end
        row = tl.load(order + place, mask=inside, other=0) // top_k
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        in_n = n < inner
        line = expert.to(tl.int64) * 2 * inner + n
        gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, hidden, BLOCK_K):
            a = _load_rows(x, row, inside, k, hidden, BLOCK_K)
            w = _load_weight(values, line, in_n, k, hidden, BLOCK_K)
            gate = tl.dot(a, w, gate, input_precision=PRECISION)
            w = _load_weight(values, line + inner, in_n, k, hidden, BLOCK_K)
            up = tl.dot(a, w, up, input_precision=PRECISION)
        if BIAS:
            gate += tl.load(bias + line, mask=in_n, other=0.0).to(tl.float32)[None, :]
            up += tl.load(bias + line + inner, mask=in_n, other=0.0).to(tl.float32)[None, :]
        value = gated(gate, up, alpha, limit, CLAMPED, GELU)
        to = out + place.to(tl.int64)[:, None] * inner + n[None, :]
        tl.store(to, value.to(out.dtype.element_ty), mask=inside[:, None] & in_n[None, :])


@triton.jit
def _down_kernel(
    x, order, ends, values, bias, factors, out, num, inner, hidden,
    PRECISION: tl.constexpr, BIAS: tl.constexpr, BLOCK_E: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    BLOCK_M: tl.constexpr = TILES.rows
    BLOCK_N: tl.constexpr = TILES.out
    BLOCK_K: tl.constexpr = TILES.columns
    expert, first, end = expert_tile(ends, tl.program_id(1), num, BLOCK_E, BLOCK_M)
    if expert < num:
        place = first + tl.arange(0, BLOCK_M)
        inside = place < end
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        in_n = n < hidden
        line = expert.to(tl.int64) * hidden + n
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, inner, BLOCK_K):
            a = _load_rows(x, place, inside, k, inner, BLOCK_K)
            w = _load_weight(values, line, in_n, k, inner, BLOCK_K)
            total = tl.dot(a, w, total, input_precision=PRECISION)
        if BIAS:
            total += tl.load(bias + line, mask=in_n, other=0.0).to(tl.float32)[None, :]
        row = tl.load(order + place, mask=inside, other=0)
        total *= tl.load(factors + row, mask=inside, other=0.0)[:, None]
        to = out + row.to(tl.int64)[:, None] * hidden + n[None, :]
        tl.store(to, total.to(out.dtype.element_ty), mask=inside[:, None] & in_n[None, :])


@triton.jit
def _summed_kernel(
    results, beside, gate, out, hidden, TOP_K: tl.constexpr, BESIDE: tl.constexpr,
    GATED: tl.constexpr, DEPENDENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, block)."""
    wait_for_launch(DEPENDENT)
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < hidden
    dtype: tl.constexpr = out.dtype.element_ty
    SUMS: tl.constexpr = 4 if TOP_K > 4 else TOP_K
    line = results + row * TOP_K * hidden + at
    total = tl.zeros([BLOCK], tl.float32)
    # Four sums, and then these: PyTorch's order.
    for first in tl.static_range(SUMS):
        part = tl.zeros([BLOCK], tl.float32)
        for place in tl.static_range(first, TOP_K, 4):
            part += tl.load(line + place * hidden, mask=inside, other=0.0).to(tl.float32)
        total += part
    value = total.to(dtype)
    if BESIDE:
        other = tl.load(beside + row * hidden + at, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            share = (1.0 / (1.0 + tl.exp(-tl.load(gate + row)))).to(dtype).to(tl.float32)
            other = (other * share).to(dtype).to(tl.float32)
        value = (other + value.to(tl.float32)).to(dtype)
    tl.store(out + row * hidden + at, value, mask=inside)


def summed(results: Tensor, beside: Beside | None) -> Tensor:
    """The sum of a row's results `[n, top_k, hidden]`, added in float32, and what is beside them:
    `[n, hidden]`. All is rounded as by `results.sum(1)` and `Beside.added`."""
    rows, top_k, hidden = results.shape
    out = torch.empty(rows, hidden, dtype=results.dtype, device=results.device)
    other, gate = (None, None) if beside is None else beside
    if rows:
        _summed_kernel[(rows, cdiv(hidden, _SUM_BLOCK))](
            results, out if other is None else other, out if gate is None else gate, out, hidden,
            TOP_K=top_k, BESIDE=other is not None, GATED=gate is not None, BLOCK=_SUM_BLOCK,
            num_warps=4, **dependent_launch(results.device),
        )  # fmt: skip
    return out


@dataclass(frozen=True, eq=False)
class GroupedExperts:
    """All experts of a layer as grouped products. Those in mxfp4 are `TiledExperts`.

    Attributes:
        up: hidden_size -> 2 * intermediate_size, gate first.
        down: intermediate_size -> hidden_size.
        clamp: alpha and limit of a clamped SwiGLU; None: `silu(gate) * up`.
        gelu: GELU (tanh approximation) instead of SiLU.
    """

    up: GroupedWeight
    down: GroupedWeight
    clamp: tuple[float, float] | None = None
    gelu: bool = False

    def __call__(
        self, x: Tensor, scores: Tensor, chosen: Tensor, beside: Beside | None = None
    ) -> Tensor:
        """Experts' results times their scores, summed, and what is beside them: x `[n,
        hidden_size]`, scores float32 and chosen `[n, top_k]` -> `[n, hidden_size]` in x's dtype."""
        num, size, hidden = len(self.up.values), x.shape[1], self.down.values.shape[1]
        order, ends = sort_rows(chosen, num)
        total, width = len(order), self.up.values.shape[1] // 2
        inner = torch.empty(total, width, dtype=x.dtype, device=x.device)
        out = torch.empty(*scores.shape, hidden, dtype=x.dtype, device=x.device)
        alpha, limit = self.clamp or (1.0, 0.0)
        is_wide = x.dtype == torch.float32
        precision = "ieee" if is_wide else "tf32"
        if total:
            of_up, of_down = choose_tiles(_WIDE_TILES if is_wide else _TILES, total, num)
            _up_kernel[tile_grid(total, num, width, of_up)](
                x.contiguous(), order, ends, self.up.values, bias_of(self.up.bias, x), inner, num,
                chosen.shape[1], size, width, alpha, limit, CLAMPED=self.clamp is not None,
                GELU=self.gelu, PRECISION=precision, **constants(self.up.bias, num, of_up),
            )  # fmt: skip
            _down_kernel[tile_grid(total, num, hidden, of_down)](
                inner, order, ends, self.down.values, bias_of(self.down.bias, x), scores, out, num,
                width, hidden, PRECISION=precision, **constants(self.down.bias, num, of_down),
            )  # fmt: skip
        return summed(out, beside)

    def tensors(self) -> list[Tensor]:
        """All tensors held, for counting bytes."""
        return self.up.tensors() + self.down.tensors()


def tile_grid(total: int, num: int, columns: int, tiles: Tiles) -> tuple[int, int]:
    """Programs by columns and by tiles of rows: the maximum for `total` rows of `num` experts,
    however rows are distributed."""
    most = (total + (tiles.rows - 1) * min(num, total)) // tiles.rows
    return cdiv(columns, tiles.out), most


def bias_of(bias: Tensor | None, x: Tensor) -> Tensor:
    """A bias for a kernel; if there is none, a placeholder of the right type."""
    return x if bias is None else bias


def constants(bias: Tensor | None, num: int, tiles: Tiles) -> dict[str, object]:
    """What both products of `num` experts are compiled for."""
    return {
        "BIAS": bias is not None,
        "BLOCK_E": power_of_2(num),
        "TILES": tiles,
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }
