"""Seeds of requests that have none."""

from __future__ import annotations

from onestem.seeds import derive_seed


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
