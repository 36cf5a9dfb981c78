"""What `onestem.cache.idle` is compared with."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from onestem.cache import ModuleRun, PagePool, Run
from onestem.cache.idle import IdleRuns, Keeper
from onestem.tree import Label, Node, RadixTree
from onestem_lab.eviction.simulate import Result, Simulation
from onestem_lab.eviction.traces import Ask

__all__ = ["Kinds", "LeastRecentlyUsed", "WholeRuns", "run_oracle"]


class Kinds(IdleRuns):
    """Shared runs against others, and nothing learned of pauses."""

    def rate(self, run: Run) -> float:
        return 0.0


class LeastRecentlyUsed(Kinds):
    """By time alone, as many pages as are wanted."""

    def rank(self, run: Run) -> float:
        return 0.0


class WholeRuns(LeastRecentlyUsed):
    """By time alone, and whole runs."""

    def evict_one(self, pages: int) -> bool:
        return super().evict_one(self.pool.num_pages)


class _Known(Node):
    """Tokens that prompts of the trace have: `askers`, the next one last."""

    __slots__ = ("askers",)

    def __init__(
        self,
        tokens: list[int] | np.ndarray,
        parent: _Known | None,
        start: int,
        label: Label = Label(),  # noqa: B008
    ) -> None:
        super().__init__(tokens, parent, start, label)
        self.askers: list[Ask] = []

    def split_off(self, at: int) -> _Known:
        upper = super().split_off(at)
        upper.askers = list(self.askers)
        return upper


class Oracle(Kinds):
    """What is wanted last goes first (Belady's MIN; of a tree's leaves it is the best choice, since
    nobody wants a run without what is above it, and pages cost about the same).

    Args:
        asks: the trace.
        times: when each was admitted in a simulation before.
        admitted: who is, in this one.
    """

    def __init__(self, pool: PagePool, asks: list[Ask], times: Mapping[Ask, float]) -> None:
        super().__init__(pool)
        self.admitted: Mapping[Ask, float] = {}
        self._times = times
        self._tree = RadixTree(_Known((), None, 0))
        self._modules: dict[str, list[Ask]] = {}
        for ask in sorted(asks, key=times.__getitem__, reverse=True):
            for node in self._path(ask.prompt):
                node.askers.append(ask)
            for name, _ in ask.modules:
                self._modules.setdefault(name, []).append(ask)

    def _path(self, prompt: np.ndarray) -> list[_Known]:
        node, at = self._tree.match(prompt, len(prompt) - 1)
        new = _Known(prompt[at:].tolist(), node, at)
        if new.key not in node.children:
            self._tree.insert(new)
            node = new
        return node.path()

    def note(self, run: Run, keeper: Keeper) -> None:
        if isinstance(run, ModuleRun):
            askers = self._modules[run.name[1]]  # type: ignore[index]
        else:
            node = self._end(run)[0]
            askers = node.askers if node is not None else []
        while askers and askers[-1] in self.admitted:
            askers.pop()
        run.rank = -self._times[askers[-1]] if askers else -math.inf
        super().note(run, keeper)

    def _end(self, run: Run) -> tuple[_Known | None, int]:
        """Which node a run's last token is in, and how many of its tokens are on the run's path;
        None: no prompt has it."""
        if run.parent is None:
            return self._tree.root, 0
        node, inside = self._end(run.parent)
        tokens, at = np.frombuffer(run.tokens, np.int32)[: run.computed], 0
        while node is not None and at < len(tokens):
            if inside == len(node.tokens):
                node, inside = node.children.get((Label(), int(tokens[at]))), 0
                continue
            known = np.frombuffer(node.tokens, np.int32)[inside : inside + len(tokens) - at]
            if not np.array_equal(known, tokens[at : at + len(known)]):
                return None, 0
            at, inside = at + len(known), inside + len(known)
        return node, inside


def run_oracle(asks: list[Ask], memory: int, times: Mapping[Ask, float]) -> Result:
    """A trace as `Oracle` has it, with the times of a simulation before."""
    simulation = Simulation(asks, memory, lambda pool: Oracle(pool, asks, times))
    assert isinstance(simulation.idle, Oracle)
    simulation.idle.admitted = simulation.result.admitted
    return simulation.run()
