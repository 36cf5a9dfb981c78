"""KV pages: the plain layout, and how rows are written to and read from it."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["allocate_pages", "read_kv", "write_kv"]


def allocate_pages(
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Pages `[num_pages, page_size, num_kv_heads, head_dim]`, not initialised."""
    return torch.empty(num_pages, page_size, num_kv_heads, head_dim, dtype=dtype, device=device)


def write_kv(pages: Tensor, slots: Tensor, values: Tensor) -> None:
    """Put `values` `[n, num_kv_heads, head_dim]` at `slots` (int64 `[n]`, page * size + slot)."""
    pages.view(-1, *pages.shape[2:]).index_copy_(0, slots, values)


def read_kv(pages: Tensor, slots: Tensor) -> Tensor:
    """The values at `slots` (int64 `[...]`): `[..., num_kv_heads, head_dim]`."""
    return pages.view(-1, *pages.shape[2:])[slots]
