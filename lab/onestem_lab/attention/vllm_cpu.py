"""vLLM's attention kernel for CPUs, as a peer: pages, causal, each sequence by itself."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from onestem.ops.kv import read_kv
from onestem_lab.attention.cases import Heads, Step
from onestem_lab.attention.paging import BlockTables

__all__ = ["BLOCK_TOKENS", "prepare_vllm"]

BLOCK_TOKENS = 128  # vLLM's own choice on a CPU


def prepare_vllm(
    step: Step, heads: Heads, q: Tensor, k_pages: Tensor, v_pages: Tensor
) -> Callable[[], Tensor]:
    """The call to time, over vLLM's pages; whole blocks are shared."""
    backend = import_module("vllm.v1.attention.backends.cpu_attn")
    ops: Any = import_module("vllm._custom_ops")
    tables = BlockTables.of(step, BLOCK_TOKENS)
    isa = backend._get_attn_isa(heads.dtype, BLOCK_TOKENS, heads.head_dim)
    keys, values = _filled_cache(heads, k_pages, v_pages, tables, ops, isa)
    block_table = tables.rows(q.device)
    counts = torch.tensor([0, *step.row_counts])
    starts = torch.cumsum(counts, 0).to(torch.int32)
    seq_lens = torch.tensor(tables.lengths, dtype=torch.int32)
    metadata = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(tables.lengths),
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
    heads: Heads, k_pages: Tensor, v_pages: Tensor, tables: BlockTables, ops: Any, isa: str
) -> tuple[Tensor, Tensor]:
    """Keys and values, `[num_blocks, num_kv_heads, BLOCK_TOKENS, head_dim]`, in the order that the
    kernel of an instruction set reads."""
    shape = (len(tables.slots), heads.num_kv_heads, 2 * BLOCK_TOKENS, heads.head_dim)
    keys, values = torch.zeros(shape, dtype=heads.dtype).chunk(2, dim=2)
    slots = torch.from_numpy(tables.slots).flatten()
    where = torch.nonzero(slots >= 0)[:, 0]
    k, v = (read_kv(pages, slots[where]) for pages in (k_pages, v_pages))
    ops.cpu_attn_reshape_and_cache(k, v, keys, values, where, isa)
    return keys, values
