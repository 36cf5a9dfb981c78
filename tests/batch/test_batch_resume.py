"""Interruptions of every kind: the file is that of a run without them, nothing is done twice."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import pytest

from onestem.batch import JobInterrupted
from onestem.errors import JobError
from tests.batch.fakes import (
    FakeEngine,
    FakeTokenizer,
    completion,
    mixed_job,
    results,
    run_fake,
    write_lines,
)
from tests.soak import seeds

ROOT = Path(__file__).parents[2]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return mixed_job(tmp_path / "in.jsonl")


@pytest.fixture
def expected(tmp_path: Path, source: Path) -> bytes:
    """The bytes of an uninterrupted run, planned in another order."""
    run_fake(source, tmp_path / "whole.jsonl", planner=None)
    return (tmp_path / "whole.jsonl").read_bytes()


class StoppingEngine(FakeEngine):
    """Raises after some answers."""

    def __init__(self, answers: int, error: BaseException) -> None:
        super().__init__()
        self.left, self.error = answers, error

    def finish(self, request):
        self.left -= 1
        if self.left < 0:
            raise self.error
        return super().finish(request)


def stop_after(answers: int, source: Path, output: Path) -> StoppingEngine:
    """Leave a job in its middle."""
    engine = StoppingEngine(answers, KeyboardInterrupt())
    with pytest.raises(JobInterrupted):
        run_fake(source, output, engine)
    return engine


def nothing_left(output: Path) -> bool:
    beside = [path.name for path in output.parent.iterdir() if path.name.startswith(output.name)]
    return beside == [output.name]


@pytest.mark.parametrize("seed", seeds(2, 4))
def test_killed_at_any_moment(tmp_path, source, expected, seed):
    output, log = tmp_path / "out.jsonl", tmp_path / "log"
    draw = random.Random(seed)
    # Short lives, in which the job hardly gets on, and long ones; the last is not cut short.
    lives = [draw.choice([draw.randint(1, 12), draw.randint(20, 90)]) for _ in range(12)]
    command = [sys.executable, "-m", "tests.batch.killed", source, output, log]
    subprocess.run([*command, ",".join(map(str, [*lives, 10**9]))], cwd=ROOT, check=True)
    assert output.read_bytes() == expected
    assert nothing_left(output)
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert sum(record["killed"] for record in records) >= 3
    finished: set[str] = set()
    for record in records:
        assert not finished & set(record["answered"]), "a finished answer was computed again"
        assert finished <= set(record["whole"]), "a finished answer was lost"
        assert len(set(record["whole"])) == len(record["whole"]), "a line is doubled"
        finished = set(record["whole"])


def test_every_event_of_a_small_job(tmp_path):
    """Each moment of one job: killed there once, then run to its end."""
    scored = {"custom_id": "c", "prompt": "which?", "completions": [" A", " B"]}
    lines = [completion("a"), b"bad", completion("b", "xyz"), scored]
    source = write_lines(tmp_path / "in.jsonl", lines)
    run_fake(source, tmp_path / "whole.jsonl")
    expected = (tmp_path / "whole.jsonl").read_bytes()
    folder = tmp_path / "killed"
    folder.mkdir()
    command = [
        sys.executable,
        "-m",
        "tests.batch.killed",
        source,
        folder / "out",
        tmp_path / "log",
        "each",
    ]
    subprocess.run(command, cwd=ROOT, check=True)
    outputs = list(folder.iterdir())
    assert len(outputs) > 30
    assert all(path.is_file() and path.read_bytes() == expected for path in outputs)


def test_interrupt_says_how_to_go_on(tmp_path, source, expected):
    output = tmp_path / "out.jsonl"
    engine = StoppingEngine(10, KeyboardInterrupt())
    with pytest.raises(
        JobInterrupted, match=r"of 66 lines are done .* the same command goes on"
    ) as caught:
        run_fake(source, output, engine)
    assert "\n" not in str(caught.value)
    assert engine.closed
    assert not output.exists()
    lines = (tmp_path / "out.jsonl.partial").read_bytes().count(b"\n")
    again = FakeEngine()
    tokenizer = FakeTokenizer()
    summary = run_fake(source, output, again, tokenizer=tokenizer)
    assert summary.resumed == lines > 10
    assert len(engine.seen) + len(again.seen) >= 48
    assert tokenizer.batches == []  # the first pass is not done again
    assert output.read_bytes() == expected


def test_interrupt_in_the_first_pass(tmp_path, source, expected):
    class Interrupted(FakeTokenizer):
        def encode_batch(self, texts):
            raise KeyboardInterrupt

    output = tmp_path / "out.jsonl"
    with pytest.raises(JobInterrupted, match="0 of 66 lines are done"):
        run_fake(source, output, tokenizer=Interrupted())
    assert [path for path in tmp_path.iterdir() if path.name.startswith("out")] == []
    run_fake(source, output)
    assert output.read_bytes() == expected


def test_a_failing_engine_loses_nothing(tmp_path, source, expected):
    output = tmp_path / "out.jsonl"
    with pytest.raises(RuntimeError, match="out of memory"):
        run_fake(source, output, StoppingEngine(7, RuntimeError("out of memory")))
    assert run_fake(source, output).resumed > 7
    assert output.read_bytes() == expected


def test_what_the_engine_aborts_is_not_answered(tmp_path):
    class Aborting(FakeEngine):
        def finish(self, request):
            output = super().finish(request)
            if len(request.prompt_token_ids) == 4:
                output.outputs[0].finish_reason = "abort"
            return output

    source = write_lines(tmp_path / "in.jsonl", [completion("a", "abc"), completion("b", "abcd")])
    output = tmp_path / "out.jsonl"
    with pytest.raises(JobError, match="left 1 of 2 lines"):
        run_fake(source, output, Aborting())
    assert not output.exists()
    assert run_fake(source, output).resumed == 1


@pytest.mark.parametrize("cut", [1, 2, 40])
def test_torn_line_is_cut(tmp_path, source, expected, cut):
    output, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    stop_after(9, source, output)
    data = partial.read_bytes()
    partial.write_bytes(data[:-cut])
    summary = run_fake(source, output)
    assert summary.resumed == data.count(b"\n") - 1
    assert output.read_bytes() == expected


@pytest.mark.parametrize("torn", [23, 24])  # a checksum, or its answer
def test_full_disk_keeps_what_is_whole(tmp_path, source, expected, monkeypatch, torn):
    output = tmp_path / "out.jsonl"
    real, calls = os.write, []

    def full(file, data):
        calls.append(data)
        if len(calls) == torn:
            return real(file, data[:5])
        if len(calls) == torn + 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(JobError, match="No space left on device: mend that"):
        run_fake(source, output)
    partial = (tmp_path / "out.jsonl.partial").read_bytes()
    assert partial.endswith(b"\n")
    assert partial.count(b"\n") == 11
    monkeypatch.undo()
    assert run_fake(source, output).resumed == 11
    assert output.read_bytes() == expected


def test_results_appear_while_it_runs(tmp_path, source):
    partial = tmp_path / "out.jsonl.partial"
    seen = []

    def look(progress):
        if progress.stage == "run":
            assert partial.read_bytes().count(b"\n") == progress.done
            seen.append(progress.done)

    run_fake(source, tmp_path / "out.jsonl", on_progress=look)
    assert seen[-1] == 66
    assert seen == sorted(set(seen))


def test_remaining_lines_are_planned_again(tmp_path, source):
    output = tmp_path / "out.jsonl"
    stop_after(20, source, output)
    engine = FakeEngine()
    summary = run_fake(source, output, engine)
    assert summary.plan is not None
    assert summary.total - summary.resumed == len(engine.seen)
    groups = [group for group, _ in groupby(r.group for r in engine.seen if r.group is not None)]
    assert len(groups) == len(set(groups))  # each group's requests one after the other
    assert all(r.group_prefix_tokens > 0 for r in engine.seen if r.group is not None)


class KindsEngine(StoppingEngine):
    """Answers briefly to those that ask for it, and else as long as may be."""

    def finish(self, request):
        output = super().finish(request)
        output.metrics.num_output_tokens = 1 if self.is_short(request) else 20
        return output

    def is_short(self, request) -> bool:
        return bytes(token - 3 for token in request.prompt_token_ids[1:6]) == b"brief"


def test_a_continued_job_has_learnt_how_long_answers_are(tmp_path):
    kinds = ("brief: ", "whole: ")
    source = write_lines(
        tmp_path / "in.jsonl",
        [
            completion(f"{kind}{i}", f"{kind}document {i // 3} is this. {i}?", max_tokens=20)
            for i in range(12)
            for kind in kinds
        ],
    )
    first, second = (KindsEngine(many, KeyboardInterrupt()) for many in (5, 100))
    with pytest.raises(JobInterrupted):
        run_fake(source, tmp_path / "out.jsonl", first)
    assert first.is_short(first.seen[0])
    run_fake(source, tmp_path / "out.jsonl", second)
    assert [second.is_short(request) for request in second.seen[:12]] == [False] * 12


def test_ids_and_seeds_come_from_job_and_custom_id(tmp_path):
    lines = [completion("a"), completion("b"), completion("c", seed=5)]
    source = write_lines(tmp_path / "in.jsonl", lines)
    first, second = FakeEngine(), FakeEngine()
    run_fake(source, tmp_path / "1.jsonl", first)
    run_fake(source, tmp_path / "2.jsonl", second, options={"dtype": "bfloat16"})
    seeds = [sorted(request.params.seed for request in engine.seen) for engine in (first, second)]
    assert all(5 in both and len(set(both)) == 3 for both in seeds)
    assert seeds[0] != seeds[1]
    bodies = [record["response"]["body"]["id"] for record in results(tmp_path / "1.jsonl")]
    assert len(set(bodies)) == 3
    assert all(
        record["response"]["body"]["created"] == 0 for record in results(tmp_path / "1.jsonl")
    )
