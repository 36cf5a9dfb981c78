"""Chunks of streams grow with the tokens that come."""

from __future__ import annotations

import pytest

from onestem.server.link.chunk_size import CHUNKS_PER_SECOND, SECONDS, ChunkSize


class Clock:
    now = 5.0

    def __call__(self) -> float:
        return self.now


def after(size: ChunkSize, clock: Clock, tokens_per_second: float, seconds: float = 1.0) -> int:
    """What a chunk has when so many tokens have come, at a step each hundredth of a second."""
    for _ in range(round(seconds * 100)):
        clock.now += 0.01
        size.note(round(tokens_per_second / 100))
    return size.tokens


@pytest.mark.parametrize("least", [1, 3])
def test_chunks_are_as_large_as_their_number_asks(least: int) -> None:
    clock = Clock()
    size = ChunkSize(least, clock)
    assert size.tokens == least
    assert after(size, clock, 0.95 * CHUNKS_PER_SECOND) == least
    assert after(size, clock, 1.95 * CHUNKS_PER_SECOND) == max(least, 2)
    assert after(size, clock, 3.95 * CHUNKS_PER_SECOND) == max(least, 4)
    assert after(size, clock, 100) == least


def test_a_pause_counts_as_time() -> None:
    clock = Clock()
    size = ChunkSize(1, clock)
    assert after(size, clock, 5 * CHUNKS_PER_SECOND) > 1
    clock.now += 60
    size.note(400)
    assert size.tokens == 1


def test_a_burst_does_not_count_before_its_time() -> None:
    clock = Clock()
    size = ChunkSize(1, clock)
    for _ in range(10):
        clock.now += SECONDS / 11
        size.note(CHUNKS_PER_SECOND)
        assert size.tokens == 1
