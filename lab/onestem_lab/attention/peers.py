"""Other implementations of the same step: PyTorch's, FlashInfer's, FlashAttention's, vLLM's.

Each kernel of a peer is a function that prepares everything that does not change between the layers
of a step, and returns a call that computes attention alone. A peer's fastest kernel counts.

Peers without pages get a contiguous copy of each sequence, and FlashInfer's cascade each run's
pages. The others get each sequence's full list of pages (`BlockTables`), in ascending order where
ours are in random order. No copy is timed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onestem.errors import ConfigError, UnsupportedError
from onestem_lab.attention.cases import Heads, Step
from onestem_lab.attention.paging import BlockTables
from onestem_lab.attention.vllm_cpu import prepare_vllm

__all__ = ["PEERS", "Call", "Inputs", "absent_peers"]

WORKSPACE_BYTES = 512 << 20


@dataclass(frozen=True, eq=False)
class Inputs:
    """A step, its tensors (see `make_tensors`), and the copies that peers share."""

    step: Step
    heads: Heads
    q: Tensor
    k_pages: Tensor
    v_pages: Tensor

    @cached_property
    def batches(self) -> list[_Batch]:
        return _batches(self.step, self.q, self.k_pages, self.v_pages)

    @cached_property
    def tables(self) -> BlockTables:
        return BlockTables.of(self.step, self.heads.page_size)

    @cached_property
    def tabled(self) -> tuple[Tensor, Tensor]:
        """Keys and values in the pages of `tables`."""
        return self.tables.copied(self.k_pages), self.tables.copied(self.v_pages)

    @cached_property
    def without_nan(self) -> tuple[Tensor, Tensor]:
        """The step's own pages, with zeros in slots without a token of a run."""
        return self.k_pages.nan_to_num(), self.v_pages.nan_to_num()

    def int32(self, values: Any) -> Tensor:
        return torch.from_numpy(np.asarray(values, np.int32)).to(self.q.device)


@dataclass(frozen=True)
class Call:
    """`run` computes, and is timed; `rows` turns its result into `[num_rows, num_q_heads,
    head_dim]`."""

    run: Callable[[], Any]
    rows: Callable[[Any], Tensor] = lambda out: out


Kernel = Callable[[Inputs], Call]


def absent_peers(names: tuple[str, ...], device: torch.device) -> dict[str, str]:
    """The named peers that are not installed, each with what it needs. Raises for a peer that is
    unknown or not for the device."""
    absent = {}
    for name in names:
        if name not in PEERS:
            raise ConfigError(f"peer is {name!r}, expected one of: {', '.join(PEERS)}")
        peer = PEERS[name]
        if not any(map(find_spec, peer.packages)):
            absent[name] = f"needs the package {' or '.join(peer.packages)}, not installed"
        if device.type not in peer.devices:
            raise UnsupportedError(
                f"peer {name!r} runs on {peer.devices[0]} only: choose --device "
                f"{peer.devices[0]} or leave it out of --against"
            )
    return absent


# --------------------------------------------------------------------------------------- PyTorch


@dataclass(frozen=True)
class _Batch:
    """Stretches with equal numbers of rows and keys: indices of the rows, `[b, rows]`; queries
    `[b, rows, num_q_heads, head_dim]`; copies of keys and values
    `[b, num_kv_heads, keys, head_dim]`."""

    index: Tensor
    q: Tensor
    k: Tensor
    v: Tensor


def _batches(step: Step, q: Tensor, k_pages: Tensor, v_pages: Tensor) -> list[_Batch]:
    """The input of an implementation without pages or sharing: a copy for each sequence."""
    alike: dict[tuple[int, int], list[tuple[int, np.ndarray]]] = defaultdict(list)
    row = 0
    for keys, rows in zip(step.seen_slots(), step.row_counts, strict=True):
        alike[rows, len(keys)].append((row, keys))
        row += rows
    return [_batch(rows, members, q, k_pages, v_pages) for (rows, _), members in alike.items()]


def _batch(
    rows: int, members: list[tuple[int, np.ndarray]], q: Tensor, k_pages: Tensor, v_pages: Tensor
) -> _Batch:
    device = k_pages.device
    start = torch.tensor([row for row, _ in members], device=device)
    index = start[:, None] + torch.arange(rows, device=device)
    copies = []
    for pages in (k_pages, v_pages):
        flat = pages.view(-1, *pages.shape[2:])
        shape = (len(members), pages.shape[2], len(members[0][1]), pages.shape[3])
        copy = torch.empty(shape, dtype=pages.dtype, device=device)
        for i, (_, slots) in enumerate(members):
            copy[i] = flat[torch.from_numpy(slots).to(device)].transpose(0, 1)
        copies.append(copy)
    return _Batch(index, q[index], *copies)


def _placed(batches: list[_Batch], q: Tensor) -> Callable[[list[Tensor]], Tensor]:
    """A function that puts results of batches, `[b, rows, num_q_heads, head_dim]`, in row order."""

    def place(results: list[Tensor]) -> Tensor:
        out = torch.full_like(q, math.nan)
        for batch, result in zip(batches, results, strict=True):
            out[batch.index] = result
        return out

    return place


def _sdpa(backend: str) -> Kernel:
    def make(inputs: Inputs) -> Call:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        if not inputs.step.decodes_only and backend != "FLASH_ATTENTION":
            raise UnsupportedError(f"{backend} has no causal mask aligned at the end")
        batches = inputs.batches
        group = inputs.heads.num_q_heads // inputs.heads.num_kv_heads

        def run() -> list[Tensor]:
            with sdpa_kernel(getattr(SDPBackend, backend)):
                return [_attend_batch(batch, group) for batch in batches]

        return Call(run, _placed(batches, inputs.q))

    return make


def _attend_batch(batch: _Batch, group: int) -> Tensor:
    """Attention of a batch, `[b, rows, num_q_heads, head_dim]`."""
    from torch.nn.attention.bias import causal_lower_right

    b, rows, num_heads, head_dim = batch.q.shape
    attend = torch.nn.functional.scaled_dot_product_attention
    if rows == 1:
        # One query: a KV head's query heads become its rows, so nothing is repeated.
        query = batch.q.view(b, num_heads // group, group, head_dim)
        return attend(query, batch.k, batch.v).view(b, 1, num_heads, head_dim)
    query = batch.q.transpose(1, 2)
    mask = causal_lower_right(rows, batch.k.shape[2])
    return attend(query, batch.k, batch.v, attn_mask=mask, enable_gqa=group > 1).transpose(1, 2)


# ------------------------------------------------------------------------------------ FlashInfer


def _flashinfer(step: Step) -> dict[str, Kernel]:
    if not step.decodes_only:
        return {"prefill": _flashinfer_prefill}
    return {
        "decode": lambda inputs: _flashinfer_decode(inputs, tensor_cores=False),
        "decode with tensor cores": lambda inputs: _flashinfer_decode(inputs, tensor_cores=True),
        "cascade": _flashinfer_cascade,
    }


def _workspace(inputs: Inputs) -> Tensor:
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=inputs.q.device)


def _page_lists(
    inputs: Inputs, pages: list[list[int]], lengths: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """indptr, indices and last_page_len (int32) of lists of pages that hold `lengths` tokens."""
    last = (np.array(lengths) - 1) % inputs.heads.page_size + 1
    indptr = np.cumsum([0, *map(len, pages)])
    return inputs.int32(indptr), inputs.int32(np.concatenate(pages)), inputs.int32(last)


def _shape(heads: Heads) -> tuple[int, int, int, int]:
    return heads.num_q_heads, heads.num_kv_heads, heads.head_dim, heads.page_size


def _flashinfer_decode(inputs: Inputs, *, tensor_cores: bool) -> Call:
    wrapper = import_module("flashinfer").BatchDecodeWithPagedKVCacheWrapper(
        _workspace(inputs), "NHD", use_tensor_cores=tensor_cores
    )
    lists = _page_lists(inputs, inputs.tables.pages, inputs.tables.lengths)
    wrapper.plan(*lists, *_shape(inputs.heads), q_data_type=inputs.heads.dtype)
    return Call(lambda: wrapper.run(inputs.q, inputs.tabled))


def _flashinfer_prefill(inputs: Inputs) -> Call:
    wrapper = import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper(
        _workspace(inputs), "NHD"
    )
    rows = inputs.int32(np.cumsum([0, *inputs.step.row_counts]))
    lists = _page_lists(inputs, inputs.tables.pages, inputs.tables.lengths)
    dtype = inputs.heads.dtype
    wrapper.plan(rows, *lists, *_shape(inputs.heads), causal=True, q_data_type=dtype)
    return Call(lambda: wrapper.run(inputs.q, inputs.tabled))


def _flashinfer_cascade(inputs: Inputs) -> Call:
    """FlashInfer's cascade, with a level for each level of the tree that has tokens."""
    step, plan = inputs.step, inputs.step.plan
    depths = sorted(set(map(len, step.row_runs)))
    if len(depths) > 1:
        raise UnsupportedError(
            f"rows see {depths[0]} to {depths[-1]} runs: FlashInfer's cascade needs as many levels "
            "for each row"
        )
    rows, levels = [], []
    for runs in zip(*step.row_runs, strict=True):
        level, counts = np.unique(runs, return_counts=True)  # runs are in the order of rows
        rows.append(inputs.int32(np.cumsum([0, *counts])))
        lengths = plan.run_len[level].tolist()
        levels.append(_page_lists(inputs, [_run_pages(step, run) for run in level], lengths))
    wrapper = import_module("flashinfer").MultiLevelCascadeAttentionWrapper(
        len(levels), _workspace(inputs), "NHD"
    )
    lists = map(list, zip(*levels, strict=True))
    wrapper.plan(rows, *lists, *_shape(inputs.heads), q_data_type=inputs.heads.dtype)
    return Call(lambda: wrapper.run(inputs.q, inputs.without_nan))


def _run_pages(step: Step, run: int) -> list[int]:
    first, length = int(step.plan.runs[run, 0]), int(step.plan.run_len[run])
    return step.plan.run_pages[first : first - (-length // step.plan.page_size)].tolist()


# -------------------------------------------------------------------------------- FlashAttention


FLASH_ATTENTION = ("flash_attn_interface", "flash_attn")  # versions 3 and 2


def _flash_attention() -> Any:
    """The newest version that can be imported: 3 may be installed for another GPU."""
    *newer, oldest = filter(find_spec, FLASH_ATTENTION)
    for name in newer:
        try:
            return import_module(name)
        except ImportError:
            continue
    return import_module(oldest)


def _flash_attn(inputs: Inputs) -> Call:
    flash_attn = _flash_attention()
    batches = inputs.batches
    scale = 1 / math.sqrt(inputs.heads.head_dim)

    def run() -> list[Tensor]:
        return [
            flash_attn.flash_attn_with_kvcache(
                batch.q,
                batch.k.transpose(1, 2),
                batch.v.transpose(1, 2),
                softmax_scale=scale,
                causal=True,
            )
            for batch in batches
        ]

    return Call(run, _placed(batches, inputs.q))


# ------------------------------------------------------------------------------------------ vLLM


def _vllm(inputs: Inputs) -> Call:
    return Call(prepare_vllm(inputs.step, inputs.heads, inputs.q, inputs.k_pages, inputs.v_pages))


def _flash_attn3(inputs: Inputs, *, ahead: bool) -> Call:
    """FlashAttention 3 as vLLM calls it, over pages; `ahead`: its schedule is made beforehand."""
    kernels = import_module("vllm.vllm_flash_attn")
    heads, tables, (keys, values) = inputs.heads, inputs.tables, inputs.tabled
    counts = inputs.step.row_counts
    starts, lengths = inputs.int32(np.cumsum([0, *counts])), inputs.int32(tables.lengths)
    longest = {"max_seqlen_q": max(counts), "max_seqlen_k": max(tables.lengths)}
    schedule = None
    if ahead:
        schedule = kernels.get_scheduler_metadata(
            batch_size=len(counts),
            num_heads_q=heads.num_q_heads,
            num_heads_kv=heads.num_kv_heads,
            headdim=heads.head_dim,
            cache_seqlens=lengths,
            qkv_dtype=heads.dtype,
            cu_seqlens_q=starts,
            page_size=heads.page_size,
            causal=True,
            **longest,
        )
    table, out = tables.rows(inputs.q.device), torch.empty_like(inputs.q)

    def run() -> Tensor:
        kernels.flash_attn_varlen_func(
            inputs.q,
            keys,
            values,
            cu_seqlens_q=starts,
            seqused_k=lengths,
            block_table=table,
            causal=True,
            out=out,
            scheduler_metadata=schedule,
            fa_version=3,
            **longest,
        )
        return out

    return Call(run)


@dataclass(frozen=True)
class Peer:
    """The packages of which a peer needs one, its devices, its kernels for a step by name ("": its
    only one), and whether they read a contiguous copy of each sequence."""

    packages: tuple[str, ...]
    devices: tuple[str, ...]
    kernels: Callable[[Step], dict[str, Kernel]]
    copies: bool = False


def _only(kernel: Kernel) -> Callable[[Step], dict[str, Kernel]]:
    return lambda step: {"": kernel}


FLASH_ATTN3: dict[str, Kernel] = {
    "": lambda inputs: _flash_attn3(inputs, ahead=False),
    "scheduled ahead": lambda inputs: _flash_attn3(inputs, ahead=True),
}

PEERS = {
    "sdpa": Peer(("torch",), ("cpu", "cuda"), _only(_sdpa("FLASH_ATTENTION")), copies=True),
    "cudnn": Peer(("torch",), ("cuda",), _only(_sdpa("CUDNN_ATTENTION")), copies=True),
    "flashinfer": Peer(("flashinfer",), ("cuda",), _flashinfer),
    "flash_attn": Peer(FLASH_ATTENTION, ("cuda",), _only(_flash_attn), copies=True),
    "flash_attn3": Peer(("vllm",), ("cuda",), lambda step: FLASH_ATTN3),
    "vllm": Peer(("vllm",), ("cpu",), _only(_vllm)),
}
