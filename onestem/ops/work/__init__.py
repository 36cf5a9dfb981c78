"""A plan as a work list: what the programs of one persistent kernel take on, in one int32 buffer.

Nothing here loops over rows, runs or spans: see `units` (who walks what), `cuts` (where walks are
cut), `deal` (who takes them) and `lists` (the buffer).
"""

from onestem.ops.work.lists import (
    ENTRY,
    HEADER,
    QUEUE,
    QUEUED,
    RECORD,
    ListTooLong,
    WorkList,
    make_work,
)
from onestem.ops.work.model import CostModel, Tile

__all__ = [
    "ENTRY",
    "HEADER",
    "QUEUE",
    "QUEUED",
    "RECORD",
    "CostModel",
    "ListTooLong",
    "Tile",
    "WorkList",
    "make_work",
]
