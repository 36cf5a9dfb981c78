"""Deterministic products: a row's bits alone are its bits in any company, and the trial that finds
the numbers of rows finds products whose sums have another order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from onestem.errors import UnsupportedError
from onestem.models import linear
from onestem.models.by_row import LADDER, cuts, in_parts, made_up, numbers_alike
from onestem.models.linear import Head, Layout, Linear, choose_layout

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((64, 64), (33, 48), (192, 64), (576, 1536), (80, 31))
Multiply = Callable[[Tensor, Tensor], Tensor]


def layouts(dtype: torch.dtype) -> list[Layout]:
    return list(dict.fromkeys((Layout.PLAIN, choose_layout(dtype, CPU, deterministic=True))))


CASES = [(dtype, layout) for dtype in DTYPES for layout in layouts(dtype)]


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int16 if x.itemsize == 2 else torch.int32)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("dtype", "layout"), CASES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_a_row_has_the_same_bits_in_any_company(dtype, layout, shape, biased):
    weight = normal(*shape).to(dtype)
    layer = Linear(
        weight, normal(shape[0]).to(dtype) if biased else None, layout, deterministic=True
    )
    head = Head(weight, layout, deterministic=True)
    row, weight, bias = made_up(*shape, dtype)  # shows more than random numbers do
    strict = Linear(weight, bias if biased else None, layout, deterministic=True)
    for rows in (0, 1, 2, 3, 5, 9, 17, 63, 65, 100, 257, 700):
        x = normal(rows, shape[1], seed=rows).to(dtype)
        alone = [layer(one[None]) for one in x[:5]]
        assert layer(x).shape == (rows, shape[0])
        for place, result in enumerate(alone):
            assert torch.equal(bits(layer(x)[place]), bits(result[0]))
            assert torch.equal(bits(head(x)[place]), bits(head(x[place : place + 1])[0]))
        same = bits(strict(row.repeat(rows, 1)))
        assert bool((same == bits(strict(row))).all())


def by_one_sum(x: Tensor, weight: Tensor) -> Tensor:
    """Products added one after the other, for each row alike."""
    total = torch.zeros(len(x), len(weight))
    for place in range(x.shape[1]):
        total += x[:, place : place + 1].float() * weight[:, place].float()
    return total.to(x.dtype)


def in_halves(x: Tensor, weight: Tensor) -> Tensor:
    half = x.shape[1] // 2
    first = by_one_sum(x[:, :half].float(), weight[:, :half])
    return (first + by_one_sum(x[:, half:].float(), weight[:, half:])).to(x.dtype)


def vector_for_one(x: Tensor, weight: Tensor) -> Tensor:
    return (in_halves if len(x) == 1 else by_one_sum)(x, weight)


def halves_from_64(x: Tensor, weight: Tensor) -> Tensor:
    return (in_halves if len(x) >= 64 else by_one_sum)(x, weight)


def last_columns_in_halves(x: Tensor, weight: Tensor) -> Tensor:
    """Another order in the last two of 33 outputs, below 8 rows."""
    result = by_one_sum(x, weight)
    if len(x) < 8:
        result[:, -2:] = in_halves(x, weight[-2:])
    return result


def rest_in_halves(x: Tensor, weight: Tensor) -> Tensor:
    """Another order in rows that fill no block of 6."""
    whole = len(x) // 6 * 6
    return torch.cat([by_one_sum(x[:whole], weight), in_halves(x[whole:], weight)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("multiply", "expected"),
    [
        (by_one_sum, LADDER),
        (in_halves, LADDER),
        (vector_for_one, LADDER[1:]),
        (halves_from_64, tuple(n for n in LADDER if n < 64)),
        (last_columns_in_halves, tuple(n for n in LADDER if n >= 8)),
        (rest_in_halves, (1, 2, 3, 4, 5)),
    ],
)
def test_the_trial_finds_sums_of_another_order(dtype, multiply, expected):
    row, weight, _ = made_up(33, 48, dtype)
    found = numbers_alike(lambda x: multiply(x, weight), row, LADDER[-1])
    assert found == expected
    assert found == numbers_alike(lambda x: multiply(x, weight), row, LADDER[-1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_nearly_every_output_shows_the_order(dtype):
    """Sums of random numbers, rounded to bf16, show it in few."""
    row, weight, _ = made_up(33, 256, dtype)
    differ = bits(by_one_sum(row, weight)) != bits(in_halves(row, weight))
    assert int(differ.sum()) >= 30
    terms = (row.double() * weight.double()).sort().values
    assert torch.equal(terms, -terms.flip(1))  # the exact sums are 0
    x, weight = normal(1, 256).bfloat16(), normal(33, 256).bfloat16()
    assert int((bits(by_one_sum(x, weight)) != bits(in_halves(x, weight))).sum()) <= 3


@pytest.mark.parametrize(
    ("rows", "numbers", "expected"),
    [
        (1, LADDER, [(1, 1)]),
        (1, LADDER[1:], [(1, 2)]),
        (9, LADDER, [(9, 16)]),
        (100, LADDER, [(64, 64), (36, 40)]),
        (120, LADDER, [(120, 128)]),
        (600, LADDER, [(512, 512), (64, 64), (24, 24)]),
        (7, (1, 2, 3), [(3, 3), (3, 3), (1, 1)]),
        (3, (128, 256), [(3, 128)]),
        (0, LADDER, []),
    ],
)
def test_rows_are_cut(rows, numbers, expected):
    assert list(cuts(rows, numbers)) == expected


def test_parts_are_contiguous_and_aligned():
    seen = []

    def multiply(x: Tensor) -> Tensor:
        seen.append((len(x), x.is_contiguous(), x.data_ptr() % 64))
        return x

    x = normal(300, 21)[1:, 1:]
    assert torch.equal(in_parts(multiply, x, (8, 128)), x)
    assert seen == [(128, True, 0), (128, True, 0), *[(8, True, 0)] * 6]


def test_weights_may_lie_anywhere():
    memory = normal(33 * 48 + 3)
    layer = Linear(memory[3:].view(33, 48), None, Layout.PLAIN, deterministic=True)
    x = normal(9, 48)
    assert torch.equal(layer(x)[4:5], layer(x[4:5]))


def test_products_without_a_number_are_refused(monkeypatch):
    monkeypatch.setattr(linear, "numbers_alike", lambda *_: (7,))
    with pytest.raises(UnsupportedError, match=r"weight 65 x 48.*leave deterministic out"):
        Linear(normal(65, 48), None, Layout.PLAIN, deterministic=True)
