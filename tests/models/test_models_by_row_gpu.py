"""The form of a GPU's products: what is chosen where a library's or our sums change their order
with the number of rows. Libraries are made up; the kernel runs on a GPU, or is interpreted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from onestem.models.by_row import made_up
from onestem.models.by_row_gpu import ROWS, choose_form, padded_rows
from onestem.models.linear import Head, Linear
from onestem.ops.triton.few_rows import ANY_ROWS, FEW_ROWS, STREAMED, rows_product, streamed_tiles
from onestem.ops.triton.tiled import Tiles
from tests.models.test_models_by_row import by_one_sum, in_halves
from tests.soak import one_in

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LADDER = (1, 2, 8, 16, 24, 48, 64, 128, 256, 320, 384, 640)
FIRST, SECOND = FEW_ROWS[0][1]
REST = tuple((most, tiles[0]) for most, tiles in FEW_ROWS[1:])
STREAMS = tuple((most, tiles) for most, (tiles,) in STREAMED)


def below(least: int):
    """A library that cuts columns below so many rows."""
    return lambda x, weight: (in_halves if len(x) < least else by_one_sum)(x, weight)


def cuts_with(*tiles: Tiles):
    """A kernel that cuts columns with some tiles."""
    return lambda x, weight, which: (in_halves if which in tiles else by_one_sum)(x, weight)


def always(x: Tensor, weight: Tensor, tiles: Tiles) -> Tensor:
    return in_halves(x, weight)


def never(x: Tensor, weight: Tensor, tiles: Tiles) -> Tensor:
    """Other bits in each row."""
    return by_one_sum(x, weight) + torch.arange(len(x))[:, None].to(x.dtype) / 64


def last(least: int) -> tuple[int, ...]:
    return tuple(rows for rows in LADDER if rows >= least)


@pytest.mark.parametrize(
    ("library", "own", "numbers", "tiles"),
    [
        (below(0), never, LADDER, ()),
        (below(320), always, last(320), ()),
        (below(384), cuts_with(), last(384), ((16, FIRST), *REST)),
        (below(384), cuts_with(FIRST), last(384), ((16, SECOND), *REST)),
        (below(384), always, (), ((16, FIRST), *REST, (float("inf"), ANY_ROWS))),
        (below(384), never, last(384), ()),
        (lambda x, weight: never(x, weight, FIRST), never, None, None),
    ],
)
def test_which_form_is_chosen(library, own, numbers, tiles):
    check_form(library, own, numbers, tiles, ())


@pytest.mark.parametrize(
    ("library", "own", "numbers", "tiles"),
    [
        (below(0), cuts_with(), LADDER, ()),
        (below(320), cuts_with(), last(320), STREAMS),
        (below(16), cuts_with(), last(16), STREAMS[:1]),
        (below(320), cuts_with(STREAMS[1][1]), last(320), (STREAMS[0], *STREAMS[2:])),
        (below(320), always, last(320), ()),
        (below(384), cuts_with(), last(384), STREAMS),
        (below(384), cuts_with(STREAMS[-1][1]), last(384), (*STREAMS[:-1], REST[-1])),
        (below(384), always, (), (*STREAMS, (float("inf"), ANY_ROWS))),
    ],
)
def test_which_form_is_chosen_where_weights_stream(library, own, numbers, tiles):
    check_form(library, own, numbers, tiles, STREAMED)


def check_form(library, own, numbers, tiles, streamed):
    row, weight, _ = made_up(33, 48, torch.float32)
    form = choose_form(
        lambda x: library(x, weight), lambda x, which: own(x, weight, which), row, LADDER, streamed
    )
    if numbers is None:
        assert form is None
        return
    assert (form.numbers, form.own) == (numbers, tiles)
    for rows in range(1, 400, 7):  # the same bits, by whichever
        which = form.tiles(rows)
        padded = next((number for number in form.numbers if number >= rows), LADDER[-1])
        x = row.repeat(rows if which else padded, 1)
        result = library(x, weight) if which is None else own(x, weight, which)
        longest = row.repeat(LADDER[-1], 1)
        first = library(longest, weight) if numbers else own(row, weight, ANY_ROWS)
        assert torch.equal(result[0], first[0])


def test_steps_are_padded_to_what_was_tried():
    assert [padded_rows(rows) for rows in (1, 3, 65, 2049, 8192, 9000)] == [
        *(1, 4, 96, 2304, 8192, 9000)
    ]
    assert list(ROWS) == sorted(set(ROWS))


@pytest.mark.parametrize("tiles", [*(t for _, some in FEW_ROWS for t in some), ANY_ROWS])
@pytest.mark.parametrize("shape", [(70, 192), (64, 100)])
def test_the_kernel_multiplies(shape, tiles):
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(n, shape[1], generator=generator).half() for n in (shape[0], 19))
    bias = torch.randn(shape[0], generator=generator).half()
    for added in (None, bias):
        want = x.double() @ weight.double().T + (0 if added is None else added.double())
        there = [one if one is None else one.to(DEVICE) for one in (x, weight, added)]
        found = rows_product(*there, tiles, torch.float32).cpu()
        assert (found.double() - want).abs().max() < 1e-4
        rounded = rows_product(*there, tiles, torch.float16).cpu()
        assert torch.equal(rounded, found.half())


@pytest.mark.skipif(
    not streamed_tiles((64, 64), torch.half, DEVICE, 0), reason="needs a Hopper GPU"
)
@pytest.mark.parametrize(("most", "tiles"), STREAMS)
@pytest.mark.parametrize("shape", [(70, 64), (4096, 14336)])
@pytest.mark.parametrize("biased", [False, True])
def test_a_weight_streams(most, tiles, shape, biased):
    """Sums of small integers are exact."""
    for rows in (1, most - 1, most):
        x, weight, bias = (
            torch.randint(-3, 4, size, device=DEVICE, dtype=torch.bfloat16)
            for size in ((rows, shape[1]), shape, shape[:1])
        )
        found = rows_product(x, weight, bias if biased else None, tiles, torch.float32)
        want = x.double() @ weight.double().T + (bias.double() if biased else 0)
        assert torch.equal(found.double(), want)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(
    ("shape", "dtype"),
    one_in(
        2,
        [(64, 64), (96, 100), (768, 2048), (4096, 4096), (4096, 14336)],
        [torch.bfloat16, torch.float16, torch.float32],
    ),
)
@pytest.mark.parametrize("biased", [False, True])
def test_a_row_has_the_same_bits_in_any_company(shape, dtype, biased):
    row, weight, bias = made_up(*shape, dtype, device=DEVICE)
    layer = Linear(weight, bias if biased else None, deterministic=True)
    head = Head(weight, deterministic=True)
    others = torch.randn(9000, shape[1], device=DEVICE).to(dtype)
    for product in (layer, head):
        alone = product(row)
        assert alone.dtype == (dtype if product is layer else torch.float32)
        for rows in (2, 3, 17, 63, 65, 250, 257, 300, 1000, 2049, 8192, 9000):
            x = others[:rows].clone()
            x[rows // 2] = row
            assert torch.equal(product(x)[rows // 2], alone[0])
        assert product(others[:0]).shape == (0, shape[0])
