"""The page's rates: what was counted over some seconds, by the clock."""

from __future__ import annotations

import asyncio
from unittest.mock import AsyncMock, Mock

import pytest

from onestem.server.records.history import History
from onestem.server.records.records import Records


def rates(samples: list[tuple[float, int]]) -> list[float | None]:
    """What is shown for samples of (seconds, output tokens so far)."""
    times = iter([0.0, *(seconds for seconds, _ in samples for _ in range(2))])
    history = History(lambda token: None, clock=lambda: next(times))
    for _, count in samples:
        history.sample({"output_tokens": count}, running=1, waiting=0, kv_used=None)
    return history.series()["output_tokens"]


def test_what_comes_at_once_is_spread_over_five_seconds():
    counts = [0, 256, 256, 256, 256, 256, 512, 512]
    shown = rates([(second, count) for second, count in enumerate(counts, start=1)])
    assert shown == [0, 128, 256 / 3, 64, 51.2, 51.2, 51.2, 51.2]


def test_seconds_that_were_longer_count_as_long():
    assert rates([(1.0, 100), (3.0, 300), (3.5, 350)]) == [100, 100, 100]


def test_it_falls_to_nothing_when_nothing_comes():
    shown = rates([(float(second), 100 * min(second, 3)) for second in range(1, 10)])
    assert shown == [100, 100, 100, 75, 60, 40, 20, 0, 0]


def test_a_sample_that_fails_is_not_the_last(monkeypatch):
    records = Records(Mock(), Mock())
    sample = Mock(side_effect=[RuntimeError("a fault"), None, SystemExit])
    monkeypatch.setattr(records.history, "sample", sample)
    monkeypatch.setattr(asyncio, "sleep", AsyncMock())
    with pytest.raises(SystemExit):
        asyncio.run(records.sample(dict))
    assert sample.call_count == 3
