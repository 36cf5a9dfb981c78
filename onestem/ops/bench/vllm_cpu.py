"""vLLM's attention kernel for CPUs, as a peer: pages, causal, each sequence for itself."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from onestem.errors import UnsupportedError
from onestem.ops.bench.cases import Heads, Step
from onestem.ops.kv import read_kv

__all__ = ["BLOCK_TOKENS", "prepare_vllm"]

BLOCK_TOKENS = 128  # vLLM's own choice on a CPU


def prepare_vllm(
    step: Step, heads: Heads, q: Tensor, k_pages: Tensor, v_pages: Tensor
) -> Callable[[], Tensor]:
    """Keys and values in vLLM's pages, shared where whole blocks are; gives the call to time.

    Raises:
        UnsupportedError: a shared run does not end at a block's end.
    """
    backend = import_module("vllm.v1.attention.backends.cpu_attn")
    ops: Any = import_module("vllm._custom_ops")
    table, num_blocks = _block_table(step)
    isa = backend._get_attn_isa(heads.dtype, BLOCK_TOKENS, heads.head_dim)
    keys, values = _filled_cache(step, heads, k_pages, v_pages, table, num_blocks, ops, isa)
    block_table = _rows_of_blocks(step, table)
    counts = torch.tensor([0, *step.row_counts])
    starts = torch.cumsum(counts, 0).to(torch.int32)
    lengths = [int(step.plan.run_len[runs].sum()) for runs in step.row_runs]
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    metadata = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(lengths),
        num_heads=heads.num_q_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        seq_lens=seq_lens,
        dtype=heads.dtype,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=-1,
        isa=isa,
        enable_kv_split=True,
    )
    out = torch.full_like(q, float("nan"))

    def run_kernel() -> Tensor:
        ops.cpu_attention_with_kv_cache(
            query=q,
            key_cache=keys,
            value_cache=values,
            output=out,
            query_start_loc=starts,
            seq_lens=seq_lens,
            scale=heads.head_dim**-0.5,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=block_table,
            softcap=0.0,
            scheduler_metadata=metadata,
            s_aux=None,
        )
        return out

    return run_kernel


def _filled_cache(
    step: Step,
    heads: Heads,
    k_pages: Tensor,
    v_pages: Tensor,
    table: dict[int, list[int]],
    num_blocks: int,
    ops: Any,
    isa: str,
) -> tuple[Tensor, Tensor]:
    """Keys and values, `[num_blocks, num_kv_heads, BLOCK_TOKENS, head_dim]`, in the order in which
    the kernel of an instruction set reads them."""
    cache = torch.zeros(
        num_blocks, heads.num_kv_heads, 2 * BLOCK_TOKENS, heads.head_dim, dtype=heads.dtype
    )
    keys, values = cache.chunk(2, dim=2)
    for run, blocks in table.items():
        slots = torch.from_numpy(step.plan.slots(run, 0, int(step.plan.run_len[run])))
        k, v = (read_kv(pages, slots) for pages in (k_pages, v_pages))
        place = torch.arange(len(slots))
        where = torch.tensor(blocks)[place // BLOCK_TOKENS] * BLOCK_TOKENS + place % BLOCK_TOKENS
        ops.cpu_attn_reshape_and_cache(k, v, keys, values, where, isa)
    return keys, values


def _rows_of_blocks(step: Step, table: dict[int, list[int]]) -> Tensor:
    """int32 `[num_sequences, most blocks]`, 0 behind a sequence's last."""
    lists = [[block for run in runs for block in table[run]] for runs in step.row_runs]
    block_table = torch.zeros(len(lists), max(map(len, lists)), dtype=torch.int32)
    for row, blocks in enumerate(lists):
        block_table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
    return block_table


def _block_table(step: Step) -> tuple[dict[int, list[int]], int]:
    """The blocks of each run, and how many there are."""
    table: dict[int, list[int]] = {}
    used = 0
    for runs in step.row_runs:
        for i, run in enumerate(runs):
            length = int(step.plan.run_len[run])
            if i < len(runs) - 1 and length % BLOCK_TOKENS:
                raise UnsupportedError(
                    f"a shared run of {length} tokens does not fill blocks of {BLOCK_TOKENS}: vLLM "
                    "shares whole blocks"
                )
            if run not in table:
                count = -(-length // BLOCK_TOKENS)
                table[run] = list(range(used, used + count))
                used += count
    return table, used
