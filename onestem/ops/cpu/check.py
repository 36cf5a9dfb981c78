"""Checks that an instruction set's kernels compute what the portable ones do.

Kernels for AVX-512 and AMX run on few machines; a compiler's or a kernel's mistake there must not
become a wrong answer. So the first use of an instruction set compares it with code without special
instructions, on a plan and rows that reach every kernel. It takes a few milliseconds per process.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import torch
from torch import Tensor

from onestem.ops.cpu.attention import CpuAttention
from onestem.ops.cpu.delta import CpuDelta
from onestem.ops.cpu.extension import DTYPES
from onestem.ops.cpu.layers import CpuLayers
from onestem.ops.cpu.linear import CpuCodes
from onestem.ops.delta import PartRows
from onestem.ops.kv import laid_out
from onestem.ops.layers import Angles, Heads
from onestem.ops.plan import AttentionPlan, PlanBuilder, windowed
from onestem.ops.scores import PLAIN, Scores
from onestem.ops.state_rows import StateRows

TRUSTED = "portable"
KV_HEADS, GROUP, PAGE_SIZE = 2, 3, 16


def find_fault(isa: str) -> str | None:
    """What an instruction set computes wrongly, in words; None if all is correct."""
    with torch.device("cpu"):
        generator = torch.Generator().manual_seed(0)
        for dtype in DTYPES:
            name = str(dtype).removeprefix("torch.")
            if not _attention_agrees(isa, dtype, generator):
                return f"attention in {name}"
            if not _layers_agree(isa, dtype, generator):
                return f"layer operations in {name}"
            # Heads that fill vectors, and ones that do not.
            if not all(_delta_agrees(isa, dtype, size, generator) for size in (64, 20)):
                return f"gated delta rules in {name}"
            if not _codes_agree(isa, dtype, generator):
                return f"products of 8 and 4 bits in {name}"
    return None


def _attention_agrees(isa: str, dtype: torch.dtype, generator: torch.Generator) -> bool:
    """Compare wide items of many and of few rows, one that is masked and padded, and vectors, with
    plain and with adjusted scores."""
    for head_dim, window in ((64, None), (80, 30)):
        plan, pages = _plan(window)
        shape = (pages, PAGE_SIZE, KV_HEADS, head_dim)
        q = torch.randn(plan.num_rows, KV_HEADS * GROUP, head_dim, generator=generator).to(dtype)
        values = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
        k, v = (laid_out(x, head_major=True) for x in values)
        slopes = torch.linspace(0.01, 0.1, KV_HEADS * GROUP)
        scores = PLAIN if window is None else Scores(softcap=20.0, alibi_slopes=slopes)
        got, want = (
            CpuAttention(isa=name).prepare(plan).attend(q, k, v, scores) for name in (isa, TRUSTED)
        )
        if not (_close(got.out, want.out) and _close(got.lse, want.lse, dtype)):
            return False
    return True


def _plan(window: int | None) -> tuple[AttentionPlan, int]:
    """A plan and its number of pages. Eleven decodes share 300 tokens, four of them 150 more, and
    have 1 to 31 tokens of their own; a chunk of 37 rows follows 12 other tokens."""
    builder, taken, positions = PlanBuilder(PAGE_SIZE), 0, []

    def run(tokens: int, position: int) -> int:
        nonlocal taken
        count = -(-tokens // PAGE_SIZE)
        taken += count
        ids = np.arange(taken - 1, taken - 1 - count, -1, dtype=np.int32)
        return builder.add_run(ids, 0, tokens, position)

    builder.add_span(0, 11, run(300, 0), 300)
    builder.add_span(0, 4, run(150, 300), 150)
    for row in range(11):
        own, above = 1 + 3 * row, 450 if row < 4 else 300
        builder.add_span(row, 1, run(own, above), own)
        positions.append(above - 1 + own)
    builder.add_span(11, 37, run(49, 0), 13, step=1)
    positions.extend(range(12, 49))
    return windowed(builder.build(np.array(positions)), window), taken


def _layers_agree(isa: str, dtype: torch.dtype, generator: torch.Generator) -> bool:
    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    hidden, delta, weight, gate_up = drawn(3, 50), drawn(3, 50), drawn(50), drawn(3, 76)
    qkv, norms = drawn(3, 4 * 48), (drawn(48), drawn(48))
    turn = torch.randn(3, 24, generator=generator, dtype=torch.float32)

    def results(name: str) -> list[Tensor]:
        ops, residual = CpuLayers(isa=name), hidden.clone()
        empty = torch.zeros(2, 2, 1, 48, dtype=dtype)
        pages = [laid_out(empty, head_major=True) for _ in range(2)]
        return [
            ops.add_rms_norm(residual, delta, weight, 1e-5),
            residual,
            ops.silu_mul(gate_up),
            ops.rope_write(
                qkv,
                Heads(2, 1, 48, *norms, 1e-6),
                Angles(turn.cos(), turn.sin()),
                torch.tensor([3, 0, 2]),
                *pages,
            ),
            *pages,
        ]

    return all(_close(a, b) for a, b in zip(results(isa), results(TRUSTED), strict=True))


def _delta_agrees(isa: str, dtype: torch.dtype, size: int, generator: torch.Generator) -> bool:
    """Compare a single row, and blocks of all their rows and of fewer."""

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32)

    parts = np.array([(0, 1, 7, 0, 1), (1, 29, 12, -1, 2)], np.int32)
    rows = PartRows.of(StateRows(*parts.T), torch.device("cpu"))
    x, weight, norm = (
        drawn(*shape).to(dtype) for shape in ((30, 4 * size), (4 * size, 4), (size,))
    )
    decay, beta = -drawn(30, 2).square(), drawn(30, 2).sigmoid()
    inputs, states = drawn(3, 3, 4 * size).to(dtype), drawn(3, 2, size, size)
    q, k, v = x.unflatten(1, (4, size)).split((1, 1, 2), 1)

    def results(name: str) -> list[Tensor]:
        ops, before, heads = CpuDelta(isa=name), inputs.clone(), states.clone()
        return [
            ops.causal_conv(x, weight, before, rows),
            ops.delta_rule(q, k, v, decay, beta, heads, rows),
            ops.gated_norm(v, norm, v, 1e-6),
            before,
            heads,
        ]

    return all(_close(a, b) for a, b in zip(results(isa), results(TRUSTED), strict=True))


def _codes_agree(isa: str, dtype: torch.dtype, generator: torch.Generator) -> bool:
    """Compare products of one row, a few rows and two panels of tiles; groups with zero points, and
    with minimums."""
    codes = torch.randint(0, 16, (48, 192), generator=generator, dtype=torch.uint8)
    zeros = torch.randint(0, 16, (48, 3), generator=generator).short()
    scales = torch.rand(48, 3, generator=generator) + 0.5
    bytes_ = torch.randint(-128, 128, (48, 192), generator=generator, dtype=torch.int8)
    weights = (
        CpuCodes.of_groups(codes, scales, 64, zeros=zeros),
        CpuCodes.of_groups(bytes_.view(torch.uint8), scales.half(), 64, bits=8, minimums=-scales),
        CpuCodes.of8(bytes_, scales[:, 0].contiguous()),
    )
    for weight, rows in product(weights, (1, 3, 21)):
        x = torch.randn(rows, 192, generator=generator).to(dtype)
        got, want = (replace(weight, isa=name).product(x, None) for name in (isa, TRUSTED))
        # A set may round rows to 8 bits, or weights to bfloat16.
        rounds = weight.group > 0 and dtype.itemsize == 2
        if not _close(got, want, torch.bfloat16 if rounds else None):
            return False
    return True


def _close(got: Tensor, want: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Whether results agree to some units in the last place of the largest value, the effect of
    weights rounded to bf16 and another order of sums. A kernel's mistake is far larger. False for
    NaN."""
    unit = torch.finfo(dtype or got.dtype).eps
    largest = float(want.abs().max())
    error = float((got.double() - want.double()).abs().max())
    return math.isfinite(error) and error <= 8 * unit * max(largest, 1.0)
