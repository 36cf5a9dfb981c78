"""Which pages the pool gives, compared with a search through all of it."""

from __future__ import annotations

import numpy as np
import pytest

from onestem.cache import PagePool, pages


def closest(free: np.ndarray, count: int) -> list[int]:
    """The first `count` free pages that lie closest together."""
    places = np.flatnonzero(free)
    span = places[count - 1 :] - places[: len(places) - count + 1]
    best = int(np.argmin(span))
    return places[best : best + count].tolist()


@pytest.mark.parametrize("looked_through", [2, 8, 64, 4096])
@pytest.mark.parametrize("seed", range(4))
def test_pages_are_those_of_a_search_through_the_whole_pool(monkeypatch, looked_through, seed):
    monkeypatch.setattr(pages, "LOOKED_THROUGH", looked_through)
    random = np.random.default_rng(seed)
    pool, free, held = PagePool(200, 16), np.ones(200, bool), []
    searched = 0
    for _ in range(600):
        room = int(free.sum())
        if held and (room < 30 or random.random() < 0.45):
            gone = held.pop(random.integers(len(held)))
            pool.release(gone)
            free[gone] = True
            continue
        count = int(random.integers(1, 12))
        if random.random() < 0.3:  # single pages for several sequences
            after = random.integers(-1, 200, count)
            after = np.unique(after)
            wanted = after + 1
            fits = (after >= 0) & (wanted < 200)
            fits[fits] = free[wanted[fits]]
            rest = free.copy()
            rest[wanted[fits]] = False
            expected = np.where(fits, wanted, -1)
            expected[~fits] = np.flatnonzero(rest)[: (~fits).sum()]
            got = pool.allocate_each(after).tolist()
            assert got == expected.tolist()
        else:
            lowest = int(np.flatnonzero(free)[0])
            got = pool.allocate(count)
            if not free[lowest : lowest + count].all():
                searched += 1
            assert got == closest(free, count)
        free[got] = False
        held.append(got)
        pool.check((some, False) for some in held)
    assert searched > 20
