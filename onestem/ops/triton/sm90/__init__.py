"""All items in one launch on Hopper GPUs: `attend_hopper`, written in Gluon.

The mathematics is that of `kernels.attend_kernel`, its twin for all other devices. It is laid out
by hand as in FlashAttention-3 (arXiv 2407.08608, sections 3.1 and 3.2). Copying warps (`copy`) fill
a ring of tiles in shared memory by the copy engine, a page at a time, and two warpgroups multiply.

A program has one of two roles for a whole launch. To *multiply*: both warpgroups walk one item of
128 queries, 64 each (`rows`), and share the ring. To *read*: each walks items of its own through
half the ring, first items of up to 64 queries (`rows`), then items of a few (`columns`). The ring
goes on from one item to the next, so that the memory never waits. The work list's queues say each
program's role and items.

Names are those of `kernels.py`. `count` is the number of tiles that a warpgroup has walked, which
gives its place in the ring.
"""

from onestem.ops.triton.sm90.copy import descriptors
from onestem.ops.triton.sm90.grid import grid_rows
from onestem.ops.triton.sm90.kernel import attend_hopper
