"""Synthetic attention steps to measure: trees of shared runs with decodes, and a mixed step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from onestem.errors import ConfigError
from onestem.ops.kv import allocate_pages
from onestem.ops.plan import AttentionPlan, PlanBuilder

__all__ = [
    "CASES",
    "Case",
    "Heads",
    "Step",
    "decode_step",
    "decodes",
    "make_tensors",
    "mixed_step",
    "tensor_bytes",
]


MOST_ROWS, MOST_TOKENS = 1 << 20, 1 << 28  # of a step; lists of more take minutes to make


@dataclass(frozen=True)
class Heads:
    """Shape of the attention: heads, their size, the dtype, tokens per page."""

    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    page_size: int = 16

    @property
    def token_bytes(self) -> int:
        """Keys and values of a token."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Step:
    """A plan, and what peers need to know about it.

    Attributes:
        num_pages: pages that the plan uses, ids 0..num_pages-1 in random order.
        row_runs: the runs that each query stretch sees, in order, whole but the last (which it sees
            causally); rows of a stretch are consecutive.
        row_counts: rows of each stretch.
    """

    name: str
    plan: AttentionPlan
    num_pages: int
    row_runs: list[list[int]]
    row_counts: list[int]

    @property
    def decodes_only(self) -> bool:
        return max(self.row_counts) == 1

    def attended(self) -> np.ndarray:
        """int64 `[num_rows]`: keys that each row sees."""
        seen = np.zeros(self.plan.num_rows, np.int64)
        for row, rows, _, first, end, step in self.plan.spans.tolist():
            seen[row : row + rows] += end - first + step * np.arange(rows)
        return seen

    def flops(self, heads: Heads) -> float:
        """Of the two products, as if nothing were shared (sharing saves none)."""
        return 4.0 * heads.num_q_heads * heads.head_dim * float(self.attended().sum())

    def shared_flops(self, heads: Heads) -> float:
        """Those of spans over a run that several stretches of rows see."""
        readers = np.zeros(self.plan.num_runs, np.int64)
        for runs in self.row_runs:
            readers[runs] += 1
        _, rows, run, first, end, _ = self.plan.spans.T.astype(np.int64)
        pairs = rows * (end - first) * (readers[run] > 1)
        return 4.0 * heads.num_q_heads * heads.head_dim * float(pairs.sum())

    def own_bytes(self, heads: Heads) -> float:
        """Keys and values of runs that one stretch of rows sees."""
        readers = np.zeros(self.plan.num_runs, np.int64)
        for runs in self.row_runs:
            readers[runs] += 1
        return float(heads.token_bytes * int(self.plan.run_len[readers == 1].sum()))

    def bytes(self, heads: Heads) -> float:
        """Each key and value that anybody sees once, queries and outputs once."""
        rows = 2 * self.plan.num_rows * heads.num_q_heads * heads.head_dim * heads.dtype.itemsize
        return float(heads.token_bytes * int(self.plan.run_len.sum()) + rows)


def tensor_bytes(step: Step, heads: Heads) -> int:
    """What `make_tensors` gives takes."""
    query = step.plan.num_rows * heads.num_q_heads * heads.head_dim * heads.dtype.itemsize
    return step.num_pages * heads.page_size * heads.token_bytes + query


class _Maker:
    """Adds runs in pages taken in random order."""

    def __init__(self, seed: int, page_size: int, num_pages: int) -> None:
        self.builder = PlanBuilder(page_size)
        self.page_size = page_size
        self._free = np.random.default_rng(seed).permutation(num_pages).astype(np.int32)
        self._used = 0

    def run(self, length: int, position: int) -> int:
        count = -(-length // self.page_size)
        pages = self._free[self._used : self._used + count]
        self._used += count
        return self.builder.add_run(pages, 0, length, position)


def decode_step(
    *,
    groups: int,
    degrees: tuple[int, ...],
    prefixes: tuple[int, ...],
    suffix: int,
    page_size: int = 16,
    seed: int = 0,
) -> Step:
    """One decode row per leaf of `groups` trees: level i has `prefixes[i]` tokens and `degrees[i]`
    branches below it; each leaf has `suffix` tokens of its own."""
    tokens = _levels(groups, degrees, prefixes, suffix)
    num_rows = tokens[-1][0]
    num_pages = sum(count * -(-length // page_size) for count, length in tokens)
    make = _Maker(seed, page_size, num_pages)
    row_runs: list[list[int]] = [[] for _ in range(num_rows)]
    start = 0
    for count, length in tokens:
        rows = num_rows // count
        for i in range(count if length else 0):
            run = make.run(length, start)
            make.builder.add_span(i * rows, rows, run, length)
            for row in range(i * rows, (i + 1) * rows):
                row_runs[row].append(run)
        start += length
    plan = make.builder.build(np.full(num_rows, start - 1))
    name = f"{groups}x{'x'.join(map(str, degrees))} {'+'.join(map(str, prefixes))}/{suffix}"
    return Step(name, plan, num_pages, row_runs, [1] * num_rows)


def _levels(
    groups: int, degrees: tuple[int, ...], prefixes: tuple[int, ...], suffix: int
) -> list[tuple[int, int]]:
    """How many runs there are at each level, and their tokens; the leaves come last."""
    if len(degrees) != len(prefixes):
        raise ConfigError(
            f"degrees {degrees} and prefixes {prefixes}: expected as many degrees as prefixes"
        )
    named = [("groups", groups, 1), ("suffix", suffix, 1)]
    named += [("degree", degree, 1) for degree in degrees]
    named += [("prefix", prefix, 0) for prefix in prefixes]
    for name, value, least in named:
        if value < least:
            raise ConfigError(f"{name} is {value}, expected at least {least}")
    counts = [groups * math.prod(degrees[:i]) for i in range(len(prefixes) + 1)]
    levels = list(zip(counts, (*prefixes, suffix), strict=True))
    rows, stored = counts[-1], sum(count * length for count, length in levels)
    if rows > MOST_ROWS or stored > MOST_TOKENS:
        raise ConfigError(
            f"the step has {rows} decodes and stores {stored} tokens, expected at most {MOST_ROWS} "
            f"and {MOST_TOKENS}: lower groups, degree, prefix or suffix"
        )
    return levels


def mixed_step(
    *,
    chunk_rows: int = 512,
    contexts: tuple[int, ...] = (0, 2048, 8192, 0, 2048, 8192, 2048),
    shared: int = 3,
    decodes: int = 256,
    suffix: int = 256,
    page_size: int = 16,
    seed: int = 0,
) -> Step:
    """Prefill chunks and decodes in one step. The last `shared` chunks stand under one shared run
    (as long as the longest of their contexts) instead of contexts of their own, and so do the
    decodes."""
    alone = contexts[: len(contexts) - shared]
    prefix = max(contexts[len(contexts) - shared :], default=0)
    lengths = [prefix, *[suffix] * decodes, *[c + chunk_rows for c in alone]]
    lengths += [chunk_rows] * shared
    make = _Maker(seed, page_size, sum(-(-n // page_size) for n in lengths))
    system = make.run(prefix, 0)
    positions: list[np.ndarray] = []
    row_runs, row_counts, row = [], [], 0

    def add(run: int, rows: int, before: int, position: int, under: list[int]) -> None:
        nonlocal row
        make.builder.add_span(row, rows, run, before + 1, step=1)
        positions.append(np.arange(position, position + rows))
        row_runs.append([*under, run])
        row_counts.append(rows)
        row += rows

    for _ in range(decodes):
        run = make.run(suffix, prefix)
        add(run, 1, suffix - 1, prefix + suffix - 1, [system])
    for _ in range(shared):
        add(make.run(chunk_rows, prefix), chunk_rows, 0, prefix, [system])
    make.builder.add_span(0, row, system, prefix)
    for context in alone:
        add(make.run(context + chunk_rows, 0), chunk_rows, context, context, [])
    plan = make.builder.build(np.concatenate(positions))
    name = f"mixed: {len(contexts)} chunks of {chunk_rows}, {decodes} decodes"
    num_pages = sum(-(-n // page_size) for n in lengths)
    return Step(name, plan, num_pages, row_runs, row_counts)


def make_tensors(
    step: Step, heads: Heads, device: torch.device, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """q `[num_rows, num_q_heads, head_dim]` and pages with random values; slots that no run uses
    hold NaN."""
    generator = torch.Generator(device).manual_seed(seed)
    rows = (step.plan.num_rows, heads.num_q_heads, heads.head_dim)
    q = torch.randn(rows, generator=generator, device=device, dtype=heads.dtype)
    shape = (step.num_pages, heads.page_size, heads.num_kv_heads, heads.head_dim)
    pages = [
        allocate_pages(*shape, dtype=heads.dtype, device=device).normal_(generator=generator)
        for _ in range(2)
    ]
    unused = torch.from_numpy(_unused_slots(step)).to(device)
    for page in pages:
        page.view(-1, heads.num_kv_heads, heads.head_dim)[unused] = float("nan")
    return q, pages[0], pages[1]


def _unused_slots(step: Step) -> np.ndarray:
    """int64: slots of the pool behind the end of a run."""
    plan = step.plan
    length = plan.run_len.astype(np.int64)
    free = -length % plan.page_size
    last = plan.run_pages[plan.runs[:, 0] + np.maximum(-(-length // plan.page_size) - 1, 0)]
    end = (last.astype(np.int64) + 1) * plan.page_size
    return np.concatenate([np.arange(e - f, e) for e, f in zip(end, free, strict=True)] or [length])


@dataclass(frozen=True)
class Case:
    """A step by name: what makes it for a page size, and the heads where they are not free."""

    make: Callable[..., Step]
    heads: tuple[int, int] | None = None

    def step(self, heads: Heads) -> tuple[Step, Heads]:
        """The step, and the heads it is meant for."""
        if self.heads is not None:
            heads = replace(heads, num_q_heads=self.heads[0], num_kv_heads=self.heads[1])
        return self.make(page_size=heads.page_size), heads


def decodes(groups: int, degrees: tuple[int, ...], prefixes: tuple[int, ...], suffix: int) -> Case:
    """See `decode_step`."""
    step = partial(decode_step, groups=groups, degrees=degrees, prefixes=prefixes, suffix=suffix)
    return Case(step)


# `groups x degree prefix/own`: decodes of 32 query heads on 8 KV heads where nothing else is said.
CASES = {
    "1x1 2048/128": decodes(1, (1,), (2048,), 128),
    "1x32 2048/128": decodes(1, (32,), (2048,), 128),
    "1x256 2048/256": decodes(1, (256,), (2048,), 256),
    "1x256 16384/256": decodes(1, (256,), (16384,), 256),
    "16x16 2048/256": decodes(16, (16,), (2048,), 256),
    "85x3 1568/128": decodes(85, (3,), (1568,), 128),
    "32x8 4096/256": decodes(32, (8,), (4096,), 256),
    "1x1024 8192/128": decodes(1, (1024,), (8192,), 128),
    "256x1 0/2048": decodes(256, (1,), (0,), 2048),
    "8/1 heads 1x512 8192/128": replace(decodes(1, (512,), (8192,), 128), heads=(8, 1)),
    "1x8x32 2048+512/128": decodes(1, (8, 32), (2048, 512), 128),
    "mixed": Case(mixed_step),
}
