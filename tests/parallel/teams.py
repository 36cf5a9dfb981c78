"""Teams whose processes are forked from one that has imported all, and that many models use one
after the other: processes take seconds to start."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import onestem.build as build
import onestem.parallel.team as teams
from onestem.engine.engine import Engine
from onestem.parallel import Team
from onestem.parallel.follower import follow
from tests.engine.harness import engine_with
from tests.forked import ENVIRONMENT

CPU = torch.device("cpu")

_context = multiprocessing.get_context("forkserver")


class Forked:
    """A process as `subprocess` has them, as far as a team looks."""

    def __init__(self, process: multiprocessing.Process) -> None:
        self._process = process
        self.pid, self.kill = process.pid, process.kill

    def wait(self, seconds: float | None = None) -> int:
        self._process.join(seconds)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a rank", seconds or 0)
        return self._process.exitcode


def _start(rank: int) -> teams.Member:
    ours, theirs = _context.Pipe()
    with theirs, patch.dict(os.environ, ENVIRONMENT):
        process = _context.Process(target=_follow, args=(theirs, rank))
        process.start()
    return teams.Member(rank, Forked(process), ours)


def _follow(end: Connection, rank: int) -> None:
    torch.set_num_threads(1)
    follow(end, rank)


@contextmanager
def forked() -> Iterator[None]:
    """Teams are forked."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(teams, "start_rank", _start)
        yield


def engine_of(
    team: Team,
    path: Path,
    *,
    num_pages: int = 512,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    **options,
) -> Engine:
    """An engine whose model is on a team, in place of the one before; `device`: of rank 0."""
    decoder = team.load_decoder(path, dtype=dtype, device=device)
    return engine_with(decoder, num_pages=num_pages, team=team, **options)


@contextmanager
def lent_to_llms(team: Team) -> Iterator[None]:
    """Each `LLM` that is made takes this team, and leaves it as it is."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(build, "Team", lambda size, device: team)
        patched.setattr(team, "close", lambda: None)
        yield


def pids_of(team: Team) -> list[int]:
    """Process ids of the other ranks, from rank 1 on."""
    return [member.process.pid for member in team.members]
