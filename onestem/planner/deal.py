"""A planned job dealt to replicas: groups kept whole, largest first, stolen by idle replicas.

What is dealt are stretches of the planned order. The order is depth first, so a stretch computes
again no more than what its first item shares with those before it. The same code deals a job to
engines (`onestem.replicas`) and in a simulation (`simulate`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from onestem.planner.sort import IntArray

FloatArray = npt.NDArray[np.float64]

# A cut may move by this part of a piece, to where it costs least.
CUT_WINDOW = 1 / 8
# Stolen items must end earlier than where they were, by at least this part.
LEAST_GAIN = 1 / 64
# Replicas that an idle one tries to steal from: those that would end last.
MOST_VICTIMS = 8
# Groups are dealt together until a replica's part of the job has at most about this many pieces.
MOST_PIECES = 1024
NOBODY = -1


@dataclass(frozen=True, eq=False)
class Costs:
    """Items of a job in planned order, and what they cost.

    Attributes:
        cost: `[num_items]` of each, where those before it are in the same replica.
        again: `[num_items]` extra cost for a replica that begins with the item: what the item
            shares with those before it.
        starts: `[num_groups]` first item of each group, rising from 0.
    """

    cost: FloatArray
    again: FloatArray
    starts: IntArray


class Piece(NamedTuple):
    """Items `first..end - 1`, of one group; `cost` is what they cost a replica."""

    first: int
    end: int
    cost: float


class Deal:
    """Which replica computes which items.

    At first groups are dealt largest first, each to the replica where it ends soonest. A group that
    costs more than a replica's share of the job is cut, as long as no part shares more than it has
    to itself. Each replica has its groups in planned order. One that has handed out all of its own
    steals from one that would end last, so much that both end together: whole groups from its end,
    then a part of one. `sort` puts them in another order.

    Args:
        costs: of the job.
        speeds: `[num_replicas]` relative to each other.

    Attributes:
        owner: `[num_items]` the replica that had each item in hand last; -1: none yet.
        speeds: may be changed at any time.
        begun: `[num_replicas]` replicas that are up. From others the last group may be taken too.
        present: `[num_replicas]` replicas that are up or will be. Others lose all that they have.
        queued, in_hand: `[num_replicas]` float64 cost of what each replica has not taken, and of
            what it has in hand.
        num_cuts: groups cut, once for each cut.
        cost_again: cost of what is computed again at cuts.
    """

    def __init__(self, costs: Costs, speeds: FloatArray) -> None:
        self.costs = costs
        self.speeds = speeds.astype(np.float64)
        self.owner = np.full(len(costs.cost), NOBODY, np.int32)
        self.begun = np.ones(len(speeds), np.bool_)
        self.present = np.ones(len(speeds), np.bool_)
        self.num_cuts = 0
        self.cost_again = 0.0
        self._before = np.concatenate(([0.0], np.cumsum(costs.cost)))
        self._queues: list[deque[Piece]] = [deque() for _ in speeds]
        self.queued = np.zeros(len(speeds))
        self.in_hand = np.zeros(len(speeds))
        self._begins = np.zeros(len(costs.cost), np.bool_)  # a group
        self._begins[costs.starts] = True
        self._place = np.arange(len(costs.cost))
        self._deal()

    def _deal(self) -> None:
        pieces = list(self._pieces())
        sizes = np.array([piece.cost for piece in pieces])
        ends = [(0.0, replica) for replica in range(len(self.speeds))]
        equal = len(set(self.speeds.tolist())) == 1
        for at in np.argsort(-sizes, kind="stable").tolist():
            if equal:
                _, replica = heappop(ends)
            else:
                replica = int(np.argmin((self.queued + sizes[at]) / self.speeds))
            self._queues[replica].append(pieces[at])
            self.queued[replica] += sizes[at]
            if equal:
                heappush(ends, (float(self.queued[replica]), replica))
        self._queues = [deque(self._in_order(queue)) for queue in self._queues]

    def _in_order(self, pieces: Iterable[Piece]) -> list[Piece]:
        return sorted(pieces, key=lambda piece: int(self._place[piece.first]))

    def _pieces(self) -> Iterator[Piece]:
        """Groups, small ones with their neighbours, and parts of those that are too large."""
        share = self._before[-1] * self.speeds.max() / self.speeds.sum()
        starts = self._bundled(share / MOST_PIECES).tolist()
        for first, end in zip(starts, [*starts[1:], len(self.costs.cost)], strict=True):
            if self._body(first, end) <= share or end - first == 1:
                yield self._piece(first, end)
            else:
                yield from self._parts(first, end, share)

    def _bundled(self, size: float) -> IntArray:
        """First items of groups that cost `size` or more, and of bundles of others."""
        starts = self.costs.starts
        cost = np.diff(self._before[starts], append=self._before[-1])
        number = self._before[starts] // max(size, np.finfo(float).tiny)
        return starts[(np.diff(number, prepend=-1.0) > 0) | (cost >= size)]

    def _parts(self, first: int, end: int, share: float) -> Iterator[Piece]:
        """A group in equal parts, each at most a share."""
        total, common = self._body(first, end), float(self.costs.again[first + 1 : end].min())
        most = (total - common) // common if common else end - first
        parts = int(max(1, min(-(-total // share), most, end - first)))
        at = first
        for part in range(1, parts):
            cut = self._near(self._before[first] + part * total / parts, total / parts, at + 1, end)
            if cut is not None:
                self.num_cuts += 1
                yield self._piece(at, cut)
                at = cut
        yield self._piece(at, end)

    def _near(self, before: float, size: float, low: int, high: int) -> int | None:
        """The item of `low..high - 1` to begin a part with, near where the cost before it is
        `before`; None: there is none."""
        if low >= high:
            return None
        around = [before - size * CUT_WINDOW, before, before + size * CUT_WINDOW]
        first, wanted, last = np.clip(np.searchsorted(self._before, around), low, high - 1).tolist()
        again = self.costs.again[first : last + 1]
        best = np.flatnonzero(again == again.min()) + first
        return int(best[np.argmin(abs(best - wanted))])

    def _body(self, first: int, end: int) -> float:
        return float(self._before[end] - self._before[first])

    def _piece(self, first: int, end: int) -> Piece:
        """A piece, at its cost for a replica that has not computed what comes before."""
        again = 0.0 if self._begins[first] else float(self.costs.again[first])
        return Piece(first, end, self._body(first, end) + again)

    def sort(self, place: IntArray) -> None:
        """Sort what each replica has not taken by `[num_items]` places in a new order. The rest of
        a group that it has begun stays first."""
        self._place = place
        for replica, queue in enumerate(self._queues):
            first = queue[0].first if queue else 0
            goes_on = not self._begins[first] and self.owner[first - 1] == replica
            begun = [queue.popleft()] if goes_on else []
            self._queues[replica] = deque(begun + self._in_order(queue))

    def take(self, replica: int, most: int) -> Piece | None:
        """The next items of a replica, at most `most`; None: there is nothing for it."""
        queue = self._queues[replica]
        if not queue and not self._steal(replica):
            return None
        piece = queue.popleft()
        self.queued[replica] -= piece.cost
        cut = piece.first + most
        if cut < piece.end:
            rest = Piece(cut, piece.end, self._body(cut, piece.end))
            queue.appendleft(rest)
            self.queued[replica] += rest.cost
            piece = Piece(piece.first, cut, piece.cost - rest.cost)
        body = self._body(piece.first, piece.end)
        self.cost_again += piece.cost - body
        self.in_hand[replica] += body
        self.owner[piece.first : piece.end] = replica
        return piece

    def done(self, replica: int, first: int, end: int) -> None:
        """Note that a replica no longer has these items in hand."""
        self.in_hand[replica] -= self._body(first, end)

    def leave(self, replica: int) -> None:
        """Note that a replica computes no more; others may take all that it has not in hand."""
        self.begun[replica] = self.present[replica] = False

    def _steal(self, thief: int) -> bool:
        """Steal from a replica that would end last. Returns whether there was anything."""
        ends = (self.queued + self.in_hand) / self.speeds
        ends[~self.present] = np.inf
        ends[[not queue for queue in self._queues]] = -1.0
        for victim in np.argsort(-ends, kind="stable")[:MOST_VICTIMS].tolist():
            if ends[victim] < 0:
                break
            moved = self._moved(victim, thief)
            if moved:
                self._queues[thief].extend(self._in_order(moved))
                self.queued[thief] += sum(piece.cost for piece in moved)
                return True
        return False

    def _moved(self, victim: int, thief: int) -> list[Piece]:
        """What a thief takes from another's queue."""
        queue, here, there = self._queues[victim], self.speeds[thief], self.speeds[victim]
        mine = self.in_hand[thief]
        if self.present[victim]:
            has = self.queued[victim] + self.in_hand[victim]
            most = (has * here - mine * there) / (here + there)
        else:
            has = np.inf
            most = self.queued[victim] / max(1, int(self.present.sum()))
        moved: list[Piece] = []
        while queue and queue[-1].cost <= most:
            moved.append(queue.pop())
            most -= moved[-1].cost
        taken = sum(piece.cost for piece in moved)
        if queue:
            piece = queue[-1]
            cut = self._cut_for_thief(piece, most, there / (here + there))
            if cut is not None:
                part = self._piece(cut, piece.end)
                ends = (mine + taken + part.cost) / here
                if ends < (1 - LEAST_GAIN) * (has - taken) / there:
                    queue[-1] = Piece(piece.first, cut, piece.cost - self._body(cut, piece.end))
                    self.queued[victim] -= self._body(cut, piece.end)
                    self.num_cuts += 1
                    moved.append(part)
            elif not moved and not self.begun[victim]:
                moved.append(queue.pop())
                taken += moved[-1].cost
        self.queued[victim] -= taken
        return moved

    def _cut_for_thief(self, piece: Piece, most: float, pays: float) -> int | None:
        """Where to cut a piece so that its end costs `most`, less the part `pays` of what is
        computed again; None: nowhere."""
        low, high = piece.first + 1, piece.end
        if low >= high or most <= 0:
            return None
        cut = high - 1
        for _ in range(2):
            cut = int(np.searchsorted(self._before, self._before[piece.end] - most))
            cut = min(max(cut, low), high - 1)
            most -= pays * self.costs.again[cut]
            if most <= 0:
                return None
        return self._near(float(self._before[piece.end] - most), most, low, high)


def simulate(deal: Deal, speeds: FloatArray, most: int) -> FloatArray:
    """Deal a job to replicas that take nothing but time: `[num_replicas]` when each one ends.

    Args:
        speeds: true speeds of the replicas; the deal learns each when its first items are done.
        most: maximum items that a replica takes at a time.
    """
    ends = np.zeros(len(speeds))
    clock = [(0.0, replica) for replica in range(len(speeds))]
    heapify(clock)
    has: dict[int, Piece] = {}
    while clock:
        now, replica = heappop(clock)
        before = has.pop(replica, None)
        if before is not None:
            deal.done(replica, before.first, before.end)
            deal.speeds[replica] = speeds[replica]
        piece = deal.take(replica, most)
        if piece is not None:
            has[replica] = piece
            ends[replica] = now + piece.cost / speeds[replica]
            heappush(clock, (float(ends[replica]), replica))
    return ends
