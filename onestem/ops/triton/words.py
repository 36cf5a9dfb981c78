"""Constants of all kernels: the word layout that `ops.work` packs, and logarithms.

Gluon's constants are Triton's, so both languages take them from here.
"""

from __future__ import annotations

import triton.language as tl

from onestem.ops import work

__all__ = ["ENTRY", "HEADER", "LN_2", "LOG2_E", "QUEUE", "QUEUED", "RECORD"]

HEADER: tl.constexpr = tl.constexpr(work.HEADER)
QUEUED: tl.constexpr = tl.constexpr(work.QUEUED)
RECORD: tl.constexpr = tl.constexpr(work.RECORD)
ENTRY: tl.constexpr = tl.constexpr(work.ENTRY)
QUEUE: tl.constexpr = tl.constexpr(work.QUEUE)
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
