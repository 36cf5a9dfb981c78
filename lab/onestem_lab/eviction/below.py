"""What host memory below KV memory keeps: prompt tokens that neither holds.

    python -m onestem_lab.eviction.below [--traces beside,scans] [--seeds 2]

Blocks of 128 tokens; requests one after the other, and KV memory goes by age. Of host memory:

before: what was written or copied back longest ago goes first.
age: what left KV memory longest ago.
after: as `onestem.cache.host` has it.

Written to lab/results/eviction-below.json.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import sys
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from onestem.cache.host import HostStore
from onestem_lab.eviction import traces
from onestem_lab.eviction.sessions import TRACES as SESSIONS
from onestem_lab.eviction.traces import Ask
from onestem_lab.results import RESULTS, write

BLOCK = 128
TRACES = {**traces.TRACES, **SESSIONS}
NAMES = "beside,scans,alone,systems,rounds,questions,documents,drift,agents,prefixes"
MEMORIES = ((32768, 65536), (32768, 131072), (65536, 131072), (65536, 262144))  # of KV, of the host
KV: Any = SimpleNamespace(nbytes=1)

Asked = tuple[list[str], int, int]  # blocks of prompt and answer, how many the prompt has, kind


class Before:
    """By use or writing, as it was."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._names = OrderedDict[str, None]()

    def get(self, name: str) -> Any:
        if name not in self._names:
            return None
        self._names.move_to_end(name)
        return KV

    def touch(self, name: str, kind: int) -> bool:
        return name in self._names

    def put(self, name: str, kv: Any, kind: int) -> None:
        self._names[name] = None
        if len(self._names) > self._budget:
            self._names.popitem(last=False)


class ByAge(HostStore):
    """All of one kind."""

    def touch(self, name: str, kind: int = 0) -> bool:
        return super().touch(name)

    def put(self, name: str, kv: Any, kind: int = 0, *, is_awaited: bool = False) -> bool:
        return super().put(name, kv)


POLICIES = {"before": Before, "age": ByAge, "after": HostStore}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", default=NAMES)
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    rows = [
        row for name in options.traces.split(",") for row in _measure(name, range(options.seeds))
    ]
    command = " ".join(["python -m onestem_lab.eviction.below", *sys.argv[1:]])
    write(RESULTS / "eviction-below.json", {"command": command, "rows": rows})


def _measure(name: str, seeds: Iterable[int]) -> list[dict[str, Any]]:
    every = [_in_order(TRACES[name].make(np.random.default_rng(seed))) for seed in seeds]
    rows = []
    for memory, host in MEMORIES:
        row: dict[str, Any] = {"trace": name, "memory": memory, "host": host}
        for policy, store in POLICIES.items():
            counts = Counter[str]()
            for asks in every:
                counts.update(_run(asks, memory // BLOCK, store(host // BLOCK)))
            row[policy] = counts["computed"] * BLOCK
            row[f"{policy}_saved"] = counts["saved"] * BLOCK
        print(row, flush=True)
        rows.append(row)
    return rows


def _in_order(asks: list[Ask]) -> list[Asked]:
    after: dict[Ask, list[Ask]] = {}
    number, coming = itertools.count(), list[tuple[float, int, Ask]]()
    for ask in asks:
        if ask.after is None:
            heapq.heappush(coming, (ask.seconds, next(number), ask))
        else:
            after.setdefault(ask.after, []).append(ask)
    found = []
    while coming:
        now, _, ask = heapq.heappop(coming)
        tokens = np.concatenate((ask.prompt, ask.answer))
        found.append((list(_blocks(tokens)), (len(ask.prompt) - 1) // BLOCK, ask.after is not None))
        for one in after.get(ask, ()):
            heapq.heappush(coming, (now + 1.0 + one.seconds, next(number), one))
    return found


def _blocks(tokens: np.ndarray) -> Iterator[str]:
    chain = 0
    for first in range(0, len(tokens) - BLOCK + 1, BLOCK):
        chain = hash((chain, tokens[first : first + BLOCK].tobytes()))
        yield str(chain)


def _run(asks: list[Asked], memory: int, host: Any) -> dict[str, int]:
    kept = OrderedDict[str, int]()
    computed = saved = 0
    for blocks, prompt, kind in asks:
        for i, name in enumerate(blocks[:prompt]):
            if name not in kept and host.get(name) is None:
                computed += prompt - i
                break
        for name in reversed(blocks):  # the last goes first
            kept.pop(name, None)
            kept[name] = kind
        while len(kept) > memory:
            name, kind = kept.popitem(last=False)
            if not host.touch(name, kind):
                host.put(name, KV, kind)
                saved += 1
    return {"computed": computed, "saved": saved}


if __name__ == "__main__":
    main()
