"""Draws in C++ against the sampler's own in PyTorch, in every instruction set."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from onestem.engine import draw as sampling
from onestem.engine.draw import Draw
from onestem.errors import ConfigError
from onestem.ops.cpu import draw_tokens, is_built
from tests.ops.cpu_isas import EVERY_ISA

pytestmark = pytest.mark.skipif(not is_built(), reason="the C++ extension is not built")

every_isa = pytest.mark.parametrize("isa", EVERY_ISA, ids=str)

SETTINGS = [
    {},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 700},
    {"top_p": 0.9},
    {"top_p": 1e-9},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 300, "top_p": 0.5, "min_p": 0.01},
]


def settings_of(rows: int, vocab: int) -> Draw:
    """All settings in turn, each with several temperatures."""
    chosen = [SETTINGS[row % len(SETTINGS)] for row in range(rows)]
    generator = torch.Generator().manual_seed(rows)

    def floats(name: str, off: float) -> torch.Tensor:
        return torch.tensor([setting.get(name, off) for setting in chosen], dtype=torch.float64)

    return Draw(
        temperature=torch.tensor([0.3, 1.0, 1.7, 20.0], dtype=torch.float64).repeat(rows)[:rows],
        top_k=torch.tensor([min(setting.get("top_k", vocab), vocab) for setting in chosen]),
        top_p=floats("top_p", 1.0),
        min_p=floats("min_p", 0.0),
        uniform=torch.rand(rows, dtype=torch.float64, generator=generator),
    )


def drawn(isa, logits: torch.Tensor, draw: Draw) -> torch.Tensor:
    settings = {field.name: getattr(draw, field.name) for field in dataclasses.fields(draw)}
    bits = sampling._weight_bits(logits.shape[1])
    return isa.call(draw_tokens, logits, **settings, weight_bits=bits, isa=isa.name)


def by_sorting(logits: torch.Tensor, draw: Draw) -> torch.Tensor:
    """The whole vocabulary in order."""
    top = logits.amax(dim=-1)
    weighed = (draw.top_k >= logits.shape[1]).nonzero().flatten()
    totals = sampling._sum_weights(logits, top, draw, weighed)
    order = sampling.leading(logits, logits.shape[1])
    ids, resolved = sampling._draw_among(order, top, totals, draw, logits.shape[1])
    assert bool(resolved.all())
    return ids


@every_isa
@pytest.mark.parametrize("vocab", [1, 2, 17, 1000, 5003])
@pytest.mark.parametrize("spread", [0.1, 3.0, 30.0])
def test_draws_are_those_of_the_sorted_vocabulary(isa, vocab, spread):
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(72, vocab, generator=generator) * spread
    logits[::2] = logits[::2].bfloat16().float()  # many equal ones
    if vocab > 2:
        logits[1::5, : vocab // 2] = -torch.inf  # masked
        logits[3::7] = 1.25  # all alike
    draw = settings_of(72, vocab)
    assert torch.equal(drawn(isa, logits, draw), by_sorting(logits, draw))


def test_draws_are_those_that_look_at_leading_tokens_first(monkeypatch):
    """What the sampler does without the extension, and on a GPU."""
    monkeypatch.setattr(sampling, "_is_native", lambda work: False)
    logits = torch.randn(72, 9000, generator=torch.Generator().manual_seed(2))
    logits[::3] *= 8
    draw = settings_of(72, 9000)
    assert torch.equal(sampling.draw_tokens(logits, draw), drawn(EVERY_ISA[0], logits, draw))


@every_isa
def test_ends_of_the_distribution(isa):
    logits = torch.tensor([[0.0, 5.0, -torch.inf, 5.0, 1.0]]).repeat(2, 1)
    draw = dataclasses.replace(
        settings_of(2, 5),
        uniform=torch.tensor([1e-300, 1 - 2.0**-53], dtype=torch.float64),
        temperature=torch.ones(2, dtype=torch.float64),
        top_k=torch.tensor([5, 5]),
    )
    assert drawn(isa, logits, draw).tolist() == [1, 0]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_does_not_depend_on_its_neighbours(threads):
    logits = torch.randn(40, 9000, generator=torch.Generator().manual_seed(1))
    draw, isa = settings_of(40, 9000), EVERY_ISA[0]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = drawn(isa, logits, draw)
    finally:
        torch.set_num_threads(before)
    alone = [drawn(isa, logits[i : i + 1], draw.rows(torch.tensor([i]))) for i in range(40)]
    assert torch.equal(together, torch.cat(alone))


def test_arguments_that_do_not_fit_are_refused():
    logits, draw = torch.zeros(2, 8), settings_of(2, 8)
    with pytest.raises(ConfigError, match=r"expected torch.float64 \[2\]"):
        drawn(EVERY_ISA[0], logits, dataclasses.replace(draw, top_p=torch.ones(2)))
    with pytest.raises(ConfigError, match=r"logits are torch\.float64"):
        drawn(EVERY_ISA[0], logits.double(), draw)
    for change in ({"uniform": draw.uniform.to("meta")}, {"top_k": draw.top_k.to("meta")}):
        with pytest.raises(ConfigError, match="on meta, expected"):
            drawn(EVERY_ISA[0], logits, dataclasses.replace(draw, **change))


def test_ids_stand_where_logits_do_whatever_the_default_device():
    logits, draw = torch.randn(2, 8), settings_of(2, 8)
    want = drawn(EVERY_ISA[0], logits, draw)
    with torch.device("meta"):
        assert torch.equal(drawn(EVERY_ISA[0], logits, draw), want)
