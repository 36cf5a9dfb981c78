"""Prefixes that callers pin: they stay in KV memory."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from onestem.cache import PrefixCache, Run
from onestem.engine.schedule.queue import InteractiveQueue
from onestem.engine.sequence import Sequence, stretches_of
from onestem.errors import RequestError
from onestem.request import ONE_TOKEN, Request

PREFIXES = ":prefixes"
"""The key of requests for pinned prefixes, so that they do not wait for a backlog."""


@dataclass(frozen=True, kw_only=True)
class PrefixRequest(Request):
    """Computes a named prefix, to be pinned; its output goes to no one."""

    name: str


def prefix_id(name: str) -> str:
    """Id of the request that computes a prefix."""
    return f"onestem-prefix:{name}"


@dataclass(frozen=True, kw_only=True)
class PrefixInfo:
    """A pinned prefix as it stands.

    Attributes:
        ready: all of it is computed.
        readers: running sequences whose prompt begins with it.
        hits: requests that have begun with it so far.
        last_used: `time.time()` of the last of them; None: none yet.
    """

    name: str
    num_tokens: int
    num_computed_tokens: int
    ready: bool
    bytes: int
    readers: int
    hits: int
    last_used: float | None


@dataclass(eq=False)
class _Pin:
    name: str
    token_ids: np.ndarray
    salt: str
    run: Run | None = None  # the last of its path, once it is computed
    hits: int = 0
    last_used: float | None = None

    def request(self) -> Request:
        """What computes it."""
        return PrefixRequest(
            name=self.name,
            request_id=prefix_id(self.name),
            prompt_token_ids=self.token_ids.tolist(),
            params=ONE_TOKEN,
            cache_salt=self.salt,
        )


@dataclass(eq=False, repr=False)
class PinnedPrefixes:
    """Which prefixes are kept, and which sequences read them.

    Attributes:
        max_model_len: tokens that must fit beside them.
        bytes_per_token: of KV.
    """

    _cache: PrefixCache
    _queue: InteractiveQueue
    max_model_len: int
    bytes_per_token: int
    _pins: dict[str, _Pin] = field(default_factory=dict)

    def __contains__(self, name: str) -> bool:
        return name in self._pins

    def add(self, name: str, token_ids: Seq[int], salt: str) -> Request:
        """Note a prefix. Returns the request that computes it."""
        if name in self._pins:
            raise RequestError(f"prefix {name!r} is pinned already: unpin it first")
        if not self._cache.enabled:
            raise RequestError("prefixes cannot be pinned with share off: use full or storage")
        self._check_room(name, len(token_ids))
        pin = self._pins[name] = _Pin(name, np.array(token_ids, np.int32), salt)
        return pin.request()

    @property
    def num_pages(self) -> int:
        """Maximum pages that prefixes may keep for good."""
        pool = self._cache.pool
        return sum(pool.pages_for(len(pin.token_ids)) + 1 for pin in self._pins.values())

    def _check_room(self, name: str, num_tokens: int) -> None:
        """What never leaves must leave room for the longest request."""
        pool = self._cache.pool
        longest = pool.pages_for(self.max_model_len) + 1
        left = (pool.num_pages - self.num_pages - longest - 1) * pool.page_size
        if num_tokens > left:
            raise RequestError(
                f"prefix {name!r} has {num_tokens} tokens; KV memory of "
                f"{pool.num_pages * pool.page_size} tokens holds {max(0, left)} more pinned ones "
                f"beside max_model_len ({self.max_model_len}): raise kv_memory, lower "
                "max_model_len, or unpin another"
            )

    def remove(self, name: str) -> bool:
        """Unpin a prefix; it stays cached until its memory is wanted. Returns whether it
        was computed."""
        pin = self._pins.pop(name, None)
        if pin is None:
            raise RequestError(f"prefix {name!r} is not pinned")
        if pin.run is not None:
            self._cache.unpin(pin.run)
        return pin.run is not None

    def let_go(self) -> bool:
        """Unpin all for now and queue them to be computed again. False: none was kept.
        Prefixes can take more pages than they need (their runs may be many and short)."""
        kept = [pin for pin in self._pins.values() if pin.run is not None]
        for pin in kept:
            assert pin.run is not None
            self._cache.unpin(pin.run)
            pin.run = None
            self._queue.push(pin.request(), PREFIXES)
        return bool(kept)

    def computed(self, request: PrefixRequest) -> None:
        """Keep what a finished request has computed, if its prefix is still wanted. It is computed
        once more where another's answer already grows from its last tokens."""
        pin = self._pins.get(request.name)
        if pin is None:
            return
        ids = pin.token_ids
        node, matched = self._cache.tree.match(ids, len(ids), stretches_of(pin.request()))
        if matched == len(ids):
            self._cache.pin(node)
            pin.run = node
        else:
            self._queue.push(pin.request(), PREFIXES)

    def admitted(self, sequence: Sequence, path: list[Run]) -> str | None:
        """Note which prefixes an admitted sequence begins with. Returns the longest's name."""
        runs = set(path)
        found = [pin for pin in self._pins.values() if pin.run in runs]
        for pin in found:
            pin.hits += sequence.index == 0
            pin.last_used = time.time()
        return max(found, key=lambda pin: len(pin.token_ids)).name if found else None

    def infos(self, running: Seq[Sequence], version: int) -> list[PrefixInfo]:
        """All of them as they stand; `running`: sequences that have their paths."""
        readers: Counter[Run] = Counter()
        computing: dict[str, int] = {}
        for sequence in running:
            readers.update(sequence.path(version))
            computing[sequence.state.request.request_id] = sequence.frontier
        return [
            self._info(pin, readers, computing.get(prefix_id(pin.name), 0))
            for pin in self._pins.values()
        ]

    def _info(self, pin: _Pin, readers: Counter[Run], so_far: int) -> PrefixInfo:
        count = len(pin.token_ids)
        computed = sum(run.computed for run in pin.run.path()) if pin.run else min(so_far, count)
        return PrefixInfo(
            name=pin.name,
            num_tokens=count,
            num_computed_tokens=computed,
            ready=pin.run is not None and computed == count,
            bytes=count * self.bytes_per_token,
            readers=readers[pin.run] if pin.run else 0,
            hits=pin.hits,
            last_used=pin.last_used,
        )

    @property
    def runs(self) -> dict[Run, str]:
        """All prefixes' runs, with those above them, and the name of a prefix on each."""
        return {run: p.name for p in self._pins.values() if p.run for run in p.run.path()}
