"""A row is rounded by itself, whoever stands beside it; and what a last bit comes to then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from onestem.models.decoder import Decoder
from onestem.models.find import find_model
from onestem.models.formats import products
from onestem.models.sizes import formats_of, weight_bytes
from onestem.models.weights import load_decoder
from onestem.ops import Angles, Heads
from onestem.ops.cpu import is_built
from onestem.ops.rounding import rounded_rows
from tests.models.dense import dense_attend, log_probabilities, prompt
from tests.models.quantised import FORMATS, dequantised, quantised

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


def test_rates_of_states_are_not_rounded(tiny: Callable[[str], Path]) -> None:
    cpu = torch.device("cpu")
    decoder = load_decoder(tiny("qwen3_5"), dtype=torch.bfloat16, device="cpu", quantization="int8")
    layer = decoder.layers[0]
    assert layer.delta is not None
    assert layer.delta.rates.kind.startswith("bfloat16")
    assert not layer.qkv.kind.startswith("bfloat16")
    formats = formats_of(decoder.config, "int8", torch.bfloat16, cpu)
    assert weight_bytes(decoder.config, torch.bfloat16, cpu, formats) == decoder.weight_bytes


@pytest.mark.parametrize("form", ["fp8 in blocks", "packed int4", "gptq, act-order", "awq"])
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
def test_states_of_stored_formats(
    family: str, form: str, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    """As published: what makes the rates, and the convolution, is left out."""
    left_out = ("conv1d", "in_proj_a", "in_proj_b", "in_proj_ba", "gate", "experts", "down_proj")
    own = FORMATS[form]
    own = replace(own, left_out=(*own.left_out, *left_out))
    found = [
        load_decoder(write(tiny(family), tmp_path / name, own), dtype=torch.float32, device="cpu")
        for name, write in (("stored", quantised), ("plain", dequantised))
    ]
    assert "from" in found[0].layers[0].qkv.kind
    stored, plain = (log_probabilities(one, IDS[:60]) for one in found)
    torch.testing.assert_close(stored, plain, atol=1e-4, rtol=0)
