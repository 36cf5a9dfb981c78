"""KV pages: their two layouts, and how rows are written to and read from them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from onestem.errors import ConfigError


def allocate_pages(
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    head_major: bool = False,
) -> Tensor:
    """Pages `[num_pages, page_size, num_kv_heads, head_dim]`, not initialised. In a page's memory
    the heads of a token are adjacent; `head_major`: the tokens of a head."""
    middle = (num_kv_heads, page_size) if head_major else (page_size, num_kv_heads)
    pages = torch.empty(num_pages, *middle, head_dim, dtype=dtype, device=device)
    return pages.transpose(1, 2) if head_major else pages


def laid_out(pages: Tensor, *, head_major: bool) -> Tensor:
    """A copy of pages in the layout `head_major`."""
    copy = allocate_pages(
        *pages.shape, dtype=pages.dtype, device=pages.device, head_major=head_major
    )
    return copy.copy_(pages)


def page_strides(k_pages: Tensor, v_pages: Tensor) -> tuple[int, int, int]:
    """Elements from page to page, token to token and head to head, the same for both. Raises
    `ConfigError` unless they have one of the layouts of `allocate_pages`."""
    _, page_size, num_heads, head_dim = k_pages.shape
    page = page_size * num_heads * head_dim
    strides = k_pages.stride()
    if strides == (page, head_dim, page_size * head_dim, 1) == v_pages.stride():
        return strides[:3]
    if k_pages.is_contiguous() and v_pages.is_contiguous():
        return page, num_heads * head_dim, head_dim
    if all(pages.transpose(1, 2).is_contiguous() for pages in (k_pages, v_pages)):
        return page, head_dim, page_size * head_dim
    raise ConfigError("KV pages are not contiguous")


def page_parts(k_pages: Tensor, v_pages: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """K and V pages with parts of `size` slots as pages."""
    if k_pages.shape[1] == size:
        return k_pages, v_pages
    shape = -1, size, *k_pages.shape[2:]
    return k_pages.view(shape), v_pages.view(shape)


def write_kv(pages: Tensor, slots: Tensor | slice, values: Tensor) -> None:
    """Put `values` `[n, num_kv_heads, head_dim]` at `slots` (int64 `[n]`, page * size + slot; or a
    slice of consecutive ones: a plain copy)."""
    if not pages.is_contiguous():
        pages.index_put_(_places(pages, slots), values)
        return
    flat = pages.view(-1, *pages.shape[2:])
    if isinstance(slots, slice):
        flat[slots] = values
    else:
        flat.index_copy_(0, slots, values)


def slot_index(slots: np.ndarray, device: torch.device) -> Tensor | slice:
    """`slots` (int64 `[n]`, n > 0) as a slice if they are consecutive, else as a tensor."""
    first, last = int(slots[0]), int(slots[-1])
    if last - first + 1 == len(slots) and bool((np.diff(slots) == 1).all()):
        return slice(first, last + 1)
    return torch.from_numpy(slots).to(device)


def read_kv(pages: Tensor, slots: Tensor | slice) -> Tensor:
    """The values at `slots` (int64 `[...]`, or a slice): `[..., num_kv_heads, head_dim]`."""
    if not pages.is_contiguous():
        return pages[_places(pages, slots)]
    return pages.view(-1, *pages.shape[2:])[slots]


def _places(pages: Tensor, slots: Tensor | slice) -> tuple[Tensor, Tensor]:
    """Page and place of each slot, for layouts in which slots are not evenly apart."""
    if isinstance(slots, slice):
        slots = torch.arange(slots.start, slots.stop, device=pages.device)
    size = pages.shape[1]
    return slots // size, slots % size
