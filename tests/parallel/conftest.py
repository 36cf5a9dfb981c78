"""A team of 2 processes that tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from onestem.parallel import Team
from tests.engine.conftest import expected, steps_that_fail, tiny
from tests.parallel.teams import CPU, forked

__all__ = ["expected", "steps_that_fail", "tiny"]


@pytest.fixture(scope="module")
def forked_teams() -> Iterator[None]:
    """Teams that the module's tests start are forked."""
    with forked():
        yield


@pytest.fixture(scope="session")
def two() -> Iterator[Team]:
    with forked():
        team = Team(2, CPU)
    yield team
    team.close()
