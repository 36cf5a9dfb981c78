"""What `scripts/size` counts, by files whose figures are known."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def size():
    loader = SourceFileLoader("size", str(ROOT / "scripts" / "size"))
    spec = spec_from_loader("size", loader)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules["size"] = module
    loader.exec_module(module)
    return module


FILES = {
    "onestem/low/base.py": "def f():\n    return 1\n",
    "onestem/low/wide.py": "class A:\n    def __init__(self):\n        self.a = self.b = 1\n"
    "    def go(self):\n        '''Go.'''\n        self.a = 2\n",
    "onestem/high/top.py": "from onestem.low.base import f\n",
    "onestem/high/__init__.py": "",
    "onestem/lone.py": "def g():\n    import onestem.high.top\n",
}


def test_figures(size):
    found = size.figures(FILES, {"tests/test_a.py": "x._a\nself._b\nx.__dict__\nx.y._z()\n"})
    assert found == {
        "lines": 11,
        "arrows upward": 0,
        "circles": 0,
        "methods of a class": 2,
        "attributes of a class": 2,
        "attributes in engine": 0,
        "lines of a file": 6,
        "lines of a function": 3,
        "functions without docstring": 2,
        "private names in tests": 2,
    }


def test_an_arrow_back_closes_a_circle(size):
    files = {**FILES, "onestem/low/wide.py": "def h():\n    from onestem.high import top\n"}
    arrows = set(size.arrows_of({path: ast.parse(text) for path, text in files.items()}))
    assert arrows == {
        ("onestem.high", "onestem.low"),
        ("onestem.low", "onestem.high"),
        ("onestem.lone", "onestem.high"),
    }
    assert size.circles_of(arrows) == [{"onestem.high", "onestem.low"}]
    assert len(size.upward_in({"onestem.high", "onestem.low"}, arrows)) == 1


def test_growth_is_refused(tmp_path):
    for folder in ("onestem", "tests", "scripts"):
        (tmp_path / folder).mkdir()
    (tmp_path / "scripts" / "size").write_text((ROOT / "scripts" / "size").read_text())
    (tmp_path / "onestem" / "a.py").write_text("class A:\n    def go(self):\n        self.a = 1\n")
    text = (ROOT / "pyproject.toml").read_text()
    (tmp_path / "pyproject.toml").write_text(text)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)

    def run():
        command = [sys.executable, "scripts/size"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert run().returncode == 0
    (tmp_path / "onestem" / "a.py").write_text("x = 1\n" * 100_000)
    done = run()
    assert done.returncode == 1
    assert "over budget: lines, lines of a file" in done.stderr
