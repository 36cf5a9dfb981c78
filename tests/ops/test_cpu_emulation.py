"""The emulated instructions, one by one, against what Intel's manual says of them; and that all the
kernels behind them are run by the other tests."""

from __future__ import annotations

import math
import os
import platform
from fractions import Fraction

import numpy as np
import pytest

from onestem.ops.cpu import is_built
from tests.ops.cpu_isas import EMULATED, EVERY_ISA, emulated

FLOAT = np.float32
TINY = np.finfo(FLOAT).tiny  # the least normal number
NAN, INFINITY = math.nan, math.inf

needs_emulation = pytest.mark.skipif(not EMULATED, reason="the emulated module is not built")


def test_a_development_installation_has_it():
    if "ONESTEM_EXPECT_EMULATED" not in os.environ or platform.machine() != "x86_64":
        pytest.skip("not run by scripts/test, or not on x86-64")
    if not is_built():
        pytest.skip("the C++ extension is not built")
    names = {isa.name for isa in EVERY_ISA}
    assert {"avx512", "avx512_bf16", "amx_bf16", "portable"} <= names


def drawn(rng, *shape, denormals=False):
    """bf16 values as float32, a few of them denormal where asked for."""
    values = (rng.standard_normal(shape) * 2.0 ** rng.integers(-3, 4, shape)).astype(FLOAT)
    if denormals:
        values[rng.random(shape) < 0.2] = FLOAT(2.0**-130)
    return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(FLOAT)


def pairs_of(values):
    """float32 `[..., 2n]` that are bf16 -> uint32 `[..., n]`, even elements in the low halves."""
    bits = np.ascontiguousarray(values).view(np.uint32) >> 16
    return bits[..., 0::2] | bits[..., 1::2] << 16


def flushed(x):
    return FLOAT(math.copysign(0.0, x)) if abs(x) < TINY else FLOAT(x)


def multiply_add(a, b, c):
    """a * b + c rounded once, to the nearest and ties to even; denormals are zeros."""
    a, b, c = (Fraction(float(flushed(x))) for x in (a, b, c))
    exact = a * b + c
    near = FLOAT(float(exact))
    around = (near, np.nextafter(near, FLOAT(-INFINITY)), np.nextafter(near, FLOAT(INFINITY)))
    return flushed(
        min(around, key=lambda x: (abs(Fraction(float(x)) - exact), int(x.view(np.uint32)) & 1))
    )


@needs_emulation
@pytest.mark.parametrize("denormals", [False, True])
def test_dot_products_of_pairs(denormals):
    """Odd places first, each rounded once."""
    rng = np.random.default_rng(0)
    a, b = (drawn(rng, 32, denormals=denormals) for _ in range(2))
    sums = rng.standard_normal(16).astype(FLOAT)
    if denormals:
        sums[::3] = FLOAT(2.0**-140)
        a[30:32], b[30:32] = 2.0**-70, [2.0**-70, 0.0]  # a product that is denormal
    want = [
        multiply_add(a[2 * i], b[2 * i], multiply_add(a[2 * i + 1], b[2 * i + 1], sums[i]))
        for i in range(16)
    ]
    got = emulated().dpbf16_ps(sums.tolist(), pairs_of(a).tolist(), pairs_of(b).tolist())
    assert got == [float(x) for x in want]


@needs_emulation
def test_the_order_of_a_pair_shows():
    """1 - 1 + 2**-30 is not 1 + 2**-30 - 1 in float32."""
    a = np.zeros(32, FLOAT)
    a[0], a[1] = 2.0**-30, -1.0
    got = emulated().dpbf16_ps(
        [1.0] * 16, pairs_of(a).tolist(), pairs_of(np.ones(32, FLOAT)).tolist()
    )
    assert got[0] == 2.0**-30
    a[0], a[1] = a[1], a[0]
    got = emulated().dpbf16_ps(
        [1.0] * 16, pairs_of(a).tolist(), pairs_of(np.ones(32, FLOAT)).tolist()
    )
    assert got[0] == 0.0


def config(shapes, *, palette=1, start_row=0):
    """The 64 bytes for tiles of (rows, row bytes)."""
    data = bytearray(64)
    data[0], data[1] = palette, start_row
    for tile, (rows, row_bytes) in enumerate(shapes):
        data[16 + 2 * tile : 18 + 2 * tile] = row_bytes.to_bytes(2, "little")
        data[48 + tile] = rows
    return bytes(data)


def in_rows(array, stride=64):
    """Sixteen rows of an array, `stride` bytes apart; behind it 0xab."""
    data = np.full((16, stride), 0xAB, np.uint8)
    rows = np.ascontiguousarray(array).view(np.uint8).reshape(len(array), -1)
    data[: len(rows), : rows.shape[1]] = rows
    return data.tobytes()


@needs_emulation
@pytest.mark.parametrize(("m", "k", "n"), [(16, 16, 16), (3, 5, 7), (1, 16, 2)])
def test_tile_products(m, k, n):
    """Even and odd places summed apart, then added to what was there."""
    rng = np.random.default_rng(m)
    a, b = drawn(rng, m, 2 * k, denormals=True), drawn(rng, k, 2 * n, denormals=True)
    c = rng.standard_normal((m, n)).astype(FLOAT)
    module = emulated()
    module.tile_loadconfig(config([(m, 4 * n), (m, 4 * k), (k, 4 * n)]))
    for tile, array in enumerate((c, pairs_of(a), pairs_of(b))):
        module.tile_loadd(tile, in_rows(array, 80), 80)
    module.tile_dpbf16ps(0, 1, 2)
    got = np.frombuffer(module.tile_stored(0, 96), np.uint8).reshape(16, 96)
    module.tile_release()
    want = np.zeros((m, n), FLOAT)
    for i in range(m):
        for j in range(n):
            even = odd = FLOAT(0)
            for s in range(k):
                even = multiply_add(a[i, 2 * s], b[s, 2 * j], even)
                odd = multiply_add(a[i, 2 * s + 1], b[s, 2 * j + 1], odd)
            want[i, j] = flushed(c[i, j] + flushed(even + odd))
    assert np.array_equal(np.ascontiguousarray(got[:m, : 4 * n]).view(FLOAT), want)
    assert (got[m:] == 0xFF).all()
    assert (got[:, 4 * n :] == 0xFF).all()


@needs_emulation
@pytest.mark.parametrize(("m", "n", "k"), [(16, 16, 16), (3, 5, 2)])
def test_tile_products_of_bytes(m, n, k):
    """Unsigned on the left, signed on the right; sums wrap."""
    module, rng = emulated(), np.random.default_rng(m)
    a = rng.integers(0, 256, (m, 4 * k), dtype=np.uint8)
    b = rng.integers(-128, 128, (k, 4 * n), dtype=np.int8)
    c = rng.integers(-(2**31), 2**31, (m, n), dtype=np.int64)
    module.tile_loadconfig(config([(m, 4 * n), (m, 4 * k), (k, 4 * n)]))
    for tile, array in enumerate((c.astype(np.int32).view(FLOAT), a, b)):
        module.tile_loadd(tile, in_rows(array), 64)
    module.tile_dpbusd(0, 1, 2)
    got = np.frombuffer(module.tile_stored(0, 64), np.int32).reshape(16, 16)[:m, :n]
    module.tile_release()
    right = b.reshape(k, n, 4).transpose(0, 2, 1).reshape(4 * k, n)
    assert np.array_equal(got, (c + a.astype(np.int64) @ right).astype(np.int32))


@needs_emulation
def test_integers():
    module, rng = emulated(), np.random.default_rng(0)
    a, b = rng.integers(0, 256, 64), rng.integers(-128, 128, 64)
    sums = rng.integers(0, 2**32, 16)
    want = (sums + (a * b).reshape(16, 4).sum(1)) % 2**32
    assert module.dpbusd(sums.tolist(), a.tolist(), (b % 256).tolist()) == want.tolist()
    x, y = (rng.integers(-(2**15), 2**15, 32) for _ in range(2))
    x[:2] = y[:2] = -(2**15)  # the only sum that wraps
    words = [(one % 2**16).tolist() for one in (x, y)]
    assert module.madd_epi16(*words) == ((x * y).reshape(16, 2).sum(1) % 2**32).tolist()


@needs_emulation
def test_shuffles():
    module, a, b = emulated(), np.arange(16), np.arange(16) + 100
    quarters = np.stack([a, b]).reshape(2, 4, 4)
    for name, at in (("unpacklo_epi32", 0), ("unpackhi_epi32", 2)):
        want = quarters[:, :, at : at + 2].transpose(1, 2, 0).reshape(16)
        assert getattr(module, name)(a.tolist(), b.tolist()) == want.tolist()


@needs_emulation
def test_tiles_are_zero_after_a_configuration():
    module = emulated()
    for make_zero in (
        lambda: module.tile_loadconfig(config([(2, 8)])),
        lambda: module.tile_zero(0),
    ):
        module.tile_loadconfig(config([(2, 8)]))
        module.tile_loadd(0, in_rows(np.ones((2, 2), FLOAT)), 64)
        make_zero()
        got = np.frombuffer(module.tile_stored(0, 64), np.uint8).reshape(16, 64)
        assert (got[:2, :8] == 0).all()
    module.tile_release()


@needs_emulation
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (config([(16, 64)], palette=2), "palette 2"),
        (config([(16, 64)], start_row=1), "start_row is 1"),
        (config([(17, 64)]), "tile 0 has 17 rows of 64 bytes"),
        (config([(16, 64), (16, 65)]), "tile 1 has 16 rows of 65 bytes"),
        (config([(0, 64)]), "rows or their bytes are 0"),
        (config([(16, 64)] * 9), "a reserved byte is not 0"),
    ],
)
def test_configurations_that_a_processor_refuses(data, message):
    with pytest.raises(RuntimeError, match=message):
        emulated().tile_loadconfig(data)
    emulated().tile_release()


@needs_emulation
@pytest.mark.parametrize(
    ("operands", "message"),
    [
        ((0, 1, 3), "shapes of the tiles do not fit"),
        ((0, 2, 1), "shapes of the tiles do not fit"),
        ((0, 1, 1), "two operands are one tile"),
        ((0, 1, 4), "tile 4 is not configured"),
        ((8, 1, 2), "tile 8 of 8"),
    ],
)
def test_tiles_used_beyond_their_configuration(operands, message):
    module = emulated()
    module.tile_loadconfig(config([(16, 64), (16, 32), (8, 64), (16, 64)]))
    module.tile_dpbf16ps(0, 1, 2)
    with pytest.raises(RuntimeError, match=message):
        module.tile_dpbf16ps(*operands)
    module.tile_release()
    with pytest.raises(RuntimeError, match="before LDTILECFG"):
        module.tile_dpbf16ps(0, 1, 2)


@needs_emulation
def test_conversions_of_float16():
    """To the nearest, ties to even; overflow to infinity, denormals kept."""
    values = [1 + 2**-11, 1 + 3 * 2**-11, 65519.0, 65520.0, -(2.0**-24), 2.0**-25, 3 * 2.0**-25]
    x = np.array([*values, *np.random.default_rng(0).standard_normal(9)], FLOAT)
    with np.errstate(over="ignore"):
        want = x.astype(np.float16)
    assert emulated().cvtps_ph(x.tolist()) == want.view(np.uint16).tolist()
    assert emulated().cvtph_ps(want.view(np.uint16).tolist()) == want.astype(FLOAT).tolist()


@needs_emulation
def test_comparisons_and_masks():
    x = [NAN, 1.0, 1.0, 0.0, -0.0, INFINITY, -1.0, 2.0] * 2
    y = [1.0, NAN, 2.0, -0.0, 0.0, INFINITY, -2.0, 2.0] * 2
    module = emulated()
    # The second operand where one is NaN or both are zeros.
    want = [b if not a > b else a for a, b in zip(x, y, strict=True)]
    assert np.array_equal(bits(module.max_ps(x, y)), bits(want))
    want = [b if not a < b else a for a, b in zip(x, y, strict=True)]
    assert np.array_equal(bits(module.min_ps(x, y)), bits(want))
    for predicate, meaning in (
        (0x03, lambda a, b: a != a or b != b),  # unordered
        (0x04, lambda a, b: a != b),  # not equal, or unordered
        (0x15, lambda a, b: not a < b),  # not less, or unordered
    ):
        mask = sum(meaning(a, b) << i for i, (a, b) in enumerate(zip(x, y, strict=True)))
        assert module.cmp_ps_mask(x, y, predicate) == mask
    with pytest.raises(RuntimeError, match="predicate 1"):
        module.cmp_ps_mask(x, y, 1)
    got = module.mask_mov_ps([0.0] * 16, 0x8421, [float(i) for i in range(16)])
    assert got == [float(i) if i % 5 == 0 else 0.0 for i in range(16)]


@needs_emulation
def test_powers_of_two():
    """What is left above the whole number below, and scaling by that number: denormals kept."""
    x = [0.0, -0.0, 1.5, -1.5, -3.0, -0.25, -(2.0**-30), 127.5, -INFINITY, NAN] + [-149.5] * 6
    module = emulated()
    left = [0.0 if math.isinf(a) else a - math.floor(a) if a == a else NAN for a in x]
    assert np.array_equal(module.reduce_ps(x), np.array(left, FLOAT), equal_nan=True)
    value = [1.25] * 9 + [1.0, 0.0, -1.0, 1.75, 1.5, 0.5, NAN]
    with np.errstate(invalid="ignore"):
        scaled = [
            0.0 * v if p == -INFINITY else FLOAT(v * 2.0 ** math.floor(p)) if p == p else NAN
            for v, p in zip(value, x, strict=True)
        ]
    assert np.array_equal(module.scalef_ps(value, x), np.array(scaled, FLOAT), equal_nan=True)


def bits(values):
    return np.array(values, FLOAT).view(np.uint32)


@needs_emulation
@pytest.mark.parametrize("table", [0xF8, 0x96, 0xCA, 0x01])
def test_ternary_logic(table):
    a, b, c = np.random.default_rng(0).integers(0, 2**32, (3, 16), dtype=np.uint32)
    want = np.zeros(16, np.uint32)
    for bit in range(32):
        index = (a >> bit & 1) << 2 | (b >> bit & 1) << 1 | (c >> bit & 1)
        want |= (np.uint32(table) >> index & 1) << bit
    got = emulated().ternarylogic(a.tolist(), b.tolist(), c.tolist(), table)
    assert got == want.tolist()
