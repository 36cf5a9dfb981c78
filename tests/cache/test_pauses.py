"""How often idle pages are used, by how long they have been idle: exact values."""

from __future__ import annotations

import pytest

from onestem.cache.pauses import AGES, Pauses


def test_what_is_not_known_halves_as_the_age_doubles():
    pauses = Pauses()
    assert [pauses.rate(age, 8.0, 1.0) for age in (-0.5, 0.0, 1 / 100)] == [8.0] * 3
    assert [pauses.rate(age, 8.0, 1.0) for age in AGES[1:4]] == [4.0, 2.0, 1.0]
    assert pauses.rate(1e9, 8.0, 1.0) == 8.0 / 2 ** (len(AGES) - 1)


def test_what_was_seen_counts_from_its_age_down():
    pauses = Pauses()
    pauses.note(4, 1 / 32, used=True)
    pauses.note(12, 1 / 64, used=False)
    # Idle for 4/32 + 12/64 turnovers in all, and for 4/64 beyond 1/64.
    assert pauses.used[:4].tolist() == [4.0, 4.0, 4.0, 0.0]
    assert pauses.waited[:4].tolist() == [5 / 16, 1 / 16, 0.0, 0.0]
    young = (4 + 8 / 16) / (5 / 16 + 1 / 16)
    older = (4 + young / 2 / 16) / (1 / 16 + 1 / 16)
    assert pauses.rate(0.0, 8.0, 1 / 16) == young == 12.0
    assert pauses.rate(1 / 64, 8.0, 1 / 16) == older == 35.0


@pytest.mark.parametrize("turnovers", [0.0, 4.0, 8.0])
def test_it_fades(turnovers):
    pauses = Pauses()
    pauses.note(4, 0.0, used=True)
    pauses.fade(turnovers)
    assert pauses.used[0] == 4 / 2 ** (turnovers / 4)
