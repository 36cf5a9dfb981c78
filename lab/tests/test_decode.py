"""What attention of a decode step takes at least, and what is allowed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from onestem_lab.attention.rates import Rates
from onestem_lab.decode import attention_seconds


def test_the_least_is_at_the_measured_rates_and_the_allowance_at_parts_of_them():
    has_state = {0: False, 1: True, 2: False}.__getitem__
    config = SimpleNamespace(num_layers=3, num_q_heads=4, head_dim=8, has_state=has_state)
    decoder = SimpleNamespace(config=config, kv_bytes_per_token=100)
    least, allowed = attention_seconds(decoder, Rates(1e3, 1e4), batch=3, prefix=10, own=5)
    products, reading = 4 * 2 * 4 * 8 * 3 * 10 / 1e3, 100 * 3 * 5 / 1e4
    assert least == pytest.approx(products + reading)
    assert allowed == pytest.approx(1.15 * (products / 0.6 + reading / 0.85))
