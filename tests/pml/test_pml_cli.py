"""`onestem pml`, in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from onestem.cli.app import app
from onestem.errors import OnestemError
from onestem.pml import compile_prompt, lay_out, read_prompt, read_schema

EXAMPLES = Path(__file__).parents[2] / "examples" / "pml"
TRAVEL = [str(EXAMPLES / "travel" / name) for name in ("schema.xml", "prompt.xml")]


def run(*arguments: str, code: int = 0):
    result = CliRunner().invoke(app, ["pml", *arguments])
    if isinstance(result.exception, OnestemError):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def test_check_examples():
    files = sorted(map(str, EXAMPLES.glob("*/*.xml")))
    lines = run("check", *files).stdout.splitlines()
    assert len(lines) == len(files) == 7
    assert f"{TRAVEL[0]}: schema travel, 11 modules" in lines
    assert f"{TRAVEL[1]}: prompt of travel, 3 imports" in lines
    with_tokens = run("check", *TRAVEL, "--model", "embedded").stdout
    assert "positions" in with_tokens
    assert "tokens to be cached" in with_tokens


def test_check_reports_each_file_on_one_line(tmp_path):
    texts = {
        "ok.xml": '<schema name="s"><module name="m"><param name="p" len="1"/></module></schema>',
        "bad.xml": '<schema name="t">\n  <module/></schema>',
        "twice.xml": '<schema name="s"/>',
        "unknown.xml": '<prompt schema="t"/>',
        "wrong.xml": '<prompt schema="s">\n <n/></prompt>',
        "long.xml": '<prompt schema="s"><m p="many words in here"/></prompt>',
        "fine.xml": '<prompt schema="s"><m p="x"/></prompt>',
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    files = [str(tmp_path / name) for name in texts]
    result = run("check", *files, str(tmp_path / "none.xml"), code=2)
    errors = result.stderr.splitlines()
    expected = {
        "bad.xml:2:3: <module> has no name": 1,
        "twice.xml:1:1: schema 's' is defined twice, first in": 1,
        "unknown.xml:1:1: schema 't' is unknown, known: s": 1,
        "wrong.xml:2:2: schema s has no module n": 1,
        "none.xml is no file": 1,
    }
    for message, count in expected.items():
        assert sum(message in line for line in errors) == count
    assert len(errors) == len(expected)
    assert len(result.stdout.splitlines()) == 3
    tokens = run("check", files[0], files[5], "--model", "embedded", code=2).stderr
    assert "long.xml:1:20: argument p='many words in here' has" in tokens


def test_show_a_schema():
    lines = run("show", TRAVEL[0]).stdout.splitlines()
    assert lines[0].startswith("schema travel: 360 positions of 8192")
    shown = [line.split(maxsplit=2)[2].strip() for line in lines[1:]]
    assert "module wishes" in shown
    assert 'parameter duration, default "one week"' in shown
    assert shown.count("union") == 4
    assert shown.index("module coast") > shown.index("module nearby")


@pytest.mark.parametrize("isolation", ["anchored", "isolated", "off"])
def test_show_a_prompt(isolation):
    from onestem.cli.pml_model import load_tokenizer

    tokenizer, limit = load_tokenizer("embedded")
    layout = lay_out(read_schema(TRAVEL[0]), tokenizer, max_positions=limit)
    compiled = compile_prompt(layout, read_prompt(TRAVEL[1]), isolation)
    options = ("--isolation", isolation)
    facts = json.loads(run("show", *TRAVEL, *options, "--json").stdout)
    assert facts["schema"]["max_positions"] == limit == 8192
    assert [s["token_ids"] for s in facts["prompt"]["segments"]] == [
        s.token_ids.tolist() for s in compiled.segments
    ]
    assert facts["prompt"]["next_position"] == compiled.next_position
    text = run("show", *TRAVEL, *options, "--ids").stdout
    for segment in compiled.segments:
        assert " ".join(map(str, segment.token_ids.tolist())) in text
    assert f"the answer begins at position {compiled.next_position}" in text


def test_errors(tmp_path):
    with pytest.raises(OnestemError, match="isolation is 'none'"):
        run("show", *TRAVEL, "--isolation", "none")
    with pytest.raises(OnestemError, match="this is a <prompt>, expected a <schema>"):
        run("show", *TRAVEL[::-1])
    with pytest.raises(OnestemError, match="is no file"):
        run("show", str(tmp_path / "none.xml"))
