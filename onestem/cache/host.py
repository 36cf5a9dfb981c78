"""Keys and values in host memory, by name: rows as in files (`storage`)."""

from __future__ import annotations

import threading
from collections import OrderedDict

from torch import Tensor

from onestem.cache.pauses import CLEARLY, BothPauses

AWAITED = 3 / 4  # half is read ahead, and what is read already waits for its turn


class HostStore:
    """Rows in host memory. Threads may share it.

    What left KV memory longest ago goes first: what is copied back keeps its age, since it is in
    KV memory too until it leaves that again. First prompts and turns of conversations have each
    their own pauses, as in KV memory: the older of both kinds' oldest goes, unless a use of the
    other one is clearly less likely. What was read for a request stays until then.

    Args:
        budget: bytes; `AWAITED` of it at most are kept for what is awaited.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.num_bytes = 0
        self._awaited = OrderedDict[str, Tensor]()
        self._awaited_bytes = 0
        # Of each kind, and in which turnover they left KV memory.
        self._kinds = tuple(OrderedDict[str, tuple[Tensor, float]]() for _ in range(2))
        self._pauses = BothPauses()
        self._turnovers = 0.0
        self._lock = threading.Lock()

    def __contains__(self, name: str) -> bool:
        return name in self._awaited or any(name in kind for kind in self._kinds)

    def __len__(self) -> int:
        return len(self._awaited) + sum(map(len, self._kinds))

    def get(self, name: str) -> Tensor | None:
        """What has a name, which is used; None: it is not here."""
        with self._lock:
            kv = self._awaited.pop(name, None)
            if kv is not None:
                self._awaited_bytes -= kv.nbytes
                self._kinds[0][name] = kv, self._turnovers
                return kv
            for i, kind in enumerate(self._kinds):
                if name in kind:
                    kv, since = kind[name]
                    self._pauses.note(i, kv.nbytes, self._turnovers - since, used=True)
                    return kv
        return None

    def touch(self, name: str, kind: int = 0) -> bool:
        """Note that what has a name leaves KV memory, as of a kind (`Run.kind`). False: it is not
        here."""
        with self._lock:
            return name in self._awaited or self._move(name, kind)

    def _move(self, name: str, kind: int) -> bool:
        for there in self._kinds:
            if name in there:
                self._kinds[kind][name] = there.pop(name)[0], self._turnovers
                return True
        return False

    def put(self, name: str, kv: Tensor, kind: int = 0, *, is_awaited: bool = False) -> bool:
        """Keep rows of a kind; False if they alone exceed the budget. `is_awaited`: they were read
        for a request."""
        if kv.nbytes > self.budget:
            return False
        with self._lock:
            self._pop(name)
            self.num_bytes += kv.nbytes
            if is_awaited:
                self._await(name, kv)
            else:
                self._kinds[kind][name] = kv, self._turnovers
            self._keep_within(self.budget)
        return True

    def make_room(self, num_bytes: int) -> None:
        """Let go what `num_bytes` displace, before they are taken: where memory is pinned, what
        is beyond the budget takes longer than computing it."""
        with self._lock:
            self._keep_within(self.budget - num_bytes)

    def _keep_within(self, most: int) -> None:
        while self.num_bytes > most and any(self._kinds):
            self._evict()

    def expect(self, name: str) -> None:
        """Note that what has a name, if it is here, is awaited."""
        with self._lock:
            for kind in self._kinds:
                if name in kind:
                    self._await(name, kind.pop(name)[0])

    def _await(self, name: str, kv: Tensor) -> None:
        self._awaited[name] = kv
        self._awaited_bytes += kv.nbytes
        while self._awaited_bytes > AWAITED * self.budget:
            oldest, kv = self._awaited.popitem(last=False)
            self._awaited_bytes -= kv.nbytes
            self._kinds[0][oldest] = kv, self._turnovers

    def _evict(self) -> None:
        ages = {
            i: self._turnovers - next(iter(kind.values()))[1]
            for i, kind in enumerate(self._kinds)
            if kind
        }
        older, *others = sorted(ages, key=lambda i: -ages[i])
        goes = older
        for other in others:
            rates = [self._pauses.rate(i, ages[i], self.budget) for i in (other, older)]
            goes = other if CLEARLY * rates[0] < rates[1] else older
        _, (kv, since) = self._kinds[goes].popitem(last=False)
        self._pauses.note(goes, kv.nbytes, self._turnovers - since, used=False)
        self.num_bytes -= kv.nbytes
        self._turnovers += kv.nbytes / self.budget
        self._pauses.fade(kv.nbytes / self.budget)

    def discard(self, name: str) -> None:
        """Drop what has a name, if it is here."""
        with self._lock:
            self._pop(name)

    def _pop(self, name: str) -> None:
        kv = self._awaited.pop(name, None)
        if kv is not None:
            self._awaited_bytes -= kv.nbytes
            self.num_bytes -= kv.nbytes
        for kind in self._kinds:
            if name in kind:
                self.num_bytes -= kind.pop(name)[0].nbytes
