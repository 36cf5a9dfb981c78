"""The counter-based generator: known answers, purity, distribution."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onestem.engine.random import derive_seed, philox4x32, uniform

INT64 = st.integers(-(2**63), 2**64 - 1)
INDEX = st.integers(0, 2**40)


def words(*values: int) -> list[np.ndarray]:
    return [np.array([value], np.uint64) for value in values]


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
def test_philox_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    result = philox4x32(words(*counter), words(*key))
    assert tuple(int(word[0]) for word in result) == expected


@given(st.lists(st.tuples(INT64, INDEX, INDEX), min_size=1, max_size=20), st.randoms())
def test_each_number_depends_on_its_own_arguments_only(rows: list, random) -> None:
    whole = dict(zip(rows, uniform(*zip(*rows)), strict=True))
    shuffled = random.sample(rows, len(rows))
    assert [whole[row] for row in shuffled] == list(uniform(*zip(*shuffled)))
    for row in rows:
        assert uniform(*([part] for part in row))[0] == whole[row]
        assert 0.0 < whole[row] < 1.0


def test_extreme_bits_stay_inside_the_open_interval() -> None:
    assert (2**52 - 1 + 0.5) * 2.0**-52 < 1.0
    assert (0 + 0.5) * 2.0**-52 > 0.0


def test_numpy_arrays_and_lists_agree_also_for_negative_seeds() -> None:
    seeds, sequences, tokens = [-5, 0, 2**62], [0, 1, 2], [3, 4, 5]
    arrays = [np.array(values, np.int64) for values in (seeds, sequences, tokens)]
    assert list(uniform(seeds, sequences, tokens)) == list(uniform(*arrays))


def test_no_rows() -> None:
    assert uniform([], [], []).shape == (0,)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_uniform_along_each_argument(axis: int) -> None:
    arguments = [[7] * 20_000, [0] * 20_000, [0] * 20_000]
    arguments[axis] = list(range(20_000))
    values = uniform(*arguments)
    assert len(set(values.tolist())) == 20_000
    counts, _ = np.histogram(values, bins=50, range=(0, 1))
    chi_square = float(((counts - 400) ** 2 / 400).sum())
    assert chi_square < 100  # 49 degrees of freedom: mean 49, deviation 10
    assert abs(float(np.corrcoef(values[:-1], values[1:])[0, 1])) < 0.03


def test_derive_seed_is_stable_and_tells_its_parts_apart() -> None:
    assert derive_seed("job", 1) == derive_seed("job", 1)
    different = {
        derive_seed(),
        derive_seed("ab", "c"),
        derive_seed("a", "bc"),
        derive_seed("abc"),
        derive_seed("1"),
        derive_seed(1),
        derive_seed(-1),
        derive_seed("", ""),
        derive_seed(""),
    }
    assert len(different) == 9
    assert all(0 <= seed < 2**63 for seed in different)


def test_derive_seed_value_does_not_change_between_versions() -> None:
    assert derive_seed("onestem", 7) == 3834123758601713922
