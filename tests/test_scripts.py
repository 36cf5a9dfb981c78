"""What a newcomer runs first says what it does while it takes minutes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Stands for python3 and the environment's python: says what pip was asked, and fails as told.
PYTHON = """#!/bin/sh
case "$*" in
"-") cat >/dev/null ;;
"-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
"-c import torch") exit 1 ;;
"-m pip "*) echo "$*" >>"$ASKED"; case "$*" in *"$FAILS"*) echo "pip's reason"; exit 3 ;; esac ;;
esac
"""


@pytest.fixture
def install(tmp_path):
    for name in ("scripts/install", "constraints.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)

    def run(fails: str = "nothing", **variables: str) -> tuple[subprocess.CompletedProcess, str]:
        asked = tmp_path / "asked"
        own = {"PYTHON": str(tmp_path / "python"), "ASKED": str(asked), "FAILS": fails}
        done = subprocess.run(
            [tmp_path / "scripts" / "install"],
            env={**os.environ, "TORCH_INDEX": "", **own, **variables},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        return done, asked.read_text()

    return run


def test_an_installation_tells_its_steps_and_their_seconds(install):
    done, asked = install()
    assert done.returncode == 0, done.stderr
    names = re.findall(r"^ +\d+ s  (.+)$", done.stderr, re.M)
    assert len(names) == 4
    told = done.stderr.splitlines()
    for name in names:  # a step is named before it begins
        assert told.index(f"{name} ...") < next(i for i, line in enumerate(told) if
                                                line.endswith(f" s  {name}"))  # fmt: skip
    assert "--index-url" not in asked
    assert done.stdout == ""


def test_an_index_of_pytorch_is_used_for_pytorch_alone(install):
    _, asked = install(TORCH_INDEX="https://example.org/cpu")
    first, *rest = asked.splitlines()
    assert "install torch --index-url https://example.org/cpu" in first
    assert "example.org" not in "".join(rest)


def test_a_step_that_fails_says_why(install):
    done, _ = install("nanobind")
    assert done.returncode == 3
    assert "pip's reason" in done.stderr
    assert "compiled" not in done.stderr  # the next step
