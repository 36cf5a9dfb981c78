"""The tree of runs: which tokens have KV, which sequences hold it, and what is evicted first.

Every sequence holds a path of runs and writes the last one. A run enters the tree as soon as its
tokens are known, so that other sequences wait for it instead of computing it again.

Runs have labels (`onestem.tree`). Prompts with different cache salts or different modules share
nothing. A run ends where positions jump, or has a label that says where.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from onestem.cache.idle import IdleRuns
from onestem.cache.modules import ModuleStore
from onestem.cache.pages import PagePool
from onestem.cache.run import Run
from onestem.cache.states import StatePool
from onestem.errors import CacheError
from onestem.tree import PLAIN, Label, RadixTree, Stretch, cut

# Minimum pages that a run loses at a time: pages freed one by one would be scattered. A small pool
# frees fewer, since what is left of the run may be needed.
LEAST_EVICTED, LEAST_EVICTED_SHARE = 16, 1 / 64


class PrefixCache:
    """The runs, their tree and their pages.

    Attributes:
        idle: runs that may be evicted.
        modules: runs outside of the tree, in the same pages.
        states: snapshots of recurrent states, of some runs; None: the model's layers keep none.
        on_evict: called with a run whose tokens from an index on (in the run) are evicted, before
            their pages are free.

    Args:
        enabled: False: every path is private, and nothing is shared (`share="off"`).
        idle: the eviction order; None: a new `IdleRuns`.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        enabled: bool = True,
        idle: IdleRuns | None = None,
        states: StatePool | None = None,
    ) -> None:
        self.pool = pool
        self.enabled = enabled
        self.root = Run((), None, 0)
        self.root.pins = 1
        self.tree = RadixTree(self.root)
        self._private: set[Run] = set()
        self.idle = IdleRuns(pool) if idle is None else idle
        self._least_evicted = min(LEAST_EVICTED, int(pool.num_pages * LEAST_EVICTED_SHARE))
        self.modules = ModuleStore(pool, self.idle)
        self.states = states
        self.on_evict: Callable[[Run, int], object] | None = None

    def attach(
        self,
        tokens: np.ndarray,
        limit: int,
        owner: object,
        stretches: Sequence[Stretch] = PLAIN,
    ) -> Run:
        """Give a sequence its path over `tokens` (int32 `[n]`), pinned, down to the run it writes.

        At most `limit` leading tokens come from runs that are stored or being computed. The rest
        becomes new runs, one for each stretch. They enter the tree unless a run there begins with
        the same tokens.
        """
        node, matched = self.root, 0
        if self.enabled:
            node, matched = self.tree.match(tokens, limit, stretches)
        for first, end, label in cut(stretches, len(tokens), matched):
            node = self._new_run(array("i", tokens[first:end].tobytes()), node, owner, label)
        self.pin(node)
        return node

    def note_use(self, node: Run, owner: object, *, in_conversation: bool = False) -> None:
        """Note that a sequence continues the last run of its path that it need not compute, and
        whether the others are a conversation's."""
        own = []
        while node.owner is owner and node.computed == 0 and node.parent is not None:
            own.append(node)
            node = node.parent
        self.idle.use(node, beside=len(node.children) > (bool(own) and self.tree.holds(own[-1])))
        for run in own:
            run.is_turn = in_conversation or node.answer_at <= node.end

    def branch(
        self, parent: Run, tokens: Sequence[int], owner: object, label: Label = PLAIN[0].label
    ) -> Run:
        """A private run below a pinned one, for a sequence that continues it alone."""
        run = self._new_run(tokens, parent, owner, label, private=True)
        run.pins = 1
        run.is_wanted = parent.is_wanted
        run.is_turn = parent.is_turn
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
        """Whether a run can enter the tree: its parent is in it, and no sibling begins alike."""
        parent = run.parent
        assert parent is not None
        return parent not in self._private and run.key not in parent.children

    def split(self, run: Run, at: int) -> Run:
        """Split a run, of the tree or private, after `at` of its tokens; returns the upper part."""
        upper = self.tree.split(run, at)
        if run in self._private:
            self._private.add(upper)
            upper.children.clear()  # private runs are nobody's children
        return upper

    def may_grow(self, run: Run) -> bool:
        """Whether a sequence that holds a run alone may append its tokens to it."""
        is_alone = run.pins == 1 and not run.children and run is not self.root
        return is_alone and run.snapshot < 0

    def pin(self, node: Run) -> None:
        """Keep a node and its ancestors."""
        for run in node.path():
            run.pins += 1
            if run.pins == 1:
                self.pool.hold(run.pages)

    def unpin(self, node: Run) -> None:
        """Release a path. Runs that nobody holds stay until their pages are needed."""
        self.idle.clock += 1
        for run in reversed(node.path()):
            run.pins -= 1
            if run.pins == 0:
                self.pool.unhold(run.pages)
                self._retire(run)

    def _retire(self, run: Run) -> None:
        """Keep the computed part of a run that nobody holds any more, if others can find it."""
        run.owner, run.grows = None, False
        self.idle.let_go(run)
        if run in self._private:
            self._adopt(run)
        if run in self._private or run.computed == 0:
            self._drop(run)
            return
        if run.computed < len(run.tokens):
            # Nothing is below it: a holder of a run below would hold this one too.
            assert not run.children
            del run.tokens[run.computed :]
        run.is_branch &= run.is_awaited
        self._note_idle(run)

    def _adopt(self, run: Run) -> None:
        """Enter a private run in the tree, less the leading tokens that another run has there.
        Answers to equal prompts share at least the prompt's last token."""
        if not self.enabled or not run.computed or run.parent is None:
            return
        # The parent may be private too, kept out by a run of the same tokens in the tree: adopt
        # below that one.
        parent: Run | None = run.parent
        own = run.tokens[: run.computed]
        lead = own[:0]
        while parent is not None and parent in self._private and parent.label == run.label:
            lead, parent = parent.tokens + lead, parent.parent
        if parent is None or parent in self._private:
            return
        tokens = np.array(lead + own, np.int32)
        node, known = self.tree.descend(parent, tokens, 0, run.label)
        # Everything above must be computed: there may be no owner left to do it.
        if any(above.computed < len(above.tokens) for above in node.path()):
            return
        # The part of a growing run that is not yet computed cannot be matched.
        if known < len(lead) or known == len(tokens):
            return
        if (run.label, int(tokens[known])) in node.children:
            return
        if known > len(lead):
            self.pool.release(run.split_off(known - len(lead)).pages)  # the snapshot stays below
        run.parent = node
        self._private.discard(run)
        self.tree.insert(run)

    def _drop(self, run: Run) -> None:
        self._private.discard(run)
        self.tree.remove(run)
        self.pool.release(run.pages)
        run.pages = []
        if self.states is not None:
            self.states.drop(run)
        parent = run.parent
        if parent is not None and parent.pins == 0 and not parent.children:
            self._note_idle(parent)

    def disown(self, node: Run, owner: object) -> None:
        """Drop an owner: other holders of its unfinished runs may take them over."""
        for run in node.path():
            if run.owner is owner:
                run.owner = None
            if run.maker is owner:
                run.maker = None

    def reserve(self, run: Run, tokens: int) -> bool:
        """Give a pinned run pages for its first `tokens` tokens, evicting if needed."""
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
        """Give each of several pinned runs a further page; False: there are too few, and no run
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
        """Evict until `pages` pages are free, beginning with what saves least."""
        if pages > self.pool.num_available:
            return False
        while self.pool.num_free < pages:
            if not self.idle.evict_one(pages - self.pool.num_free):
                return False
        return True

    def _note_idle(self, run: Run) -> None:
        if run.pins == 0 and not run.children and run is not self.root:
            self.idle.note(run, self)

    def evict(self, run: Run, last_used: int, pages: int) -> int:
        """Free at least `pages` pages, or all, from the end of a leaf that nobody has held since
        `last_used`. Its beginning can still be matched. Returns the pages freed."""
        current = run.pins == 0 and not run.children and run.last_used == last_used
        if not current or not self.tree.holds(run):
            return 0
        lost = min(len(run.pages), max(pages, self._least_evicted))
        kept = max(0, (len(run.pages) - lost) * self.pool.page_size - run.offset)
        if self.on_evict is not None and kept < run.computed:
            self.on_evict(run, kept)
        if lost == len(run.pages):
            self._drop(run)
        else:
            self._shorten(run, len(run.pages) - lost)
        return lost

    def _shorten(self, run: Run, pages: int) -> None:
        """Keep only the tokens in a leaf's first `pages` pages."""
        if self.states is not None:
            self.states.drop(run)
        self.pool.release(run.pages[pages:])
        run.pages, run.pages_array = run.pages[:pages], None
        run.computed = min(run.computed, pages * self.pool.page_size - run.offset)
        del run.tokens[run.computed :]
        self._note_idle(run)

    def clear(self) -> None:
        """Drop everything that nobody holds."""
        on_evict, self.on_evict = self.on_evict, None
        while self.idle.evict_one(self.pool.num_pages):
            pass
        self.on_evict = on_evict

    def runs(self) -> Iterator[Run]:
        """All runs: in the tree, private, and of modules."""
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
