"""The dealing of items to programs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from onestem.ops.work.model import CostModel

ALIKE = 1.1  # items whose times differ by at most this factor are dealt out together
FEW = 8  # such items are dealt one by one, in fewer operations
MOST_HANDS, LONG = 0.7, 0.35  # of the hands; of the others' time (`hands_in_rows`)


def dealt(time: np.ndarray, free: np.ndarray) -> np.ndarray:
    """int64 `[len(time)]`: the hand of each item: the longest first, to the hand that is free first
    (Graham, Bounds on multiprocessing timing anomalies, 1969, theorem 2). free: when each hand can
    begin, in ns."""
    order = np.argsort(-time, kind="stable")
    hand = np.zeros(len(time), np.int64)
    load, hands = free.copy(), len(free)
    size = np.floor(np.log(time[order]) / np.log(ALIKE))
    bounds = [0, *(np.flatnonzero(np.diff(size)) + 1).tolist(), len(order)]
    for first, end in pairwise(bounds):
        items = order[first:end]
        if len(items) <= FEW:
            for item in items.tolist():
                soonest = int(load.argmin())
                hand[item] = soonest
                load[soonest] += time[item]
            continue
        # Times at which each hand could begin its next item of this size, the one after it, ...
        longest = float(time[items[0]])
        most = int(len(items) // hands + (load.max() - load.min()) // longest + 2)
        begin = load[:, None] + longest * np.arange(min(most, len(items)))
        places = np.argsort(begin.T.reshape(-1), kind="stable")[: len(items)]
        hand[items] = places % hands
        load = load + np.bincount(hand[items], time[items], hands)
    return hand


def late_hands(hands: int, cost: CostModel) -> np.ndarray:
    """float64 `[hands]`: when each hand that reads can begin, if the halves of programs that begin
    sooner are the first hands."""
    return np.where(np.arange(hands) >= hands // 2, cost.late_ns[0], 0.0)


def hands_in_rows(rows: np.ndarray, few: np.ndarray, hands: int) -> int:
    """How many of the hands that read take all items in rows, by the times in ns of these and of
    items with few queries. What rows share comes from the cache. So where most hands would begin
    with it, and it takes long, a part of them does, and the others read from memory meanwhile."""
    shared, own = float(rows.sum()), float(few.sum())
    if len(rows) <= MOST_HANDS * hands or not LONG * own <= shared <= 2 * own:
        return hands
    longest = float(rows.max())
    rounds = int((shared + own) / hands // longest)
    return min(hands, math.ceil(shared / (rounds * longest))) if rounds > 1 else hands


@dataclass(frozen=True)
class Deal:
    """The dealing of items. `split`: programs that multiply and that read (`WorkList.split`)."""

    split: tuple[int, int]
    num_kv_heads: int
    cost: CostModel

    def in_order(self, time: np.ndarray, kind: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The order of items with these times and tiles (`kind`), the widest tiles last, and
        `WorkList.queues`."""
        last = len(self.cost.tiles) - 1
        wide = kind == last
        if not self.cost.together:
            # On each side the longest come first. Items of about the same length keep their order:
            # they read the same keys, which are then in the cache.
            length = np.rint(np.log(time) / np.log(1.25))
            return np.lexsort((-length, wide)), np.zeros((0, 4), np.int32)
        few = (kind == 0) & (last > 1)
        multiply, read = self.split
        hands = 2 * read // self.num_kv_heads, multiply // self.num_kv_heads
        hand = np.zeros(len(time), np.int64)
        rows = ~wide & ~few
        # Halves that begin sooner take items in rows first, or all others if they can.
        apart = bool(rows.any()) or int(np.count_nonzero(few)) <= read // self.num_kv_heads
        late = late_hands(hands[0], self.cost) * apart
        hand[rows] = dealt(time[rows], late[: hands_in_rows(time[rows], time[few], hands[0])])
        taken = np.bincount(hand[rows], time[rows], hands[0])
        hand[few] = dealt(time[few], taken + late)
        hand[wide] = dealt(time[wide], np.zeros(hands[1]))
        counts = (
            np.bincount(hand[side], minlength=number)
            for side, number in ((~wide, hands[0]), (few, hands[0]), (wide, hands[1]))
        )
        return np.lexsort((-time, few, hand, wide)), self._queues(apart, *counts)

    def _queues(
        self, apart: bool, reading: np.ndarray, few: np.ndarray, wide: np.ndarray
    ) -> np.ndarray:
        """`WorkList.queues`, from each hand's number of items that read, of those with few rows,
        and of items that multiply. Items of hand i follow those of hand i - 1.

        apart: of the programs that read, the second halves are the first hands, since they begin
        sooner (`CostModel.late_ns`). Else both halves of a program have the same hand, for two KV
        heads. These lie side by side in memory, and some sizes of heads are read faster so.
        """
        multiply, read = self.split
        stop = np.cumsum(np.concatenate((reading, wide)))
        start = stop - np.concatenate((reading, wide))
        program = np.repeat(np.arange(multiply + read), 2)
        multiplies = program < multiply
        half = np.arange(len(program)) % 2
        reader = program - multiply
        reader = reader + read * (half == 0) if apart else 2 * reader + half
        place = np.where(multiplies, program, reader)
        hand, head = np.divmod(place, self.num_kv_heads)
        there = hand < np.where(multiplies, len(wide), len(reading))
        hand = np.where(there, hand + len(reading) * multiplies, 0)
        queues = np.zeros((len(program), 4), np.int32)
        if len(stop):
            few_start = stop - np.concatenate((few, np.zeros_like(wide)))
            for column, values in enumerate((start, stop, None, few_start)):
                if values is not None:
                    queues[:, column] = values[hand] * there
        queues[:, 2] = head
        queues[multiplies, 3] = -1
        return queues
