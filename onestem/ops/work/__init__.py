"""A plan as a work list: the items of one persistent kernel's programs, in one int32 buffer.

Nothing here loops over rows, runs or spans. See `units` (rows that walk together), `cuts` (where
walks are cut), `deal` (which program takes which item) and `lists` (the buffer).
"""

from onestem.ops.work.lists import ListTooLong, WorkList, make_work
from onestem.ops.work.model import CostModel, Tile
