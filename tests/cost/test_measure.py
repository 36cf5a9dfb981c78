"""Rates of this device: measured with what engines run, and kept by what they depend on."""

from __future__ import annotations

import time

import pytest
import torch

import onestem.cost.kept as kept
import onestem.cost.measure as measuring
from onestem.cost import ModelShape
from onestem.models.config import ModelConfig
from onestem.models.weights import random_decoder
from onestem.ops import resolve
from tests.models.tiny import make_tiny

CPU = torch.device("cpu")


@pytest.fixture
def few(tmp_path, monkeypatch):
    """Few and short measurements, kept in a folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(measuring, "CACHE_BYTES", 1 << 10)
    monkeypatch.setattr(measuring, "ROWS", (1, 4))
    monkeypatch.setattr(measuring, "WALKS", ((1, 2, 32), (4, 1, 32)))
    monkeypatch.setattr(measuring, "SAMPLED_ROWS", (1, 2))
    monkeypatch.setattr(measuring, "HOST_JOBS", ((1, 4, 6), (4, 4, 3), (4, 20, 1), (6, 4, 1)))


@pytest.mark.parametrize("family", ["llama", "gpt2", "falcon", "mpt"])
def test_rates_are_measured_once_for_a_model_of_any_family(family, few, tmp_path, monkeypatch):
    config = ModelConfig.from_directory(make_tiny(family, tmp_path / family))
    group = config.num_q_heads // config.num_kv_heads
    assert kept.known_rates(config, torch.float32, CPU) is None
    rates = kept.rates_here(config, torch.float32, CPU)
    assert rates.linear.rows == (1, 4)
    assert rates.attention.rows == (group, 4 * group)
    assert rates.head.rows == (1, 2)
    assert rates.dtype == "float32"
    assert rates.walk_seconds >= 0
    assert not rates.overlaps
    monkeypatch.setattr(kept, "measure", None)  # would fail
    assert kept.rates_here(config, torch.float32, CPU) == rates
    assert kept.known_rates(config, torch.bfloat16, CPU) is None


def test_a_rate_that_still_rises_is_not_taken_for_all_rows(tmp_path, monkeypatch):
    """On a busy machine even a step of one row may take long, and says nothing of many."""
    config = ModelConfig.from_directory(make_tiny("llama", tmp_path / "llama"))
    decoder = random_decoder(config, dtype=torch.float32, device=CPU)
    seconds = iter([0.4, 0.5, 0.6, 1.0, 4.0])
    monkeypatch.setattr(measuring, "ROWS", (1, 4, 16, 64, 256))
    monkeypatch.setattr(measuring, "_seconds", lambda *_, **__: next(seconds))
    shape = ModelShape.of(config, 4)
    curve = measuring.linear_rates(decoder, shape, resolve("auto", CPU), time.perf_counter)
    assert curve.rows == (1, 4, 16, 64)  # 64 take 1.7 times as long as 16
