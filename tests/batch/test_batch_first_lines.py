"""What a job says of its first bad line, and of first lines that are all bad."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from onestem.batch import first_pass
from onestem.errors import JobError
from tests.batch.fakes import completion, results, run_fake, write_lines

PLAIN = {"id": 1, "prompt": "abc"}
BATCH_LINE = (
    '{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": ...}}'
)
ROWS = "; or onestem batch --prompt '{prompt}' reads such rows"
NO_ID = f"the line has no custom_id, expected {BATCH_LINE}"
REASON = NO_ID + ROWS.replace(" reads", " --id id reads")


def in_folder(source: Path) -> list[str]:
    return sorted(path.name for path in source.parent.iterdir())


def refusal(source: Path, **changes) -> str:
    """Why a job is refused; it has said nothing else."""
    told: list[str] = []
    with pytest.raises(JobError) as caught:
        run_fake(source, source.with_name("out.jsonl"), on_first_error=told.append, **changes)
    assert told == []
    return str(caught.value)


@pytest.mark.parametrize("count", [1, 3, 256])
def test_a_job_of_bad_lines_alone_is_refused_and_leaves_nothing(tmp_path, count):
    source = write_lines(tmp_path / "in.jsonl", [b"", *[PLAIN] * count])
    assert refusal(source) == (
        f"{source}, line 2: {REASON} (0 of the first {count} lines can be answered): "
        "correct the lines, or go on with --keep-going"
    )
    assert in_folder(source) == ["in.jsonl"]


def test_a_corrected_input_has_its_output_free(tmp_path):
    source = write_lines(tmp_path / "in.jsonl", [PLAIN])
    refusal(source)
    write_lines(source, [completion("1")])
    assert run_fake(source, tmp_path / "out.jsonl").exit_code == 0


def test_a_refused_job_leaves_the_output_that_it_was_to_replace(tmp_path):
    source = write_lines(tmp_path / "in.jsonl", [PLAIN])
    (tmp_path / "out.jsonl").write_text("of somebody else\n")
    assert "0 of the first 1 lines" in refusal(source, force=True)
    assert (tmp_path / "out.jsonl").read_text() == "of somebody else\n"
    assert in_folder(source) == ["in.jsonl", "out.jsonl"]


@pytest.mark.parametrize(("bad", "refused"), [(255, False), (256, True)])
def test_one_good_line_among_the_first_is_enough(tmp_path, bad, refused):
    source = write_lines(tmp_path / "in.jsonl", [*[PLAIN] * bad, completion("a")])
    if refused:
        assert "0 of the first 256 lines" in refusal(source)
    else:
        assert run_fake(source, tmp_path / "out.jsonl").ok == 1


@pytest.mark.parametrize(("last", "refused"), [(completion("a"), False), (PLAIN, True)])
def test_lines_count_and_not_chunks(tmp_path, monkeypatch, last, refused):
    """Long lines make short chunks: a chunk of one bad line says little."""
    monkeypatch.setattr(first_pass, "CHUNK_BYTES", 1)
    source = write_lines(tmp_path / "in.jsonl", [PLAIN, PLAIN, last])
    if refused:
        assert "0 of the first 3 lines" in refusal(source)
    else:
        assert run_fake(source, tmp_path / "out.jsonl").failed == 2


def test_told_to_keep_going_it_answers_each_line(tmp_path):
    source, told = write_lines(tmp_path / "in.jsonl", [PLAIN] * 300), []
    summary = run_fake(source, tmp_path / "out.jsonl", keep_going=True, on_first_error=told.append)
    assert (summary.total, summary.failed, summary.exit_code) == (300, 300, 1)
    assert [record["error"]["line"] for record in results(tmp_path / "out.jsonl")] == [
        *range(1, 301)
    ]
    assert told == [f"{source}, line 1: {REASON}"]


def test_the_first_bad_line_is_told_once_and_before_all_else(tmp_path):
    lines = [completion(f"c{i}") for i in range(600)]
    lines[300]["body"]["wonder"] = lines[301]["body"]["wonder"] = lines[599]["body"]["wonder"] = 1
    source, events = write_lines(tmp_path / "in.jsonl", lines), []
    run_fake(
        source,
        tmp_path / "out.jsonl",
        on_first_error=events.append,
        on_progress=lambda progress: events.append(progress.stage),
    )
    told = f"{source}, line 301: unknown field in body: 'wonder'"
    assert events[:5] == ["read", "read", told, "read", "read"]
    assert set(events[5:]) == {"run", "write"}


def test_a_good_job_tells_nothing(tmp_path):
    source, told = write_lines(tmp_path / "in.jsonl", [completion("a")]), []
    run_fake(source, tmp_path / "out.jsonl", on_first_error=told.append)
    assert told == []


CHAT_LINE = (
    '{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": ...}}'
)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (PLAIN, REASON),
        ({"prompt": "a"}, NO_ID + ROWS),
        (
            {"id": 1, "messages": []},
            f"the line has no custom_id, expected {CHAT_LINE}; or "
            "onestem batch --messages '{messages}' --id id reads such rows",
        ),
        (
            {"custom_id": "1", "prompt": "a"},
            f"unknown field beside body: 'prompt', expected {BATCH_LINE}{ROWS}",
        ),
        ({"id": 1, "body": {"prompt": "a"}}, "the line has no custom_id"),
        ({"id": 1, "text": "a"}, "the line has no custom_id"),
    ],
)
def test_a_plain_prompt_is_told_what_a_batch_line_is(tmp_path, line, reason):
    source = write_lines(tmp_path / "in.jsonl", [line])
    assert refusal(source).startswith(f"{source}, line 1: {reason} (0 of")


def test_half_of_a_surrogate_pair_in_a_prompt(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps(completion("a", "half \ud83d of it")) + "\n")
    assert refusal(source).startswith(
        f"{source}, line 1: the line has an unpaired \\ud800-\\udfff escape, which is half a "
        "character: write both halves, or leave it out (0 of"
    )
