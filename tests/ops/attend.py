"""Attention as one call, over a plan that is checked."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from onestem.errors import ConfigError
from onestem.ops import AttentionPlan, Scores, resolve
from onestem.ops.plan import END, FIRST, ROW, ROWS, RUN, STEP
from onestem.ops.state import State


def attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, plan: AttentionPlan, *, impl: str, **options: Any
) -> State:
    """What an implementation computes. `options`: of `Scores`."""
    check_plan(plan, num_pages=len(k_pages))
    scores = Scores(**options)
    scores.check(q)
    heads = [(q.shape[2], q.shape[1] // k_pages.shape[2])]
    return resolve(impl, q.device, heads=heads).prepare(plan).attend(q, k_pages, v_pages, scores)


def check_plan(plan: AttentionPlan, *, num_pages: int | None = None) -> None:
    """Raise `ConfigError` unless the plan is well formed: ranges, steps, page lists (pages
    0..num_pages-1; None: any), and no token shown to a row twice."""
    _check_runs(plan, num_pages)
    source, shift = plan.moved.T.astype(np.int64)
    known = (source >= 0) & (source < plan.num_rows)
    _require(bool(known.all()), f"a moved row is not in 0..{plan.num_rows - 1}")
    right = plan.row_position[source] - shift == plan.row_position[plan.num_rows :]
    _require(bool(right.all()), "a moved row's position is not its row's less its shift")
    if plan.num_spans == 0:
        return
    row, rows, run, first, end, step = plan.spans.T.astype(np.int64)
    inside = (rows >= 1) & (row >= 0) & (row + rows <= plan.num_queries)
    _require(bool(inside.all()), f"a span's rows leave 0..{plan.num_queries - 1}")
    known = (run >= 0) & (run < plan.num_runs)
    _require(bool(known.all()), f"a span's run is not in 0..{plan.num_runs - 1}")
    _require(bool((first >= 0).all()), "a span starts before its run")
    _require(bool(np.isin(step, (0, 1)).all()), "a span's step is neither 0 nor 1")
    last = end + (rows - 1) * step
    _require(bool((last <= plan.run_len[run]).all()), "a span ends behind its run")
    _check_disjoint(plan)


def _check_runs(plan: AttentionPlan, num_pages: int | None) -> None:
    page_start, offset, length, _ = plan.runs.T.astype(np.int64)
    pages = -(-(offset + length) // plan.page_size)
    ok = (page_start >= 0) & (length >= 0) & (page_start + pages <= len(plan.run_pages))
    _require(bool(ok.all()), "a run's page list leaves run_pages")
    ok = (offset >= 0) & (offset < plan.page_size)
    _require(bool(ok.all()), f"a run's offset is not in 0..{plan.page_size - 1}")
    used = [plan.run_pages[a : a + n] for a, n in zip(page_start, pages, strict=True)]
    _require(all(bool((ids >= 0).all()) for ids in used), "a run has a negative page id")
    last = max((int(ids.max()) for ids in used if len(ids)), default=-1)
    inside = num_pages is None or last < num_pages
    _require(inside, f"a run has page {last}, the pages given are {num_pages}")


def _check_disjoint(plan: AttentionPlan) -> None:
    by_run: dict[int, list[list[int]]] = {}
    for span in plan.spans.tolist():
        by_run.setdefault(span[RUN], []).append(span)
    for run, spans in by_run.items():
        seen: list[list[int]] = []
        for span in sorted(spans):
            seen = [other for other in seen if other[ROW] + other[ROWS] > span[ROW]]
            _require(
                not any(_overlap(other, span) for other in seen),
                f"a row is shown a token of run {run} twice",
            )
            seen.append(span)


def _overlap(a: list[int], b: list[int]) -> bool:
    """Whether two spans of one run show some row a common token."""
    start, stop = max(a[ROW], b[ROW]), min(a[ROW] + a[ROWS], b[ROW] + b[ROWS])
    rows = np.arange(start, stop)
    end_a = a[END] + (rows - a[ROW]) * a[STEP]
    end_b = b[END] + (rows - b[ROW]) * b[STEP]
    return bool((np.minimum(end_a, end_b) > max(a[FIRST], b[FIRST])).any())


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(f"attention plan: {message}")
