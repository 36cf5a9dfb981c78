"""Names of control tokens in a job's texts: what is a token, what is characters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from onestem.batch import JobInput
from onestem.options import InputOptions
from tests.batch.fakes import (
    BOS,
    FIRST_BYTE,
    FakeEngine,
    completion,
    results,
    run_fake,
    write_lines,
)  # fmt: skip

QUOTED = [byte + FIRST_BYTE for byte in b"<s>"]
ROW = {"q": "x<s>y", "many": ["<s>a", "b"]}


def ids(*parts) -> list[int]:
    """BOS, then texts and ids."""
    found = [BOS]
    for part in parts:
        found += [part] if isinstance(part, int) else [byte + FIRST_BYTE for byte in part.encode()]
    return found


def asked(tmp_path: Path, lines: list[dict], **options) -> list[list[int]]:
    """The prompts' ids, with those of their completions."""
    source = write_lines(tmp_path / "in.jsonl", lines)
    engine = FakeEngine(room=1)
    output = tmp_path / "out.jsonl"
    run_fake(JobInput(source, InputOptions(**options)), output, engine, planner=None, force=True)
    assert all(result["error"] is None for result in results(output))
    return [list(request.prompt_token_ids) for request in engine.seen]


@pytest.mark.parametrize(
    ("template", "default", "read", "characters"),
    [
        ("<s>{q}", ids(BOS, "x<s>y"), ids(BOS, "x", BOS, "y"), ids("<s>x<s>y")),
        ("{q}", ids("x", BOS, "y"), ids("x", BOS, "y"), ids("x<s>y")),
        ("a{q}<s>{q}", ids("ax<s>y", BOS, "x<s>y"), ids("ax", BOS, "y", BOS, "x", BOS, "y"),
         ids("ax<s>y<s>x<s>y")),
        ("<{q}", ids("<x<s>y"), ids("<x", BOS, "y"), ids("<x<s>y")),
    ],
)  # fmt: skip
def test_templates(tmp_path, template, default, read, characters):
    for said, expected in ((None, default), (True, read), (False, characters)):
        assert asked(tmp_path, [ROW], prompt=template, parse_special=said) == [expected]
        if said is not None:
            body = json.dumps({"parse_special": said})
            assert asked(tmp_path, [ROW], prompt=template, body=body) == [expected]
            other = {"prompt": template, "body": body, "parse_special": not said}
            assert asked(tmp_path, [ROW], **other) == [expected]  # the request says it


def test_a_name_that_a_value_completes_is_characters(tmp_path):
    assert asked(tmp_path, [{"a": "s>"}], prompt="<{a}") == [ids("<s>")]


def test_scores_of_rows(tmp_path):
    scored = {"prompt": "<s>{q}", "completions": '["<s>{q}", "{q}"]'}
    source = write_lines(tmp_path / "in.jsonl", [ROW])
    run_fake(JobInput(source, InputOptions(**scored)), tmp_path / "out.jsonl")
    first, second = results(tmp_path / "out.jsonl")[0]["response"]["body"]["data"][0]["scores"]
    assert first["token_ids"] == ids(BOS, "x<s>y")[1:]
    assert second["token_ids"] == ids("x<s>y")[1:]  # its prompt is beside it
    many = InputOptions(prompt="<s>{q}", completions="{many}")
    run_fake(JobInput(source, many), tmp_path / "many.jsonl")
    told = results(tmp_path / "many.jsonl")[0]["response"]["body"]["data"][0]["scores"]
    assert [one["token_ids"] for one in told] == [ids("<s>a")[1:], ids("b")[1:]]
    lists = InputOptions(prompt="{q}", completions="{many}")
    run_fake(JobInput(source, lists), tmp_path / "lists.jsonl")
    told = results(tmp_path / "lists.jsonl")[0]["response"]["body"]["data"][0]["scores"]
    assert [one["token_ids"] for one in told] == [ids(BOS, "a")[1:], ids("b")[1:]]
    assert asked(tmp_path, [ROW], text="{q}.")[0] == ids("x<s>y")


def test_lines(tmp_path):
    lines = [
        completion("a", "<s>b"),
        completion("b", "<s>b", parse_special=False),
        completion("c", [7, 8]),
        completion("d", "<s>b", parse_special=True),
    ]
    token, characters = ids(BOS, "b"), ids("<s>b")
    assert asked(tmp_path, lines) == [token, characters, [7, 8], token]
    held = asked(tmp_path, lines, parse_special=False)
    assert held == [characters, characters, [7, 8], token]
