"""Other implementations of the same step: PyTorch's, FlashInfer's, FlashAttention's, vLLM's.

Each peer is a function that makes ready everything that does not change between two steps' layers,
and gives calls that compute attention alone. A peer with several kernels gives several calls: its
fastest is what counts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onestem.errors import ConfigError, UnsupportedError
from onestem.ops.bench.cases import Heads, Step
from onestem.ops.bench.vllm_cpu import prepare_vllm

__all__ = ["PEERS", "Call", "absent_peers", "make_calls"]

WORKSPACE_BYTES = 512 << 20


@dataclass(frozen=True)
class Call:
    """`run` computes, and is timed; `rows` makes `[num_rows, num_q_heads, head_dim]` of what it
    gives."""

    run: Callable[[], Any]
    rows: Callable[[Any], Tensor] = lambda out: out


Calls = dict[str, Call]


def absent_peers(names: tuple[str, ...], device: torch.device) -> dict[str, str]:
    """Of the peers named those that are not installed, each with what it needs. Raises for a peer
    that is unknown or not for the device."""
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


def make_calls(
    peer: str, step: Step, heads: Heads, q: Tensor, k_pages: Tensor, v_pages: Tensor
) -> Calls:
    """The calls of a peer, by name ("": its only one)."""
    return PEERS[peer].make(step, heads, q, k_pages, v_pages)


# --------------------------------------------------------------------------------------- PyTorch


@dataclass(frozen=True)
class _Batch:
    """Stretches of as many rows over as many keys: where the rows stand, `[b, rows]`; queries
    `[b, rows, num_q_heads, head_dim]`; copies of keys and values
    `[b, num_kv_heads, keys, head_dim]`."""

    index: Tensor
    q: Tensor
    k: Tensor
    v: Tensor


def _batches(step: Step, q: Tensor, k_pages: Tensor, v_pages: Tensor) -> list[_Batch]:
    """What an implementation without pages or sharing reads: each sequence its own copy."""
    alike: dict[tuple[int, int], list[tuple[int, np.ndarray]]] = defaultdict(list)
    row = 0
    for runs, rows in zip(step.row_runs, step.row_counts, strict=True):
        slots = [step.plan.slots(run, 0, int(step.plan.run_len[run])) for run in runs]
        keys = np.concatenate(slots)
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
    """Puts results of batches, `[b, rows, num_q_heads, head_dim]`, where their rows stand."""

    def place(results: list[Tensor]) -> Tensor:
        out = torch.full_like(q, math.nan)
        for batch, result in zip(batches, results, strict=True):
            out[batch.index] = result
        return out

    return place


def _sdpa(backend: str) -> Callable[..., Calls]:
    def make(step: Step, heads: Heads, q: Tensor, k_pages: Tensor, v_pages: Tensor) -> Calls:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        if not step.decodes_only and backend != "FLASH_ATTENTION":
            raise UnsupportedError(f"{backend} has no causal mask aligned at the end")
        batches = _batches(step, q, k_pages, v_pages)
        group = heads.num_q_heads // heads.num_kv_heads

        def run() -> list[Tensor]:
            with sdpa_kernel(getattr(SDPBackend, backend)):
                return [_attend_batch(batch, group) for batch in batches]

        return {"": Call(run, _placed(batches, q))}

    return make


def _attend_batch(batch: _Batch, group: int) -> Tensor:
    """`[b, rows, num_q_heads, head_dim]`."""
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


def _flashinfer(step: Step, heads: Heads, q: Tensor, k_pages: Tensor, v_pages: Tensor) -> Calls:
    pages = (k_pages, v_pages)
    if not step.decodes_only:
        return {"prefill": _flashinfer_prefill(step, heads, q, pages)}
    return {
        "decode": _flashinfer_decode(step, heads, q, pages, tensor_cores=False),
        "decode with tensor cores": _flashinfer_decode(step, heads, q, pages, tensor_cores=True),
        "cascade": _flashinfer_cascade(step, heads, q, pages),
    }


def _workspace() -> Tensor:
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


def _page_lists(step: Step) -> tuple[Tensor, Tensor, Tensor]:
    """indptr, indices and last_page_len (int32) of each stretch's pages, one run after the other;
    runs but the last must fill their pages."""
    plan = step.plan
    lists, last = [], []
    for runs in step.row_runs:
        parts, length = [], 0
        for run in runs:
            if length % plan.page_size:
                raise UnsupportedError(
                    f"a shared run of {length} tokens does not fill pages of {plan.page_size}: "
                    "FlashInfer needs a prefix of whole pages"
                )
            length = int(plan.run_len[run])
            parts.append(_run_pages(step, run))
        lists.append(np.concatenate(parts))
        last.append((length - 1) % plan.page_size + 1)
    indptr = np.cumsum([0, *map(len, lists)])
    return _int32(indptr), _int32(np.concatenate(lists)), _int32(np.array(last))


def _run_pages(step: Step, run: int) -> np.ndarray:
    first, length = int(step.plan.runs[run, 0]), int(step.plan.run_len[run])
    return step.plan.run_pages[first : first - (-length // step.plan.page_size)]


def _int32(values: Any) -> Tensor:
    return torch.from_numpy(np.asarray(values, np.int32)).cuda()


def _shape(heads: Heads) -> tuple[int, int, int, int]:
    return heads.num_q_heads, heads.num_kv_heads, heads.head_dim, heads.page_size


def _flashinfer_decode(
    step: Step, heads: Heads, q: Tensor, pages: tuple[Tensor, Tensor], *, tensor_cores: bool
) -> Call:
    flashinfer = import_module("flashinfer")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        _workspace(), "NHD", use_tensor_cores=tensor_cores
    )
    wrapper.plan(*_page_lists(step), *_shape(heads), q_data_type=heads.dtype)
    return Call(lambda: wrapper.run(q, pages))


def _flashinfer_prefill(step: Step, heads: Heads, q: Tensor, pages: tuple[Tensor, Tensor]) -> Call:
    flashinfer = import_module("flashinfer")
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(), "NHD")
    rows = _int32(np.cumsum([0, *step.row_counts]))
    wrapper.plan(rows, *_page_lists(step), *_shape(heads), causal=True, q_data_type=heads.dtype)
    return Call(lambda: wrapper.run(q, pages))


def _flashinfer_cascade(step: Step, heads: Heads, q: Tensor, pages: tuple[Tensor, Tensor]) -> Call:
    """One level for each level of the tree that has tokens."""
    flashinfer = import_module("flashinfer")
    plan, columns = step.plan, list(zip(*step.row_runs, strict=True))
    rows, indptr, indices, last = [], [], [], []
    for runs in columns:
        level, counts = np.unique(runs, return_counts=True)  # runs stand in the order of rows
        rows.append(_int32(np.cumsum([0, *counts])))
        lists = [_run_pages(step, int(run)) for run in level]
        indptr.append(_int32(np.cumsum([0, *map(len, lists)])))
        indices.append(_int32(np.concatenate(lists)))
        last.append(_int32((plan.run_len[level] - 1) % plan.page_size + 1))
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(len(columns), _workspace(), "NHD")
    wrapper.plan(rows, indptr, indices, last, *_shape(heads), q_data_type=heads.dtype)
    return Call(lambda: wrapper.run(q, pages))


# -------------------------------------------------------------------------------- FlashAttention


FLASH_ATTENTION = ("flash_attn_interface", "flash_attn")  # versions 3 and 2


def _flash_attention() -> Any:
    """The newest that can be imported: version 3 may be installed for another GPU."""
    *newer, oldest = filter(find_spec, FLASH_ATTENTION)
    for name in newer:
        try:
            return import_module(name)
        except ImportError:
            continue
    return import_module(oldest)


def _flash_attn(step: Step, heads: Heads, q: Tensor, k_pages: Tensor, v_pages: Tensor) -> Calls:
    flash_attn = _flash_attention()
    batches = _batches(step, q, k_pages, v_pages)
    scale = 1 / math.sqrt(heads.head_dim)

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

    return {"": Call(run, _placed(batches, q))}


# ------------------------------------------------------------------------------------------ vLLM


def _vllm(step: Step, heads: Heads, q: Tensor, k_pages: Tensor, v_pages: Tensor) -> Calls:
    return {"": Call(prepare_vllm(step, heads, q, k_pages, v_pages))}


@dataclass(frozen=True)
class Peer:
    """The packages of which it needs one, where it runs, and what makes its calls."""

    packages: tuple[str, ...]
    devices: tuple[str, ...]
    make: Callable[..., Calls]


PEERS = {
    "sdpa": Peer(("torch",), ("cpu", "cuda"), _sdpa("FLASH_ATTENTION")),
    "cudnn": Peer(("torch",), ("cuda",), _sdpa("CUDNN_ATTENTION")),
    "flashinfer": Peer(("flashinfer",), ("cuda",), _flashinfer),
    "flash_attn": Peer(FLASH_ATTENTION, ("cuda",), _flash_attn),
    "vllm": Peer(("vllm",), ("cpu",), _vllm),
}
