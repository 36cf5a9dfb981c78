"""The command line, as a person types it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from onestem.ops.cpu import is_built
from tests.engine.tiny_tokenizers import make_byte_level_tokenizer
from tests.models.tiny import VOCAB_SIZE, make_tiny

COMMAND = [sys.executable, "-m", "onestem"]
CPU = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = make_tiny("llama", tmp_path_factory.mktemp("cli") / "llama")
    make_byte_level_tokenizer(path, vocab_size=VOCAB_SIZE)
    return path


def onestem(*args, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*COMMAND, *map(str, args)], capture_output=True, text=True, env=CPU, check=False
    )
    assert done.returncode == code, done.stderr
    return done


def job_lines(count: int, max_tokens: int = 12) -> list[dict]:
    head = "All of these questions are about one and the same short document. "
    return [
        {
            "custom_id": f"q{i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {
                "model": "tiny",
                "prompt": f"{head}{i % 3} Question {i}",
                "max_tokens": max_tokens,
                "temperature": i % 2,
            },
        }
        for i in range(count)
    ]


def write_job(path, lines) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_help_names_every_verb():
    text = onestem("--help").stdout
    below = {"bench": "batch", "pml": "show"}
    for verb in ("batch", "generate", "plan", "env", "bench", "pml"):
        assert verb in text
        words = [verb, *([below[verb]] if verb in below else [])]
        assert "--help" in onestem(*words, "--help").stdout


def test_generate(model):
    out = onestem(
        "generate", "--model", model, "hello", "-n", 3, "--max-tokens", 4, "--seed", 1, "--json"
    ).stdout
    answer = json.loads(out)
    assert len(answer["outputs"]) == 3
    assert all(len(o["token_ids"]) <= 4 for o in answer["outputs"])
    assert (
        len(onestem("generate", "--model", model, "a", "b", "--max-tokens", 1).stdout.splitlines())
        >= 2
    )


def test_errors_are_one_line_and_exit_2(model, tmp_path):
    for args, message in (
        (("generate", "--model", tmp_path / "none", "x"), "no directory"),
        (("generate", "--model", model, "x", "--temperature", "-1"), "temperature is -1.0"),
        (("generate", "--model", model, "x", "--system", "y"), "add --chat"),
        (("batch", tmp_path / "none.jsonl", "-o", tmp_path / "o", "--model", model), "is no file"),
        (("plan", tmp_path / "none.jsonl", "--model", model), "is no file"),
        (("bench", "batch", "--model", model, "--degree", "2,2"), "degree has 2 levels, prefix 1"),
        (("bench", "batch", "--model", model, "--order", "odd"), "order is 'odd'"),
    ):
        done = onestem(*args, code=2)
        assert done.stdout == ""
        assert message in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


def test_env():
    facts = json.loads(onestem("env", "--json").stdout)
    assert facts["attention chosen"]["cpu"] == ("cpu" if is_built() else "torch")
    assert set(facts["linear layers on the cpu"]) == {"float32", "bfloat16", "float16"}
    assert facts["versions"]["torch"]


def test_plan_reports_before_anything_is_computed(model, tmp_path):
    write_job(tmp_path / "in.jsonl", [*job_lines(12), {"custom_id": "bad"}])
    report = json.loads(onestem("plan", tmp_path / "in.jsonl", "--model", model, "--json").stdout)
    assert report["requests"] == 12
    assert report["failed_lines"] == 1
    assert report["saving_all_levels"] >= report["saving_one_level"] > 0.5
    for name in ("groups", "logical_prompt_tokens", "planning_seconds"):
        assert name in report
    assert "12 requests" in onestem("plan", tmp_path / "in.jsonl", "--model", model).stdout


def test_bench_batch_gives_equal_tokens_in_every_mode(model):
    args = (
        "bench",
        "batch",
        "--model",
        model,
        "--groups",
        2,
        "--prefix",
        "30,11",
        "--degree",
        "3,2",
        "--distinct",
        5,
        "--output",
        4,
        "--dtype",
        "float32",
        "--device",
        "cpu",
        "--kv-memory",
        "1MiB",
        "--seed",
        3,
        "--json",
    )
    results = {}
    for share in ("full", "storage", "off"):
        for order in ("shuffled", "sorted", "round-robin") if share == "full" else ("shuffled",):
            results[share, order] = json.loads(
                onestem(*args, "--share", share, "--order", order).stdout
            )
    full, storage, off = (results[share, "shuffled"] for share in ("full", "storage", "off"))
    assert full["tokens_sha256"] == storage["tokens_sha256"] == off["tokens_sha256"]
    assert full["requests"] == 12
    assert full["processed_prompt_tokens"] == 2 * (30 + 3 * 11 + 6 * 5)
    assert off["processed_prompt_tokens"] == off["logical_prompt_tokens"] == 12 * 46
    assert off["saving"] == 0
    for order in ("sorted", "round-robin"):
        assert results["full", order]["saving"] == full["saving"]
    for name in (
        "seconds",
        "requests_per_s",
        "output_tokens_per_s",
        "steps",
        "peak_kv_tokens",
        "planning_seconds",
        "host_seconds",
    ):
        assert full[name] >= 0
    ceiling = json.loads(onestem(*args, "--share", "no-attention").stdout)
    assert ceiling["processed_prompt_tokens"] == full["processed_prompt_tokens"]


def test_batch_writes_every_line_in_order(model, tmp_path):
    lines = job_lines(7)
    lines[3]["body"]["nonsense"] = 1
    write_job(tmp_path / "in.jsonl", lines)
    done = onestem(
        "batch", tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl", "--model", model, code=1
    )
    assert done.stdout == ""
    assert done.stderr.strip().splitlines()[-1].endswith("7 lines, 1 failed")
    results = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [r["custom_id"] for r in results] == [f"q{i}" for i in range(7)]
    assert "nonsense" in results[3]["error"]["message"]
    assert all(r["response"]["status_code"] == 200 for i, r in enumerate(results) if i != 3)
    again = onestem(
        "batch", tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl", "--model", model, code=1
    )
    assert "already complete" in again.stderr


def test_killed_at_any_moment_it_goes_on(model, tmp_path):
    """kill -9 while answers come, several times; the final file is that of an uninterrupted run."""
    write_job(tmp_path / "in.jsonl", job_lines(60, max_tokens=24))
    args = (
        "--model",
        str(model),
        "--dtype",
        "float32",
        "--max-step-tokens",
        "32",
        "--kv-memory",
        "200KiB",
        "-q",
    )
    onestem("batch", tmp_path / "in.jsonl", "-o", tmp_path / "whole.jsonl", *args)
    whole = (tmp_path / "whole.jsonl").read_bytes()
    output, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    kept: list[bytes] = []
    for target in (1, 12, 30):
        process = subprocess.Popen(
            [*COMMAND, "batch", str(tmp_path / "in.jsonl"), "-o", str(output), *args], env=CPU
        )
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            if partial.exists() and partial.read_bytes().count(b"\n") >= target:
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.002)
        process.wait()
        if output.exists():
            break
        now = partial.read_bytes().split(b"\n")[:-1]
        # What was finished before stays as it was: nothing is computed twice.
        assert now[: len(kept)] == kept
        kept = now
    assert len(kept) >= 12
    done = onestem("batch", tmp_path / "in.jsonl", "-o", output, *args)
    assert output.read_bytes() == whole
    assert f"{len(kept)} lines were done before" in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl", "whole.jsonl"]


def test_ctrl_c_says_how_to_go_on(model, tmp_path):
    write_job(tmp_path / "in.jsonl", job_lines(600, max_tokens=24))
    command = [
        *COMMAND,
        "batch",
        str(tmp_path / "in.jsonl"),
        "-o",
        str(tmp_path / "out.jsonl"),
        "--model",
        str(model),
        "-q",
        "--max-step-tokens",
        "32",
        "--kv-memory",
        "200KiB",
    ]
    process = subprocess.Popen(command, env=CPU, stderr=subprocess.PIPE, text=True)
    partial = tmp_path / "out.jsonl.partial"
    while not (partial.exists() and partial.stat().st_size) and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the same command goes on" in errors
    assert "Traceback" not in errors
    onestem(*command[3:])


def test_the_reference_is_what_help_says():
    """docs/cli.md is written by scripts/docs."""
    from pathlib import Path

    root = Path(__file__).parent.parent
    command = [
        sys.executable,
        "-m",
        "typer",
        "onestem.cli.app",
        "utils",
        "docs",
        "--name",
        "onestem",
    ]
    done = subprocess.run(
        [*command, "--title", "Command line"],
        capture_output=True, text=True, check=True, cwd=root, env=CPU,
    )  # fmt: skip
    assert done.stdout.strip() == (root / "docs" / "cli.md").read_text().strip(), "run scripts/docs"
