"""`onestem bench paper`, and the page that is made of its results."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from onestem.cli.app import app
from onestem.errors import ConfigError, OnestemError
from onestem_lab.papers.page import PAGE, RESULTS, page, results
from onestem_lab.papers.registry import EXPERIMENTS, NAMES, find
from onestem_lab.results import COMMIT, commit_of


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["bench", "paper", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_the_list():
    listed = json.loads(run("--json"))
    assert [each["name"] for each in listed] == list(EXPERIMENTS)
    lines = run().splitlines()
    assert [line.split()[0] for line in lines] == list(EXPERIMENTS)
    assert len(lines) >= 35


def test_one_run_has_several_names():
    assert find("cache-fig10") is find("cache-fig3") is EXPERIMENTS["cache-fig9"]
    assert sum(len(each.names) for each in EXPERIMENTS.values()) == len(NAMES)
    (line,) = (line for line in run().splitlines() if line.startswith("cache-fig9 "))
    assert line.endswith("(also cache-fig3, cache-fig10, cache-fig11)")


def test_one_writes_its_files(tmp_path, monkeypatch):
    monkeypatch.setenv("ONESTEM_MODEL", "/etc/none")
    shown = run("cache-table2", "--out", str(tmp_path), "--quiet", "--against", "sdpa")
    assert "4.53 / 4.53" in shown
    assert "Left out: sdpa: nothing is compared with peers here." in shown
    assert "Left out: model /etc/none: no model runs here." in shown
    result = json.loads((tmp_path / "cache-table2.json").read_text())
    assert result["model"] is None
    assert result["versions"]["onestem"]
    assert result["commit"]
    assert (tmp_path / "cache-table2.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["relay-fig66"], "did you mean relay-fig6"),
        (["all"], "--out"),
        (["--scale", "0.1"], "name a table or figure, or all"),
        (["relay-fig6", "--scale", "0"], "scale is 0"),
        (["relay-fig6", "--repeat", "0"], "repeat is 0"),
        (["relay-fig6", "--repeat", "99999999999"], "expected 1 to 1000"),
        (["batch-fig6a", "--against", "foo"], "peer is 'foo', expected one of: sdpa"),
        (["batch-fig9", "--model", "m"], "--model has no effect on batch-fig9: leave it out"),
        (["batch-fig9", "--seed", "1"], "--seed has no effect on batch-fig9: leave it out"),
        (["relay-fig6", "--threads", "1"], "--threads has no effect on relay-fig6"),
        (["relay-fig6", "--out", "{taken}"], "relay-fig6.svg is not a regular file"),
    ],
)
def test_mistakes(arguments, line, tmp_path):
    (tmp_path / "relay-fig6.svg").mkdir()
    with pytest.raises(OnestemError, match=line):
        run(*(argument.format(taken=tmp_path) for argument in arguments))


def test_what_the_device_cannot_hold_is_refused(monkeypatch):
    monkeypatch.setattr("onestem_lab.papers.bench.memory_bytes", lambda device: 2**30)
    with pytest.raises(ConfigError, match=r"llama2-7b takes 13 GiB of weights.*--scale"):
        run("relay-fig10", "--quiet", "--device", "cpu", "--dtype", "bfloat16")


def test_all_goes_on_without_what_cannot_run(monkeypatch, tmp_path):
    monkeypatch.setattr("onestem_lab.papers.bench.memory_bytes", lambda device: 2**30)
    some = {name: EXPERIMENTS[name] for name in ("relay-fig10", "cache-table2")}
    monkeypatch.setattr("onestem_lab.papers.registry.EXPERIMENTS", some)
    arguments = ["bench", "paper", "all", "--out", str(tmp_path), "--quiet", "--device", "cpu"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "relay-fig10: llama2-7b takes" in result.stderr
    page = (tmp_path / "paper.html").read_text()
    assert "4.53 / 4.53" in page
    assert "<svg" in page
    assert "relay-fig10" not in page


def test_the_commit_of_a_result(tmp_path, monkeypatch):
    monkeypatch.delenv(COMMIT, raising=False)
    assert commit_of(tmp_path, "0.1.0.dev440+g2e9236af4") == "2e9236af4"
    assert commit_of(tmp_path, "0.1.0") == "unknown"
    monkeypatch.setenv(COMMIT, "abc")
    assert commit_of(tmp_path, "0.1.0") == "abc"


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == page(results())


def test_each_result_is_shown():
    assert {file.stem for file in RESULTS.iterdir()} == set(results())
