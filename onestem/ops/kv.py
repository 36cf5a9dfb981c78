"""KV pages: the plain layout, and how rows are written to and read from it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = ["allocate_pages", "read_kv", "slot_index", "write_kv"]


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


def write_kv(pages: Tensor, slots: Tensor | slice, values: Tensor) -> None:
    """Put `values` `[n, num_kv_heads, head_dim]` at `slots` (int64 `[n]`, page * size + slot; a
    slice where they are consecutive: a plain copy)."""
    flat = pages.view(-1, *pages.shape[2:])
    if isinstance(slots, slice):
        flat[slots] = values
    else:
        flat.index_copy_(0, slots, values)


def slot_index(slots: np.ndarray, device: torch.device) -> Tensor | slice:
    """`slots` (int64 `[n]`, n > 0) as a slice where they are consecutive, else as a tensor."""
    first, last = int(slots[0]), int(slots[-1])
    if last - first + 1 == len(slots) and bool((np.diff(slots) == 1).all()):
        return slice(first, last + 1)
    return torch.from_numpy(slots).to(device)


def read_kv(pages: Tensor, slots: Tensor) -> Tensor:
    """The values at `slots` (int64 `[...]`): `[..., num_kv_heads, head_dim]`."""
    return pages.view(-1, *pages.shape[2:])[slots]
