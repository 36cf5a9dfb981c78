"""A stopped comparison with other engines goes on where it was."""

from __future__ import annotations

import dataclasses

from onestem_lab.peers.log import RunLog
from onestem_lab.peers.runners.job import Group, Job

JOB = Job(
    model="m", dtype="float32", vocab_size=8, prompts=[[1, 2], [1, 3]], groups=[Group(1, (0, 1))],
    output_tokens=2, kv_tokens=64, kv_bytes=64, threads=1, settings={}, outputs="",
)  # fmt: skip
KEY = {"engine": "vllm", "settings": {"eager": True}, "turn": 0}
RESULT = {"engine": "vllm", "seconds": 1.5}


def test_finished_runs_are_kept_where_asked_for(tmp_path):
    stem = tmp_path / "0.1b-4x16"
    RunLog(stem, JOB, keep=False).add(KEY, RESULT)
    log = RunLog(stem, dataclasses.replace(JOB, settings={"eager": True}, outputs="x"), keep=True)
    assert log.find(KEY) == RESULT
    assert log.find({**KEY, "turn": 1}) is None
    assert RunLog(stem, JOB, keep=False).find(KEY) is None
    assert RunLog(stem, JOB, keep=True).find(KEY) is None


def test_runs_of_another_job_and_half_a_line_are_passed_over(tmp_path):
    stem = tmp_path / "0.1b-4x16"
    log = RunLog(stem, JOB, keep=False)
    log.add(KEY, RESULT)
    with log.path.open("a") as file:
        file.write('{"job": "')
    other = dataclasses.replace(JOB, output_tokens=3)
    assert RunLog(stem, JOB, keep=True).find(KEY) == RESULT
    log = RunLog(stem, JOB, keep=True)
    log.add({**KEY, "turn": 1}, RESULT)
    assert RunLog(stem, JOB, keep=True).find({**KEY, "turn": 1}) == RESULT
    assert RunLog(stem, other, keep=True).find(KEY) is None


def test_first_answers_of_a_new_log_are_not_the_old_ones(tmp_path):
    log = RunLog(tmp_path / "a", JOB, keep=False)
    log.add(KEY, RESULT)
    log.answers.write_text("[[1]]")
    assert RunLog(tmp_path / "a", JOB, keep=True).answers.exists()
    assert not RunLog(tmp_path / "a", JOB, keep=False).answers.exists()
