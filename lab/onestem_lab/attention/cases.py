"""Synthetic attention steps to measure: decodes on trees of shared runs, and a mixed step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from onestem.errors import ConfigError
from onestem.ops.kv import allocate_pages
from onestem.ops.plan import AttentionPlan, PlanBuilder

__all__ = [
    "CASES",
    "TREES",
    "Case",
    "Heads",
    "Step",
    "decode_step",
    "decodes",
    "make_tensors",
    "mixed_step",
    "tensor_bytes",
    "tree_levels",
]


MOST_ROWS, MOST_TOKENS = 1 << 20, 1 << 28  # of a step; larger lists take minutes to make


@dataclass(frozen=True)
class Heads:
    """Shape of the attention: heads, their size, the dtype, tokens per page."""

    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    page_size: int = 16

    @property
    def label(self) -> str:
        return f"{self.num_q_heads}/{self.num_kv_heads}"

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Step:
    """A plan, and what peers need of it.

    Attributes:
        num_pages: pages that the plan uses, ids 0..num_pages-1 in random order.
        row_runs: the runs that each query stretch sees, in order: whole, but the last causally.
            Rows of a stretch are consecutive.
        row_counts: rows of each stretch.
    """

    plan: AttentionPlan
    num_pages: int
    row_runs: list[list[int]]
    row_counts: list[int]

    @property
    def decodes_only(self) -> bool:
        return max(self.row_counts) == 1

    def seen_slots(self) -> list[np.ndarray]:
        """int64: slots of the tokens that each stretch sees, in order."""
        plan = self.plan
        slots = [plan.slots(run, 0, n) for run, n in enumerate(plan.run_len.tolist())]
        return [np.concatenate([slots[run] for run in runs]) for runs in self.row_runs]

    def attended(self) -> np.ndarray:
        """int64 `[num_rows]`: keys that each row sees."""
        seen = np.zeros(self.plan.num_rows, np.int64)
        for row, rows, _, first, end, step in self.plan.spans.tolist():
            seen[row : row + rows] += end - first + step * np.arange(rows)
        return seen

    def flops(self, heads: Heads) -> float:
        """FLOPs of the two products (sharing saves none)."""
        return 4.0 * heads.num_q_heads * heads.head_dim * float(self.attended().sum())

    def shared_flops(self, heads: Heads) -> float:
        """FLOPs of spans over a run that several stretches of rows see."""
        readers = np.zeros(self.plan.num_runs, np.int64)
        for runs in self.row_runs:
            readers[runs] += 1
        _, rows, run, first, end, _ = self.plan.spans.T.astype(np.int64)
        pairs = rows * (end - first) * (readers[run] > 1)
        return 4.0 * heads.num_q_heads * heads.head_dim * float(pairs.sum())

    def own_bytes(self, heads: Heads) -> float:
        """Bytes of keys and values of runs that only one stretch of rows sees."""
        readers = np.zeros(self.plan.num_runs, np.int64)
        for runs in self.row_runs:
            readers[runs] += 1
        return float(heads.token_bytes * int(self.plan.run_len[readers == 1].sum()))

    def bytes(self, heads: Heads) -> float:
        """Bytes of all keys and values, queries and outputs, each counted once."""
        rows = 2 * self.plan.num_rows * heads.num_q_heads * heads.head_dim * heads.dtype.itemsize
        return float(heads.token_bytes * int(self.plan.run_len.sum()) + rows)


def tensor_bytes(step: Step, heads: Heads) -> int:
    """Bytes of the tensors that `make_tensors` returns."""
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
    counts: tuple[int, ...], lengths: tuple[int, ...], *, page_size: int = 16, seed: int = 0
) -> Step:
    """One decode row per leaf of a tree whose nodes are runs.

    Args:
        counts: nodes of each level; the last are the leaves. Children are spread evenly: node j of
            n is below node j * m // n of the m above.
        lengths: tokens of each node of a level; 0 leaves the level out.
    """
    _check_levels(counts, lengths)
    num_rows = counts[-1]
    num_pages = sum(count * -(-n // page_size) for count, n in zip(counts, lengths, strict=True))
    make = _Maker(seed, page_size, num_pages)
    row_runs: list[list[int]] = [[] for _ in range(num_rows)]
    position = 0
    for bounds, length in zip(_rows_below(counts), lengths, strict=True):
        for row, end in pairwise(bounds if length else ()):
            run = make.run(length, position)
            make.builder.add_span(row, end - row, run, length)
            for runs in row_runs[row:end]:
                runs.append(run)
        position += length
    plan = make.builder.build(np.full(num_rows, position - 1))
    return Step(plan, num_pages, row_runs, [1] * num_rows)


def _rows_below(counts: tuple[int, ...]) -> list[list[int]]:
    """Bounds of each level's nodes in rows (leaves), `[count + 1]`."""
    node = np.arange(counts[-1])  # the node that each row is below
    levels = []
    for count, above in zip(reversed(counts), (*reversed(counts[:-1]), 1), strict=True):
        levels.append(np.searchsorted(node, np.arange(count + 1)).tolist())
        node = node * above // count
    return levels[::-1]


def _check_levels(counts: tuple[int, ...], lengths: tuple[int, ...]) -> None:
    if len(counts) != len(lengths):
        raise ConfigError(
            f"counts {counts} and lengths {lengths}: expected as many counts as lengths"
        )
    for above, count in pairwise((1, *counts)):
        if count < above:
            raise ConfigError(
                f"a level of {count} nodes is below one of {above}: expected at least as many"
            )
    for length, least in zip(lengths, (*[0] * (len(lengths) - 1), 1), strict=True):
        if length < least:
            raise ConfigError(f"a node has {length} tokens, expected at least {least}")
    rows, stored = counts[-1], sum(math.prod(level) for level in zip(counts, lengths, strict=True))
    if rows > MOST_ROWS or stored > MOST_TOKENS:
        raise ConfigError(
            f"the step has {rows} decodes and stores {stored} tokens, expected at most {MOST_ROWS} "
            f"and {MOST_TOKENS}: lower its counts or its lengths"
        )


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
    """Prefill chunks and decodes in one step. The last `shared` chunks and the decodes are below
    one shared run, as long as the longest of the chunks' contexts, which replaces these."""
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
    num_pages = sum(-(-n // page_size) for n in lengths)
    return Step(plan, num_pages, row_runs, row_counts)


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
    """int64: slots of the pages after the end of a run."""
    plan = step.plan
    length = plan.run_len.astype(np.int64)
    free = -length % plan.page_size
    last = plan.run_pages[plan.runs[:, 0] + np.maximum(-(-length // plan.page_size) - 1, 0)]
    end = (last.astype(np.int64) + 1) * plan.page_size
    return np.concatenate([np.arange(e - f, e) for e, f in zip(end, free, strict=True)] or [length])


@dataclass(frozen=True)
class Case:
    """A named step: its maker for a page size, and its heads if they are fixed."""

    make: Callable[..., Step]
    heads: tuple[int, int] | None = None

    def step(self, heads: Heads) -> tuple[Step, Heads]:
        """The step, and its heads."""
        if self.heads is not None:
            heads = replace(heads, num_q_heads=self.heads[0], num_kv_heads=self.heads[1])
        return self.make(page_size=heads.page_size), heads


def decodes(groups: int, degrees: tuple[int, ...], prefixes: tuple[int, ...], suffix: int) -> Case:
    """Decodes of `groups` trees: level i has `prefixes[i]` tokens and `degrees[i]` branches below
    it; each leaf has `suffix` tokens of its own."""
    if len(degrees) != len(prefixes):
        raise ConfigError(
            f"degrees {degrees} and prefixes {prefixes}: expected as many degrees as prefixes"
        )
    counts = (groups, *(groups * math.prod(degrees[: i + 1]) for i in range(len(degrees))))
    return Case(partial(decode_step, counts, (*prefixes, suffix)))


def tree_levels(text: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Counts and lengths of `decode_step` from `counts_lengths`, numbers separated by commas."""
    counts, _, lengths = text.partition("_")
    try:
        levels = [tuple(int(part) for part in half.split(",")) for half in (counts, lengths)]
    except ValueError:
        raise ConfigError(
            f"tree is {text!r}, expected counts_lengths, such as 1,4,256_32,256,32"
        ) from None
    return levels[0], levels[1]


def _trees(name: str, *trees: str) -> dict[str, Case]:
    return {f"{name} {tree}": Case(partial(decode_step, *tree_levels(tree))) for tree in trees}


# `groups x degree prefix/own`: decodes of 32 query heads on 8 KV heads unless said otherwise.
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

# The trees of two papers on tree-attention kernels, `counts_lengths` of their levels.
TREES = {
    # Yi et al., PAT, arXiv 2511.22333.
    "pat": _trees(
        "pat",
        "1,10_4096,416", "1,256_256,32", "1,1024_2048,32", "1,2,64_1024,256,256",
        "1,4,256_32,256,32", "1,8,512_32,512,256", "1,8,512_32,2048,256", "1,8,512_512,512,256",
        "1,4,8,256_32,256,256,32", "1,4,16,512_1024,256,128,32",
        "1,4,16,64,256,1024_256,32,256,64,32,256",
        "1,16,32,64,128,1024_256,128,64,32,32,32", "1,16,32,64,256,1024_256,128,64,32,32,32",
        "1,8,16,32,64,128,1024_256,128,64,32,32,32,32",
        "1,8,16,32,64,256,1024_256,128,64,32,32,32,32",
        "2,8,16,256_256,256,32,32", "4,16,256,512_512,32,128,32", "8,16,32,256_512,512,256,32",
        "256_1024", "256_4096",
    ),
    # Pan et al., FastTree, MLSys 2025.
    "fasttree": _trees(
        "fasttree",
        "1,2,64_8,256,32", "1,4,256_8,256,32", "1,4,8,256_8,256,256,32", "1,256_256,32",
        "1,1024_2048,32", "1,16,64_1024,256,32", "1,4,16,512_1024,256,128,32",
        "1,4,16,64,256,1024_256,8,256,64,32,256", "1,10_4000,400",
        "1,2,4,8,16,32,64,128,1024_16,16,16,16,16,16,16,16,16",
        "1,2,4,8,16,32,64,128,1024_256,128,64,16,16,16,16,16,16",
        "1,8,16,32,64,128,1024_256,128,64,16,16,16,16",
        "1,8,16,32,64,256,1024_256,128,64,16,16,16,16",
        "1,16,32,64,128,1024_256,128,64,16,16,16", "1,16,32,64,256,1024_256,128,64,16,16,16",
    ),
}  # fmt: skip
