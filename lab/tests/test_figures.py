"""The entry that measures all public figures."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from onestem_lab import figures
from onestem_lab.figures import FIGURES, Figure
from onestem_lab.papers.registry import EXPERIMENTS
from onestem_lab.peers.cases import CASES
from onestem_lab.results import UNFINISHED, commit

WRITES = """
import json, sys, time
from pathlib import Path
out, *rest = sys.argv[1:]
if "late" in rest:
    time.sleep(600)
if "wrong" in rest:
    sys.exit(3)
Path(out).write_text(json.dumps({"commit": rest[0]}))
with (Path(out).parent / "runs").open("a") as runs:
    runs.write("x")
"""


@pytest.mark.parametrize("figure", FIGURES, ids=lambda one: one.name)
def test_each_command_is_there_with_its_options(figure: Figure) -> None:
    module, *arguments = figure.command.split()
    assert figure.seconds <= 480 or (figure.gpus == 0 and "60x8" in figure.name)
    words = dict.fromkeys(("out", "folder", "peers", "llama", "gguf"), "there")
    assert "{{" not in figure.command.format(**words)
    if module == "onestem":
        assert arguments[:2] == ["bench", "paper"]
        assert arguments[2] in EXPERIMENTS
        return
    found = find_spec(module)
    assert found is not None
    assert found.origin is not None
    path = Path(found.origin)
    if path.name == "__init__.py":
        path = path.with_name("__main__.py")
    text = path.read_text()
    if module == "onestem_lab.peers.run":
        text += (path.parent / "settings.py").read_text() + (path.parent / "ordered.py").read_text()
        assert arguments[0] in CASES
    for option in re.findall(r"(?<= )--[a-z-]+", figure.command):
        assert f'"{option}"' in text, option


def test_names_are_one_each() -> None:
    assert len({one.name for one in FIGURES}) == len(FIGURES)


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """Runs the entry over one figure of a machine of our own; exit code and what was printed."""
    (tmp_path / "writes_a_figure.py").write_text(WRITES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")

    def run(capsys, *words: str, seconds: int = 60, more: tuple[str, ...] = ()) -> tuple[int, str]:
        command = " ".join(["writes_a_figure", "{out}", *words])
        monkeypatch.setattr(figures, "FIGURES", (Figure("paper/one", command, seconds, gpus=0),))
        argv = ["figures", "--machine", "cpu", "--out", str(tmp_path / "out"), *more]
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as ended:
            figures.main()
        code = ended.value.code
        return (code, capsys.readouterr().out) if isinstance(code, int) else (2, str(code))

    return run


def test_a_figure_of_this_commit_is_measured_once(lab, tmp_path, capsys) -> None:
    assert lab(capsys, commit()) == (
        0,
        "paper/one: measured\n0 done, 1 measured, 0 failed, 0 not run\n",
    )
    assert lab(capsys, commit())[1].startswith("paper/one: done\n")
    assert (tmp_path / "out/paper/runs").read_text() == "x"
    for found in ({"commit": "an older one"}, {"commit": commit(), UNFINISHED: True}):
        (tmp_path / "out/paper/one.json").write_text(json.dumps(found))
        assert lab(capsys, commit())[1].startswith("paper/one: measured\n")
    assert (tmp_path / "out/paper/runs").read_text() == "xxx"


def test_a_commit_with_the_same_package_will_do(tmp_path, monkeypatch) -> None:
    def git(*words: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
        return subprocess.check_output([*command, *words], text=True).strip()

    def commit_file(path: str, more: str = "") -> str:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"{path}\n{more}")
        git("add", path)
        git("commit", "-qm", path)
        return git("rev-parse", "--short=12", "HEAD")

    git("init", "-q")
    paths = ("onestem/a.py", "onestem/__init__.py", "csrc/a.h", "onestem/ops/cpu/a.py")
    of_gpu, wide, *of_cpu = map(commit_file, paths)
    commit_file("onestem/__init__.py", '__version__ = "1"\n')
    here = commit_file("docs/a.md")
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "commit", lambda: here)
    for named, on_gpu, on_cpu in (
        (of_gpu, False, False),
        (wide, True, False),
        (of_cpu[0], True, False),
        (of_cpu[1], True, True),
        ("nowhere", False, False),
    ):
        out = tmp_path / "one.json"
        out.write_text(json.dumps({"commit": named}))
        assert figures.is_done(out, of_cpu=False) == on_gpu
        assert figures.is_done(out) == on_cpu


@pytest.mark.parametrize(
    ("words", "seconds", "why"),
    [
        (("other",), 60, "it wrote no result of "),
        (("any", "wrong"), 60, "exit code 3; see "),
        (("any", "late"), 1, "it took more than 1 s; see "),
    ],
)
def test_what_fails_is_told_with_its_log(lab, capsys, words, seconds, why) -> None:
    code, told = lab(capsys, *words, seconds=seconds)
    assert code == 1
    assert why in told
    assert told.endswith("0 done, 0 measured, 1 failed, 0 not run\n")


def test_what_is_not_run_says_why(lab, capsys) -> None:
    assert "up to 60 s are not left of --seconds" in lab(capsys, "x", more=("--seconds", "5"))[1]
    assert "it needs --llama-server" in lab(capsys, "{llama}")[1]
    assert "paper/one: not run: up to 60 s\n" in lab(capsys, "x", more=("--list",))[1]
    told = lab(capsys, "x", more=("--only", "two"))
    assert told == (2, "two: no figure of cpu; there are paper/one")
