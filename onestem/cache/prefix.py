"""The tree of runs: what KV is stored for which tokens, who holds it, and what goes first.

Every sequence walks a path of runs; its last run is the one it writes. A run is entered in the
tree as soon as its tokens are known, so that others can wait for it instead of computing it again.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from onestem.cache.pages import PagePool
from onestem.errors import CacheError
from onestem.tree import Node, RadixTree

__all__ = ["PrefixCache", "Run"]


class Run(Node):
    """Tokens whose keys and values are (or will be) stored once.

    Attributes:
        pages: page ids of the first tokens; allocated as the tokens are computed.
        offset: slot of the first token in its first page.
        computed: leading tokens whose KV is written, or scheduled to be in the present step.
        pins: sequences (and groups) whose path holds this run.
        owner: who computes what is not yet computed (any object), or None.
        last_used: the cache's clock when it was last let go.
        uid: number of creation; orders rows so that a run's rows are neighbours.
    """

    __slots__ = (
        "computed",
        "last_used",
        "offset",
        "owner",
        "pages",
        "pages_array",
        "pins",
        "pool",
        "uid",
    )
    _uids = itertools.count()

    def __init__(self, tokens: Sequence[int], parent: Run | None, start: int) -> None:
        super().__init__(tokens, parent, start)
        self.pages: list[int] = []
        self.pages_array: np.ndarray | None = None
        self.offset = 0
        self.computed = 0
        self.pins = 0
        self.owner: object | None = None
        self.last_used = 0
        self.uid = next(Run._uids)
        self.pool: PagePool | None = None

    def split_off(self, at: int) -> Run:
        """Nothing is copied: where the cut falls inside a page, both parts refer to it."""
        upper = super().split_off(at)
        upper.pool, upper.owner = self.pool, self.owner
        upper.pins, upper.last_used = self.pins, self.last_used
        upper.offset = self.offset
        upper.computed = min(self.computed, at)
        self.computed -= upper.computed
        assert self.pool is not None
        cut = self.offset + at
        whole, inside = divmod(cut, self.pool.page_size)
        upper.pages = self.pages[: whole + (inside > 0)]
        if inside and len(self.pages) > whole:
            self.pool.share(self.pages[whole], held=self.pins > 0)
            self.pages, self.offset = self.pages[whole:], inside
        else:
            self.pages, self.offset = self.pages[whole:], 0
        self.pages_array = upper.pages_array = None
        return upper

    def page_ids(self) -> np.ndarray:
        """int32 `[len(pages)]`."""
        if self.pages_array is None or len(self.pages_array) != len(self.pages):
            self.pages_array = np.array(self.pages, dtype=np.int32)
        return self.pages_array

    def slots(self, first: int, end: int) -> np.ndarray:
        """int64: where tokens first..end-1 of this run stand."""
        assert self.pool is not None
        index = np.arange(self.offset + first, self.offset + end)
        size = self.pool.page_size
        return self.page_ids()[index // size].astype(np.int64) * size + index % size


class PrefixCache:
    """Runs in a tree and in pages.

    Args:
        pool: the KV pages.
        enabled: False stores nothing for others (`share="off"`): every path is private.
    """

    def __init__(self, pool: PagePool, *, enabled: bool = True) -> None:
        self.pool = pool
        self.enabled = enabled
        self.root = Run((), None, 0)
        self.root.pins = 1
        self.tree = RadixTree(self.root)
        self._private: set[Run] = set()
        self._clock = 0
        self._idle: list[tuple[int, int, int, Run]] = []  # heap of runs that may be evicted

    # ----------------------------------------------------------------------------- paths

    def attach(self, tokens: np.ndarray, limit: int, owner: object) -> Run:
        """Give a sequence its path over `tokens` (int32 `[n]`), pinned, down to the run it writes.

        At most `limit` leading tokens are taken from what is stored or being computed; the rest
        becomes a run of its own, entered in the tree unless another run there begins alike.
        """
        node, matched = self.tree.match(tokens, limit) if self.enabled else (self.root, 0)
        if matched < len(tokens):
            node = self._new_run(tokens[matched:].tolist(), node, owner)
        self.pin(node)
        return node

    def branch(self, parent: Run, tokens: Sequence[int], owner: object) -> Run:
        """A private run below a pinned one, for a sequence that continues it alone."""
        run = self._new_run(tokens, parent, owner, private=True)
        run.pins = 1
        parent_path = parent.path()
        for node in parent_path:
            node.pins += 1
        return run

    def _new_run(
        self, tokens: Sequence[int], parent: Run, owner: object, *, private: bool = False
    ) -> Run:
        run = Run(tokens, parent, parent.end)
        run.pool, run.owner = self.pool, owner
        if private or not self.enabled or not len(tokens) or tokens[0] in parent.children:
            self._private.add(run)
        else:
            self.tree.insert(run)
        return run

    def may_grow(self, run: Run) -> bool:
        """Whether a sequence that holds a run alone may append its tokens to it."""
        return run.pins == 1 and not run.children and run is not self.root

    def pin(self, node: Run) -> None:
        """Keep a node and its ancestors."""
        for run in node.path():
            run.pins += 1
            if run.pins == 1:
                self.pool.hold(run.pages)

    def unpin(self, node: Run) -> None:
        """Let go of a path. What nobody holds stays until its pages are wanted."""
        self._clock += 1
        for run in reversed(node.path()):
            run.pins -= 1
            if run.pins == 0:
                self.pool.unhold(run.pages)
                self._retire(run)

    def _retire(self, run: Run) -> None:
        """Nobody holds a run any more: keep what is computed, if others can find it."""
        run.owner = None
        run.last_used = self._clock
        if run in self._private:
            self._adopt(run)
        if run in self._private or run.computed == 0:
            self._drop(run)
            return
        if run.computed < len(run.tokens):
            # Nobody is below it: whoever is holds this run too.
            assert not run.children
            del run.tokens[run.computed :]
        self._note_idle(run)

    def _adopt(self, run: Run) -> None:
        """Enter a private run in the tree if no other there begins alike."""
        parent = run.parent
        assert parent is not None
        if (
            self.enabled
            and run.computed
            and parent not in self._private
            and run.tokens[0] not in parent.children
        ):
            self._private.discard(run)
            self.tree.insert(run)

    def _drop(self, run: Run) -> None:
        self._private.discard(run)
        self.tree.remove(run)
        self.pool.release(run.pages)
        run.pages = []
        parent = run.parent
        if parent is not None and parent.pins == 0 and not parent.children:
            self._note_idle(parent)

    def disown(self, node: Run, owner: object) -> None:
        """An owner leaves: whoever else holds its unfinished runs may take them over."""
        for run in node.path():
            if run.owner is owner:
                run.owner = None

    # ----------------------------------------------------------------------------- pages

    def reserve(self, run: Run, tokens: int) -> bool:
        """Give a pinned run pages for its first `tokens` tokens, evicting if need be."""
        missing = self.pool.pages_for(tokens, run.offset) - len(run.pages)
        if missing <= 0:
            return True
        if not self.make_room(missing):
            return False
        after = run.pages[-1] if run.pages else None
        pages = self.pool.allocate(missing, after)
        run.pages.extend(pages)
        self.pool.hold(pages)
        return True

    def make_room(self, pages: int) -> bool:
        """Evict, least recently used first, until so many pages are free."""
        if pages > self.pool.num_available:
            return False
        while self.pool.num_free < pages:
            if not self._evict_one():
                return False
        return True

    def _note_idle(self, run: Run) -> None:
        if run.pins == 0 and not run.children and run is not self.root:
            heapq.heappush(self._idle, (run.last_used, -run.end, run.uid, run))

    def _evict_one(self) -> bool:
        while self._idle:
            last_used, _, _, run = heapq.heappop(self._idle)
            current = run.pins == 0 and not run.children and run.last_used == last_used
            if current and self.tree.holds(run):
                self._drop(run)
                return True
        return False

    def clear(self) -> None:
        """Evict everything that nobody holds."""
        while self._evict_one():
            pass

    # ----------------------------------------------------------------------------- books

    def runs(self) -> Iterator[Run]:
        yield from self.tree
        yield from self._private

    def cached_tokens(self) -> int:
        """Tokens whose KV is stored."""
        return sum(run.computed for run in self.runs())

    def check(self) -> None:
        """Raise `CacheError` unless free + cached == total, page by page."""
        self.pool.check((run.pages, run.pins > 0) for run in self.runs())
        for run in self.runs():
            if self.pool.pages_for(run.computed, run.offset) > len(run.pages):
                raise CacheError(
                    f"a run has {run.computed} computed tokens and {len(run.pages)} pages"
                )
            below = sum(child.pins for child in run.children.values())
            if run.pins < below:
                raise CacheError(
                    f"a run is pinned {run.pins} times, the runs below it {below} times"
                )
