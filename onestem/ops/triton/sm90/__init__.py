"""All items in one launch on Hopper GPUs: `attend_hopper`, written in Gluon.

The same mathematics as `kernels.attend_kernel`, which is its twin for all other devices, laid out
by hand as FlashAttention-3 does it (arXiv 2407.08608, sections 3.1 and 3.2): copying warps (`copy`)
fill a ring of tiles in shared memory by the copy engine, a page at a time, and two warpgroups
multiply.

A program has one of two roles for a whole launch. To *multiply*: both warpgroups walk one item of
128 queries, 64 each (`rows`), and share the ring. To *read*: each walks items of its own through
half the ring, which runs on from one item to the next, so that the memory never waits; first those
of up to 64 queries (`rows`), then those of a few (`columns`). Who does which, and with which items,
stands in the work list's queues.

Names are those of `kernels.py`; `count` numbers the tiles that a warpgroup has walked, and with it
its place in the ring.
"""

from onestem.ops.triton.sm90.copy import box_tokens, descriptors
from onestem.ops.triton.sm90.kernel import attend_hopper

__all__ = ["attend_hopper", "box_tokens", "descriptors"]
