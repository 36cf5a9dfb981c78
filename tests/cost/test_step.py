"""The cost of a step: RelayAttention's theory, curves, and rates by name."""

from __future__ import annotations

import dataclasses
import json
from fractions import Fraction

import pytest

from onestem.cost import Curve, ModelShape, Rates, StepCost, named_devices, named_rates
from onestem.errors import ConfigError
from onestem.models.config import ModelConfig
from onestem.shapes import find_shape

# The paper counts a token's keys and values as one element for each of a query's: two query heads
# to a KV head.
PAPER = ModelShape(1, 1, 1, num_layers=1, num_q_heads=2, num_kv_heads=1, head_dim=8, itemsize=2)
BYTES_ALONE = Curve((1,), (1e300,), 1.0)


@pytest.mark.parametrize("system", [64, 512, 2048])
@pytest.mark.parametrize("context", [1, 128, 256])
@pytest.mark.parametrize("batch", [2, 4, 32, 256])
def test_bytes_alone_give_relay_attentions_equation_10(system, context, batch):
    cost = StepCost(PAPER, Rates("", "", "", BYTES_ALONE, BYTES_ALONE, BYTES_ALONE))
    row = PAPER.query_bytes
    assert row == PAPER.token_bytes
    apart = batch * cost.attention([], system + context, 1)
    relay = cost.attention([(system, batch)], context, batch)
    assert apart == row * batch * (system + context + 2)  # eq. 8
    assert relay == row * (system + batch * (context + 7))  # eq. 9
    p = Fraction(system + context + 2) / (Fraction(system, batch) + context + 7)  # eq. 10
    assert Fraction(apart) / Fraction(relay) == p


def test_a_shared_run_is_never_dearer_than_the_same_run_read_for_each():
    slow_together = Curve((2, 4, 512), (4e9, 1e9, 4e12), 1e9)
    cost = StepCost(PAPER, Rates("", "", "", BYTES_ALONE, slow_together, BYTES_ALONE))
    apart = StepCost(PAPER, cost.rates, shared=False)
    for rows in (1, 2, 3, 50, 1000):
        assert cost.run(100, rows) <= apart.run(100, rows) == rows * apart.run(100, 1)
    assert cost.run(100, 2) == apart.run(100, 2)
    assert cost.run(100, 1000) < apart.run(100, 1000)
    assert cost.run(1, 1000) == apart.run(1, 1000)  # merging states takes longer


def test_a_decode_may_take_more_than_its_bytes():
    rates = Rates("", "", "", BYTES_ALONE, BYTES_ALONE, BYTES_ALONE, walk_seconds=9.0)
    row = PAPER.query_bytes
    # 100 keys of each row, twice its queries, and a walk in each layer.
    assert StepCost(PAPER, rates).attention([], 100, 5) == 5 * (row * (100 + 2) + 9.0)


def test_layers_with_windows_walk_what_these_leave():
    """A layer of another head size counts by its bytes."""
    heads = ((1, 8, True), (1, 24, True))
    shape = dataclasses.replace(PAPER, num_layers=2, layer_heads=heads)
    rates = Rates("", "", "", BYTES_ALONE, BYTES_ALONE, BYTES_ALONE)
    for windows, seen in (
        ((200, None), (100, 20, 10)),
        ((64, 64), (34, 20, 10)),  # a row sees 10 of its own, 20 above them, 34 above those
        ((None, 64), (100 / 4 + 34 * 3 / 4, 20, 10)),
        ((16, 8), (0, 6 / 4, 10 / 4 + 8 * 3 / 4)),
    ):
        cost = StepCost(dataclasses.replace(shape, windows=windows), rates)
        vars(cost)["pass_seconds"] = 0.0  # queries and outputs take nothing
        found = cost.attention([(100, 3), (20, 2)], 10, 3)
        assert found == cost.walk(1) * (seen[0] + seen[1] + 3 * seen[2])


def test_a_curve_is_linear_between_its_points_and_goes_on_at_its_last_rate():
    curve = Curve((2, 4, 8), (2.0, 8.0, 8.0), 10.0)
    assert [curve.seconds(1.0, 0, rows) for rows in (1, 2, 3, 4, 6, 8, 16)] == [
        1.0, 1.0, 0.75, 0.5, 0.75, 1.0, 2.0
    ]  # fmt: skip
    assert curve.seconds(1.0, 50.0, 8) == 5.0  # its bytes take longer


def test_experts_cost_what_some_row_takes_of_them():
    """Qwen3-30B-A3B: 30.5 billion parameters, of which a row takes 3.3."""
    config = ModelConfig.from_directory(find_shape("qwen3-30b-a3b"))
    shape = ModelShape.of(config, 2)
    experts = shape.experts
    assert experts is not None
    table = 2 * config.vocab_size * config.hidden_size
    assert (shape.weight_bytes + table) / 2 == pytest.approx(30.53e9, rel=1e-3)
    curve = Curve((1, 64), (1e12, 64e12), 1e12)
    cost = StepCost(shape, Rates("", "", "", curve, curve, curve))
    dense = StepCost(dataclasses.replace(shape, experts=None), cost.rates)
    each = 2 * experts.layers * experts.parameters / 1e12  # seconds of an expert in all layers
    assert experts.touched(1) == pytest.approx(8)
    assert cost.linear(1) - dense.linear(1) == pytest.approx(8 * each)
    assert experts.touched(1000) == pytest.approx(128)
    # 1,024 rows: 64 for each expert, which take as long as one.
    assert cost.linear(1024) - dense.linear(1024) == pytest.approx(128 * each)
    assert 8 < experts.touched(10) < 80
    # Of 48 layers, a prompt's row skips the last one's experts, router and output.
    layer = 8 * 3 * 768 + 128 + 2 * 32 * 128 + 2 * 4 * 128
    assert 1 - shape.prompt_share == pytest.approx((layer - (32 + 2 * 4) * 128) / layer / 48)
    four_bits = ModelShape.of(ModelConfig.from_directory(find_shape("gpt-oss-20b")), 2)
    assert four_bits.weight_bytes < 14e9 < 40e9
    assert ModelShape.of(
        ModelConfig.from_directory(find_shape("gpt-oss-20b")), 2, on_gpu=False
    ).weight_bytes == pytest.approx(2 * (20.9e9 - 201088 * 2880), rel=0.01)


@pytest.mark.parametrize(
    ("rows", "flops", "num_bytes"),
    [((), (), 1.0), ((1, 2), (1.0,), 1.0), ((2, 1), (1.0, 1.0), 1.0), ((1,), (0.0,), 1.0),
     ((0,), (1.0,), 1.0), ((1,), (1.0,), 0.0)],
)  # fmt: skip
def test_malformed_curves_are_refused(rows, flops, num_bytes):
    with pytest.raises(ConfigError, match="rates:"):
        Curve(rows, flops, num_bytes)


def test_named_rates_are_read_whole_and_other_names_are_refused():
    assert "h200" in named_devices()
    for name in named_devices():
        rates = named_rates(name)
        assert Rates.from_dict(json.loads(json.dumps(dataclasses.asdict(rates)))) == rates
        assert rates.memory_bytes > 0
        assert rates.source
    with pytest.raises(ConfigError, match="no rates are known of a device 'h300', expected one of"):
        named_rates("h300")
