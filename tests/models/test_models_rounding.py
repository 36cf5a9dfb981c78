"""A row is rounded by itself, whoever stands beside it; and what a last bit comes to then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from onestem.models.decoder import Decoder
from onestem.models.find import find_model
from onestem.models.formats import products
from onestem.models.weights import load_decoder
from onestem.ops import Angles, Heads
from onestem.ops.cpu import is_built
from onestem.ops.rounding import rounded_rows
from tests.models.dense import dense_attend, prompt

ROWS = 64
IDS = prompt(400, 250)


def embedded(form: Any, dtype: torch.dtype = torch.float32) -> Decoder:
    return load_decoder(find_model("embedded"), dtype=dtype, device="cpu", quantization=form)


@pytest.mark.parametrize(("form", "told"), [("fp8", 0), ("int8", 0), ("int4", 1)])
def test_a_format_that_costs_small_models_much_says_so(
    form: str, told: int, caplog: pytest.LogCaptureFixture
) -> None:
    embedded(form)
    assert sum("costs small models" in one.message for one in caplog.records) == told


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["fp8", "int8", "int4"])
def test_a_row_alone_has_the_bits_that_it_has_among_others(form: str, dtype: torch.dtype) -> None:
    """All of a model but attention, in batches of 1 to 64 rows."""
    decoder = embedded(form, dtype)

    def queries(_: int, qkv: Tensor, heads: Heads, __: Angles) -> Tensor:
        width = heads.num_q_heads * heads.head_dim
        return qkv[:, :width].unflatten(1, (-1, heads.head_dim))

    def logits(ids: Tensor) -> Tensor:
        return decoder.logits(decoder.forward(ids, torch.zeros_like(ids), queries))

    ids = IDS[:ROWS]
    alone = torch.cat([logits(one[None]) for one in ids])
    for rows in range(1, ROWS + 1):
        got = logits(ids[:rows])
        if form == "int8":
            assert torch.equal(got, alone[:rows])
        else:  # libraries and AMX may add up many rows in another order
            most = 1e-5 if dtype == torch.float32 else 0.05
            assert (got - alone[:rows]).abs().max() <= most * alone.abs().max()


@pytest.mark.skipif(not is_built(), reason="the C++ extension is not built")
def test_a_last_bit_becomes_a_step_of_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a value lies half-way between two codes: so attention's order of sums shows in int8."""
    seen: list[Tensor] = []
    multiply = products.CpuProduct.__call__

    def noted(self: products.CpuProduct, x: Tensor) -> Tensor:
        seen.append(x.clone())
        return multiply(self, x)

    monkeypatch.setattr(products.CpuProduct, "__call__", noted)
    decoder, positions = embedded("int8"), torch.arange(len(IDS))
    attend, generator = dense_attend(decoder.config, positions), torch.Generator()

    def nearly(layer: int, qkv: Tensor, heads: Heads, angles: Angles) -> Tensor:
        out = attend(layer, qkv, heads, angles)
        return out * (1 + 2**-22 * torch.randn(out.shape, generator=generator.manual_seed(layer)))

    answers, inputs = [], []
    for each in (attend, nearly):
        seen.clear()
        answers.append(decoder.logits(decoder.forward(IDS, positions, each)))
        inputs.append(list(seen))
    for x, y in zip(*inputs, strict=True):
        (codes, scales), (others, _) = (rounded_rows(one, torch.int8) for one in (x, y))
        flipped = codes != others
        if flipped.any():
            break
    assert flipped.sum() < 10  # the first ones
    half_way = ((x / scales).abs().frac() - 0.5).abs()
    assert half_way[flipped].max() < 1e-3
    off = (answers[0] - answers[1]).abs().max() / answers[0].abs().max()
    assert off > 1e-3  # not 1e-6, as of sums alone
