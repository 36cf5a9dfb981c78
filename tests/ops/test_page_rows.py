"""Keys and values of tokens in all layers' pages at once, against one layer after the other."""

from __future__ import annotations

import pytest
import torch

from onestem.ops.kv import allocate_pages, read_kv

page_rows = pytest.importorskip("onestem.ops.triton.page_rows")

SHAPES = [(2, 8), (1, 20), (3, 128)]  # KV heads and their size


@pytest.mark.parametrize("head_major", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_those_of_each_layer(dtype, head_major):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    every = []
    for heads, dim in SHAPES:
        pages = allocate_pages(7, 4, heads, dim, dtype=dtype, device=device, head_major=head_major)
        every.append(pages.copy_(torch.randn(pages.shape)))
    before = [pages.clone() for pages in every]
    slots = torch.randperm(28)[:21].to(device)
    moved = page_rows.PageRows(every)
    rows = torch.full((30, sum(h * d for h, d in SHAPES)), 7.0, dtype=dtype, device=device)
    moved.gather(torch.cat([slots[:3], slots]), 3, 21, rows)
    want = torch.cat([read_kv(pages, slots).flatten(1) for pages in every], 1)
    assert torch.equal(rows[:21], want)
    assert bool((rows[21:] == 7).all())

    new = torch.randn(want.shape).to(rows)
    moved.scatter(slots, 0, 21, new)
    assert torch.equal(torch.cat([read_kv(pages, slots).flatten(1) for pages in every], 1), new)
    others = torch.tensor(sorted(set(range(28)) - set(slots.tolist())), device=device)
    for pages, old in zip(every, before, strict=True):
        assert torch.equal(read_kv(pages, others), read_kv(old, others))


def test_pages_that_are_elsewhere_are_found():
    """KV memory that was released and taken again."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    every = [allocate_pages(7, 4, *shape, dtype=torch.float32, device=device) for shape in SHAPES]
    moved = page_rows.PageRows(every)
    before, taken = [pages.data_ptr() for pages in every], []
    for pages in every:
        storage, size = pages.untyped_storage(), pages.untyped_storage().nbytes()
        storage.resize_(0)
        taken.append(torch.empty(size, dtype=torch.uint8, device=device))
        storage.resize_(size)
        pages.copy_(torch.randn(pages.shape))
    assert before != [pages.data_ptr() for pages in every]
    moved.locate()
    slots = torch.arange(28, device=device)
    rows = torch.empty(28, sum(h * d for h, d in SHAPES), device=device)
    moved.gather(slots, 0, 28, rows)
    assert torch.equal(rows, torch.cat([read_kv(pages, slots).flatten(1) for pages in every], 1))
