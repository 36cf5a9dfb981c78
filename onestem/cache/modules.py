"""Runs that are not part of a sequence: modules of prompts in PML, found by key.

A module run's keys and values are a function of its key (`onestem.pml.segments`) and its position,
so every request that names the key may read them, also where it has the module at another position.
Its pages share the tree's pool and eviction order.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

import numpy as np

from onestem.cache.idle import IdleRuns
from onestem.cache.pages import PagePool
from onestem.cache.run import Run
from onestem.tree import Label


class ModuleRun(Run):
    """Tokens of a module at consecutive positions.

    Attributes:
        name: the key by which it is found.
        kept: False: it is freed as soon as nobody holds it (placeholders; `share="off"`).
    """

    __slots__ = ("kept", "name")

    def __init__(self, name: Hashable, tokens: np.ndarray, position: int, kept: bool) -> None:
        super().__init__(tokens.tolist(), None, 0, Label(shift=position))
        self.name = name
        self.kept = kept

    def store_at(self, position: int) -> None:
        """Have its keys and values at another position, before there are any."""
        self.label = Label(shift=position)

    @property
    def complete(self) -> bool:
        """Whether all of it is computed, or will be in the current step."""
        return self.computed == len(self.tokens)


@dataclass(eq=False, repr=False)
class ModuleStore:
    """Module runs by name. Those that may be evicted are in one order with the tree's."""

    pool: PagePool
    _idle: IdleRuns
    _runs: dict[Hashable, ModuleRun] = field(default_factory=dict)

    def get(self, name: Hashable) -> ModuleRun | None:
        """The run of a name; None: there is none."""
        return self._runs.get(name)

    def attach(
        self, name: Hashable, tokens: np.ndarray, position: int, owner: object, *, kept: bool = True
    ) -> ModuleRun:
        """Pin and return the run of a name. If it is new, `owner` has to compute it.

        Args:
            tokens: int32 `[n]`.
            position: of the first token.
        """
        run = self._runs.get(name)
        if run is None:
            run = self._runs[name] = ModuleRun(name, tokens, position, kept)
            run.pool, run.owner = self.pool, owner
        self.pin(run)
        return run

    def pin(self, run: ModuleRun) -> None:
        """Keep a run."""
        run.pins += 1
        if run.pins == 1:
            self.pool.hold(run.pages)

    def unpin(self, run: ModuleRun) -> None:
        """Release a run. If nobody holds it, it stays until its pages are needed."""
        run.pins -= 1
        if run.pins:
            return
        self._idle.clock += 1
        self.pool.unhold(run.pages)
        run.owner = None
        self._idle.let_go(run)
        if run.kept and run.computed:
            self._idle.note(run, self)
        else:
            self._drop(run)

    def note_use(self, run: ModuleRun, owner: object) -> None:
        """Note that a sequence imports a run: a use, unless the sequence has to compute it."""
        if run.owner is not owner:
            self._idle.use(run, beside=True)

    def evict(self, run: Run, last_used: int, pages: int) -> int:
        """Free all of a run that nobody has held since `last_used`; the pages it had, or 0."""
        assert isinstance(run, ModuleRun)
        current = run.pins == 0 and run.last_used == last_used
        if not current or self._runs.get(run.name) is not run:
            return 0
        lost = len(run.pages)
        self._drop(run)
        return lost

    def _drop(self, run: ModuleRun) -> None:
        del self._runs[run.name]
        self.pool.release(run.pages)
        run.pages = []

    def __iter__(self) -> Iterator[ModuleRun]:
        return iter(list(self._runs.values()))

    def __len__(self) -> int:
        return len(self._runs)
