"""The counter-based generator and the waiting times that are made of it."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ops.reference_sampling import noise_bits, philox4x32, waiting_times


def words(*values: int) -> tuple[np.ndarray, ...]:
    return tuple(np.array([value], np.uint64) for value in values)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # the known answers published with Random123
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter, key, expected) -> None:
    result = philox4x32(words(*counter), words(*key))
    assert tuple(int(word[0]) for word in result) == expected


def test_each_id_has_bits_of_its_own_whatever_is_asked_beside_it() -> None:
    whole = noise_bits(5, 2, 7, np.arange(1000))
    assert len(set(whole.tolist())) == 1000
    some = np.array([999, 3, 0, 500, 4])
    assert noise_bits(5, 2, 7, some).tolist() == whole[some].tolist()
    for other in ((6, 2, 7), (5, 3, 7), (5, 2, 8), (5 + (1 << 40), 2, 7)):
        assert not np.isin(noise_bits(*other, np.arange(1000)), whole).any()


BITS = [
    "0xcc74a8572f73d3c6",
    "0xed197b1edf3885ac",
    "0x115666f55a7bd9cb",
    "0x2a9d3ef3c8d8d1c5",
    "0x64e7b52a8ad9d50f",
]


def test_bits_do_not_change_between_versions() -> None:
    found = noise_bits(3, 1, 4, np.array([0, 1, 2, 3, 128_255]))
    assert [hex(int(bits)) for bits in found] == BITS


def test_waiting_times_are_exact_where_they_are_short() -> None:
    bits = np.array([0, 1, 2**20, 2**62, 2**63 - 1, 2**63, 2**64 - 1], np.uint64)
    expected = [
        2.0**-65, 1.5 * 2.0**-64, (2**20 + 0.5) * 2.0**-64, -np.log1p(-0.25), np.log(2), np.log(2),
        65 * np.log(2),
    ]  # fmt: skip
    np.testing.assert_allclose(waiting_times(bits), expected, rtol=1e-13)


@pytest.mark.parametrize("axis", ["seed", "sequence", "token", "id"])
def test_waiting_times_are_exponential_along_each_argument(axis: str) -> None:
    """Kolmogorov-Smirnov at p = 1e-4, and neighbours are independent."""
    count = 3_000
    place = {"seed": 7, "sequence": 0, "token": 0}
    if axis == "id":
        bits = noise_bits(*place.values(), np.arange(count))
    else:
        one = np.array([11])
        bits = np.concatenate([noise_bits(*{**place, axis: i}.values(), one) for i in range(count)])
    waits = waiting_times(bits)
    uniform = np.sort(np.exp(-waits))
    distance = np.abs(uniform - (np.arange(count) + 0.5) / count).max()
    assert distance < 2.2 / np.sqrt(count)
    assert abs(float(np.corrcoef(waits[:-1], waits[1:])[0, 1])) < 0.03
