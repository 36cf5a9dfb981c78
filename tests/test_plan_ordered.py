"""`plan --write`: a job's lines in the order in which the engine takes them, byte for byte."""

from __future__ import annotations

import json
import os
import random
import tempfile
from pathlib import Path

import numpy as np
import pytest

from onestem.batch import JobInput
from onestem.batch.lines import MAX_LINE_BYTES
from onestem.batch.ordered import OrderedLines
from onestem.batch.results import split_result_id
from onestem.errors import ConfigError, JobError
from onestem.jobs import plan_file, run_file
from onestem.llm import LLM
from onestem.options import EngineOptions, InputOptions
from tests.batch.fakes import completion, write_lines
from tests.forked import onestem


@pytest.fixture
def options(model):
    return EngineOptions(str(model), device="cpu", kv_memory="4MiB")


def shuffled(count=40, **body):
    """Prompts over documents over instructions, at random."""
    lines = [
        completion(f"q{i}", f"Instruction {i % 2}. Document {i % 10}. Question {i}", **body)
        for i in range(count)
    ]
    random.Random(0).shuffle(lines)
    return lines


def write(source, path, options, **more):
    with tempfile.TemporaryDirectory() as work:
        return plan_file(source, Path(work), options=options, predicts=False, write=path, **more)


def ids(path):
    return [json.loads(line)["custom_id"] for line in path.read_bytes().splitlines()]


def test_the_lines_are_in_the_order_in_which_the_engine_takes_them(options, tmp_path):
    job = shuffled(max_tokens=3, ignore_eos=True)
    source = write_lines(tmp_path / "in.jsonl", job)
    report = write(source, tmp_path / "ordered.jsonl", options)
    assert report["written"] == {"path": str(tmp_path / "ordered.jsonl"), "lines": 40}
    llm = LLM(options.model, device="cpu", kv_memory="4MiB", max_num_seqs=2)
    taken, run = [], llm.engine.run

    def noted(requests):
        def seen():
            for request in requests:
                taken.append(job[split_result_id(request.request_id)[1] - 1]["custom_id"])
                yield request

        return run(seen())

    llm.engine.run = noted
    run_file(llm, source, tmp_path / "out.jsonl")
    assert ids(tmp_path / "ordered.jsonl") == taken != ids(source)


def test_every_line_is_there_byte_for_byte(options, tmp_path):
    """Bad, blank, double, odd and very long lines; no end of the last one."""
    good = [json.dumps(line).encode() for line in shuffled()]
    bad = [b"{", b"", b" \t", b"\xff\xfe", good[3], b"[" * (MAX_LINE_BYTES + 9), b"", b"{}"]
    odd = [b"  " + good[0].replace(b'"q', b'"r') + b" \r", good[1].replace(b'"q', b'"\\u0071q')]
    lines = [*odd, *good]
    for at, line in enumerate(bad):
        lines.insert(4 + 5 * at, line)
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"\n".join(lines))
    path = tmp_path / "ordered.jsonl"
    report = write(source, path, options)
    written = path.read_bytes().split(b"\n")
    assert written.pop() == b""
    assert sorted(written) == sorted(lines)
    assert report["written"]["lines"] == len(lines)
    assert written[-len(bad) :] == bad
    assert report["failed_lines"] + 3 == len(bad)

    again = write(path, tmp_path / "twice.jsonl", options)
    assert again["saving"] == report["saving"]
    assert sorted((tmp_path / "twice.jsonl").read_bytes().split(b"\n")) == sorted([*lines, b""])


@pytest.mark.parametrize("content", [b"", b"\n", b"\n\n \n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n"])
def test_a_job_of_nothing(options, tmp_path, content):
    source = tmp_path / "in.jsonl"
    source.write_bytes(content)
    write(source, tmp_path / "ordered.jsonl", options)
    assert (tmp_path / "ordered.jsonl").read_bytes() == content


def test_a_byte_order_mark_stays_at_the_beginning(options, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", shuffled())
    plain = tmp_path / "plain.jsonl"
    write(source, plain, options)
    source.write_bytes(b"\xef\xbb\xbf" + source.read_bytes())
    write(source, tmp_path / "marked.jsonl", options)
    assert (tmp_path / "marked.jsonl").read_bytes() == b"\xef\xbb\xbf" + plain.read_bytes()


def test_rows_of_a_template_are_lines_and_tables_are_none(options, tmp_path):
    rows = [{"id": f"q{i}", "custom_id": f"q{i}", "text": f"Text {i % 3} {i}"} for i in range(9)]
    source = write_lines(tmp_path / "in.jsonl", rows)
    template = InputOptions(prompt="{text}", id="id")
    write(JobInput(source, template), tmp_path / "ordered.jsonl", options)
    assert sorted(ids(tmp_path / "ordered.jsonl")) == sorted(ids(source))
    assert ids(tmp_path / "ordered.jsonl") != ids(source)
    (tmp_path / "in.csv").write_text("id,text\na,b\n")
    (tmp_path / "set").mkdir()
    source.rename(tmp_path / "set" / "in.jsonl")
    for table in (tmp_path / "in.csv", tmp_path / "set"):
        with pytest.raises(JobError, match="is a table: make JSON lines of it"):
            write(JobInput(table, template), tmp_path / "none.jsonl", options)
    assert not (tmp_path / "none.jsonl").exists()


def test_nothing_is_written_over_unasked(options, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", shuffled())
    path, link = tmp_path / "ordered.jsonl", tmp_path / "link.jsonl"
    path.write_text("kept")
    link.symlink_to(path)
    for taken in (path, link):
        with pytest.raises(JobError, match=r"exists: choose another file .* with --force"):
            write(source, taken, options)
    assert path.read_text() == "kept"
    write(source, link, options, force=True)
    assert link.is_symlink()
    assert sorted(ids(path)) == sorted(ids(source))

    os.link(source, tmp_path / "same.jsonl")
    for same in (source, tmp_path / "same.jsonl"):
        with pytest.raises(JobError, match="is the input: choose another file"):
            write(source, same, options, force=True)
    with pytest.raises(JobError, match="is the page of --html: choose another file"):
        write(source, tmp_path / "a", options, html=tmp_path / "a")
    with pytest.raises(JobError, match=r"is schema .*: choose another file"):
        write(source, tmp_path / "a.pml", options, schemas=[tmp_path / "a.pml"])
    with pytest.raises(JobError, match="does not exist: make it first"):
        write(source, tmp_path / "none" / "a", options)
    with pytest.raises(ConfigError, match="--force is for the file of --write"):
        plan_file(source, tmp_path, options=options, force=True)


@pytest.mark.parametrize("change", ["longer", "shorter", "other"])
def test_an_input_that_changes_leaves_the_file_as_it_was(tmp_path, change):
    source = write_lines(tmp_path / "in.jsonl", shuffled())
    path = tmp_path / "ordered.jsonl"
    path.write_text("kept")
    before = sorted(os.listdir(tmp_path))
    ordered = OrderedLines(JobInput(source), path, force=True, others={})
    if change == "other":
        write_lines(tmp_path / "new", shuffled()[::-1])
        os.replace(tmp_path / "new", source)
    else:
        os.truncate(source, 100 if change == "shorter" else 100_000)
    with pytest.raises(JobError, match="changed while it was read"):
        ordered.write(np.arange(1, 41))
    assert path.read_text() == "kept"
    assert sorted(os.listdir(tmp_path)) == before


def test_a_job_that_is_refused_writes_nothing(options, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}] * 3)
    with pytest.raises(JobError, match="0 of the first 3 lines"):
        write(source, tmp_path / "ordered.jsonl", options)
    assert os.listdir(tmp_path) == ["in.jsonl"]


def test_the_command_says_where_the_lines_are(model, tmp_path):
    source, path = write_lines(tmp_path / "in.jsonl", shuffled()), tmp_path / "ordered.jsonl"
    args = ("plan", source, "--model", model, "--device", "cpu", "--no-predict", "-q")
    shown = onestem(*args, "--write", path).stdout
    assert shown.endswith(f"{path}: 40 lines, in the order of the plan\n")
    assert "replace it with --force" in onestem(*args, "--write", path, code=2).stderr
    done = onestem(*args, "--write", path, "--force", "--json")
    assert json.loads(done.stdout)["written"] == {"path": str(path), "lines": 40}
    (tmp_path / "options.toml").touch()
    for option in ("--write", "--html"):
        same = (option, tmp_path / "options.toml", "--config", tmp_path / "options.toml")
        assert "is the file of options" in onestem(*args, *same, code=2).stderr
