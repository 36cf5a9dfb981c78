"""Keys and values of tokens in all layers' pages at once, in Triton: to rows and from rows.

Copies of each layer by itself would be hundreds of launches for one prompt, which the steps beside
them would wait for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from onestem.ops.kv import page_strides
from onestem.ops.triton.sizes import cdiv

_TOKENS, _VALUES = 8, 256  # of a program's tile
_FIELDS = 7  # of a tensor in the table


@triton.jit(do_not_specialize=["first_slot", "count"])
def _move(table, slots, first_slot, rows, count, width, page_size,
          OUT: tl.constexpr, BITS: tl.constexpr, TOKENS: tl.constexpr, VALUES: tl.constexpr,
          FIELDS: tl.constexpr):  # fmt: skip
    """Program (i, j): tokens j * TOKENS.. of pages tensor i to their rows (OUT), or from them."""
    one = table + tl.program_id(0) * FIELDS
    if BITS == 16:
        pages = tl.load(one).to(tl.pointer_type(tl.int16))
    else:
        pages = tl.load(one).to(tl.pointer_type(tl.int32))
    size, dim, first = tl.load(one + 1), tl.load(one + 2), tl.load(one + 3)
    per_page, per_token, per_head = tl.load(one + 4), tl.load(one + 5), tl.load(one + 6)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(slots + first_slot + token, mask=token < count, other=0)
    page = (slot // page_size) * per_page + (slot % page_size) * per_token
    row = rows + token.to(tl.int64) * width + first
    for start in range(0, size, VALUES):
        value = start + tl.arange(0, VALUES)
        there = (token < count)[:, None] & (value < size)[None, :]
        inside = (value // dim) * per_head + value % dim
        at = pages + page[:, None] + inside[None, :]
        to = row[:, None] + value[None, :]
        if OUT:
            tl.store(to, tl.load(at, mask=there), mask=there)
        else:
            tl.store(at, tl.load(to, mask=there), mask=there)


class PageRows:
    """Copies between pages and rows; a row has a token's values of each pages tensor in turn.

    Args:
        every: pages `[num_pages, page_size, num_kv_heads, head_dim]` of 2 or 4 bytes a value, in
            either layout.
    """

    def __init__(self, every: Sequence[Tensor]) -> None:
        self._every = every
        self._places: list[int] = []
        self.locate()

    def locate(self) -> None:
        """Note where the pages are. To be called before a copy: an engine that slept has other
        memory."""
        places = [pages.data_ptr() for pages in self._every]
        if places == self._places:
            return
        self._places = places
        every, fields, first = self._every, [], 0
        for pages in every:
            _, self._page_size, heads, dim = pages.shape
            strides = page_strides(pages, pages)
            fields.append([pages.data_ptr(), heads * dim, dim, first, *strides])
            first += heads * dim
        self._table = torch.tensor(fields, dtype=torch.int64, device=every[0].device)
        self._width = first
        self._bits = 8 * every[0].dtype.itemsize

    def gather(self, slots: Tensor, first: int, count: int, rows: Tensor) -> None:
        """Copy what is at slots[first : first + count] (int64) to `rows` `[count.., width]`."""
        self._launch(slots, first, count, rows, out=True)

    def scatter(self, slots: Tensor, first: int, count: int, rows: Tensor) -> None:
        """Copy `rows` `[count.., width]` to slots[first : first + count] (int64)."""
        self._launch(slots, first, count, rows, out=False)

    def _launch(self, slots: Tensor, first: int, count: int, rows: Tensor, *, out: bool) -> None:
        _move[len(self._table), cdiv(count, _TOKENS)](
            self._table, slots, first, rows.view(torch.int16 if self._bits == 16 else torch.int32),
            count, self._width, self._page_size,
            OUT=out, BITS=self._bits, TOKENS=_TOKENS, VALUES=_VALUES, FIELDS=_FIELDS,
        )  # fmt: skip
