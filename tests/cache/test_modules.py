"""Module runs: found by name, kept while they are read, evicted in one order with the tree."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from onestem.cache import ModuleRun, PagePool, PrefixCache, Run
from onestem.cache.idle import IdleRuns


def ids(tokens) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def module(cache: PrefixCache, name: str, count: int, **options) -> ModuleRun:
    run = cache.modules.attach(name, ids(range(count)), 7, "owner", **options)
    assert cache.reserve(run, count)
    run.computed = count
    return run


def path(cache: PrefixCache, tokens) -> Run:
    run = cache.attach(ids(tokens), len(tokens) - 1, "owner")
    assert cache.reserve(run, len(tokens))
    run.computed = len(tokens)
    return run


def test_a_name_is_one_run():
    cache = PrefixCache(PagePool(8, 4))
    a = module(cache, "a", 6)
    assert cache.modules.attach("a", ids(range(6)), 7, "other") is a
    assert (a.pins, a.owner, a.position, a.complete) == (2, "owner", 7, True)
    cache.modules.unpin(a)
    assert not cache.make_room(7)
    cache.modules.unpin(a)
    assert cache.modules.get("a") is a
    assert a.owner is None
    assert cache.make_room(8)
    assert cache.modules.get("a") is None
    cache.check()


def test_the_tree_and_modules_go_in_one_order():
    cache = PrefixCache(PagePool(6, 4))
    first = module(cache, "first", 4)
    middle = path(cache, range(10, 14))
    last = module(cache, "last", 4)
    cache.modules.unpin(first)
    cache.unpin(middle)
    cache.modules.unpin(last)
    gone = []
    for pages in (4, 5, 6):
        assert cache.make_room(pages)
        gone.append([run.start == 0 and not run.pages for run in (first, middle, last)])
    assert gone == [[True, False, False], [True, True, False], [True, True, True]]


def test_use_makes_young():
    cache = PrefixCache(PagePool(4, 4))
    for name in "ab":
        cache.modules.unpin(module(cache, name, 4))
    cache.modules.unpin(module(cache, "a", 4))
    assert cache.make_room(3)
    assert [run.name for run in cache.modules] == ["a"]


def test_what_is_not_kept_goes_at_once():
    cache = PrefixCache(PagePool(4, 4))
    cache.modules.unpin(module(cache, "placeholder", 4, kept=False))
    begun = cache.modules.attach("begun", ids(range(4)), 0, "owner")
    cache.modules.unpin(begun)
    assert len(cache.modules) == 0
    assert cache.pool.num_free == 4


def test_a_pool_that_never_fills_remembers_no_more_than_it_holds():
    cache = PrefixCache(PagePool(64, 4))
    for _ in range(2000):
        cache.modules.unpin(module(cache, "a", 4))
        cache.unpin(cache.attach(ids([1, 2, 3]), 2, "owner"))
    assert sum(map(len, cache.idle._heaps)) < 300
    assert [run.name for run in cache.modules] == ["a"]


class AnyOrder(IdleRuns):
    def rank(self, run: Run) -> float:
        return (7 * len(run.tokens) + self.clock) % 5

    def rate(self, run: Run) -> float:
        return 0.0


def evict_first(cache: PrefixCache, pages: int) -> bool:
    """Of all that may go the first loses pages, and nobody else; False if nobody may."""
    before = {run: len(run.pages) for run in cache.runs() if not run.pins and not run.children}
    assert cache.idle.evict_one(pages) == bool(before)
    if before:
        first = min(before, key=lambda run: (run.rank, run.last_used, -run.end, run.uid))
        assert [run for run in before if len(run.pages) < before[run]] == [first]
        assert before[first] - len(first.pages) >= min(pages, before[first])
        assert not (isinstance(first, ModuleRun) and first.pages)
    return bool(before)


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=10, max_size=40))
def test_the_heap_has_the_order_of_ranks(uses):
    pool = PagePool(64, 4)
    cache = PrefixCache(pool, idle=AnyOrder(pool))
    for start, (number, is_path) in enumerate(uses):
        if is_path:
            cache.unpin(path(cache, range(100 * start, 100 * start + 9 + number)))
        else:
            cache.modules.unpin(module(cache, str(number), 1 + number))
        if number == 0:
            evict_first(cache, 2)
    while evict_first(cache, 2):
        cache.check()
    assert pool.num_free == 64


class Traffic(RuleBasedStateMachine):
    """Modules and paths come and go in a small pool."""

    def __init__(self) -> None:
        super().__init__()
        pool = PagePool(10, 4)
        self.cache = PrefixCache(pool, idle=AnyOrder(pool))
        self.held: list[Run] = []

    @rule(name=st.sampled_from("abcd"), count=st.integers(1, 9), kept=st.booleans())
    def take_module(self, name, count, kept):
        # The name says the tokens, and whether they are kept, as keys do.
        name = f"{name}{count}{kept}"
        run = self.cache.modules.attach(name, ids(range(count)), 3, self, kept=kept)
        self.cache.modules.note_use(run, self)
        self._compute(run, count)

    @rule(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=20))
    def take_path(self, tokens):
        run = self.cache.attach(ids(tokens), len(tokens) - 1, self)
        self.cache.note_use(run, self)
        self._compute(run, None)

    def _compute(self, run, count):
        self.held.append(run)
        for part in [run] if isinstance(run, ModuleRun) else run.path():
            size = len(part.tokens)
            if part.computed < size and not self.cache.reserve(part, size):
                break  # nothing is computed behind what is not
            part.computed = size

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def leave(self, data):
        run = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        if isinstance(run, ModuleRun):
            self.cache.modules.unpin(run)
        else:
            self.cache.disown(run, self)
            self.cache.unpin(run)

    @rule(pages=st.integers(1, 9))
    def evict(self, pages):
        evict_first(self.cache, pages)

    @invariant()
    def balanced(self):
        self.cache.check()
        for run in self.held:
            if isinstance(run, ModuleRun):
                assert self.cache.modules.get(run.name) is run

    def teardown(self):
        while self.held:
            run = self.held.pop()
            (self.cache.modules if isinstance(run, ModuleRun) else self.cache).unpin(run)
        self.cache.clear()
        self.cache.check()
        assert self.cache.pool.num_free == self.cache.pool.num_pages


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(
    max_examples=80,
    stateful_step_count=30,
)
