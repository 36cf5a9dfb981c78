"""Prefixes that stay in KV memory: pinned ones, and those of planned groups.
And why a prompt shares what it shares."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import islice

import numpy as np

from onestem.cache import PrefixCache, Run
from onestem.engine.schedule.queue import InteractiveQueue
from onestem.engine.sequence import RequestState, Sequence, stretches_of
from onestem.errors import RequestError
from onestem.request import ONE_TOKEN, Request, Rerendered, Reuse

__all__ = [
    "PREFIXES",
    "PinnedPrefixes",
    "PlannedGroups",
    "PrefixInfo",
    "PrefixRequest",
    "explain",
    "prefix_id",
]

PREFIXES = ":prefixes"
"""The key of requests for pinned prefixes, so that they do not wait for a backlog."""

SHOWN = 4  # tokens of runs beside a prompt's own, for an explanation
SHOWN_ANSWER = 16  # tokens of an answer that a prompt leaves
LOOKED_AT = 16  # newest runs beside one, among which an answer is looked for


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


class PinnedPrefixes:
    """Which prefixes are kept, and which sequences read them.

    Args:
        cache: where their runs are.
        queue: where requests that compute prefixes wait.
        max_model_len: tokens that must fit beside them.
        bytes_per_token: of KV.
    """

    def __init__(
        self,
        cache: PrefixCache,
        queue: InteractiveQueue,
        *,
        max_model_len: int,
        bytes_per_token: int,
    ) -> None:
        self._cache = cache
        self._queue = queue
        self._max_model_len = max_model_len
        self._bytes_per_token = bytes_per_token
        self._pins: dict[str, _Pin] = {}

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
        longest = pool.pages_for(self._max_model_len) + 1
        left = (pool.num_pages - self.num_pages - longest - 1) * pool.page_size
        if num_tokens > left:
            raise RequestError(
                f"prefix {name!r} has {num_tokens} tokens; KV memory of "
                f"{pool.num_pages * pool.page_size} tokens holds {max(0, left)} more pinned ones "
                f"beside max_model_len ({self._max_model_len}): raise kv_memory, lower "
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
            bytes=count * self._bytes_per_token,
            readers=readers[pin.run] if pin.run else 0,
            hits=pin.hits,
            last_used=pin.last_used,
        )

    @property
    def runs(self) -> dict[Run, str]:
        """All prefixes' runs, with those above them, and the name of a prefix on each."""
        return {run: p.name for p in self._pins.values() if p.run for run in p.run.path()}


class PlannedGroups:
    """Members of each group that are here, and what is pinned for it.

    Args:
        cache: where the prefixes are.
        is_open: whether further members of a group may still come.
    """

    def __init__(self, cache: PrefixCache, is_open: Callable[[int], bool]) -> None:
        self._cache = cache
        self._is_open = is_open
        self._pins: dict[int, Run] = {}
        self._members: dict[int, set[RequestState]] = {}

    @property
    def num_pinned(self) -> int:
        """Prefixes that are kept."""
        return len(self._pins)

    def admitted(self, sequence: Sequence) -> None:
        """Note that a member was admitted: its group's prefix stays from now on."""
        request = sequence.state.request
        group = request.group
        if group is None or not self._cache.enabled:
            return
        self._members.setdefault(group, set()).add(sequence.state)
        if group in self._pins or request.group_prefix_tokens <= 0:
            return
        limit = min(request.group_prefix_tokens, len(request.prompt_token_ids) - 1)
        ids = sequence.ids()[:limit].copy()
        node, matched = self._cache.tree.match(ids, limit, sequence.stretches)
        if matched == limit > 0:
            self._cache.pin(node)
            self._pins[group] = node

    def finished(self, state: RequestState) -> None:
        """Note that a sequence of a request has ended."""
        group = state.request.group
        if group is None or not state.finished:
            return
        self._members.get(group, set()).discard(state)
        self.release_closed()

    def release_closed(self) -> None:
        """Release what groups keep that have no member here and can get none."""
        members = self._members.items()
        self._release([g for g, left in members if not left and not self._is_open(g)])

    def release_all(self) -> None:
        """Release all planned prefixes."""
        self._release(list(self._pins))

    def release_jobs(self) -> bool:
        """Release what groups of jobs keep; False: nothing."""
        members = self._members.items()
        groups = [g for g, left in members if any(m.request.priority == "job" for m in left)]
        pinned = [group for group in groups if group in self._pins]
        self._unpin(pinned)
        return bool(pinned)

    def _release(self, groups: list[int]) -> None:
        for group in groups:
            self._members.pop(group, None)
        self._unpin(groups)

    def _unpin(self, groups: list[int]) -> None:
        for group in groups:
            node = self._pins.pop(group, None)
            if node is not None:
                self._cache.unpin(node)


def explain(sequence: Sequence, path: list[Run], prefix: str | None) -> Reuse:
    """Args:
    sequence: newly admitted: the runs that it is to compute are its own.
    path: its runs.
    prefix: the longest pinned prefix on it.
    """
    own = next((run for run in path if run.owner is sequence and run.computed == 0), None)
    matched = own.start if own is not None else len(sequence.tokens)
    beside = _beside(own) if own is not None else ()
    at_end = matched >= sequence.match_limit
    return Reuse(
        matched_tokens=matched,
        prefix=prefix,
        ended="prompt" if at_end else "differs" if beside else "new",
        here=sequence.tokens[matched] if matched < len(sequence.tokens) else None,
        there=() if at_end else beside,
        rerendered=_rerendered(own) if own is not None and not at_end else None,
    )


def _beside(own: Run) -> tuple[int, ...]:
    """First tokens of the other runs of the same label that begin where this one does. What another
    salt has stored is not shown."""
    assert own.parent is not None
    others = (run for run in own.parent.children.values() if run is not own)
    return tuple(islice((run.tokens[0] for run in others if run.label == own.label), SHOWN))


def _rerendered(own: Run) -> Rerendered | None:
    """What a prompt leaves that goes on, as `own`, from inside an answer that has ended. O(1) where
    there is no answer, otherwise O(runs of the conversation's path)."""
    assert own.parent is not None
    if own.parent.answer_at > own.start:
        return None
    left = _newest(own.parent, own, lambda run: run.answer_at <= own.start)
    if left is None or left.grows:
        return None
    lost = list(_below(left))
    earlier = (token for run in lost for token in run.tokens[: min(run.computed, SHOWN_ANSWER)])
    return Rerendered(
        at=own.start,
        num_tokens=sum(run.computed for run in lost),
        offset=own.start - left.answer_at,
        earlier=tuple(islice(earlier, SHOWN_ANSWER)),
    )


def _below(run: Run) -> Iterator[Run]:
    """A run and the newest runs that follow it, as far as they have ended."""
    following: Run | None = run
    while following is not None and not following.grows:
        yield following
        following = _newest(following, run, lambda _: True)


def _newest(parent: Run, like: Run, wanted: Callable[[Run], bool]) -> Run | None:
    """The newest `wanted` run below another, of the label of `like` and not `like` itself."""
    children = islice(reversed(parent.children.values()), LOOKED_AT)
    return next(
        (c for c in children if c is not like and c.label == like.label and wanted(c)), None
    )
