"""What peers that do not run here are given: their interfaces, computed in float64 from pages and
tables, must give what the plan says."""

from __future__ import annotations

import sys
import types
from functools import partial

import numpy as np
import pytest
import torch

from onestem.errors import UnsupportedError
from onestem.ops import resolve
from onestem_lab.attention import peers
from onestem_lab.attention.cases import Heads, Step, decode_step, make_tensors, mixed_step
from onestem_lab.attention.paging import BlockTables
from onestem_lab.attention.peers import PEERS, Inputs

HEADS = Heads(4, 2, 16, torch.float64, page_size=16)
# Runs of less than a page, of a page and some tokens, and of whole pages; nodes without siblings.
STEPS = {
    "pages cut": partial(decode_step, (1, 2, 5), (8, 20, 5)),
    "whole pages": partial(decode_step, (2, 3, 7), (32, 16, 21)),
    "chunks": partial(
        mixed_step, chunk_rows=5, contexts=(0, 19, 21), shared=2, decodes=3, suffix=4
    ),
}


def inputs_of(name: str) -> Inputs:
    step = STEPS[name](page_size=HEADS.page_size)
    return Inputs(step, HEADS, *make_tensors(step, HEADS, torch.device("cpu")))


def attend(q, keys, values):
    """Rows of one stretch, causal at the end: float64 `[rows, num_q_heads, head_dim]`."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (keys, values))
    scores = torch.einsum("rhd,khd->hrk", q, k) * q.shape[2] ** -0.5
    hidden = torch.ones(scores.shape[1:]).triu(scores.shape[2] - len(q) + 1).bool()
    return torch.einsum("hrk,khd->rhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def read(pages, ids, length):
    return pages[torch.as_tensor(ids).long()].flatten(0, 1)[:length]


def of_lists(indptr, indices, last, page_size):
    """Pages and tokens of each list."""
    bounds = indptr.tolist()
    for i, end in enumerate(last.tolist()):
        ids = indices[bounds[i] : bounds[i + 1]]
        yield ids, (len(ids) - 1) * page_size + end


class Paged:
    """FlashInfer's wrappers of decodes and of prefill."""

    def __init__(self, workspace, layout, use_tensor_cores=False):
        assert layout == "NHD"

    def plan(self, *arguments, causal=False, q_data_type):
        *rows, indptr, indices, last, q_heads, kv_heads, head_dim, page_size = arguments
        assert (q_heads, kv_heads, head_dim) == (4, 2, 16)
        self.lists = list(of_lists(indptr, indices, last, page_size))
        self.rows = rows[0].tolist() if rows else list(range(len(self.lists) + 1))
        assert causal == bool(rows)

    def run(self, q, pages):
        out = torch.full_like(q, torch.nan)
        for i, (ids, length) in enumerate(self.lists):
            rows = slice(self.rows[i], self.rows[i + 1])
            out[rows] = attend(q[rows], *(read(x, ids, length) for x in pages))
        return out


class Cascade:
    def __init__(self, num_levels, workspace, layout):
        self.num_levels = num_levels

    def plan(self, rows, indptr, indices, last, *shape, q_data_type):
        page_size = shape[-1]
        lists = zip(indptr, indices, last, strict=True)
        self.levels = [(r, list(of_lists(*x, page_size))) for r, x in zip(rows, lists, strict=True)]
        assert len(self.levels) == self.num_levels

    def run(self, q, pages):
        assert not any(page.isnan().any() for page in pages)
        out = torch.full_like(q, torch.nan)
        for row in range(len(q)):
            seen = [
                lists[int(np.searchsorted(rows.numpy(), row, "right")) - 1]
                for rows, lists in self.levels
            ]
            keys, values = (torch.cat([read(x, *part) for part in seen]) for x in pages)
            out[row] = attend(q[row : row + 1], keys, values)[0]
        return out


def flash_attn_varlen_func(
    q, k, v, *, max_seqlen_q, cu_seqlens_q, max_seqlen_k, seqused_k, block_table, causal, out,
    scheduler_metadata, fa_version,
):  # fmt: skip
    assert (causal, fa_version) == (True, 3)
    assert scheduler_metadata in (None, "schedule")
    assert max_seqlen_k == int(seqused_k.max())
    assert max_seqlen_q == int(cu_seqlens_q.diff().max())
    starts = cu_seqlens_q.tolist()
    for i, length in enumerate(seqused_k.tolist()):
        ids = block_table[i, : -(-length // k.shape[1])]
        rows = slice(starts[i], starts[i + 1])
        out[rows] = attend(q[rows], read(k, ids, length), read(v, ids, length))
    return out


def scheduler_metadata(*, batch_size, cache_seqlens, page_size, num_heads_q, **rest) -> str:
    assert (batch_size, page_size, num_heads_q) == (len(cache_seqlens), HEADS.page_size, 4)
    return "schedule"


def reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, isa):
    size = key_cache.shape[2]
    for cache, new in ((key_cache, key), (value_cache, value)):
        cache[slot_mapping // size, :, slot_mapping % size] = new


def cpu_attention(*, query, key_cache, value_cache, output, query_start_loc, seq_lens, **rest):
    longest = {
        "max_seqlen_q": int(query_start_loc.diff().max()),
        "max_seqlen_k": int(max(seq_lens)),
    }
    flash_attn_varlen_func(
        query, key_cache.transpose(1, 2), value_cache.transpose(1, 2), **longest,
        cu_seqlens_q=query_start_loc, seqused_k=seq_lens, block_table=rest["block_table"],
        causal=rest["causal"], out=output, scheduler_metadata=None, fa_version=3,
    )  # fmt: skip


MODULES = {
    "flashinfer": {
        "BatchDecodeWithPagedKVCacheWrapper": Paged,
        "BatchPrefillWithPagedKVCacheWrapper": Paged,
        "MultiLevelCascadeAttentionWrapper": Cascade,
    },
    "vllm.vllm_flash_attn": {
        "flash_attn_varlen_func": flash_attn_varlen_func,
        "get_scheduler_metadata": scheduler_metadata,
    },
    "vllm.v1.attention.backends.cpu_attn": {"_get_attn_isa": lambda *shape: "vec"},
    "vllm._custom_ops": {
        "cpu_attn_get_scheduler_metadata": lambda **shape: None,
        "cpu_attn_reshape_and_cache": reshape_and_cache,
        "cpu_attention_with_kv_cache": cpu_attention,
    },
}


@pytest.fixture(autouse=True)
def interfaces(monkeypatch):
    monkeypatch.setattr(peers, "WORKSPACE_BYTES", 1)
    for name, members in MODULES.items():
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**members))


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("peer", ["flashinfer", "flash_attn3", "vllm"])
def test_a_paged_peer_is_given_the_step(peer, name):
    inputs = inputs_of(name)
    pages = inputs.k_pages, inputs.v_pages
    want = resolve("reference").prepare(inputs.step.plan).attend(inputs.q, *pages).out
    kernels = PEERS[peer].kernels(inputs.step)
    for make in kernels.values():
        call = make(inputs)
        torch.testing.assert_close(call.rows(call.run()), want, rtol=1e-9, atol=1e-9)
    assert len(kernels) == {"flashinfer": 1 if name == "chunks" else 3, "flash_attn3": 2}.get(
        peer, 1
    )


def test_pages_are_shared_where_all_their_tokens_are():
    """8 shared tokens and 20 below them: the first page is their child's, the second a leaf's."""
    tables = BlockTables.of(STEPS["pages cut"](), 16)
    assert tables.lengths == [33] * 5
    first, second, third = zip(*tables.pages, strict=True)
    assert (len(set(first)), len(set(second)), len(set(third))) == (2, 5, 5)
    step = STEPS["whole pages"]()
    assert len(BlockTables.of(step, 16).slots) == step.num_pages  # no copies


def test_a_cascade_of_uneven_depth_is_refused():
    inputs = inputs_of("pages cut")
    step = inputs.step
    uneven = Step(step.plan, step.num_pages, [*step.row_runs[:-1], [0]], step.row_counts)
    cascade = PEERS["flashinfer"].kernels(uneven)["cascade"]
    with pytest.raises(UnsupportedError, match="rows see 1 to 3 runs: FlashInfer's cascade needs"):
        cascade(Inputs(uneven, HEADS, inputs.q, inputs.k_pages, inputs.v_pages))
