"""Which waiting request is admitted next: by keys' turns, then by what is in the cache.

With a backlog larger than the cache, first come, first served computes most prefixes again and
again: each is evicted before the next request with it comes. So requests whose prefix is cached go
first, the longest prefix first, and groups that share one follow each other (BatchLLM, section 4.4,
names this as future work). No request waits for ever: the oldest is passed at most `max_passed`
times, and only by requests that waited when the oldest before it was taken.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Any

import numpy as np

from onestem.engine.sequence import stretches_of
from onestem.request import Request
from onestem.tree import Node, RadixTree, cut

MIN_AHEAD = 64  # cached tokens that a request needs more than the oldest, to pass it


class _Place(Node):
    """Tokens of waiting prompts, and the requests whose prompt ends with them."""

    __slots__ = ("ending",)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.ending: set[_Waiting] = set()


@dataclass(eq=False, slots=True)
class _Waiting:
    """A request; `number`: of its arrival; `passed`: how many later ones went before it."""

    request: Request
    number: int
    passed: int = 0
    place: _Place | None = None


class Backlog:
    """Requests of one key. A prompt in PML has no prefix to go by: it passes none.

    Args:
        cached: what is stored, or being computed.
        max_passed: maximum later requests that may pass one; 0: first come, first served.
    """

    def __init__(self, cached: RadixTree[Any], max_passed: int) -> None:
        self._cached = cached
        self._max_passed = max_passed
        self._waiting: dict[str, _Waiting] = {}  # the oldest first
        self._prompts = RadixTree(_Place((), None, 0))
        self._unplaced: dict[str, _Waiting] = {}
        self._ahead: deque[_Waiting] = deque()  # whose prefixes were found in the cache
        self._num_arrived = 0
        self._turn = 0  # requests that arrived before may pass the oldest
        self._looked_at: int | None = None  # insertions into the cache at the last look

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, request: Request) -> None:
        """Put a request after those that wait."""
        one = _Waiting(request, self._num_arrived)
        self._num_arrived += 1
        self._waiting[request.request_id] = self._unplaced[request.request_id] = one

    def remove(self, request_id: str) -> Request | None:
        """Take out a request, if it is here."""
        one = self._waiting.pop(request_id, None)
        if one is None:
            return None
        self._unplaced.pop(request_id, None)
        if one.place is not None:
            self._leave(one, one.place)
        return one.request

    def peek(self) -> Request | None:
        """The next request, left where it is."""
        return self._next().request if self._waiting else None

    def pop(self) -> Request:
        """Take the next request."""
        one = self._next()
        older = list(takewhile(lambda other: other is not one, self._waiting.values()))
        for other in older:
            other.passed += 1
        if not older:
            self._turn, self._looked_at = self._num_arrived, None
        self.remove(one.request.request_id)
        return one.request

    def _next(self) -> _Waiting:
        oldest = next(iter(self._waiting.values()))
        if oldest.passed >= self._max_passed:
            return oldest
        while self._ahead and not self._is_here(self._ahead[0]):
            self._ahead.popleft()
        if not self._ahead and self._may_find():
            self._look(oldest)
        return self._ahead[0] if self._ahead else oldest

    def _is_here(self, one: _Waiting) -> bool:
        return self._waiting.get(one.request.request_id) is one

    def _may_find(self) -> bool:
        """Whether a request may pass the oldest, and that or the cache has changed since."""
        second = next(islice(self._waiting.values(), 1, 2), None)
        if second is None or second.number >= self._turn:
            return False
        return self._looked_at != self._cached.num_inserted

    def _look(self, oldest: _Waiting) -> None:
        """Find the requests that may pass the oldest."""
        self._looked_at = self._cached.num_inserted
        for one in self._unplaced.values():
            self._enter(one)
        self._unplaced.clear()
        least = self._num_cached(oldest) + MIN_AHEAD
        found = [
            (-num_cached, one.number, one)
            for place, num_cached in self._prompts.overlap(self._cached, least)
            for one in place.ending
            if one.number < self._turn
        ]
        self._ahead.extend(one for _, _, one in sorted(found))

    def _num_cached(self, one: _Waiting) -> int:
        if one.place is None:
            return 0
        ids = np.asarray(one.request.prompt_token_ids, np.int32)
        return self._cached.num_found(ids, stretches_of(one.request))

    def _enter(self, one: _Waiting) -> None:
        """Enter a request's prompt in the tree of those that wait."""
        if one.request.pml is not None:
            return
        ids = np.asarray(one.request.prompt_token_ids, np.int32)
        stretches = stretches_of(one.request)
        node, known = self._prompts.match(ids, len(ids), stretches)
        for first, end, label in cut(stretches, len(ids), known):
            node = _Place(ids[first:end].tolist(), node, first, label)
            self._prompts.insert(node)
        node.ending.add(one)
        one.place = node

    def _leave(self, one: _Waiting, place: _Place) -> None:
        place.ending.remove(one)
        while not place.ending and not place.children and place.parent is not None:
            self._prompts.remove(place)
            place = place.parent


@dataclass(eq=False)
class _Line:
    """The waiting requests of a key. `mark`: how much of its share it has had."""

    backlog: Backlog
    weight: float = 1.0
    mark: float = 0.0


@dataclass(eq=False, repr=False)
class Turns:
    """A line per key. The next comes from the key that has had the least of its share (stride
    scheduling); a key that comes back after a pause gets no credit for it. No request passes
    another key's: each is taken in the place of its own key's oldest.
    """

    _cached: RadixTree[Any]
    _max_passed: int
    _lines: dict[str, _Line] = field(default_factory=dict)
    _key_of: dict[str, str] = field(default_factory=dict)
    _now: float = 0.0

    def __len__(self) -> int:
        return len(self._key_of)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._key_of

    def push(self, request: Request, key: str, weight: float) -> None:
        """Put a request into its key's line; `weight`: the key's share from now on."""
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = _Line(Backlog(self._cached, self._max_passed))
        if not line.backlog:
            line.mark = max(line.mark, self._now)
        line.weight = weight
        line.backlog.push(request)
        self._key_of[request.request_id] = key

    def remove(self, request_id: str) -> Request | None:
        """Take out a request, if it is here."""
        key = self._key_of.pop(request_id, None)
        return None if key is None else self._lines[key].backlog.remove(request_id)

    def peek(self) -> Request | None:
        """The next request, left where it is."""
        return self._next().backlog.peek() if self._key_of else None

    def pop(self) -> Request:
        """Take the next request."""
        line = self._next()
        self._now = line.mark
        line.mark += 1 / line.weight
        request = line.backlog.pop()
        del self._key_of[request.request_id]
        return request

    def _next(self) -> _Line:
        ready = [line for line in self._lines.values() if line.backlog]
        return min(ready, key=lambda line: line.mark)
