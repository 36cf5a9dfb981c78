"""Products with weights of 8 and 4 bits in C++, in every instruction set, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from onestem.errors import ConfigError
from onestem.ops.cpu import CpuCodes, is_built
from onestem.ops.rounding import rounded_rows
from tests.ops.cpu_isas import EVERY_ISA, Isa
from tests.soak import soaked

pytestmark = pytest.mark.skipif(not is_built(), reason="the C++ extension is not built")

every_isa = pytest.mark.parametrize("isa", EVERY_ISA, ids=str)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Of a row; of four, two and one; of panels, one and two, the last one not full; of three panels.
ROWS = (0, 1, 6, 7, 16, 33)


@pytest.fixture(params=[2, soaked(1)], autouse=True)
def threads(request):
    """Two; with one run the models of the other tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _rows(rows: int, size: int, dtype: torch.dtype) -> Tensor:
    x = torch.randn(rows, size, generator=_generator(rows))
    x[1::5] *= 30
    x[2::5] = 0
    return x.to(dtype)


# With AMX more rows are multiplied as bfloat16.
MOST_PAIRS = 6


def _widened(isa: Isa, dtype: torch.dtype, rows: int) -> bool:
    """Whether weights in groups become bfloat16."""
    return isa.name == "amx_bf16" and dtype == torch.bfloat16 and rows > MOST_PAIRS


def _in_bytes(isa: Isa, dtype: torch.dtype) -> bool:
    """Whether rows are rounded to 8 bits for weights in groups."""
    return {"avx512_bf16": dtype.itemsize == 2, "amx_bf16": dtype == torch.float16}.get(
        isa.name, False
    )


@every_isa
@pytest.mark.parametrize(("out", "size"), [(16, 64), (40, 100), (100, 1090)])
def test_8_bits_are_exact(isa: Isa, out: int, size: int) -> None:
    """Whole numbers; then scales and bias in float32, in this order, and one rounding."""
    generator = _generator(out)
    codes = torch.randint(-128, 128, (out, size), generator=generator, dtype=torch.int8)
    scales, bias = (torch.rand(out, generator=generator) + 0.5 for _ in range(2))
    weight = isa.codes(CpuCodes.of8(codes, scales))
    for dtype in DTYPES:
        for rows in ROWS:
            x = _rows(rows, size, dtype)
            rounded, by = rounded_rows(x, torch.int8)
            sums = (rounded.double() @ codes.double().t()).float()
            assert torch.equal(weight.product(x, bias), (sums * by * scales + bias).to(dtype))
    wide = torch.full_like(sums, torch.nan, dtype=torch.float32)
    assert torch.equal(weight.product(x, None, wide), sums * by * scales)


TABLE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)

# What a group has beside its codes.
FORMS = ("zeros", "one zero", "halves", "minimums", "levels", "table")


def _weight(form: str, bits: int, out: int, size: int, group: int) -> tuple[CpuCodes, Tensor]:
    """A random weight, and in float64 the numbers that it is."""
    generator = _generator(size)

    def random(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    codes = random(0, 1 << bits, out, size).to(torch.uint8)
    shape, top = (out, size // group), 1 << bits
    scales = (torch.rand(shape, generator=generator) + 0.5) * 16 / top
    values, named = codes.double(), {}
    if form == "levels":
        each = next(one for one in (16, 8, 4, 2, 1) if shape[1] % one == 0)
        supers = (out, shape[1] // each)
        factors = [(torch.rand(supers, generator=generator) / 256).half() for _ in range(2)]
        parts = random(-128, 128, *shape).to(torch.int8), random(0, 64, *shape).to(torch.uint8)
        held, least = (
            one.double() * by.double().repeat_interleave(each, 1)
            for one, by in zip(parts, factors, strict=True)
        )
        scales, named["minimums"] = ((*two, each) for two in zip(parts, factors, strict=True))
    else:
        scales = scales if form.endswith(("zeros", "zero")) else scales.half()
        held, least = scales.double(), torch.zeros(shape).double()
    if form in ("zeros", "one zero"):
        few = form == "one zero"
        zeros = torch.full(shape, top // 2) if few else random(0, top + 1, *shape)
        named["zeros"] = zeros.short()
        least = -held * zeros
    elif form == "minimums":
        named["minimums"] = torch.randn(shape, generator=generator).half()
        least = named["minimums"].double()
    elif form == "table":
        scales, named["table"] = scales.bfloat16(), TABLE
        held, values = scales.double(), torch.tensor(TABLE)[codes.int()].double()
    packed = CpuCodes.of_groups(codes, scales, group, bits=bits, **named)
    return packed, values * held.repeat_interleave(group, 1) + least.repeat_interleave(group, 1)


SHAPES = [
    *(
        (form, 4, *shape)
        for form in FORMS
        for shape in ((16, 128, 128), (40, 384, 128), (40, 192, 64), (100, 416, 32))
    ),
    ("zeros", 4, 33, 384, 384),
    ("minimums", 4, 16, 96, 96),
    # More inputs than tiles take in one pass.
    ("levels", 4, 100, 1184, 32),
    ("halves", 8, 100, 1120, 32),
    *(
        (form, 8, *shape)
        for form in FORMS[:-1]
        for shape in ((16, 128, 128), (40, 192, 64), (40, 224, 32), (100, 272, 16))
    ),
]


@every_isa
@pytest.mark.parametrize(("form", "bits", "out", "size", "group"), SHAPES)
def test_groups(isa: Isa, form: str, bits: int, out: int, size: int, group: int) -> None:
    packed, meant = _weight(form, bits, out, size, group)
    weight, bias = isa.codes(packed), torch.randn(out, generator=_generator(out))
    for dtype in DTYPES:
        for rows in ROWS:
            x = _rows(rows, size, dtype)
            exact = x.double() @ meant.t() + bias.double()
            off = (weight.product(x, bias).double() - exact).abs()
            # A group's rows have 16 bits (or weights bfloat16's, in AMX), results are rounded.
            magnitudes = meant.abs().amax() * 2 + 1e-6
            most = x.double().abs().amax(1, keepdim=True) * size * magnitudes * 2**-16
            most = most + exact.abs() * torch.finfo(dtype).eps
            if _widened(isa, dtype, rows):
                most += (x.double().abs() @ meant.abs().t()) * 2**-8
            elif _in_bytes(isa, dtype):
                # Half a step of 127 to a group's maximum, which may be cut.
                steps = x.double().abs().unflatten(1, (-1, group)).amax(2) / 127
                most += steps.repeat_interleave(group, 1) / 2 @ meant.abs().t()
            assert (off <= most).all()


@pytest.mark.parametrize(("form", "bits", "out", "size", "group"), SHAPES)
def test_rows_of_a_weight(form: str, bits: int, out: int, size: int, group: int) -> None:
    packed, meant = _weight(form, bits, out, size, group)
    at = torch.tensor([out - 1, 0, out // 2, out - 1])
    torch.testing.assert_close(packed.rows(at).double(), meant[at], rtol=1e-6, atol=1e-5)


def test_numbers_are_kept_as_they_are() -> None:
    """16 bits, or two levels; one zero for all is a number."""
    for form, size in (("one zero", 4), ("halves", 2), ("levels", 1), ("table", 2)):
        packed, _ = _weight(form, 4, 32, 512, 32)
        assert packed.scales.values.itemsize == size
        assert packed.scales.values.numel() == 32 * 16
        assert packed.zeros is None
    assert _weight("zeros", 4, 32, 512, 32)[0].zeros is not None


@every_isa
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_depends_on_itself_alone(isa: Isa, dtype: torch.dtype) -> None:
    """Bits are those of the row alone, or of one of many that are multiplied as bfloat16."""
    generator = _generator(0)
    codes = torch.randint(-128, 128, (64, 256), generator=generator).to(torch.int8)
    weights = [CpuCodes.of8(codes, torch.rand(64) + 0.5)]
    for form, bits, group in (
        *(("zeros", 4, group) for group in (32, 64, 128)),
        *(("levels", 8, group) for group in (16, 32, 64)),
        ("minimums", 4, 32),
        ("table", 4, 32),
    ):
        weights.append(_weight(form, bits, 64, 256, group)[0])
    x = torch.randn(37, 256, generator=generator).to(dtype)
    for packed in weights:
        weight = isa.codes(packed)
        whole = weight.product(x, None)
        alone = torch.cat([weight.product(row, None) for row in x[:, None]])
        for begin, end in ((0, 1), (36, 37), (3, 7), (8, 15), (3, 9), (2, 15), (5, 37)):
            widened = packed.group > 0 and _widened(isa, dtype, end - begin)
            want = whole if widened else alone
            assert torch.equal(weight.product(x[begin:end], None), want[begin:end])


@every_isa
@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_what_is_no_number_stays_in_its_row(isa: Isa, odd: float) -> None:
    x = torch.randn(20, 128, generator=_generator(1)).bfloat16()
    x[3, 77] = odd
    codes = torch.randint(0, 16, (32, 128), generator=_generator(2)).to(torch.uint8)
    four = CpuCodes.of_groups(codes, torch.ones(32, 1), 128, minimums=-torch.ones(32, 1))
    eight = CpuCodes.of_groups(codes, torch.ones(32, 4), 32, bits=8, minimums=-torch.ones(32, 4))
    for weight in (four, eight, CpuCodes.of8(codes.to(torch.int8) - 8, torch.ones(32))):
        for rows in (4, 20):
            y = isa.codes(weight).product(x[:rows], None)
            assert not y[3].isfinite().any()
            assert y[[0, 1, 2, *range(4, rows)]].isfinite().all()


@every_isa
def test_a_scale_that_is_no_number_stays_in_its_outputs(isa: Isa) -> None:
    """Whatever its bits are."""
    scales = torch.full((32, 4), 0.5).half()
    scales.view(torch.int16)[7] = torch.tensor([0x3800, 0x7FFF, 0x7C01, 0x3800]).short()
    codes = torch.randint(0, 16, (32, 128), generator=_generator(2)).to(torch.uint8)
    for bits in (4, 8):
        weight = isa.codes(CpuCodes.of_groups(codes, scales, 32, bits=bits, minimums=-scales))
        for rows in (1, 4, 20):
            y = weight.product(_rows(rows, 128, torch.bfloat16), None)
            assert y[:, 7].isnan().all()
            assert y[:, [*range(7), *range(8, 32)]].isfinite().all()


@every_isa
def test_results_are_written_among_others(isa: Isa) -> None:
    codes = torch.randint(0, 16, (40, 128), generator=_generator(3)).to(torch.uint8)
    weight = isa.codes(CpuCodes.of_groups(codes, torch.ones(40, 4), 32, bits=8))
    for rows in (1, 3, 20):
        x, wide = _rows(rows, 128, torch.bfloat16), torch.full((rows, 100), 3.0)
        weight.product(x, None, wide[:, 20:60])
        expected = weight.product(x, None, torch.empty(rows, 40))
        assert torch.equal(wide[:, 20:60], expected)
        assert (wide[:, [*range(20), *range(60, 100)]] == 3).all()


def test_other_rows_are_refused() -> None:
    weight = CpuCodes.of8(torch.ones(32, 64, dtype=torch.int8), torch.ones(32))
    for x in (torch.ones(2, 63), torch.ones(2, 64, dtype=torch.float64), torch.ones(64)):
        with pytest.raises(ConfigError, match="expected rows of 64 in"):
            weight.product(x, None)
    for out in (torch.empty(1, 32), torch.empty(2, 32).double(), torch.empty(32, 2).t()):
        with pytest.raises(ConfigError, match=r"got out .*, expected .2, 32., contiguous"):
            weight.product(torch.ones(2, 64), None, out)
