"""Whose output it is: complete, another job's, somebody else's; and what a job holds in memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from onestem.batch import JobInterrupted, identity, model_identity
from onestem.batch.workplace import Workplace
from onestem.errors import JobError, RequestError
from tests.batch.fakes import FakeEngine, completion, mixed_job, results, run_fake, write_lines

ROOT = Path(__file__).parents[2]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return mixed_job(tmp_path / "in.jsonl", 10)


class Stopping(FakeEngine):
    def finish(self, request):
        if len(self.seen) > 7:
            raise KeyboardInterrupt
        return super().finish(request)


def leave_unfinished(source: Path, output: Path, **changes) -> None:
    with pytest.raises(JobInterrupted):
        run_fake(source, output, Stopping(), **changes)


def test_a_complete_job_is_not_run_again(tmp_path, source):
    output, engine = tmp_path / "out.jsonl", FakeEngine()
    first = run_fake(source, output)
    before = output.stat()
    again = run_fake(source, output, engine)
    assert again.already_complete
    assert "already complete" in again.last_line()
    assert (again.total, again.failed, again.exit_code) == (first.total, first.failed, 1)
    assert engine.seen == []
    assert output.stat().st_mtime_ns == before.st_mtime_ns
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_another_path_to_the_same_input_is_the_same_job(tmp_path, source):
    run_fake(source, tmp_path / "out.jsonl")
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(source.read_bytes())
    assert run_fake(copy, tmp_path / "out.jsonl").already_complete


@pytest.mark.parametrize("text", ["notes of mine\n", '{"id": "batch_req_123"}\n', "no line end"])
def test_a_file_of_somebody_else_is_refused(tmp_path, source, text):
    output = tmp_path / "out.jsonl"
    output.write_text(text)
    with pytest.raises(JobError, match=r"out.jsonl exists and is not of this job: .*--force"):
        run_fake(source, output)
    assert output.read_text() == text
    assert not (tmp_path / "out.jsonl.work").exists()
    assert not run_fake(source, output, force=True).already_complete


def test_a_complete_file_that_was_changed_is_refused(tmp_path, source):
    output = tmp_path / "out.jsonl"
    run_fake(source, output)
    whole = output.read_bytes()
    output.write_bytes(whole[: whole.rindex(b"\n", 0, -1) + 1])
    with pytest.raises(JobError, match="not as this job left it"):
        run_fake(source, output)
    run_fake(source, output, force=True)
    assert output.read_bytes() == whole


def test_an_empty_output_file_is_as_good_as_none(tmp_path, source):
    (tmp_path / "out.jsonl").touch()
    assert run_fake(source, tmp_path / "out.jsonl").total > 0


CHANGES = [
    ({"model_identity": "model-2"}, "the model was model-1, now model-2"),
    ({"options": {"dtype": "bfloat16"}}, "dtype was float32, now bfloat16"),
    ({"options": {"dtype": "float32", "seed": 1}}, "seed was None, now 1"),
]


@pytest.mark.parametrize(("changes", "words"), CHANGES)
def test_another_job_on_unfinished_work_is_refused(tmp_path, source, changes, words):
    output = tmp_path / "out.jsonl"
    leave_unfinished(source, output)
    before = (tmp_path / "out.jsonl.partial").read_bytes()
    with pytest.raises(JobError, match="unfinished work of another job") as caught:
        run_fake(source, output, **changes)
    assert words in str(caught.value)
    assert "--force" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert (tmp_path / "out.jsonl.partial").read_bytes() == before
    assert run_fake(source, output).resumed > 0


BEGUN = {"dtype": "float32", "seed": 5, "max_model_len": 500}


@pytest.mark.parametrize("options", [{}, {"seed": 5}, {"max_model_len": 64}])
def test_a_job_goes_on_as_it_began(tmp_path, source, options):
    """Under another name of the model, another limit, and a seed that nobody asks for now."""
    whole, output = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    run_fake(source, whole, options=BEGUN)
    leave_unfinished(source, output, options=BEGUN)
    now = {"model_name": "big", "options": {"dtype": "float32", **options}}
    engine = FakeEngine()
    assert run_fake(source, output, engine, **now).resumed > 3
    assert output.read_bytes() == whole.read_bytes()
    assert len(engine.seen) < len(results(output))


def test_a_job_killed_before_it_is_cleared_away_is_complete_under_another_name(tmp_path, source):
    output, work = tmp_path / "out.jsonl", tmp_path / "out.jsonl.work"
    leave_unfinished(source, output)
    manifest = (work / "manifest.json").read_bytes()
    run_fake(source, output)
    work.mkdir()
    (work / "manifest.json").write_bytes(manifest)
    assert run_fake(source, output, model_name="big").already_complete
    assert not work.exists()


def test_a_complete_job_that_was_given_what_is_settled_now(tmp_path, source):
    output = tmp_path / "out.jsonl"
    run_fake(source, output, options={"dtype": "float32", "max_model_len": 500})
    now = {"options": {"dtype": "float32"}, "max_model_len": 500}
    assert run_fake(source, output, **now).already_complete
    with pytest.raises(JobError, match="exists and is not of this job"):
        run_fake(source, output, **now | {"max_model_len": 400})


@pytest.mark.parametrize("names", ["max_num_seqs", "max_model_len"])
def test_a_lower_limit_is_for_lines_that_have_no_answer(tmp_path, names):
    """They get their error; what is answered stays."""
    lines = [completion(str(i), "x" * (90 - 3 * i)) for i in range(16)]
    source, output = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    leave_unfinished(source, output, **{names: 100})
    before = {one["custom_id"]: one for one in map(json.loads, partial_lines(output))}

    def limited(request):
        if len(request.prompt_token_ids) >= 64:
            raise RequestError("prompt is too long, limit is 64")

    run_fake(source, output, validate=limited, **{names: 64})
    found = {one["custom_id"]: one for one in results(output)}
    assert len(found) == 16
    assert before.items() <= found.items()
    refused = {name for name, one in found.items() if one["error"]}
    assert refused == {str(i) for i in range(10)} - before.keys()
    assert refused


def partial_lines(output: Path) -> list[bytes]:
    return output.with_name("out.jsonl.partial").read_bytes().splitlines()


def test_another_input_on_unfinished_work_is_refused(tmp_path, source):
    output = tmp_path / "out.jsonl"
    leave_unfinished(source, output)
    other = write_lines(tmp_path / "other.jsonl", [completion("a")])
    with pytest.raises(JobError, match="the input has other content"):
        run_fake(other, output)
    assert run_fake(other, output, force=True).total == 1


def test_force_goes_on_with_the_jobs_own_work(tmp_path, source):
    """The same command continues, with --force in it too."""
    output = tmp_path / "out.jsonl"
    output.write_text("of somebody else\n")
    leave_unfinished(source, output, force=True)
    assert output.read_text() == "of somebody else\n"  # until the new one is complete
    with pytest.raises(JobError):
        run_fake(source, output)
    assert run_fake(source, output, force=True).resumed > 0
    assert run_fake(source, output, force=True).already_complete


def test_answers_of_nobody_are_refused(tmp_path, source):
    (tmp_path / "out.jsonl.partial").write_text("something\n")
    with pytest.raises(JobError, match="nothing says which job"):
        run_fake(source, tmp_path / "out.jsonl")
    run_fake(source, tmp_path / "out.jsonl", force=True)


@pytest.mark.parametrize("changed", [{"format": 0}, {"whitespace": "compact"}])
def test_work_of_another_version_is_refused(tmp_path, source, changed):
    output = tmp_path / "out.jsonl"
    leave_unfinished(source, output)
    place = Workplace(output)
    place.write_manifest(place.read_manifest() | changed)
    with pytest.raises(JobError, match="another version of the program wrote it"):
        run_fake(source, output)
    run_fake(source, output, force=True)


@pytest.mark.parametrize("version", [None, 1])
def test_work_of_another_sampler_is_refused(tmp_path, source, version):
    """Its answers would be mixed with others that the same seeds do not give."""
    output = tmp_path / "out.jsonl"
    leave_unfinished(source, output)
    place = Workplace(output)
    manifest = place.read_manifest() | {"sampler": version}
    place.write_manifest({k: v for k, v in manifest.items() if v is not None})
    with pytest.raises(JobError, match="another version of the program, which draws other tokens"):
        run_fake(source, output)
    assert run_fake(source, output, force=True).resumed == 0


def test_files_that_are_not_ours_stay(tmp_path, source):
    work = tmp_path / "out.jsonl.work"
    work.mkdir()
    (work / "notes").write_text("mine")
    run_fake(source, tmp_path / "out.jsonl")
    assert [path.name for path in work.iterdir() if path.name != "lock"] == ["notes"]


def test_two_at_once_are_refused(tmp_path, source):
    output = tmp_path / "out.jsonl"
    refused = []

    def second(progress):
        if progress.stage == "run" and not refused:
            with pytest.raises(JobError, match="another process is writing") as caught:
                run_fake(source, output)
            refused.append(caught.value)

    run_fake(source, output, on_progress=second)
    assert len(refused) == 1


def test_the_lock_of_a_dead_process_is_free(tmp_path, source):
    output, log = tmp_path / "out.jsonl", tmp_path / "log"
    command = [sys.executable, "-m", "tests.batch.killed", source, output, log, "30"]
    subprocess.run(command, cwd=ROOT, check=True)
    assert (tmp_path / "out.jsonl.work" / "lock").exists()
    run_fake(source, output)


def test_paths_that_cannot_be(tmp_path, source):
    with pytest.raises(JobError, match="does not exist: make it first"):
        run_fake(source, tmp_path / "no" / "out.jsonl")
    with pytest.raises(JobError, match="not a regular file"):
        run_fake(source, tmp_path)
    with pytest.raises(JobError, match="both input and output"):
        run_fake(source, source)
    with pytest.raises(JobError, match="cannot read"):
        run_fake(tmp_path / "missing.jsonl", tmp_path / "out.jsonl")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(JobError, match="not a regular file"):
        run_fake(tmp_path / "pipe", tmp_path / "out.jsonl")


def test_a_link_stays_a_link(tmp_path, source):
    (tmp_path / "elsewhere").mkdir()
    link, target = tmp_path / "out.jsonl", tmp_path / "elsewhere" / "real.jsonl"
    link.symlink_to(target)
    run_fake(source, link)
    assert link.is_symlink()
    assert target.is_file()
    assert run_fake(source, link).already_complete


def test_input_that_changes_while_it_is_read(tmp_path, source):
    def change(progress):
        if progress.stage == "read" and progress.done:
            source.write_bytes(b"other\n")

    real = run_fake
    lines = [completion(f"c{i}", "x" * 300) for i in range(300)]
    write_lines(source, lines)
    with pytest.raises(JobError, match="changed while it was read"):
        real(source, tmp_path / "out.jsonl", on_progress=change)
    assert not (tmp_path / "out.jsonl.work").exists()


def test_summary_counts_what_this_run_did(tmp_path, source):
    stages = []
    summary = run_fake(source, tmp_path / "out.jsonl", on_progress=lambda p: stages.append(p.stage))
    assert summary.num_computed_tokens == summary.num_prompt_tokens > 0
    assert summary.num_output_tokens > 0
    assert summary.seconds >= summary.read_seconds > 0
    assert summary.plan.report.requests == summary.ok
    assert list(dict.fromkeys(stages)) == ["read", "run", "write"]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's count of memory")
def test_memory_does_not_hold_the_job(tmp_path):
    """20,000 lines of 400 tokens: 32 MB of ids on the disk, 64 MB and more as lists."""
    lines = (completion(f"request-{i}", f"{i % 50:03}{'y' * 396}") for i in range(20_000))
    source = write_lines(tmp_path / "in.jsonl", lines)
    command = [sys.executable, "-m", "tests.batch.measured", source, tmp_path / "out.jsonl"]
    growth = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert int(growth) < 16 << 20
    assert (tmp_path / "out.jsonl").read_bytes().count(b"\n") == 20_000


def make_model(folder: Path, weights: bytes) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def test_model_identity(tmp_path, monkeypatch):
    one = model_identity(make_model(tmp_path / "1", b"weights"))
    assert model_identity(make_model(tmp_path / "2", b"weights")) == one
    assert model_identity(make_model(tmp_path / "3", b"Weights")) != one
    (tmp_path / "2" / "chat_template.jinja").write_text("x")
    assert model_identity(tmp_path / "2") != one
    monkeypatch.setattr(identity, "WHOLE_BYTES", 1 << 20)
    large = bytearray(8 << 20)
    sampled = model_identity(make_model(tmp_path / "4", large))
    large[-1] = 1
    assert model_identity(make_model(tmp_path / "5", large)) != sampled
