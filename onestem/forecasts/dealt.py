"""A job on several engines: ways to deal its requests, and what the parts take together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import numpy as np

from onestem.cost import Forecast, Work
from onestem.cost.work import IntArray
from onestem.planner import JobPlan

Dealt = Literal["groups", "random", "round-robin", "prefix-hash"]
# Requests of a piece that a simulated replica takes at a time.
STEAL_REQUESTS = 16
# Servers' routers hash this number of a prompt's first tokens, or fewer.
HASHED_TOKENS = 256


@dataclass(frozen=True)
class ReplicasForecast:
    """What a job takes on several engines.

    Attributes:
        each: forecasts of the engines that have a part of it.
        replicas: how many there are.
        num_cuts: groups cut, once for each cut.
    """

    each: list[Forecast]
    replicas: int
    num_cuts: int

    @property
    def whole(self) -> Forecast:
        """Seconds until the last engine ends, the largest peak KV memory, and sums of the rest."""
        names = [field.name for field in fields(Forecast)]
        whole = {name: sum(getattr(one, name) for one in self.each) for name in names}
        for name in ("seconds", "peak_kv_tokens"):
            whole[name] = max((getattr(one, name) for one in self.each), default=0)
        return Forecast(**whole)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able dict: the whole, `num_cuts`, and the seconds of each engine."""
        seconds = [one.seconds for one in self.each] + [0.0] * (self.replicas - len(self.each))
        return {**asdict(self.whole), "num_cuts": self.num_cuts, "replica_seconds": seconds}


def dealt_parts(work: Work, owner: IntArray, replicas: int) -> Iterator[Work]:
    """The part of each replica that gets something.

    Args:
        owner: `[num_requests]` replica of each request, in the plan's order.
    """
    by_owner = np.argsort(owner.astype(np.int32), kind="stable")
    bounds = np.cumsum(np.bincount(owner, minlength=replicas))[:-1]
    parts = np.split(by_owner, bounds)
    return (work.part(positions) for positions in parts if len(positions))


def dealt_otherwise(plan: JobPlan, work: Work, replicas: int, how: Dealt) -> IntArray:
    """`[num_requests]` replica of each request, in the plan's order, dealt without its groups."""
    if how == "round-robin":
        return plan.order % replicas
    if how == "random":
        return np.random.default_rng(0).integers(0, replicas, len(plan.order))
    # Requests that share their first HASHED_TOKENS tokens are below one node of that depth.
    depth, parent = plan.tree.depth, plan.tree.parent.tolist()
    deepest = np.minimum(depth, HASHED_TOKENS).tolist()
    key = list(range(len(parent)))
    for node in range(1, len(parent)):
        if deepest[parent[node]] == HASHED_TOKENS:
            key[node] = key[parent[node]]
    reached = np.array(deepest) == HASHED_TOKENS
    drawn = np.random.default_rng(0).integers(0, replicas, len(parent))
    alone = np.random.default_rng(1).integers(0, replicas, len(plan.order))
    return np.where(reached[work.tree.home], drawn[np.array(key)[work.tree.home]], alone)
