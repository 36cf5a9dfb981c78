"""Plans of every shape a step can have: trees, modules, mixed chunks, windows, empty rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from onestem.ops import AttentionPlan, PlanBuilder, windowed

__all__ = [
    "Case",
    "chat",
    "decode_tree",
    "empty_rows",
    "make_tensors_slots",
    "mixed_step",
    "modules",
    "narrow",
    "random_case",
    "rebuild",
    "windowed_fast",
]


@dataclass
class Case:
    """A plan, how many pages the pool needs, and (decode trees) what grows from step to step.

    own_runs, own_spans: int64 `[num_seqs]`, each sequence's own run and its span.
    unwindowed, window: of a plan that `windowed` made: the plan before, and the window.
    """

    name: str
    plan: AttentionPlan
    num_pages: int
    own_runs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    own_spans: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    unwindowed: AttentionPlan | None = None
    window: int = 0


class _Maker:
    """Adds runs in pages taken at random from a pool, starting in the middle of a page."""

    def __init__(self, rng: np.random.Generator, page_size: int, num_pages: int) -> None:
        self.rng, self.page_size, self.num_pages = rng, page_size, num_pages
        self.builder = PlanBuilder(page_size)
        self.free = rng.permutation(num_pages).astype(np.int32)
        self.used = 0
        self.num_spans = 0

    def run(self, length: int, position: int, *, slack: int = 0, offset: int | None = None) -> int:
        offset = int(self.rng.integers(0, self.page_size)) if offset is None else offset
        count = -(-(offset + length) // self.page_size) + slack
        pages = self.free[self.used : self.used + count]
        assert len(pages) == count, "the pool of the plan is too small"
        self.used += count
        return self.builder.add_run(pages, offset, length, position)

    def span(
        self, row: int, rows: int, run: int, end: int, *, first: int = 0, end_step: int = 0
    ) -> None:
        self.builder.add_span(row, rows, run, end, first=first, end_step=end_step)
        self.num_spans += 1

    def case(self, name: str, positions: list[int], **more: np.ndarray) -> Case:
        return Case(name, self.builder.build(np.array(positions)), self.num_pages, **more)


def decode_tree(
    rng: np.random.Generator,
    *,
    num_seqs: int,
    page_size: int = 16,
    fan: tuple[int, ...] = (1, 10, 10),
    tokens: tuple[int, ...] = (1024, 512, 128),
    own: tuple[int, int] = (100, 300),
    share: bool = True,
    pad_rows: int = 0,
    num_pages: int | None = None,
) -> Case:
    """`num_seqs` decodes, dealt over the leaves of a tree with `fan[i]` children at level i.

    share=False gives every sequence a span of its own over each shared run. `pad_rows` rows behind
    the others see nothing.
    """
    need = num_seqs * (-(-own[1] // page_size) + 6) + 4 * sum(
        int(np.prod(fan[: i + 1])) * -(-n // page_size) for i, n in enumerate(tokens)
    )
    make = _Maker(rng, page_size, num_pages or need)
    leaves = int(np.prod(fan))
    cuts = (
        np.sort(rng.integers(0, num_seqs + 1, leaves - 1)) if leaves > 1 else np.zeros(0, np.int64)
    )
    bounds = np.concatenate(([0], cuts, [num_seqs]))
    level_bounds = bounds
    for level in reversed(range(len(fan))):
        start = sum(tokens[:level])
        for a, b in pairwise(level_bounds.tolist()):
            if b > a:
                run = make.run(tokens[level], start)
                if share:
                    make.span(a, b - a, run, tokens[level])
                else:
                    for row in range(a, b):
                        make.span(row, 1, run, tokens[level])
        level_bounds = level_bounds[:: fan[level]]
    positions, own_runs, own_spans = [], [], []
    for row in range(num_seqs):
        length = int(rng.integers(own[0], own[1] + 1))
        own_runs.append(make.run(length, sum(tokens), slack=2))
        own_spans.append(make.num_spans)
        make.span(row, 1, own_runs[-1], length)
        positions.append(sum(tokens) + length - 1)
    positions += [0] * pad_rows
    name = f"tree of {len(fan)} levels, {num_seqs} decodes" + ("" if share else ", not shared")
    return make.case(name, positions, own_runs=np.array(own_runs), own_spans=np.array(own_spans))


def chat(
    rng: np.random.Generator, *, num_seqs: int, page_size: int = 16, system: int = 2048
) -> Case:
    """RelayAttention's shape: one system prompt, one own run per request."""
    return decode_tree(
        rng, num_seqs=num_seqs, page_size=page_size, fan=(1,), tokens=(system,), own=(1, 200)
    )


def modules(
    rng: np.random.Generator,
    *,
    num_seqs: int,
    num_modules: int = 12,
    page_size: int = 16,
    tokens: tuple[int, int] = (40, 400),
    prompt_rows: int = 9,
    pad_rows: int = 0,
    num_pages: int | None = None,
) -> Case:
    """Prompt Cache's shape: each sequence imports any modules; the positions have gaps.

    One sequence in five computes `prompt_rows` rows of its new text, the others decode.
    """
    need = num_modules * (tokens[1] // page_size + 2) + num_seqs * (100 // page_size + 4)
    make = _Maker(rng, page_size, num_pages or need)
    lengths = rng.integers(tokens[0], tokens[1] + 1, num_modules)
    starts = np.cumsum(np.concatenate(([0], lengths + rng.integers(0, 9, num_modules))))
    runs = [make.run(int(n), int(p)) for n, p in zip(lengths, starts[:-1], strict=True)]
    positions: list[int] = []
    seen: list[list[tuple[int, int]]] = [[] for _ in runs]
    for _ in range(num_seqs):
        rows = prompt_rows if rng.random() < 0.2 else 1
        before = int(rng.integers(0, 80)) if rows == 1 else 0
        base, row = int(starts[-1]), len(positions)
        make.span(
            row,
            rows,
            make.run(before + rows, base, slack=1),
            before + 1,
            end_step=1 if rows > 1 else 0,
        )
        for i in np.flatnonzero(rng.random(num_modules) < 0.4):
            if seen[i] and seen[i][-1][1] == row:
                seen[i][-1] = (seen[i][-1][0], row + rows)
            else:
                seen[i].append((row, row + rows))
        positions.extend(range(base + before, base + before + rows))
    for i, pieces in enumerate(seen):
        for a, b in pieces:
            make.span(a, b - a, runs[i], int(lengths[i]))
    return make.case(f"modules, {num_seqs} sequences", positions + [0] * pad_rows)


def mixed_step(
    rng: np.random.Generator,
    *,
    num_groups: int,
    decodes: int,
    chunks: int,
    chunk_rows: int = 100,
    page_size: int = 16,
    prefix: int = 300,
    pad_rows: int = 0,
    num_pages: int | None = None,
) -> Case:
    """BatchLLM's shape: groups of one prefix; decodes and prefill chunks of a group in one step.

    The last group's prefix is being computed in this very step, by a chunk of its own, and the
    chunk that follows reads it.
    """
    need = (
        num_groups
        * (
            prefix // page_size
            + 2
            + decodes * (200 // page_size + 4)
            + chunks * (2 * chunk_rows // page_size + 4)
        )
        + chunk_rows
    )
    make = _Maker(rng, page_size, num_pages or need)
    positions: list[int] = []
    for group in range(num_groups):
        run = make.run(prefix, 0)
        if group == num_groups - 1:
            rows = min(prefix, chunk_rows)
            make.span(len(positions), rows, run, prefix - rows + 1, end_step=1)
            positions.extend(range(prefix - rows, prefix))
        start = len(positions)
        for _ in range(decodes):
            length = int(rng.integers(1, 200))
            make.span(len(positions), 1, make.run(length, prefix, slack=1), length)
            positions.append(prefix + length - 1)
        for _ in range(chunks):
            rows, before = int(rng.integers(1, chunk_rows + 1)), int(rng.choice([0, 17]))
            own = make.run(before + rows, prefix)
            make.span(len(positions), rows, own, before + 1, end_step=1)
            positions.extend(range(prefix + before, prefix + before + rows))
        make.span(start, len(positions) - start, run, prefix)
    return make.case(
        f"mixed step, {num_groups} groups, {len(positions)} rows", positions + [0] * pad_rows
    )


def empty_rows(rng: np.random.Generator, *, num_rows: int, page_size: int = 16) -> Case:
    """Rows that see nothing, a run without tokens, a chunk whose first rows see nothing."""
    make = _Maker(rng, page_size, 512)
    make.run(0, 0)
    shared = make.run(70, 0)
    make.span(2, 5, shared, 70)
    make.span(9, 6, shared, 40, first=40, end_step=1)  # its first row sees nothing
    own = make.run(1, 70)
    make.span(3, 1, own, 1)
    return make.case(f"empty rows, {num_rows} rows", [*range(70, 70 + num_rows)])


def random_case(rng: np.random.Generator, *, page_size: int) -> Case:
    """Small and unlikely: any lengths around page bounds, any rows."""
    make = _Maker(rng, page_size, 4096)
    edge = [1, page_size - 1, page_size, page_size + 1, int(rng.integers(1, 90))]
    lengths = [max(1, int(rng.choice(edge))) for _ in range(6)]
    runs = [make.run(n, 100 * i) for i, n in enumerate(lengths)]
    positions: list[int] = []
    for _ in range(int(rng.integers(1, 12))):
        rows, before = (
            int(rng.choice([1, 1, 2, int(rng.integers(1, 40))])),
            int(rng.integers(0, 30)),
        )
        row = len(positions)
        for run, n in zip(runs, lengths, strict=True):
            if rng.random() < 0.5:
                make.span(row, rows, run, n)
        if rng.random() < 0.9:
            make.span(row, rows, make.run(before + rows, 600), before + 1, end_step=1)
        positions.extend(range(600 + before, 600 + before + rows))
    return make.case(f"random, pages of {page_size}", positions)


def make_tensors_slots(plan: AttentionPlan) -> np.ndarray:
    """int64: every slot that a run of the plan uses (all others may hold NaN)."""
    parts = [plan.slots(run, 0, int(plan.run_len[run])) for run in range(plan.num_runs)]
    return np.unique(np.concatenate(parts)) if parts else np.zeros(0, np.int64)


def rebuild(plan: AttentionPlan, pages: list[np.ndarray]) -> AttentionPlan:
    """The plan built anew as the engine builds it, run by run and span by span in Python.

    pages: int32, each run's page list, ready made (as `cache.Run.page_ids` keeps it).
    """
    builder = PlanBuilder(plan.page_size)
    for i, (offset, length, position) in enumerate(
        zip(
            plan.run_offset.tolist(), plan.run_len.tolist(), plan.run_position.tolist(), strict=True
        )
    ):
        builder.add_run(pages[i], offset, length, position)
    for row, rows, run, first, first_step, end, end_step in plan.spans.tolist():
        builder.add_span(row, rows, run, end, first=first, first_step=first_step, end_step=end_step)
    return builder.build(plan.row_position)


def windowed_fast(plan: AttentionPlan, window: int) -> AttentionPlan:
    """`ops.windowed` without a loop over spans (it may cut a little finer)."""
    spans = plan.spans
    span = np.repeat(np.arange(len(spans)), spans[:, 1])
    j = np.arange(len(span)) - np.repeat(np.cumsum(spans[:, 1]) - spans[:, 1], spans[:, 1])
    row, _, run, first, first_step, end, end_step = spans.T[:, span]
    row = row + j
    firsts = np.maximum(
        first + j * first_step, plan.row_position[row] - window + 1 - plan.run_position[run]
    )
    ends = end + j * end_step
    alive = firsts < ends
    step = np.diff(firsts)
    joins = alive[1:] & alive[:-1] & (j[1:] > 0) & ((step == 0) | (step == 1))
    joins[1:] &= ~(joins[:-1] & (step[1:] != step[:-1]))
    start = np.flatnonzero(alive & ~np.concatenate(([False], joins)))
    stop = np.append(start[1:], len(span))
    # A stretch ends where the next starts or where a row sees nothing.
    dead = np.append(np.flatnonzero(~alive), len(span))
    stop = np.minimum(stop, dead[np.searchsorted(dead, start)])
    rows = stop - start
    steps = np.where(rows > 1, np.append(step, 0)[start], 0)
    out = np.stack(
        [row[start], rows, run[start], firsts[start], steps, ends[start], end_step[start]], 1
    )
    return AttentionPlan(
        plan.page_size,
        plan.run_pages,
        plan.run_page_start,
        plan.run_offset,
        plan.run_len,
        plan.run_position,
        out.astype(np.int32),
        plan.row_position,
    )


def narrow(case: Case, window: int) -> Case:
    """The case under a sliding window."""
    return Case(
        f"{case.name}, window {window}",
        windowed(case.plan, window),
        case.num_pages,
        unwindowed=case.plan,
        window=window,
    )


def all_small(rng: np.random.Generator, num_seqs: int) -> list[Case]:
    """The checks' cases at a size that an interpreter can run."""
    tree = decode_tree(
        rng, num_seqs=num_seqs, fan=(1, 3, 3), tokens=(150, 70, 33), own=(1, 60), pad_rows=3
    )
    mixed = mixed_step(rng, num_groups=3, decodes=8, chunks=2, chunk_rows=40, prefix=90)
    return [
        tree,
        decode_tree(rng, num_seqs=num_seqs, fan=(2, 2, 3), tokens=(3, 70, 5), own=(1, 40)),
        decode_tree(rng, num_seqs=12, fan=(1, 2, 2), tokens=(60, 20, 9), own=(1, 30), share=False),
        chat(rng, num_seqs=num_seqs // 3, system=130),
        modules(rng, num_seqs=num_seqs // 2, num_modules=7, tokens=(5, 90)),
        mixed,
        narrow(tree, 100),
        narrow(mixed, 33),
        empty_rows(rng, num_rows=18),
        *(random_case(rng, page_size=size) for size in (1, 3, 16, 64)),
    ]
