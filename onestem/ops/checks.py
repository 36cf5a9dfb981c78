"""Checks of what every implementation of attention relies on; each raises a `ConfigError`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from onestem.errors import ConfigError
from onestem.ops.plan import AttentionPlan

__all__ = ["check_scores", "check_shapes"]


def check_shapes(q: Tensor, k_pages: Tensor, v_pages: Tensor, plan: AttentionPlan) -> None:
    """Check that q, pages and plan fit together; see `ops.attention`."""
    if q.dim() != 3 or q.shape[0] != plan.num_rows:
        raise ConfigError(
            f"q has shape {tuple(q.shape)}, expected [{plan.num_rows}, num_q_heads, head_dim]"
        )
    if k_pages.shape != v_pages.shape or k_pages.dim() != 4 or k_pages.shape[1] != plan.page_size:
        raise ConfigError(
            f"pages have shapes {tuple(k_pages.shape)} and {tuple(v_pages.shape)}, "
            f"expected [num_pages, {plan.page_size}, num_kv_heads, head_dim] twice"
        )
    _check_heads(q, k_pages)
    if not q.dtype == k_pages.dtype == v_pages.dtype:
        raise ConfigError(
            f"q is {q.dtype}, pages are {k_pages.dtype} and {v_pages.dtype}, expected one dtype"
        )
    if not q.device == k_pages.device == v_pages.device:
        raise ConfigError(
            f"q is on {q.device}, pages are on {k_pages.device} and {v_pages.device}, expected "
            "one device"
        )
    plan.check(num_pages=len(k_pages))


def _check_heads(q: Tensor, k_pages: Tensor) -> None:
    num_q_heads, head_dim = q.shape[1:]
    num_kv_heads = k_pages.shape[2]
    if min(num_q_heads, num_kv_heads, head_dim) < 1:
        raise ConfigError(
            f"q has {num_q_heads} heads of {head_dim}, pages have {num_kv_heads}: expected at "
            "least 1 of each"
        )
    if k_pages.shape[3] != head_dim or num_q_heads % num_kv_heads != 0:
        raise ConfigError(
            f"q has {num_q_heads} heads of {head_dim}, pages have {num_kv_heads} of "
            f"{k_pages.shape[3]}: expected one head_dim and a multiple of the KV heads"
        )


def check_scores(
    q: Tensor, scale: float | None, alibi_slopes: Tensor | None, softcap: float | None
) -> None:
    """Check scale, ALiBi slopes and softcap of the scores; see `ops.attention`."""
    if scale is not None and not math.isfinite(scale):
        raise ConfigError(f"scale is {scale}, expected a finite number")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ConfigError(f"softcap is {softcap}, expected a positive number, or None for none")
    if alibi_slopes is None:
        return
    kind = (alibi_slopes.dtype, alibi_slopes.device, tuple(alibi_slopes.shape))
    if kind != (torch.float32, q.device, (q.shape[1],)):
        raise ConfigError(
            f"alibi_slopes are {kind[0]} {list(kind[2])} on {kind[1]}, expected torch.float32 "
            f"[{q.shape[1]}] on {q.device}: one slope for each query head"
        )
