"""Pages and runs: nothing is lost, nothing is freed while it is held."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from onestem.cache import PagePool, PrefixCache, Run
from onestem.cache.idle import IdleRuns, Kind
from onestem.errors import CacheError


def ids(tokens) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def compute(cache: PrefixCache, run: Run) -> bool:
    """Write the KV of a whole path."""
    for node in run.path():
        if not cache.reserve(node, len(node.tokens)):
            return False
        node.computed = len(node.tokens)
    return True


def test_pages_come_in_stretches():
    pool = PagePool(10, 4)
    first = pool.allocate(3)
    assert first == [0, 1, 2]
    assert pool.allocate(2, after=2) == [3, 4]
    pool.release([1])
    assert pool.allocate(5) == [5, 6, 7, 8, 9]
    assert pool.num_free == 1
    with pytest.raises(CacheError, match="2 pages asked, 1 of 10"):
        pool.allocate(2)


def test_split_inside_a_page_shares_it():
    cache = PrefixCache(PagePool(8, 4))
    a = cache.attach(ids(range(10)), 9, "a")
    assert compute(cache, a)
    assert len(a.pages) == 3
    b = cache.attach(ids([*range(6), 50, 51]), 7, "b")
    upper = a.parent
    assert upper is b.parent
    assert (upper.pages, upper.offset) == ([0, 1], 0)
    assert (a.pages, a.offset) == ([1, 2], 2)
    assert upper.slots(4, 6).tolist() == [4, 5]
    assert a.slots(0, 3).tolist() == [6, 7, 8]
    assert compute(cache, b)
    assert b.pages == [3]
    cache.check()
    for run in (a, b):
        cache.unpin(run)
    cache.check()
    cache.clear()
    cache.check()
    assert cache.pool.num_free == 8


def test_held_pages_are_never_evicted():
    cache = PrefixCache(PagePool(4, 4))
    a = cache.attach(ids(range(8)), 7, "a")
    assert compute(cache, a)
    b = cache.attach(ids(range(100, 112)), 11, "b")
    assert not cache.reserve(b, 12)
    cache.unpin(a)
    assert cache.pool.num_available == 4
    assert cache.reserve(b, 12)
    assert (cache.pool.num_free, len(a.pages)) == (0, 1)
    cache.check()


def test_least_recently_used_goes_first():
    cache = PrefixCache(PagePool(3, 4))
    runs = [cache.attach(ids([10 * i + j for j in range(4)]), 3, i) for i in range(3)]
    for run in runs:
        assert compute(cache, run)
    for run in (runs[1], runs[0], runs[2]):
        cache.unpin(run)
    again = cache.attach(ids([10, 11, 12, 13, 99]), 4, "again")
    assert again.start == 4
    cache.unpin(again)
    assert cache.make_room(1)
    assert cache.tree.holds(runs[1])
    assert not cache.tree.holds(runs[0])


def test_unfinished_tokens_are_forgotten():
    cache = PrefixCache(PagePool(4, 4))
    a = cache.attach(ids(range(8)), 7, "a")
    assert cache.reserve(a, 5)
    a.computed = 5
    cache.disown(a, "a")
    cache.unpin(a)
    assert list(a.tokens) == list(range(5))
    node, matched = cache.tree.match(ids(range(8)))
    assert matched == 5
    assert node is a


def test_identical_prompts_compute_their_last_token_each():
    cache = PrefixCache(PagePool(4, 4))
    a = cache.attach(ids(range(6)), 5, "a")
    b = cache.attach(ids(range(6)), 5, "b")
    assert b.start == 5
    assert not cache.tree.holds(b)
    assert a.parent is b.parent
    cache.unpin(a)
    cache.unpin(b)
    cache.check()


def test_nothing_is_kept_below_what_is_not_computed():
    """Who was to compute an equal prompt leaves after another has answered it."""
    cache = PrefixCache(PagePool(4, 4))
    first = cache.attach(ids([0]), 0, "first")
    second = cache.attach(ids([0]), 0, "second")
    assert cache.reserve(second, 2)
    second.tokens.append(0)
    second.computed = 2
    waits = cache.attach(ids([0, 1]), 1, "waits")
    assert waits.parent is first
    cache.disown(first, "first")
    for run in (first, second, waits):
        cache.unpin(run)
    cache.check()
    assert cache.cached_tokens() == 0
    assert list(cache.runs()) == []


class Traffic(RuleBasedStateMachine):
    """Random attach, compute, grow, finish, abort: the books always balance."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache(PagePool(12, 3))
        self.live: dict[int, Run] = {}
        self.count = 0

    @rule(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=10))
    def attach(self, tokens):
        self.count += 1
        self.live[self.count] = self.cache.attach(ids(tokens), len(tokens) - 1, self.count)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def progress(self, data):
        """Compute some tokens of the first unfinished run that nobody else owns."""
        key = data.draw(st.sampled_from(sorted(self.live)))
        for run in self.live[key].path():
            if run.computed < len(run.tokens):
                if run.owner in (None, key):
                    take = data.draw(st.integers(1, len(run.tokens) - run.computed))
                    if self.cache.reserve(run, run.computed + take):
                        run.owner = key
                        run.computed += take
                return

    @precondition(lambda self: self.live)
    @rule(data=st.data(), token=st.integers(0, 2))
    def grow(self, data, token):
        key = data.draw(st.sampled_from(sorted(self.live)))
        run = self.live[key]
        if run.computed < len(run.tokens):
            return
        if self.cache.may_grow(run):
            run.tokens.append(token)
        else:
            self.live[key] = self.cache.branch(run, [token], key)
            self.cache.unpin(run)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def leave(self, data):
        key = data.draw(st.sampled_from(sorted(self.live)))
        run = self.live.pop(key)
        self.cache.disown(run, key)
        self.cache.unpin(run)

    @invariant()
    def balanced(self):
        self.cache.check()

    def teardown(self):
        for key, run in self.live.items():
            self.cache.disown(run, key)
            self.cache.unpin(run)
        self.cache.check()
        assert self.cache.pool.num_held == 0
        self.cache.clear()
        self.cache.check()
        assert self.cache.pool.num_free == self.cache.pool.num_pages


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=150, stateful_step_count=30)


@given(st.integers(1, 40), st.integers(1, 8), st.integers(0, 7))
def test_pages_for(tokens, size, offset):
    pool = PagePool(100, size)
    offset %= size
    touched = {(offset + i) // size for i in range(tokens)}
    assert pool.pages_for(tokens, offset) == len(touched)


def test_a_run_loses_its_end_and_keeps_its_beginning():
    cache = PrefixCache(PagePool(6, 4))
    a = cache.attach(ids(range(18)), 17, "a")
    assert compute(cache, a)
    assert cache.attach(ids([*range(6), 99]), 6, "b").parent is a.parent
    for run in (a, next(run for run in cache.runs() if run.tokens[0] == 99)):
        cache.unpin(run)
    assert (a.start, a.offset, a.pages) == (6, 2, [1, 2, 3, 4])
    assert cache.make_room(3)
    assert (a.pages, a.computed, list(a.tokens)) == ([1, 2], 6, list(range(6, 12)))
    cache.check()
    again = cache.attach(ids(range(18)), 17, "again")
    assert (again.start, again.parent) == (12, a)
    assert compute(cache, again)
    cache.unpin(again)
    cache.check()


def ask(cache: PrefixCache, tokens, *, marked: bool = False) -> Run:
    """A request that is admitted, computed and answered with nothing: where it left the tree."""
    run = cache.attach(ids(tokens), len(tokens) - 1, "ask")
    cache.note_use(run, "ask", in_conversation=marked)
    parent = run.parent
    run.answer_at = run.end
    assert compute(cache, run)
    cache.unpin(run)
    return parent


def test_who_goes_on_alone_shares_with_nobody():
    cache = PrefixCache(PagePool(64, 4))
    history = list(range(8))
    ask(cache, history)
    for turn in range(1, 4):
        history += range(100 * turn, 100 * turn + 8)
        left = ask(cache, history)
        assert left.end == 8 * turn
        assert (left.is_continued, left.is_shared) == (True, False)
    left = ask(cache, [*history[:20], 7, 7])
    assert (left.end, left.is_shared) == (20, True)
    assert [run.is_shared for run in left.path()] == [False, False, True]
    # What is gone is computed again by the same conversation: nobody else has come.
    cache.clear()
    ask(cache, history[:8])
    ask(cache, history[:16])
    assert cache.idle.evict_one(2)
    left = ask(cache, history)
    assert (left.end, left.is_shared) == (8, False)


def test_headers_outlast_documents_that_are_read_once():
    cache = PrefixCache(PagePool(40, 4))
    header = list(range(32))
    found = []
    for number in range(40):
        if number % 8 < 2:
            found.append(ask(cache, [*header, 1000 + number, 5]).end)
        else:
            ask(cache, range(10_000 * number, 10_000 * number + 40))
        cache.check()
    # Two questions, then six documents. The header is lost once: that documents do not come again
    # must be learned.
    assert found == [0, 32, 0] + 7 * [32]


def test_conversations_go_least_recently_used_first():
    cache = PrefixCache(PagePool(400, 4))
    rng = np.random.default_rng(0)
    histories: list[list[int]] = [[1000 * i] for i in range(6)]
    last = [0] * 6
    for step in range(1, 60):
        i = int(rng.integers(6))
        histories[i] += rng.integers(3, 999, 5).tolist()
        ask(cache, histories[i])
        last[i] = step
    gone = []
    while cache.idle.evict_one(1):
        heads = {run.tokens[0] // 1000 for run in cache.tree if run.parent is cache.root}
        gone += [i for i in range(6) if i not in heads and i not in gone]
    assert gone == sorted(range(6), key=last.__getitem__)


OTHERS = itertools.count(100_000, 1000)


def talk(cache: PrefixCache, first: int, pauses, *, marked: bool = False) -> list[int]:
    """What a conversation finds at each of its turns of 8 tokens, if so many prompts of 40 tokens
    come after each."""
    history: list[int] = []
    found = []
    for pause in pauses:
        history += range(first + len(history), first + len(history) + 8)
        found.append(ask(cache, history, marked=marked).end)
        for start in itertools.islice(OTHERS, pause):
            ask(cache, range(start, start + 40))
        cache.check()
    return found


class OldestFirst(IdleRuns):
    def rate(self, run: Run) -> float:
        return 0.0


@pytest.mark.parametrize("order", [IdleRuns, OldestFirst])
def test_conversations_outlast_prompts_that_nobody_continues(order):
    pool = PagePool(40, 4)
    cache = PrefixCache(pool, idle=order(pool))
    # That it comes back after two of them is learned; then six come, more than memory holds.
    found = talk(cache, 0, 8 * [2] + 4 * [6])
    assert found[:9] == [8 * turn for turn in range(9)]
    assert found[9:] == ([72, 80, 88] if order is IdleRuns else [0, 0, 0])


@pytest.mark.parametrize("marked", [False, True])
def test_a_first_prompt_that_is_marked_is_kept_as_a_conversation(marked):
    cache = PrefixCache(PagePool(40, 4))
    talk(cache, 0, 8 * [2])
    assert talk(cache, 5000, [6, 0], marked=marked) == [0, 8 * marked]


def test_what_differs_within_a_prompt_is_no_turn():
    cache = PrefixCache(PagePool(40, 4))
    talk(cache, 0, [0, 0])
    for tokens, is_turn in (([*range(16), 9, 9], True), ([*range(12), 9, 9], False),
                            ([*range(7), 9], False), (range(8), False)):  # fmt: skip
        run = cache.attach(ids(tokens), len(tokens) - 1, "ask")
        cache.note_use(run, "ask")
        assert run.is_turn == is_turn, tokens
        cache.unpin(run)


def test_chances_of_what_is_long_ago():
    kind = Kind()
    kind.used, kind.lost = 30.0, 8.0
    assert kind.chance == 31 / 40
    for _ in range(2000):
        kind.fade(0.5)
    assert kind.chance == 0.5
