"""Slots of recurrent states: one for each running sequence, and snapshots, each of the state after
a run's last token. Where layers keep a state, a prompt can go on only from there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from onestem.cache.run import Run
from onestem.errors import CacheError

SNAPSHOT_SHARE = 0.25  # of all slots, at least


@dataclass(slots=True, eq=False)
class StateSlot:
    """The state of an admitted sequence.

    Attributes:
        slot: that it writes.
        source: that its next rows continue; -1: none, the state begins with zeros.
        at: tokens of its prompt that are in the state, those of this step too.
        is_begun: whether it has rows.
        promised: slots for sequences that will fork from it.
        whole: it is alone, and fits while its path is one run: no snapshot parts that.
        common: first tokens that the next request has in common with it; None: not looked for.
        decodes: its prompt is in the state, and so are all tokens that it has sampled but the last.
    """

    slot: int
    source: int = -1
    at: int = 0
    is_begun: bool = False
    promised: int = 0
    whole: bool = False
    common: int | None = None
    decodes: bool = False


class StatePool:
    """Slots 0..num_slots-1: free, a sequence's, or a snapshot's.

    All slots are of one size. So a snapshot is worth the tokens between the one above it on its
    path and itself; each use counts these again from the clock, which is the worth of what was
    evicted last (GreedyDual; Cao and Irani 1997). Snapshots that planned requests wait for go after
    all others.

    Attributes:
        num_taken: snapshots that were taken so far.
        on_evict: called with a run whose snapshot is evicted, before its slot is free.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_taken = 0
        self.on_evict: Callable[[Run], object] = lambda run: None
        self._free = list(range(num_slots - 1, -1, -1))
        self._snapshots: dict[int, Run] = {}
        self._worth: dict[int, float] = {}
        self._clock = 0.0
        # Of the step that is being decided: snapshots that are read, and those that are taken.
        self._read: set[int] = set()
        self._written: set[int] = set()

    @property
    def runs(self) -> Iterable[Run]:
        """Those that have snapshots."""
        return self._snapshots.values()

    @property
    def num_snapshots(self) -> int:
        """Snapshots that are held."""
        return len(self._snapshots)

    @property
    def most_sequences(self) -> int:
        """Maximum sequences that have slots: others are left for snapshots."""
        return max(1, self.num_slots - max(1, int(SNAPSHOT_SHARE * self.num_slots)))

    @property
    def num_free(self) -> int:
        """Slots that are nobody's."""
        return len(self._free)

    @property
    def num_idle(self) -> int:
        """Slots that are free, or a snapshot's that no planned request waits for."""
        others = (run for slot, run in self._snapshots.items() if slot not in self._written)
        return len(self._free) + sum(not _is_needed(run) for run in others)

    @property
    def num_available(self) -> int:
        """Slots that are free, or a snapshot's that could be evicted after the step's rows."""
        return len(self._free) + len(self._snapshots) - len(self._written)

    def begin_step(self) -> None:
        """Begin to decide a step."""
        self._read.clear()
        self._written.clear()

    def take(self, *, after_rows: bool = False) -> int | None:
        """A slot, maybe that of the snapshot of least worth. None: there is none that the step does
        not use.

        Args:
            after_rows: it is written after the step's rows, which may still read it.
        """
        if not self._free:
            used = self._written if after_rows else self._written | self._read
            found = [slot for slot in self._snapshots if slot not in used]
            if not found:
                return None
            slot = min(found, key=self._rank)
            self._clock = max(self._clock, self._worth[slot])
            self.on_evict(self._snapshots[slot])
            self.drop(self._snapshots[slot])
        return self._free.pop()

    def give(self, slot: int) -> None:
        """Free a sequence's slot."""
        self._free.append(slot)

    def snapshot(
        self, run: Run, above: int, *, promised: int, filled: int | None = None
    ) -> int | None:
        """A slot for a snapshot of a run's last token, taken after the step's rows. None: there is
        none of less worth.

        Args:
            above: tokens up to the snapshot above it.
            promised: slots that others will take in this step.
            filled: a sequence's slot, which has that state and becomes the snapshot; what is
                returned takes its place.
        """
        if self.num_available <= promised:
            return None
        worth = self._clock + run.end - above
        if not self._free:
            ranks = [self._rank(s) for s in self._snapshots if s not in self._written]
            if not ranks or min(ranks) >= (_is_needed(run), worth):
                return None
        slot = self.take(after_rows=filled is None)
        if slot is not None:
            self.keep(run, slot if filled is None else filled, above)
            if filled is None:
                self._written.add(slot)
        return slot

    def keep(self, run: Run, slot: int, above: int) -> None:
        """Make a slot the snapshot of a run that has none."""
        assert run.snapshot < 0
        run.snapshot = slot
        self._snapshots[slot] = run
        self._worth[slot] = self._clock + run.end - above
        self.num_taken += 1

    def is_there(self, run: Run) -> bool:
        """Whether a run's snapshot was taken before this step."""
        return run.snapshot not in self._written

    def read(self, run: Run, above: int) -> int:
        """The snapshot of a run, which a step reads."""
        slot = run.snapshot
        self._worth[slot] = self._clock + run.end - above
        self._read.add(slot)
        return slot

    def drop(self, run: Run) -> None:
        """Free the snapshot of a run, if it has one."""
        if run.snapshot >= 0:
            del self._snapshots[run.snapshot], self._worth[run.snapshot]
            self._written.discard(run.snapshot)
            self._free.append(run.snapshot)
            run.snapshot = -1

    def _rank(self, slot: int) -> tuple[bool, float]:
        return _is_needed(self._snapshots[slot]), self._worth[slot]

    def check(self, runs: Iterable[Run], held: Iterable[int]) -> None:
        """Raise `CacheError` unless each slot is free, a snapshot's of one of `runs`, or one of
        `held`, which are sequences'."""
        snapshots = {run.snapshot: run for run in runs if run.snapshot >= 0}
        every = sorted([*self._free, *snapshots, *held])
        if every != list(range(self.num_slots)) or snapshots != self._snapshots:
            raise CacheError(
                f"states do not balance: {len(self._free)} free, {len(snapshots)} snapshots of "
                f"{len(self._snapshots)} counted, of {self.num_slots}"
            )


def _is_needed(run: Run) -> bool:
    """Whether planned requests wait, or are to come, for a snapshot."""
    return run.is_branch and run.is_held
