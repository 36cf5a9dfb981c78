"""Attention over plans in C++."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from onestem.errors import ConfigError, UnsupportedError
from onestem.ops.cpu.extension import DTYPES, checked_isa, chosen_isa, native
from onestem.ops.kv import page_strides
from onestem.ops.plan import AttentionPlan
from onestem.ops.scores import PLAIN, Scores
from onestem.ops.state import State

MAX_HEAD_DIM = 512


@dataclass(frozen=True)
class CpuCost:
    """Costs of work, in nanoseconds of one core. They decide which runs get items of their own, and
    where long items are cut. Each dtype has measured defaults (`CpuCost.default`).

    Attributes:
        read: a byte of K or V read from memory.
        thin: one query head times one element of K or V, if few rows see a token: keys and values
            are then read straight from the pages.
        pack: an element of K or V converted for an item of many rows.
        wide: one query row (a head of it) times one element in such an item.
        state: an element of a partial result, written and merged.
        pack_few: as `pack`, for items whose rows' heads fill at most one vector.
        item: starting and ending an item.
        shortest: minimum length of a cut item.
        cuts: no item is more than `1 / (cuts * threads)` of all work, if it can be cut.
    """

    read: float
    thin: float
    pack: float
    wide: float
    state: float
    pack_few: float
    item: float = 500
    shortest: float = 20_000
    cuts: int = 4

    @staticmethod
    def default(dtype: torch.dtype, isa: str | None = None) -> CpuCost:
        """The costs of an instruction set (default: the one in use) with a dtype."""
        return CpuCost(*native().default_rates(isa or chosen_isa(), DTYPES[dtype]))


@dataclass(frozen=True)
class CpuAttention:
    """C++ implementation of `AttentionImpl`, with as many threads as torch uses.

    Args:
        isa: instruction set, by default the one in use.
        cost: by default the instruction set's for the dtype.
        deterministic: see `AttentionImpl`.
    """

    name: str = "cpu"
    isa: str | None = None
    cost: CpuCost | None = None
    deterministic: bool = False
    takes_parts = False

    def head_major(self, head_dim: int, dtype: torch.dtype) -> bool:
        return True

    def prepare(self, plan: AttentionPlan, *, share: bool = True) -> PreparedCpu:
        return PreparedCpu(plan, share, self.deterministic, checked_isa(self.isa), self.cost)


class PreparedCpu:
    """A copy of a plan; the first layer makes its work items, and the others use them."""

    def __init__(
        self,
        plan: AttentionPlan,
        share: bool,
        deterministic: bool,
        isa: str,
        cost: CpuCost | None = None,
    ) -> None:
        self.native = native().make_plan(
            isa,
            plan.page_size,
            plan.run_pages,
            plan.runs,
            plan.spans,
            plan.row_position,
            0 if plan.window is None else plan.window,
            share,
            [] if cost is None else [float(value) for value in astuple(cost)],
            deterministic,
            plan.moved[:, 0].tolist(),
        )
        self._num_rows, self._num_queries = plan.num_rows, plan.num_queries
        self._page_size = plan.page_size
        self._last_page = self.native.last_page()

    def attend(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, scores: Scores = PLAIN) -> State:
        """See `PreparedAttention`."""
        self._check(q, k_pages, v_pages)
        scores.check(q)
        strides = page_strides(k_pages, v_pages)
        _, num_heads, head_dim = q.shape
        out = q.new_empty(self._num_rows, num_heads, head_dim)
        lse = q.new_empty(self._num_rows, num_heads, dtype=torch.float32)
        q = q.contiguous()
        slopes = None if scores.alibi_slopes is None else scores.alibi_slopes.contiguous()
        self.native.attend(
            DTYPES[q.dtype],
            q.data_ptr(),
            k_pages.data_ptr(),
            v_pages.data_ptr(),
            strides,
            out.data_ptr(),
            lse.data_ptr(),
            num_heads,
            k_pages.shape[2],
            head_dim,
            scores.factor(head_dim),
            0 if slopes is None else slopes.data_ptr(),
            scores.softcap or 0.0,
            torch.get_num_threads(),
        )
        return State(out, lse)

    def describe(
        self, dtype: torch.dtype, num_q_heads: int, num_kv_heads: int, head_dim: int
    ) -> list[dict[str, Any]]:
        """The work items for these heads, in the order in which they start."""
        items = self.native.describe(
            DTYPES[dtype], num_q_heads, num_kv_heads, head_dim, torch.get_num_threads()
        )
        names = ("wide", "rows", "kv_head", "num_kv_heads", "pieces", "nanoseconds", "hand")
        return [dict(zip(names, item, strict=True)) for item in items]

    def _check(self, q: Tensor, k_pages: Tensor, v_pages: Tensor) -> None:
        """Check all that the C++ code relies on to stay inside the tensors."""
        if not (q.is_cpu and k_pages.is_cpu and v_pages.is_cpu):
            names = ", ".join(sorted({x.device.type for x in (q, k_pages, v_pages)}))
            raise ConfigError(f"attention implementation 'cpu' got tensors on {names}")
        if q.dtype not in DTYPES or not q.dtype == k_pages.dtype == v_pages.dtype:
            raise UnsupportedError(
                f"attention implementation 'cpu' got {q.dtype}, {k_pages.dtype} and "
                f"{v_pages.dtype}, expected one of float32, bfloat16 and float16 for all"
            )
        num_queries, num_heads, head_dim = q.shape
        if not takes_size(head_dim):
            raise UnsupportedError(
                f"head_dim is {head_dim}, attention implementation 'cpu' takes multiples of 8 up "
                f"to {MAX_HEAD_DIM}: use impl='torch'"
            )
        pages, _, kv_heads, _ = k_pages.shape
        expected = (pages, self._page_size, kv_heads, head_dim)
        if (
            k_pages.shape != expected
            or v_pages.shape != expected
            or not _divides(kv_heads, num_heads)
        ):
            raise ConfigError(
                f"q {tuple(q.shape)} does not fit pages {tuple(k_pages.shape)} and "
                f"{tuple(v_pages.shape)} of {self._page_size} slots"
            )
        self.check(num_queries, pages)

    def check(self, num_queries: int, pages: int) -> None:
        """Raise `ConfigError` where queries or pages are not those of the plan."""
        if num_queries != self._num_queries or self._last_page >= pages:
            raise ConfigError(
                f"the plan has {self._num_queries} rows and pages up to {self._last_page}, got "
                f"{num_queries} rows and {pages} pages"
            )


def takes_size(head_dim: int) -> bool:
    """Whether the kernels take heads of this size."""
    return head_dim % 8 == 0 and 0 < head_dim <= MAX_HEAD_DIM


def _divides(kv_heads: int, num_heads: int) -> bool:
    return 0 < kv_heads <= num_heads and num_heads % kv_heads == 0
