"""What is said of another order of fields is what a job in that order saves."""

from __future__ import annotations

import json

import pytest

from onestem.batch import JobInput
from onestem.jobs import plan_file
from onestem.options import EngineOptions, InputOptions
from tests.batch.fakes import write_lines

DOCUMENTS = [f"document {i}: " + " ".join(f"word{i * j}" for j in range(40)) for i in range(3)]
ROWS = [
    {"id": f"T-{i}", "time": f"2026-11-{i:02}", "doc": DOCUMENTS[i % 3], "ask": f"Why {i * i}?"}
    for i in range(24)
]
OPTIONS = EngineOptions("embedded")


def plan(source, folder, **options):
    folder.mkdir()
    if options:
        source = JobInput(source, InputOptions(**options))
    return plan_file(source, folder, options=OPTIONS, predicts=False)


def test_the_better_template_saves_what_was_said(tmp_path):
    source = write_lines(tmp_path / "in.jsonl", ROWS)
    template = r"[{id}] at {time}\nDocument:\n{doc}\n\nQuestion: {ask}\nAnswer:"
    now = plan(source, tmp_path / "now", prompt=template)
    advice = now["advice"]
    assert now["saving"] < 0.05
    assert [field["name"] for field in advice["fields"]][:4] == ["id", "time", "doc", "ask"]
    assert [field["distinct"] for field in advice["fields"]] == [24, 24, 3, 24, 1]
    assert advice["moved"] == [0, 1]
    ((role, better),) = advice["template"]
    assert (role, better) == (
        None, "Document:\n{doc}\n\n[{id}] at {time}\n\nQuestion: {ask}\nAnswer:"
    )  # fmt: skip
    then = plan(source, tmp_path / "then", prompt=better)
    assert then["saving"] == advice["saving"] > 0.6
    assert then["processed_tokens"] == advice["processed_tokens"]
    assert then["advice"]["moved"] == ()


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_date_in_system_prompts_is_found(tmp_path, shuffled):
    def line(row, moves):
        date = f"Today is {row['time']}."
        head = ["You help customers.", *([] if moves else [date]), "Be brief."]
        middle = f"\n\n{date}" if moves else ""
        body = {
            "messages": [
                {"role": "system", "content": ("\n" if moves else " ").join(head)},
                {"role": "user", "content": f"Text: {row['doc']}{middle}\n\nAsked: {row['ask']}"},
            ]
        }
        url = "/v1/chat/completions"
        return {"custom_id": row["id"], "method": "POST", "url": url, "body": body}

    rows = sorted(ROWS, key=lambda row: hash(row["id"])) if shuffled else ROWS
    now = plan(write_lines(tmp_path / "a", [line(row, False) for row in rows]), tmp_path / "now")
    advice = now["advice"]
    assert [advice["fields"][i]["name"] for i in advice["moved"]] == ["Today is #"]
    then = plan(write_lines(tmp_path / "b", [line(row, True) for row in rows]), tmp_path / "then")
    assert advice["saving"] == then["saving"] > now["saving"] + 0.4


def test_nothing_is_said_where_nothing_is_gained(tmp_path):
    good = write_lines(tmp_path / "a", ROWS)
    found = plan(good, tmp_path / "1", prompt=r"{doc}\n\nQuestion: {ask}")
    assert found["advice"]["moved"] == ()
    assert found["advice"]["saving"] is None
    lines = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": {"prompt": [i]}}
        for i in range(1, 4)
    ]
    assert plan(write_lines(tmp_path / "b", lines), tmp_path / "2")["advice"] is None
    assert plan(write_lines(tmp_path / "c", []), tmp_path / "3")["advice"] is None
    scored = plan(good, tmp_path / "4", prompt="{id} {doc}", completions="{ask}")
    assert scored["advice"] is None
    assert json.dumps(found)
