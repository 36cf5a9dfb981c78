"""The tree of runs: what KV is stored for which tokens, who holds it, and what goes first.

Every sequence walks a path of runs; its last run is the one it writes. A run is entered in the
tree as soon as its tokens are known, so that others can wait for it instead of computing it again.

Runs have labels (`onestem.tree`): prompts of different cache salts, or that see different modules,
share nothing, and a run ends where positions jump.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from onestem.cache.idle import IdleRuns
from onestem.cache.modules import ModuleStore
from onestem.cache.pages import PagePool
from onestem.cache.run import Run
from onestem.errors import CacheError
from onestem.tree import PLAIN, Label, RadixTree, Stretch, cut

__all__ = ["PrefixCache"]

# Pages that a run loses at a time: those that free up one by one would be scattered. Few of a small
# pool: what is left of the run may be wanted.
LEAST_EVICTED, LEAST_EVICTED_SHARE = 16, 1 / 64


class PrefixCache:
    """Runs in a tree and in pages.

    Attributes:
        modules: runs outside of the tree, in the same pages.

    Args:
        pool: the KV pages.
        enabled: False stores nothing for others (`share="off"`): every path is private.
        idle: which runs go first; None: as `IdleRuns` says.
    """

    def __init__(
        self, pool: PagePool, *, enabled: bool = True, idle: IdleRuns | None = None
    ) -> None:
        self.pool = pool
        self.enabled = enabled
        self.root = Run((), None, 0)
        self.root.pins = 1
        self.tree = RadixTree(self.root)
        self._private: set[Run] = set()
        self._idle = IdleRuns(pool) if idle is None else idle
        self._least_evicted = min(LEAST_EVICTED, int(pool.num_pages * LEAST_EVICTED_SHARE))
        self.modules = ModuleStore(pool, self._idle)

    # ----------------------------------------------------------------------------- paths

    def attach(
        self,
        tokens: np.ndarray,
        limit: int,
        owner: object,
        stretches: Sequence[Stretch] = PLAIN,
    ) -> Run:
        """Give a sequence its path over `tokens` (int32 `[n]`), pinned, down to the run it writes.

        At most `limit` leading tokens are taken from what is stored or being computed; the rest
        becomes runs of its own, one for each stretch, entered in the tree unless another run there
        begins alike.
        """
        node, matched = self.root, 0
        if self.enabled:
            node, matched = self.tree.match(tokens, limit, stretches)
        for first, end, label in cut(stretches, len(tokens), matched):
            node = self._new_run(tokens[first:end].tolist(), node, owner, label)
        self.pin(node)
        return node

    def note_use(self, node: Run, owner: object) -> None:
        """A sequence was given its path: it goes on from the last run that it is not to compute."""
        own = 0
        while node.owner is owner and node.computed == 0 and node.parent is not None:
            own = self.tree.holds(node)
            node = node.parent
        self._idle.use(node, beside=len(node.children) > own)

    def branch(
        self, parent: Run, tokens: Sequence[int], owner: object, label: Label = PLAIN[0].label
    ) -> Run:
        """A private run below a pinned one, for a sequence that continues it alone."""
        run = self._new_run(tokens, parent, owner, label, private=True)
        run.pins = 1
        parent_path = parent.path()
        for node in parent_path:
            node.pins += 1
        return run

    def _new_run(
        self,
        tokens: Sequence[int],
        parent: Run,
        owner: object,
        label: Label,
        *,
        private: bool = False,
    ) -> Run:
        run = Run(tokens, parent, parent.end, label)
        run.pool, run.owner = self.pool, owner
        if private or not self.enabled or not len(tokens) or not self._may_enter(run):
            self._private.add(run)
        else:
            self.tree.insert(run)
        return run

    def _may_enter(self, run: Run) -> bool:
        """Whether a run can be found: its parent can, and nothing there begins alike."""
        parent = run.parent
        assert parent is not None
        return parent not in self._private and run.key not in parent.children

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
        self._idle.clock += 1
        for run in reversed(node.path()):
            run.pins -= 1
            if run.pins == 0:
                self.pool.unhold(run.pages)
                self._retire(run)

    def _retire(self, run: Run) -> None:
        """Nobody holds a run any more: keep what is computed, if others can find it."""
        run.owner, run.grows = None, False
        self._idle.let_go(run)
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
        """Enter a private run in the tree, without the first tokens that another has there (equal
        prompts' answers begin alike, with the prompt's last token at least)."""
        if not self.enabled or not run.computed or run.parent is None:
            return
        # Sequences that part from a prompt stand below a run that another of the same tokens may
        # have kept out of the tree: they are adopted below that one.
        parent: Run | None = run.parent
        own = run.tokens[: run.computed]
        lead = own[:0]
        while parent is not None and parent in self._private and parent.label == run.label:
            lead, parent = parent.tokens + lead, parent.parent
        if parent is None or parent in self._private:
            return
        tokens = np.array(lead + own, np.int32)
        node, known = self.tree.descend(parent, tokens, 0, run.label)
        # Above what is kept all must be computed: nobody may be left to do it.
        if any(above.computed < len(above.tokens) for above in node.path()):
            return
        # Of a run that grows, what is not computed yet cannot be matched.
        if known < len(lead) or known == len(tokens):
            return
        if (run.label, int(tokens[known])) in node.children:
            return
        if known > len(lead):
            self.pool.release(run.split_off(known - len(lead)).pages)
        run.parent = node
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

    def add_pages(self, runs: Sequence[Run]) -> bool:
        """Give each of several pinned runs a page more; False: there are not enough, and nobody has
        got one."""
        if not runs:
            return True
        if not self.make_room(len(runs)):
            return False
        after = np.array([run.pages[-1] if run.pages else -1 for run in runs], np.int64)
        pages = self.pool.allocate_each(after)
        self.pool.hold_new(pages)
        for run, page in zip(runs, pages.tolist(), strict=True):
            run.pages.append(page)
        return True

    def make_room(self, pages: int) -> bool:
        """Evict, what saves least first, until so many pages are free."""
        if pages > self.pool.num_available:
            return False
        while self.pool.num_free < pages:
            if not self._idle.evict_one(pages - self.pool.num_free):
                return False
        return True

    def _note_idle(self, run: Run) -> None:
        if run.pins == 0 and not run.children and run is not self.root:
            self._idle.note(run, self)

    def evict(self, run: Run, last_used: int, pages: int) -> int:
        """Take at least so many pages, or all, from the end of a leaf that nobody has held since
        `last_used`: what begins like it still finds its beginning."""
        current = run.pins == 0 and not run.children and run.last_used == last_used
        if not current or not self.tree.holds(run):
            return 0
        lost = min(len(run.pages), max(pages, self._least_evicted))
        if lost == len(run.pages):
            self._drop(run)
        else:
            self._shorten(run, len(run.pages) - lost)
        return lost

    def _shorten(self, run: Run, pages: int) -> None:
        """Keep the tokens in a leaf's first pages."""
        self.pool.release(run.pages[pages:])
        run.pages, run.pages_array = run.pages[:pages], None
        run.computed = min(run.computed, pages * self.pool.page_size - run.offset)
        del run.tokens[run.computed :]
        self._note_idle(run)

    def clear(self) -> None:
        """Evict everything that nobody holds."""
        while self._idle.evict_one(self.pool.num_pages):
            pass

    # ----------------------------------------------------------------------------- books

    def runs(self) -> Iterator[Run]:
        yield from self.tree
        yield from self._private
        yield from self.modules

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
