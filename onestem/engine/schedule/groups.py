"""Prefixes of planned groups: they stay in KV memory while members may come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from onestem.cache import PrefixCache, Run
from onestem.engine.sequence import RequestState, Sequence


@dataclass(eq=False, repr=False)
class PlannedGroups:
    """Members of each group that are here, and what is pinned for it.

    Args:
        is_open: whether further members of a group may still come.
    """

    _cache: PrefixCache
    _is_open: Callable[[int], bool]
    _pins: dict[int, Run] = field(default_factory=dict)
    _members: dict[int, set[RequestState]] = field(default_factory=dict)

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
