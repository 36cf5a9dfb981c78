"""Constants of all kernels: the word layout that `ops.work` packs, and logarithms.

Gluon's constants are Triton's, so both languages take them from here.
"""

from __future__ import annotations

import triton.language as tl

from onestem.ops.work import lists

__all__ = [
    "AT_DEST",
    "AT_MERGES",
    "AT_PAGES",
    "AT_POSITIONS",
    "AT_RECORDS",
    "AT_ROWS",
    "AT_WALK",
    "CLEAR_HI",
    "CLEAR_LO",
    "END",
    "ENTRY",
    "FIRST_ENTRY",
    "FIRST_STATE",
    "HEADER",
    "HI",
    "LN_2",
    "LOG2_E",
    "NUM_MERGES",
    "NUM_PARTS",
    "NUM_ROWS",
    "NUM_WALK",
    "POSITION",
    "QUEUE",
    "QUEUED",
    "QUEUE_FEW",
    "QUEUE_HEAD",
    "QUEUE_START",
    "QUEUE_STOP",
    "RECORD",
    "ROW_START",
    "SHARED",
    "STEP",
    "WALK_START",
    "WINDOW",
]

HEADER: tl.constexpr = tl.constexpr(lists.HEADER)
QUEUED: tl.constexpr = tl.constexpr(lists.QUEUED)
QUEUE_FEW: tl.constexpr = tl.constexpr(lists.QUEUE_FEW)
QUEUE_HEAD: tl.constexpr = tl.constexpr(lists.QUEUE_HEAD)
QUEUE_START: tl.constexpr = tl.constexpr(lists.QUEUE_START)
QUEUE_STOP: tl.constexpr = tl.constexpr(lists.QUEUE_STOP)
RECORD: tl.constexpr = tl.constexpr(lists.RECORD)
ENTRY: tl.constexpr = tl.constexpr(lists.ENTRY)
QUEUE: tl.constexpr = tl.constexpr(lists.QUEUE)
AT_DEST: tl.constexpr = tl.constexpr(lists.AT_DEST)
AT_MERGES: tl.constexpr = tl.constexpr(lists.AT_MERGES)
AT_PAGES: tl.constexpr = tl.constexpr(lists.AT_PAGES)
AT_POSITIONS: tl.constexpr = tl.constexpr(lists.AT_POSITIONS)
AT_RECORDS: tl.constexpr = tl.constexpr(lists.AT_RECORDS)
AT_ROWS: tl.constexpr = tl.constexpr(lists.AT_ROWS)
AT_WALK: tl.constexpr = tl.constexpr(lists.AT_WALK)
CLEAR_HI: tl.constexpr = tl.constexpr(lists.CLEAR_HI)
CLEAR_LO: tl.constexpr = tl.constexpr(lists.CLEAR_LO)
END: tl.constexpr = tl.constexpr(lists.END)
FIRST_ENTRY: tl.constexpr = tl.constexpr(lists.FIRST_ENTRY)
FIRST_STATE: tl.constexpr = tl.constexpr(lists.FIRST_STATE)
HI: tl.constexpr = tl.constexpr(lists.HI)
NUM_MERGES: tl.constexpr = tl.constexpr(lists.NUM_MERGES)
NUM_PARTS: tl.constexpr = tl.constexpr(lists.NUM_PARTS)
NUM_ROWS: tl.constexpr = tl.constexpr(lists.NUM_ROWS)
NUM_WALK: tl.constexpr = tl.constexpr(lists.NUM_WALK)
POSITION: tl.constexpr = tl.constexpr(lists.POSITION)
ROW_START: tl.constexpr = tl.constexpr(lists.ROW_START)
SHARED: tl.constexpr = tl.constexpr(lists.SHARED)
STEP: tl.constexpr = tl.constexpr(lists.STEP)
WALK_START: tl.constexpr = tl.constexpr(lists.WALK_START)
WINDOW: tl.constexpr = tl.constexpr(lists.WINDOW)
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
