"""Triton's experts against products written out for each row and each of its experts."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from onestem.models.description import Experts
from onestem.models.formats.experts import of_mxfp4
from onestem.models.formats.held import Groups, Levels
from onestem.models.mlp import route as route_in_torch
from onestem.ops.experts import E2M1, MAX_POWER, Beside, GroupedWeight
from onestem.ops.triton import experts as triton_experts
from onestem.ops.triton.experts import GroupedExperts, route, sort_rows, summed, tile_grid
from onestem.ops.triton.tiled import Tiles
from onestem.ops.triton.tiled_experts import TiledExperts

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = Tiles(32, 16, stages=2, columns=32)


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


@pytest.mark.parametrize(("rows", "num", "top_k"), [(0, 4, 2), (1, 5, 3), (9, 60, 4), (40, 8, 8)])
@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize("normalized", [False, True])
def test_route(rows: int, num: int, top_k: int, sigmoid: bool, normalized: bool) -> None:
    logits = drawn(rows, num)
    correction = drawn(num, seed=1) if sigmoid else None
    experts = Experts(
        num=num,
        top_k=top_k,
        intermediate_size=8,
        layers=(True,),
        scores="sigmoid" if sigmoid else "softmax",
        normalized=normalized,
        scale=1.5,
        correction=sigmoid,
    )
    scores, chosen = route(
        logits, correction, top_k=top_k, sigmoid=sigmoid, normalized=normalized, scale=1.5
    )
    want_scores, want = route_in_torch(logits, experts, correction)
    assert torch.equal(chosen.long(), want)
    torch.testing.assert_close(scores, want_scores, atol=1e-6, rtol=1e-6)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_rows_of_nan_take_experts_that_there_are() -> None:
    logits = torch.full((2, 5), float("nan"), device=DEVICE)
    _, chosen = route(logits, None, top_k=3, sigmoid=False, normalized=True, scale=1.0)
    assert bool(((chosen >= 0) & (chosen < 5)).all())


@pytest.mark.parametrize(("rows", "num", "top_k"), [(0, 3, 2), (1, 3, 2), (70, 7, 3), (300, 4, 1)])
def test_sort_rows(rows: int, num: int, top_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_experts, "_SORT_BLOCK", 64)
    chosen = drawn(rows, num).topk(top_k).indices.to(torch.int32)
    order, ends = sort_rows(chosen, num)
    flat = chosen.flatten().long()
    assert torch.equal(order.long(), flat.argsort(stable=True))
    assert torch.equal(ends.long(), flat.bincount(minlength=num).cumsum(0))


def written_out(
    x: Tensor, scores: Tensor, chosen: Tensor, up: Tensor, down: Tensor, bias: tuple[Tensor, ...]
) -> Tensor:
    """In float64."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=DEVICE)
    for row in range(len(x)):
        for score, expert in zip(scores[row], chosen[row].tolist(), strict=True):
            gate, value = (up[expert].double() @ x[row].double()).chunk(2)
            if bias:
                first, second = bias[0][expert].double().chunk(2)
                gate = (gate + first).clamp(max=1.5)
                value = (value + second).clamp(-1.5, 1.5) + 1
                inner = gate * torch.sigmoid(1.7 * gate) * value
                result = down[expert].double() @ inner + bias[1][expert].double()
            else:
                result = down[expert].double() @ (gate * torch.sigmoid(gate) * value)
            out[row] += score.double() * result
    return out


@pytest.mark.parametrize(
    ("rows", "num", "top_k", "hidden", "inner"),
    [
        (0, 3, 2, 32, 16),
        (1, 5, 4, 48, 40),
        (7, 3, 2, 40, 72),
        (90, 4, 2, 32, 24),
        (33, 40, 1, 32, 8),
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_grouped_experts(
    rows: int,
    num: int,
    top_k: int,
    hidden: int,
    inner: int,
    bias: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton_experts, "choose_tiles", lambda *_: (SMALL, SMALL))
    x = drawn(rows, hidden)
    up, down = drawn(num, 2 * inner, hidden, seed=1) / 6, drawn(num, hidden, inner, seed=2) / 6
    biases = (drawn(num, 2 * inner, seed=3), drawn(num, hidden, seed=4)) if bias else (None, None)
    clamp = (1.7, 1.5) if bias else None
    experts = GroupedExperts(GroupedWeight(up, biases[0]), GroupedWeight(down, biases[1]), clamp)
    scores, chosen = drawn(rows, num, seed=5).topk(top_k)
    got = experts(x, scores.contiguous(), chosen)
    exact = written_out(x, scores, chosen, up, down, biases if bias else ())
    torch.testing.assert_close(got.double(), exact, atol=2e-5, rtol=1e-5)
    if rows > 1:
        alone = experts(x[1:2], scores[1:2].contiguous(), chosen[1:2])
        assert torch.equal(alone, got[1:2])


def test_no_expert_has_a_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows take one expert, the last."""
    monkeypatch.setattr(triton_experts, "choose_tiles", lambda *_: (SMALL, SMALL))
    x, up, down = drawn(50, 32), drawn(6, 32, 32, seed=1), drawn(6, 32, 16, seed=2) / 6
    scores = torch.ones(50, 1, device=DEVICE)
    chosen = torch.full((50, 1), 5, device=DEVICE)
    got = GroupedExperts(GroupedWeight(up), GroupedWeight(down))(x, scores, chosen)
    exact = written_out(x, scores, chosen, up, down, ())
    torch.testing.assert_close(got.double(), exact, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(("rows", "hidden", "inner"), [(1, 64, 32), (20, 160, 96)])
def test_mxfp4_is_multiplied_as_transformers_converts_it(
    rows: int, hidden: int, inner: int
) -> None:
    num, top_k = 5, 2
    up, down = mxfp4(num, 2 * inner, hidden), mxfp4(num, hidden, inner)
    bias = tuple(drawn(num, size, seed=size) for size in (2 * inner, hidden)) if rows > 1 else ()
    clamp = (1.7, 1.5) if bias else None
    x, logits = drawn(rows, hidden), drawn(rows, num, seed=1)
    scores, chosen = logits.softmax(-1).topk(top_k)
    experts = TiledExperts.of(up, down, bias or (None, None), clamp)
    got = experts(x, scores.contiguous(), chosen)
    exact = written_out(x, scores, chosen, converted(up), converted(down), bias)
    torch.testing.assert_close(got.double(), exact, atol=1e-4, rtol=1e-5)
    assert experts(x[:0], scores[:0].contiguous(), chosen[:0]).shape == (0, hidden)
    if DEVICE.type == "cuda":  # where 16 bits are unpacked by instructions of their own
        got = experts(x.bfloat16(), scores.contiguous(), chosen)
        exact = written_out(x.bfloat16(), scores, chosen, converted(up), converted(down), bias)
        torch.testing.assert_close(got.double(), exact, atol=0.05, rtol=0.02)


def test_scales_of_mxfp4_from_the_least_to_the_largest() -> None:
    # Gate and up are the row itself: 1 is 2 (of exponent 1) times a scale of 1/2.
    codes = 4 * torch.eye(32, dtype=torch.uint8, device=DEVICE).repeat(2, 1)
    up = Groups(codes, torch.full((64, 1), 0.25, device=DEVICE), None, 32, 4, table=E2M1)
    assert torch.equal(up.dense(), torch.eye(32, device=DEVICE).repeat(2, 1))
    powers = torch.tensor([[0], [1], [64], [MAX_POWER]], device=DEVICE)
    scales = torch.ldexp(torch.ones(4, 1, device=DEVICE), powers - 128)
    down = replace(mxfp4(1, 4, 32)[0], scales=scales)
    x = 8 * torch.eye(32, device=DEVICE)
    ones = torch.ones(32, 1, device=DEVICE)
    got = TiledExperts.of([up], [down])(x, ones, torch.zeros_like(ones).int())
    exact = (x * torch.sigmoid(x) * x).double() @ down.dense().double().T
    torch.testing.assert_close(got.double(), exact, atol=0, rtol=1e-5)


def mxfp4(num: int, rows: int, columns: int) -> list[Groups]:
    """Random codes: every value of four bits, scales of 1/32 to 1/4."""
    generator = torch.Generator().manual_seed(rows)
    draw = functools.partial(torch.randint, generator=generator, dtype=torch.uint8)
    values = draw(0, 256, (num, rows, columns // 2)).to(DEVICE)
    powers = draw(122, 126, (num, rows, columns // 32)).to(DEVICE)
    return [of_mxfp4(*pair) for pair in zip(values, powers, strict=True)]


def converted(weights: list[Groups]) -> Tensor:
    """[num, out_features, in_features] float32, by transformers."""
    codes = torch.stack([one.codes for one in weights])
    blocks = (codes[..., 0::2] | codes[..., 1::2] << 4).unflatten(-1, (-1, 16))
    scales = torch.stack([one.scales for one in weights])
    powers = (scales.frexp().exponent + 127).to(torch.uint8)
    return convert_moe_packed_tensors(blocks, powers, dtype=torch.float32).transpose(1, 2)


# Bits, columns that share a scale, kind of codes, and what else there is.
CODES = {
    "int4": (4, 128, torch.uint8, ()),
    "int4, zeros": (4, 32, torch.uint8, ("zeros",)),
    "int4, zeros that differ between experts": (4, 64, torch.uint8, ("zero of each",)),
    "int4, act-order": (4, 32, torch.uint8, ("zeros", "order")),
    "int4, minimums": (4, 32, torch.uint8, ("minimums",)),
    "int4, minimums in two levels": (4, 32, torch.uint8, ("levels",)),
    "8 bits": (8, 16, torch.uint8, ("zeros",)),
    "int8": (8, 1000, torch.uint8, ()),
    "fp8 in blocks": (8, 128, torch.float8_e4m3fn, ()),
    "fp8": (8, 1000, torch.float8_e4m3fn, ()),
}


def in_codes(form: str, num: int, rows: int, columns: int, seed: int) -> list[Groups]:
    """Random weights of experts."""
    bits, group, dtype, more = CODES[form]
    generator = torch.Generator().manual_seed(seed)
    draw = functools.partial(torch.randint, generator=generator)
    group, held = min(group, columns), []
    size = (rows, -(-columns // group))
    for expert in range(num):
        codes = torch.randn(rows, columns, generator=generator).to(dtype)
        if dtype == torch.uint8:
            codes = draw(0, 1 << bits, (rows, columns)).to(dtype)
        scales = (torch.rand(size, generator=generator) + 0.5) / codes.double().std().float()
        zeros = minimums = order = None
        if dtype == torch.uint8:
            zeros = torch.full(size, 1 << (bits - 1), dtype=torch.int16)
        if "zeros" in more:
            zeros = draw(0, 1 << bits, size, dtype=torch.int16)
        if "zero of each" in more:
            zeros = torch.full(size, 4 + expert, dtype=torch.int16)
        if "order" in more:
            order = torch.randperm(columns, generator=generator)
        if "minimums" in more:
            minimums, zeros = torch.randn(size, generator=generator), None
        if "levels" in more:
            supers = (torch.rand(rows, size[1] // 4, generator=generator) / 256).half()
            parts = [draw(0, 64, size).to(torch.uint8) for _ in range(2)]
            scales, minimums = Levels(parts[0], supers, 4), Levels(parts[1], -supers, 4)
            zeros = None
        weight = Groups(codes, scales, zeros, group, bits, order, minimums)
        held.append(on_device(weight))
    return held


def on_device(weight: Groups) -> Groups:
    def moved(one: Any) -> Any:
        if isinstance(one, Levels):
            return replace(one, parts=one.parts.to(DEVICE), supers=one.supers.to(DEVICE))
        return one.to(DEVICE) if isinstance(one, Tensor) else one

    return Groups(**{name: moved(value) for name, value in vars(weight).items()})


@pytest.mark.parametrize(
    ("form", "hidden", "inner"),
    [(form, 256, 128) for form in CODES] + [("8 bits", 192, 48), ("fp8", 96, 36), ("int4", 64, 32)],
)
def test_experts_in_codes_are_those_they_stand_for(form: str, hidden: int, inner: int) -> None:
    """Experts that many rows take, that one takes, and that none takes; widths that are no whole
    chunks. Float32 rows are multiplied exactly but for the order of float32 sums."""
    num, rows = 4, 19
    up, down = in_codes(form, num, 2 * inner, hidden, 1), in_codes(form, num, hidden, inner, 2)
    meant = [torch.stack([one.dense() for one in weights]) for weights in (up, down)]
    experts = TiledExperts.of(up, down)
    x, scores = drawn(rows, hidden, seed=3) / 8, drawn(rows, 2, seed=4).sigmoid()
    chosen = torch.tensor([[0, 3]] * (rows - 1) + [[1, 0]], device=DEVICE)
    got = experts(x, scores, chosen)
    exact = written_out(x, scores, chosen, *meant, ())
    sizes = written_out(x.abs(), scores, chosen, *(one.abs() for one in meant), ())
    assert ((got.double() - exact).abs() <= 2**-20 * sizes).all()
    alone = experts(x[-1:], scores[-1:].contiguous(), chosen[-1:])
    assert torch.equal(alone, got[-1:])
    if DEVICE.type == "cuda":
        got = experts(x.bfloat16(), scores, chosen)
        exact = written_out(x.bfloat16(), scores, chosen, *meant, ())
        # Rows between the products, results of experts and their sum are rounded.
        assert (got.double() - exact).norm() <= 3 * torch.finfo(torch.bfloat16).eps * exact.norm()


def test_as_many_tiles_as_there_may_be() -> None:
    for total, num, rows in itertools.product(range(1, 8), range(1, 4), range(1, 5)):
        counts = itertools.product(range(total + 1), repeat=num)
        most = max(sum(-(-n // rows) for n in one) for one in counts if sum(one) == total)
        assert tile_grid(total, num, 64, Tiles(64, rows)) == (1, most)


@pytest.mark.parametrize(
    ("rows", "top_k", "hidden"), [(0, 2, 32), (3, 1, 40), (5, 3, 1100), (9, 8, 64), (2, 10, 16)]
)
@pytest.mark.parametrize(  # a sigmoid of float32 is off by a bit here and there
    ("kind", "dtype"),
    [("alone", torch.float32), ("beside", torch.float32), ("gated", torch.float16)],
)
def test_results_are_summed_with_what_is_beside_them(
    rows: int, top_k: int, hidden: int, kind: str, dtype: torch.dtype
) -> None:
    results = drawn(rows, top_k, hidden, dtype=dtype)
    other = drawn(rows, hidden, seed=1, dtype=dtype)
    gate = drawn(rows, 1, seed=2) if kind == "gated" else None
    beside = None if kind == "alone" else Beside(other, gate)
    got = summed(results, beside)
    sums = [results[:, first::4].float().sum(1) for first in range(min(4, top_k))]
    want = functools.reduce(torch.add, sums).to(dtype) if rows else got
    assert torch.equal(got, want if beside is None else beside.added(want))
