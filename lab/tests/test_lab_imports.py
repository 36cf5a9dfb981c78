"""The laboratory's packages import, and what its verbs' help needs imports no torch."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

LAB = Path(__file__).parents[1] / "onestem_lab"


def test_all_names_exist():
    for folder in ("attention", "cli", "load", "papers"):
        for path in (LAB / folder).glob("*.py"):
            module = import_module(f"onestem_lab.{folder}.{path.stem}")
            for exported in getattr(module, "__all__", ()):
                assert hasattr(module, exported), f"{path}: {exported}"


def test_verbs_import_no_torch():
    code = (
        "import sys, onestem_lab.cli, onestem_lab.lengths, onestem_lab.load.run\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
