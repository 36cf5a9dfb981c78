"""Pages that those who run will still ask for; admission leaves them free."""

from __future__ import annotations

from collections.abc import Iterable

from onestem.cache import PrefixCache
from onestem.engine.sequence import Sequence

__all__ = ["ReservedPages"]


class ReservedPages:
    """What was reserved when it was counted, and to who was admitted since.

    Args:
        cache: the runs.
        lookahead_tokens: decodes that admission leaves room for, per sequence.
    """

    def __init__(self, cache: PrefixCache, lookahead_tokens: int) -> None:
        self._cache = cache
        self._lookahead_tokens = lookahead_tokens
        self._num_pages = 0

    def count(self, running: Iterable[Sequence]) -> None:
        """Count anew, for all who run."""
        self._num_pages = sum(map(self._pages, running))

    def add(self, sequence: Sequence) -> None:
        """One more is admitted."""
        self._num_pages += self._pages(sequence)

    def take_back(self, sequence: Sequence) -> None:
        """One of those who were counted is to be preempted."""
        self._num_pages -= self._pages(sequence)

    def have_room(self, sequence: Sequence) -> bool:
        """Whether a sequence with its path attached fits beside what is reserved."""
        needed = self._uncomputed(sequence) + self._lookahead(sequence)
        return needed + self._num_pages <= self._cache.pool.num_available

    def _pages(self, sequence: Sequence) -> int:
        if sequence.slot >= 0:
            return self._lookahead(sequence)
        return self._uncomputed(sequence) + self._lookahead(sequence)

    def _uncomputed(self, sequence: Sequence) -> int:
        """Pages still to be allocated on its path, for runs that it is to compute itself."""
        size = self._cache.pool.page_size
        imported = sequence.modules.missing_pages() if sequence.modules is not None else 0
        return imported + sum(
            max(0, -(-(run.offset + len(run.tokens)) // size) - len(run.pages))
            for run in sequence.path(self._cache.tree.num_splits)
            if run.owner is sequence or run.owner is None
        )

    def _lookahead(self, sequence: Sequence) -> int:
        if sequence.score_only:
            return 0
        most = sequence.state.request.params.max_tokens
        ahead = self._lookahead_tokens
        if most is not None:
            ahead = min(ahead, most - sequence.num_output)
        return self._cache.pool.pages_for(ahead)
