"""A Triton kernel that reads plans: not tuned, meant to show what a kernel needs of the contract.

Two launches. `_attend`: a persistent grid takes work items from a list whose length stands on the
device; page lists are read in the kernel; the query heads of a KV head are packed into the row
axis; a row with one item is written at once, others leave states in a workspace. `_merge` merges
them, and writes (0, -inf) for empty rows. All of a step's indices travel in one int32 buffer, so
one CUDA graph serves every plan.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from items import Cost, Items, make_items
from torch import Tensor

from onestem.ops import AttentionPlan, State

__all__ = ["TritonReader"]


@triton.jit
def _attend_item(
    control,
    item,
    head,
    q,
    k,
    v,
    out,
    lse,
    part_out,
    part_lse,
    scale,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One item for one KV head; m = row * GROUP + query head of the group."""
    item_ptr = control + tl.load(control + 2) + item * 4
    row_start = tl.load(item_ptr)
    num_rows = tl.load(item_ptr + 1)
    walk_start = tl.load(item_ptr + 2)
    walk_end = walk_start + tl.load(item_ptr + 3)
    walk = control + tl.load(control + 3)
    runs = control + tl.load(control + 7)
    pages = control + tl.load(control + 8)
    window = tl.load(control + 10)

    m = tl.arange(0, BLOCK_M)  # [BLOCK_M]
    j = m // GROUP  # [BLOCK_M] row of the item
    used = j < num_rows
    d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    row = tl.load(control + tl.load(control + 4) + row_start + j, mask=used, other=0)
    dest = tl.load(control + tl.load(control + 5) + row_start + j, mask=used, other=-1)
    position = tl.load(control + tl.load(control + 9) + row, mask=used, other=0)  # [BLOCK_M]
    num_heads: tl.constexpr = NUM_KV_HEADS * GROUP
    state = row.to(tl.int64) * num_heads + head * GROUP + m % GROUP  # [BLOCK_M]
    in_dim = d < HEAD_DIM
    query = tl.load(
        q + state[:, None] * HEAD_DIM + d[None, :], mask=used[:, None] & in_dim[None, :], other=0.0
    )

    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    denominator = tl.zeros([BLOCK_M], tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for entry in range(walk_start, walk_end):
        entry_ptr = walk + entry * 8
        run = tl.load(entry_ptr)
        first = tl.load(entry_ptr + 1) + j * tl.load(entry_ptr + 2)  # [BLOCK_M]
        end = tl.load(entry_ptr + 3) + j * tl.load(entry_ptr + 4)  # [BLOCK_M]
        lo = tl.load(entry_ptr + 5)
        hi = tl.load(entry_ptr + 6)
        page_list = pages + tl.load(runs + run * 4)
        offset = tl.load(runs + run * 4 + 1)
        oldest = (
            position - window + 1 - tl.load(runs + run * 4 + 3)
        )  # [BLOCK_M] first token in a row's window
        first = tl.maximum(first, oldest)
        for start in range(lo, hi, BLOCK_N):
            n = start + tl.arange(0, BLOCK_N)  # [BLOCK_N] tokens of the run
            inside = n < hi
            page = tl.load(page_list + (offset + n) // PAGE_SIZE, mask=inside, other=0)
            slot = page.to(tl.int64) * PAGE_SIZE + (offset + n) % PAGE_SIZE
            where = (slot * NUM_KV_HEADS + head) * HEAD_DIM  # [BLOCK_N]
            key = tl.load(
                k + where[None, :] + d[:, None], mask=inside[None, :] & in_dim[:, None], other=0.0
            )
            score = tl.dot(query, key, input_precision="ieee") * scale  # [BLOCK_M, BLOCK_N]
            seen = (n[None, :] >= first[:, None]) & (n[None, :] < end[:, None]) & inside[None, :]
            score = tl.where(seen & used[:, None], score, float("-inf"))
            new_max = tl.maximum(running_max, tl.max(score, 1))
            safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
            weight = tl.exp(score - safe_max[:, None])
            shrink = tl.exp(running_max - safe_max)
            running_max = new_max
            denominator = denominator * shrink + tl.sum(weight, 1)
            value = tl.load(
                v + where[:, None] + d[None, :], mask=inside[:, None] & in_dim[None, :], other=0.0
            )
            total = total * shrink[:, None]
            total += tl.dot(weight.to(value.dtype), value, input_precision="ieee")

    seen_any = denominator > 0.0
    result = total / tl.where(seen_any, denominator, 1.0)[:, None]
    log_sum = tl.where(
        seen_any, running_max + tl.log(tl.where(seen_any, denominator, 1.0)), float("-inf")
    )
    final = used & (dest < 0)
    tl.store(
        out + state[:, None] * HEAD_DIM + d[None, :],
        result.to(out.dtype.element_ty),
        mask=final[:, None] & in_dim[None, :],
    )
    tl.store(lse + state, log_sum, mask=final)
    partial = used & (dest >= 0)
    place = dest.to(tl.int64) * num_heads + head * GROUP + m % GROUP
    tl.store(
        part_out + place[:, None] * HEAD_DIM + d[None, :],
        result,
        mask=partial[:, None] & in_dim[None, :],
    )
    tl.store(part_lse + place, log_sum, mask=partial)


@triton.jit
def _attend(
    control,
    q,
    k,
    v,
    out,
    lse,
    part_out,
    part_lse,
    scale,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    num_work = tl.load(control) * NUM_KV_HEADS
    rows_at = tl.load(control + 2)
    for work in range(tl.program_id(0), num_work, tl.num_programs(0)):
        item = work // NUM_KV_HEADS
        head = work % NUM_KV_HEADS
        num_rows = tl.load(control + rows_at + item * 4 + 1)
        if num_rows * GROUP <= 16:
            _attend_item(
                control,
                item,
                head,
                q,
                k,
                v,
                out,
                lse,
                part_out,
                part_lse,
                scale,
                NUM_KV_HEADS,
                GROUP,
                HEAD_DIM,
                PAGE_SIZE,
                16,
                BLOCK_N,
                BLOCK_D,
            )
        else:
            _attend_item(
                control,
                item,
                head,
                q,
                k,
                v,
                out,
                lse,
                part_out,
                part_lse,
                scale,
                NUM_KV_HEADS,
                GROUP,
                HEAD_DIM,
                PAGE_SIZE,
                BLOCK_M,
                BLOCK_N,
                BLOCK_D,
            )


@triton.jit
def _merge(
    control,
    out,
    lse,
    part_out,
    part_lse,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    num_merges = tl.load(control + 1)
    merges = control + tl.load(control + 6)
    h = tl.arange(0, BLOCK_H)  # [BLOCK_H]
    d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    in_head = h < NUM_HEADS
    inside = in_head[:, None] & (d < HEAD_DIM)[None, :]
    for merge in range(tl.program_id(0), num_merges, tl.num_programs(0)):
        row = tl.load(merges + merge * 4).to(tl.int64)
        start = tl.load(merges + merge * 4 + 1).to(tl.int64)
        parts = tl.load(merges + merge * 4 + 2)
        running_max = tl.full([BLOCK_H], float("-inf"), tl.float32)
        denominator = tl.zeros([BLOCK_H], tl.float32)
        total = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
        for part in range(parts):
            place = (start + part) * NUM_HEADS + h
            part_max = tl.load(part_lse + place, mask=in_head, other=float("-inf"))
            value = tl.load(
                part_out + place[:, None] * HEAD_DIM + d[None, :], mask=inside, other=0.0
            )
            new_max = tl.maximum(running_max, part_max)
            safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
            shrink = tl.exp(running_max - safe_max)
            weight = tl.exp(part_max - safe_max)
            running_max = new_max
            denominator = denominator * shrink + weight
            total = total * shrink[:, None] + value * weight[:, None]
        seen_any = denominator > 0.0
        result = total / tl.where(seen_any, denominator, 1.0)[:, None]
        log_sum = tl.where(
            seen_any, running_max + tl.log(tl.where(seen_any, denominator, 1.0)), float("-inf")
        )
        place = row * NUM_HEADS + h
        tl.store(
            out + place[:, None] * HEAD_DIM + d[None, :],
            result.to(out.dtype.element_ty),
            mask=inside,
        )
        tl.store(lse + place, log_sum, mask=in_head)


@dataclass(eq=False)
class TritonReader:
    """Fixed buffers for plans of up to `max_rows` rows, `max_parts` partial states and `max_words`
    int32 of control."""

    max_rows: int
    num_kv_heads: int
    group: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    device: torch.device
    max_parts: int
    max_words: int = 1 << 18
    programs: int = 8
    block_m: int = 64
    block_n: int = 32
    cost: Cost | None = None

    def __post_init__(self) -> None:
        heads = self.num_kv_heads * self.group
        shape = (self.max_rows, heads, self.head_dim)
        options = {"device": self.device}
        nan = float("nan")
        self.q = torch.full(shape, nan, dtype=self.dtype, **options)
        self.out = torch.full(shape, nan, dtype=self.dtype, **options)
        self.lse = torch.full(shape[:2], nan, dtype=torch.float32, **options)
        self.part_out = torch.full(
            (self.max_parts, heads, self.head_dim), nan, dtype=torch.float32, **options
        )
        self.part_lse = torch.full((self.max_parts, heads), nan, dtype=torch.float32, **options)
        self.control = torch.zeros(self.max_words, dtype=torch.int32, **options)
        pinned = self.device.type == "cuda"
        self.host = torch.zeros(self.max_words, dtype=torch.int32, pin_memory=pinned)
        self.host_numpy = self.host.numpy()
        if self.cost is None:
            self.cost = Cost(block_rows=max(1, self.block_m // self.group))

    def prepare(self, plan: AttentionPlan, window: int = 0) -> tuple[Items, int]:
        """A step's host work: items, packed into the pinned buffer; gives them and its words."""
        items = make_items(plan, self.cost, window)
        assert int(items.merges[:, 2].sum()) <= self.max_parts, "the workspace is too small"
        return items, items.pack(plan, self.host_numpy, window)

    def upload(self, words: int) -> None:
        self.control[:words].copy_(self.host[:words], non_blocking=True)

    def launch(self, k_pages: Tensor, v_pages: Tensor) -> None:
        """Reads `q` `[max_rows, num_q_heads, head_dim]` and `control`; writes `out` and `lse`."""
        block_d = triton.next_power_of_2(self.head_dim)
        _attend[(self.programs,)](
            self.control,
            self.q,
            k_pages,
            v_pages,
            self.out,
            self.lse,
            self.part_out,
            self.part_lse,
            self.head_dim**-0.5,
            NUM_KV_HEADS=self.num_kv_heads,
            GROUP=self.group,
            HEAD_DIM=self.head_dim,
            PAGE_SIZE=self.page_size,
            BLOCK_M=self.block_m,
            BLOCK_N=self.block_n,
            BLOCK_D=max(16, block_d),
            num_warps=4,
            num_stages=2,
        )
        self.launch_merge()

    def launch_merge(self) -> None:
        """The second launch of `launch`."""
        heads = self.num_kv_heads * self.group
        block_d = triton.next_power_of_2(self.head_dim)
        _merge[(self.programs,)](
            self.control,
            self.out,
            self.lse,
            self.part_out,
            self.part_lse,
            NUM_HEADS=heads,
            HEAD_DIM=self.head_dim,
            BLOCK_H=triton.next_power_of_2(heads),
            BLOCK_D=block_d,
            num_warps=4,
        )

    def attend(
        self, q: Tensor, k_pages: Tensor, v_pages: Tensor, plan: AttentionPlan, window: int = 0
    ) -> State:
        """Prepare, copy and launch for one plan."""
        self.q[: plan.num_rows] = q
        _, words = self.prepare(plan, window)
        self.upload(words)
        self.launch(k_pages, v_pages)
        return State(self.out[: plan.num_rows], self.lse[: plan.num_rows])
