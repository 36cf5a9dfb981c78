"""Processes import what this one imports, whatever lies in the working directory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from onestem.processes import python_module


def test_files_of_the_working_directory_are_not_imported(tmp_path: Path) -> None:
    (tmp_path / "token.py").write_text("raise SystemExit('imported')")
    (tmp_path / "x.py").write_text("1 + 1")

    def run(command: list[str]) -> str:
        done = subprocess.run([*command, "x.py"], cwd=tmp_path, capture_output=True, text=True)
        return done.stdout + done.stderr

    assert "imported" in run([sys.executable, "-m", "tokenize"])
    assert "NUMBER" in run(python_module("tokenize"))


def test_the_path_and_the_arguments_are_handed_on(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "told.py").write_text("import sys; print(__name__, sys.argv[1:])")
    monkeypatch.syspath_prepend(tmp_path)
    done = subprocess.run(python_module("told", "5", "a b"), capture_output=True, text=True)
    assert done.stdout == "__main__ ['5', 'a b']\n"
