"""The command line, as a person types it."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from onestem.build import pick_device, pick_dtype
from onestem.cli import main, options
from onestem.cli.app import app
from onestem.cli.bench import LAB
from onestem.engine.text.tokenizer import Tokenizer
from onestem.errors import ConfigError, JobError, OnestemError
from onestem.jobs import run_file
from onestem.llm import LLM
from onestem.models.config import ModelConfig
from onestem.models.families import FAMILIES
from onestem.ops.cpu import is_built
from tests.forked import ENVIRONMENT, Command, onestem
from tests.models.quantised import FORMATS, quantised

CPU = {**os.environ, **ENVIRONMENT}


def typed(*args, code: int = 0) -> subprocess.CompletedProcess[str]:
    """A new interpreter, as at a prompt; `onestem` is the same without its imports."""
    done = subprocess.run(
        [sys.executable, "-m", "onestem", *map(str, args)],
        capture_output=True, text=True, env=CPU, check=False,
    )  # fmt: skip
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
    text = typed("--help").stdout
    below = {"bench": "batch", "pml": "show"}
    for verb in ("batch", "chat", "generate", "plan", "score", "models", "env", "bench", "pml"):
        assert verb in text
        words = [verb, *([below[verb]] if verb in below else [])]
        assert "--help" in onestem(*words, "--help").stdout


def test_a_full_disk_behind_the_output_is_one_line(monkeypatch, capsys):
    def fill():
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("onestem.cli.app.app", fill)
    with pytest.raises(SystemExit, match="2"):
        main()
    assert capsys.readouterr().err == (
        "onestem: the output cannot be written: No space left on device\n"
    )


def test_generate(model):
    out = typed(
        "generate", "--model", model, "hello", "-n", 3, "--max-tokens", 4, "--seed", 1, "--json"
    ).stdout
    answer = json.loads(out)
    assert len(answer["outputs"]) == 3
    assert all(len(o["token_ids"]) <= 4 for o in answer["outputs"])
    assert (
        len(onestem("generate", "--model", model, "a", "b", "--max-tokens", 1).stdout.splitlines())
        >= 2
    )


def test_an_answer_that_ends_with_an_error_is_said(model, monkeypatch):
    with LLM(model, dtype="float32", kv_memory="4MiB", device="cpu") as llm:
        logits = llm.decoder.logits
        monkeypatch.setattr(llm.decoder, "logits", lambda hidden: logits(hidden) * float("nan"))
        monkeypatch.setattr(options, "load_llm", lambda _: llm)
        done = CliRunner().invoke(app, ["generate", "a", "b", "--raw", "--json"])
    assert isinstance(done.exception, OnestemError)
    assert str(done.exception).startswith("prompt 1: the logits are not finite")
    reasons = [json.loads(line)["outputs"][0]["finish_reason"] for line in done.stdout.splitlines()]
    assert reasons == ["error", "error"]


def test_a_prompt_may_come_through_a_pipe(model):
    def piped(text: bytes, *more: str) -> subprocess.CompletedProcess[bytes]:
        command = ["-m", "onestem", "generate", "--model", str(model), "--max-tokens", "1", *more]
        return subprocess.run(
            [sys.executable, *command, "--json"], input=text, capture_output=True, env=CPU
        )

    assert json.loads(piped("two\n模\n".encode()).stdout)["prompt"] == "two\n模"
    assert json.loads(piped(b"not this", "this").stdout)["prompt"] == "this"
    nothing, bad = piped(b" \n"), piped(b"\xff")
    assert (nothing.returncode, nothing.stderr) == (
        2,
        b"onestem: there is no prompt: nothing came through the pipe\n",
    )
    assert bad.returncode == 2
    assert bad.stderr.startswith(b"onestem: the prompt is not UTF-8: ")
    assert bad.stderr.count(b"\n") == 1


def test_errors_are_one_line_and_exit_2(model, tmp_path):
    for args, message in (
        (("generate", "--model", tmp_path / "none", "x"), "no directory"),
        (("generate", "--model", model, "x", "--temperature", "-1"), "temperature is -1.0"),
        (("generate", "--model", model, "x", "--raw", "--system", "y"), "--raw has none"),
        (("batch", tmp_path / "none.jsonl", "-o", tmp_path / "o", "--model", model), "is no file"),
        (("plan", tmp_path / "none.jsonl", "--model", model), "is no file"),
        (("bench", "batch", "--model", model, "--degree", "2,2"), "degree has 2 levels, prefix 1"),
        (("bench", "batch", "--model", model, "--input-order", "odd"), "input_order is 'odd'"),
        (("bench", "batch", "--model", model, "--order", "odd"), "order is 'odd'"),
        (("plan", tmp_path / "none.jsonl", "--quantization", "int8"), "is no file"),
        (("plan", tmp_path / "none.jsonl", "--levels", "two"), "levels is 'two', expected"),
        (("bench", "batch", "--max-num-seqs", 0), "max_num_seqs is 0, expected"),
        (("bench", "batch", "--groups", 10**9, "--degree", "1"), "limit is 10000000: lower"),
        (("bench", "batch", "--model", model, "--prefix", 10**7), "max_model_len is"),
        (("bench", "serve", "--rate", 0), "rate is 0.0, expected 1e-06 to 1,000,000"),
        (("bench", "serve", "--rate", "nan"), "rate is nan, expected 1e-06 to 1,000,000"),
        (("bench", "serve", "--rate", 1e6, "--duration", 2), "is more than 1,000,000 requests"),
        (("bench", "serve", "--requests", 0), "requests is 0, expected 1 to 1,000,000"),
        (
            ("bench", "serve", "--duration", "inf"),
            "duration is inf, expected above 0, up to 1,000,000",
        ),
        (("bench", "serve", "--timeout", -1), "timeout is -1.0, expected above 0, up to"),
        (("bench", "serve", "--limit", 0), "limit is 0.0, expected above 0, up to"),
        (("bench", "serve", "--scale", "nan"), "scale is nan, expected above 0, up to 1000"),
        (("bench", "serve", "--resolution", "nan"), "resolution is nan, expected a number above 0"),
        (("bench", "serve", "--vocab-size", 0), "vocab-size is 0, expected at least 302"),
        (("bench", "serve", "--log", tmp_path), "expected a file in a folder that exists"),
        (("bench", "paper", "cache-table2", "--out", __file__), "choose another folder"),
        (("bench", "batch", "--model", model, "--trace", tmp_path), "Is a directory"),
        (("bench", "batch", "--model", model, "--output", "x"), "output is 'x': expected a number"),
        (("bench", "attention", "--degree", "2,0"), "degree is 2,0, expected at least 1"),
        (("bench", "attention", "--groups", 0), "groups is 0, expected at least 1"),
        (("bench", "attention", "--prefix", -1), "prefix is -1, expected at least 0"),
        (("bench", "attention", "--suffix", 0), "suffix is 0, expected at least 1"),
        (("bench", "attention", "--case", "all", "--prefix", 9), "--prefix has no effect"),
        (("generate", "--model", "shape:llama-7b", "x"), "did you mean llama2-7b?"),
        (("generate", "--model", "shape:nothing", "x"), "has none: give token ids"),
    ):
        done = onestem(*args, code=2)
        assert done.stdout == ""
        assert message in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


def test_env():
    facts = json.loads(onestem("env", "--json").stdout)
    assert facts["attention chosen"]["cpu"] == ("cpu" if is_built() else "torch")
    assert set(facts["linear layers on the cpu"]) == {"float32", "bfloat16", "float16"}
    assert set(facts["quantised weights on cpu"]) == {"fp8", "int8", "int4"}
    assert facts["versions"]["torch"]
    assert facts["memory of this machine"]["answer_memory auto"].endswith(" GiB")


def test_models_lists_families():
    known = json.loads(onestem("models", "--json").stdout)["families"]
    assert tuple(known) == tuple(FAMILIES)
    assert "Gemma 3 270M and 1B" in onestem("models").stdout


def test_models_says_what_a_directory_needs_before_it_is_loaded(model, tmp_path):
    found = json.loads(onestem("models", model, "--kv-memory", "1MiB", "--json").stdout)
    with LLM(model, device="cpu", kv_memory="1MiB") as llm:
        assert found["weight_bytes"] == llm.decoder.weight_bytes
        assert found["file_bytes"] == (model / "model.safetensors").stat().st_size
        assert found["parameters"] == llm.decoder.num_parameters
        assert found["kv_bytes_per_token"] == llm.decoder.kv_bytes_per_token
        assert (found["kv_tokens"], found["max_model_len"]) == (
            llm.kv_tokens,
            llm.engine.max_model_len,
        )
    assert found["problem"] is None
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = onestem("models", tmp_path, "--kv-memory", "1MiB", code=1)
    assert "has neither model.safetensors" in done.stdout
    assert f"tokens in KV memory: {found['kv_tokens']}" in done.stdout
    shutil.copytree(model, tmp_path, dirs_exist_ok=True)
    for name in ("generation_config.json", "tokenizer.json"):
        before = (tmp_path / name).read_text()
        (tmp_path / name).write_text('{"temperature": -1}')
        with pytest.raises(ConfigError) as refused:
            LLM(tmp_path, device="cpu", kv_memory="1MiB")
        assert f"problem: {refused.value}" in onestem("models", tmp_path, code=1).stdout
        (tmp_path / name).write_text(before)
    config["architectures"] = ["DeepseekV3ForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = onestem("models", tmp_path, code=2)
    assert "DeepseekV3ForCausalLM is not supported: it has experts and latent" in done.stderr
    assert "nearest family that works is LlamaForCausalLM" in done.stderr


def perplexity_of(path, text=None):
    """Of a text's first 4,000 tokens (None: Python's help topics), in float32."""
    from pydoc_data.topics import topics

    text = text or "\n\n".join(topics[name] for name in sorted(topics))
    with LLM(path, dtype="float32", device="cpu", kv_memory="16MiB") as llm:
        ids = llm.tokenizer.encode(text[:32_000], add_special_tokens=False)
        values = llm.score([ids[:4000]])[0].token_logprobs
    return math.exp(-sum(values) / len(values))


def test_models_tells_what_a_format_adds(model, tmp_path):
    path = quantised(model, tmp_path / "awq", FORMATS["awq"])
    found = json.loads(onestem("models", path, "--check", "--original", model, "--json").stdout)
    assert found["quantization"] == "awq"
    assert [one["module"] for one in found["errors"]][-1] == "model.layers.1.mlp.down_proj"
    assert all(0.01 < one["weights"] < 0.2 for one in found["errors"])
    rounded, exact = found["perplexity"]["loaded"], found["perplexity"]["float32"]
    assert exact == pytest.approx(perplexity_of(model), rel=1e-4)
    assert rounded == pytest.approx(perplexity_of(path), rel=1e-4) != exact
    assert found["perplexity"]["verdict"].startswith(f"{rounded / exact - 1:+.1%}, ")
    alone = onestem("models", path, "--check").stdout.splitlines()[-1]
    assert alone.endswith("--original DIR compares with the weights that were quantised")
    *lines, last = onestem("models", model, "--quantization", "int8", "--check").stdout.splitlines()
    assert "quantised: int8" in lines
    assert f", in float32 {exact:.2f} (4000 tokens of Python's help topics): " in last
    told = [line for line in lines if "int8 per channel" in line and "weights off by 0." in line]
    assert len(told) == 7 * 2 + 1  # two layers, and the head
    assert told[-1].startswith("lm_head:")
    done = onestem("models", path, "--quantization", "int8", "--check", code=1)
    assert "problem: quantization is int8, and the weights" in done.stdout
    assert "are not quantised" in onestem("models", model, "--original", model, code=2).stderr


def test_plain_weights_pass_a_check(model, tmp_path):
    """Nothing is quantised: that is no failure."""
    text = tmp_path / "text"
    text.write_text("a text of ours " * 9)
    *_, told, last = onestem("models", model, "--text", text, "--device", "cpu").stdout.splitlines()
    assert told == (
        "check: nothing is quantised, so there are no errors of a format; the files are complete"
    )
    found = perplexity_of(model, text.read_text())
    assert last.startswith(f"perplexity: {found:.2f} (")
    assert last.endswith(f"tokens of {text}): these are its weights in float32")
    text.write_bytes(b"\xff")
    assert (
        "cannot be read: it is not UTF-8" in onestem("models", model, "--text", text, code=2).stderr
    )
    (tmp_path / "no-words").mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(model / name, tmp_path / "no-words")
    found = json.loads(onestem("models", tmp_path / "no-words", "--check", "--json").stdout)
    assert found["errors"] == []
    assert found["perplexity"] is None


def plain_lines(count: int) -> list[dict]:
    """What people write who do not know the format."""
    return [{"id": i, "prompt": "a"} for i in range(count)]


NO_CUSTOM_ID = (
    "line 1: the line has no custom_id, expected "
    '{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": ...}}'
    "; or onestem batch --prompt '{prompt}' --id id reads such rows"
)


def test_plan_reports_before_anything_is_computed(model, tmp_path):
    source = tmp_path / "in.jsonl"
    write_job(source, [*job_lines(12), {"custom_id": "bad"}])
    done = onestem("plan", source, "--model", model, "--json", "--quiet", "--no-predict", code=1)
    assert done.stderr == f"onestem: {source}, line 13: method is None, expected POST\n"
    report = json.loads(done.stdout)
    assert report["requests"] == 12
    assert report["failed_lines"] == 1
    assert report["saving_all_levels"] >= report["saving_one_level"] > 0.5
    for name in ("groups", "logical_prompt_tokens", "planning_seconds"):
        assert name in report
    write_job(source, job_lines(12))
    done = onestem("plan", source, "--model", model, "--no-predict")
    assert "12 requests" in done.stdout
    assert "reading (bytes)" in done.stderr
    assert f"this plan (all) computes {report['processed_tokens']} of them" in done.stdout
    for levels, saving in (("one", report["saving_one_level"]), ("none", 0)):
        done = onestem("plan", source, "--model", model, "--levels", levels, "--json", "-q")
        assert json.loads(done.stdout)["saving"] == saving


def test_answers_end_with_the_model_whatever_max_tokens_says(model, tmp_path):
    """The plan is that of the largest `max_tokens` that the model takes."""
    flags = ("--model", model, "--max-model-len", 128, "--device", "h200", "--dtype", "bfloat16")
    reports = []
    for count in (128, 10**9):
        write_job(source := tmp_path / "in.jsonl", job_lines(4, max_tokens=count))
        done = onestem("plan", source, *flags, "-q", "--json")
        reports.append(json.loads(done.stdout)["forecast"]["full"])
    assert reports[0] == reports[1]
    assert 128 <= reports[0]["peak_kv_tokens"] <= 4 * 128


def test_a_trace_takes_no_file_of_its_job(model, tmp_path):
    write_job(source := tmp_path / "in.jsonl", job_lines(2))
    text, kept = source.read_bytes(), tmp_path / "kept.jsonl"
    kept.write_text("of before\n")
    output = tmp_path / "out.jsonl"
    job = ("batch", source, "-o", output, "--model", model, "-q", "--trace")
    refused = onestem(*job, source, code=2).stderr
    assert "in.jsonl is the job's input: choose another file" in refused
    assert "out.jsonl is the job's output" in onestem(*job, output, code=2).stderr
    partial = onestem(*job, tmp_path / "out.jsonl.partial", code=2).stderr
    assert "out.jsonl.partial is the job's unfinished output" in partial
    assert "is the job's work folder" in onestem(*job, tmp_path / "out.jsonl.work", code=2).stderr
    (link := tmp_path / "link.jsonl").hardlink_to(source)
    assert "link.jsonl is the job's input" in onestem(*job, link, code=2).stderr
    assert source.read_bytes() == text
    onestem(*job, tmp_path / "steps.jsonl")
    onestem(*job, kept)  # it is complete: no step is computed
    assert kept.read_text() == "of before\n"
    with LLM(model, trace=source) as llm, pytest.raises(JobError, match="is the job's input"):
        run_file(llm, source, output)


def test_a_trace_takes_no_file_of_lengths(model, tmp_path):
    (lengths := tmp_path / "lengths").write_text("3\n")
    (link := tmp_path / "link").hardlink_to(lengths)
    for option in ("--prefix", "--distinct", "--output"):
        args = ("bench", "batch", "--model", model, option, f"file:{lengths}", "--trace", link)
        refused = onestem(*args, code=2).stderr
        told = f"trace {link} is the file of lengths of {option[2:]}: choose another file"
        assert refused == f"onestem: {told}\n"
    assert lengths.read_text() == "3\n"


def test_a_trace_is_not_written_over_the_options(model, tmp_path):
    (config := tmp_path / "onestem.toml").write_text("seed = 3\n")
    args = ("bench", "batch", "--model", model, "--config", config, "--trace", config)
    told = f"onestem: trace {config} is the file of options: choose another file\n"
    assert onestem(*args, code=2).stderr == told
    assert config.read_text() == "seed = 3\n"


def test_a_seed_gives_a_job_other_answers(model, tmp_path):
    lines = job_lines(6)[1::2]  # of temperature 1
    write_job(source := tmp_path / "in.jsonl", lines)
    job = ("batch", source, "--model", model, "-q")

    def answers(name: str, *flags: object) -> list:
        onestem(*job, "-o", tmp_path / name, *flags)
        records = map(json.loads, (tmp_path / name).read_text().splitlines())
        return [one["response"]["body"]["choices"] for one in records]

    first = answers("a.jsonl", "--seed", "5")
    assert answers("b.jsonl", "--seed", "5") == first
    assert all(a != b for a, b in zip(answers("c.jsonl", "--seed", "6"), first, strict=True))
    assert answers("d.jsonl") == answers("e.jsonl")
    refused = onestem(*job, "-o", tmp_path / "a.jsonl", "--seed", "6", code=2).stderr
    assert "--force" in refused


def test_plan_refuses_what_batch_refuses(model, tmp_path):
    write_job(source := tmp_path / "in.jsonl", job_lines(3))
    for wrong in (["--max-model-len", "1"], ["--max-model-len", "999999"], ["--kv-memory", "1"]):
        plan = onestem("plan", source, "--model", model, *wrong, code=2)
        batch = onestem("batch", source, "-o", tmp_path / "o", "--model", model, *wrong, code=2)
        assert plan.stderr == batch.stderr != ""


def test_plan_counts_the_devices_that_hold_a_model(model, tmp_path):
    write_job(source := tmp_path / "in.jsonl", job_lines(3))
    args = ("plan", source, "--model", model, "--kv-memory", "1MiB", "--tensor-parallel-size", "2")
    assert "rates are known of one device alone: give --no-predict" in onestem(*args, code=2).stderr
    one, two = (
        json.loads(onestem(*args[:count], "--no-predict", "--json", "--quiet").stdout)
        for count in (-2, len(args))
    )
    assert two["kv_bytes_per_token"] * 2 == one["kv_bytes_per_token"]
    assert two["kv_memory_tokens"] == one["kv_memory_tokens"] * 2


def test_plan_predicts_for_a_device_that_is_not_here(model, tmp_path):
    write_job(source := tmp_path / "in.jsonl", job_lines(12, max_tokens=7))
    args = ("plan", source, "--model", model, "--device", "h200", "--quiet")
    assert "give --dtype bfloat16" in onestem(*args, code=2).stderr
    args += ("--dtype", "bfloat16")
    report = json.loads(onestem(*args, "--json").stdout)
    found = report["forecast"]
    assert found["device"] == "NVIDIA H200"
    assert report["open_ended"] == {"requests": 0, "most_tokens": 0}
    computed = found["full"]["computed_prompt_tokens"]
    assert computed == found["storage"]["computed_prompt_tokens"]
    assert computed == report["processed_tokens_all_levels"]
    assert found["off"]["computed_prompt_tokens"] == report["logical_prompt_tokens"]
    assert found["full"]["rows"] == computed + 12 * 6
    shown = onestem(*args).stdout
    seconds, tokens = found["full"]["seconds"], found["full"]["peak_kv_tokens"]
    assert (
        f"  sharing: {seconds:.1f} s, {computed} prompt tokens computed, "
        f"maximum {tokens} tokens in KV memory\n"
    ) in shown
    wrong = onestem("plan", source, "--model", model, "--device", "cpu:1", code=2)
    assert "device is 'cpu:1', expected auto, cpu, cuda or cuda:N" in wrong.stderr
    wrong = onestem("plan", source, "--model", model, "--device", "h300", code=2)
    assert "h300" in wrong.stderr
    assert "h200" in wrong.stderr
    batch = ("batch", source, "-o", tmp_path / "o", "--model", model, "--device", "h200")
    assert "device is 'h200'" in onestem(*batch, code=2).stderr


def test_plan_shows_what_the_largest_groups_share(model, tmp_path):
    source = tmp_path / "in.jsonl"
    head = "\x1b[2J two\nlines, and many more words than anybody wants to see in a table."
    lines = job_lines(5)
    for i, line in enumerate(lines):
        line["body"]["prompt"] = f"{head}{i}" if i < 3 else f"same{i}"
    write_job(source, lines)
    done = onestem("plan", source, "--model", model, "--quiet", "--json", "--no-predict")
    assert done.stderr == ""
    large, small = json.loads(done.stdout)["largest_groups"]
    tokenizer = Tokenizer.from_directory(model)
    config = ModelConfig.from_directory(model)
    kv_bytes = config.kv_values_per_token * pick_dtype("auto", config, pick_device("cpu")).itemsize
    tokens = len(tokenizer.encode(head))
    assert large == {
        "requests": 3,
        "prefix_tokens": tokens,
        "kv_bytes": tokens * kv_bytes,
        "text": head[:59] + "…",
    }
    assert (small["requests"], small["text"]) == (2, "same")
    shown = onestem("plan", source, "--model", model, "--quiet", "--no-predict").stdout
    mebibytes = f"{large['kv_bytes'] / 2**20:.2f} MiB of KV memory"
    text = r"'\x1b[2J two\nlines, and many more words than anybody wants to s…'"
    assert f"  3 requests share {tokens} tokens ({mebibytes}): {text}\n" in shown


def test_rows_of_a_table_are_planned_answered_and_scored(model, tmp_path):
    source, page, output = tmp_path / "in.csv", tmp_path / "plan.html", tmp_path / "out.jsonl"
    document = "a document that is long enough to be worth its place in front of all else"
    rows = [f"{i},{i % 2} {document},{['yes', 'no'][i % 3 == 0]}" for i in range(12)]
    source.write_text("\n".join(["key,text,answer", *rows]) + "\n")
    args = (source, "--model", model, "--id", "key", "--prompt", r"Id {key}\n{text}\nAsk:", "-q")
    device = ("--device", "h200", "--dtype", "bfloat16")
    shown = onestem("plan", *args, *device, "--html", page, "--price-per-hour", "$7").stdout
    assert "costs at $7.00 an hour: $0.00" in shown
    assert "  now:    key | text | “Ask:”\n  better: text | key | “Ask:”\n" in shown
    assert "Another order of the fields would save" in page.read_text()
    onestem("batch", *args, "-o", output, "--body", '{"max_tokens": 2}')
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["custom_id"] for line in lines] == [str(i) for i in range(12)]
    assert "give --completions or --text" in onestem("score", *args, "-o", page, code=2).stderr
    scores = tmp_path / "scores.jsonl"
    onestem("score", *args, "-o", scores, "--completions", "{answer}")
    assert len(json.loads(scores.read_text().splitlines()[0])["response"]["body"]["data"]) == 1


@pytest.mark.parametrize("verb", ["batch", "plan"])
def test_plain_lines_are_refused(model, tmp_path, verb):
    source = tmp_path / "in.jsonl"
    write_job(source, plain_lines(300))
    output = ("-o", tmp_path / "out.jsonl") if verb == "batch" else ()
    done = onestem(verb, source, *output, "--model", model, code=2)
    assert done.stdout == ""
    assert done.stderr == (
        f"onestem: {source}, {NO_CUSTOM_ID} (0 of the first 256 lines can be answered): "
        "correct the lines, or go on with --keep-going\n"
    )
    assert list(tmp_path.iterdir()) == [source]
    # The way out that it names.
    write_job(source, plain_lines(2))
    rows = ("--prompt", "{prompt}", "--id", "id", "--model", model, "-q")
    if verb == "batch":
        onestem(verb, source, "-o", tmp_path / "out.jsonl", *rows)
    else:
        onestem(verb, source, *rows, "--no-predict")


def test_plain_lines_with_keep_going(model, tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_job(source, plain_lines(300))
    args = ("--model", model, "--keep-going", "--quiet")
    done = onestem("batch", source, "-o", output, *args, code=1)
    assert done.stderr.splitlines() == [
        f"onestem: {source}, {NO_CUSTOM_ID} (each such line has its reason in {output})",
        f"{output}: complete: 300 lines, 300 failed",
    ]
    done = onestem("plan", source, *args, "--no-predict", code=1)
    assert done.stderr == f"onestem: {source}, {NO_CUSTOM_ID}\n"
    assert "300 lines that cannot be answered" in done.stdout


def test_bench_compares_sharing_with_none(model, tmp_path):
    trace = tmp_path / "trace.jsonl"
    args = (
        "bench", model, "--groups", 2, "--prefix", "30,11", "--degree", "3,2", "--distinct", 5,
        "--output", 4, "--dtype", "float32", "--device", "cpu", "--kv-memory", "1MiB",
    )  # fmt: skip
    found = json.loads(onestem(*args, "--trace", trace, "--json").stdout)
    assert list(found) == ["model", "full", "off"]
    assert found["model"] == str(model)
    full, off = found["full"], found["off"]
    assert full["tokens_sha256"] == off["tokens_sha256"]
    assert full["processed_prompt_tokens"] == 2 * (30 + 3 * 11 + 6 * 5)
    assert off["processed_prompt_tokens"] == 12 * 46
    steps = list(map(json.loads, trace.read_text().splitlines()))
    assert sum(one["prefix"] + one["distinct"] for one in steps) == full["processed_prompt_tokens"]
    table = onestem(*args, "--share", "storage").stdout
    assert re.search(r"^storage gives [\d.]+ times the requests per second of off$", table, re.M)
    alone = onestem(*args, "--share", "off").stdout
    assert "times" not in alone
    assert re.search(r"^off +processed_prompt_tokens +552$", alone, re.M)


def test_verbs_of_the_laboratory_say_how_to_get_it(monkeypatch):
    monkeypatch.setattr("onestem.cli.bench._added", dict)
    for verb in LAB:
        result = CliRunner().invoke(app, ["bench", verb, "--device", "cpu"])
        assert str(result.exception) == (
            f"onestem bench {verb} is of onestem-lab, which is not installed: "
            "pip install ./lab in a clone"
        )
    listed = CliRunner().invoke(app, ["bench", "--help"]).output
    assert "attention" not in listed
    mistyped = CliRunner().invoke(app, ["bench", "atention", "--device", "cpu"])
    assert str(mistyped.exception) == (
        "'atention' is no verb of onestem bench and no model: give one of job, attention, batch, "
        "paper, pml, serve, tune, or a model's directory, owner/name, shape:NAME or embedded"
    )
    moved = CliRunner().invoke(app, ["tune"])
    assert "`onestem bench tune`" in str(moved.exception)
    assert "pip install ./lab" in str(moved.exception)


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
                onestem(*args, "--share", share, "--input-order", order).stdout
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


def test_bench_batch_draws_lengths_and_makes_up_a_shape():
    result = json.loads(
        onestem(
            "bench", "batch", "--model", "shape:nothing", "--groups", 2, "--degree", 6,
            "--prefix", "uniform:10..40", "--distinct", "poisson:5", "--output", "uniform:1..9",
            "--device", "cpu", "--kv-memory", "1MiB", "--json",
        ).stdout
    )  # fmt: skip
    drawn = result["drawn"]
    assert result["model"] == "shape:nothing"
    assert (result["distinct"], result["output"]) == ("poisson:5", "uniform:1..9")
    assert result["output_tokens"] == drawn["output_tokens"] > 12
    assert result["processed_prompt_tokens"] == drawn["prefix_tokens"] + drawn["distinct_tokens"]


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


def test_killed_several_times_it_goes_on(model, tmp_path):
    """kill -9 while answers come; the final file is that of an uninterrupted run."""
    write_job(tmp_path / "in.jsonl", job_lines(60, max_tokens=24))
    # The model's name is part of what seeds come from: the same in every run of this test.
    args = ("--model", model.name, "--dtype", "float32", "--max-step-tokens", 32,
            "--kv-memory", "200KiB", "-q")  # fmt: skip
    output, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    job = ("batch", tmp_path / "in.jsonl", "-o", output, *args)
    whole = ("batch", tmp_path / "in.jsonl", "-o", tmp_path / "whole.jsonl", *args)
    onestem(*whole, folder=model.parent)
    kept: list[bytes] = []
    for results in (1, 12, 30):
        killed = Command(*job, folder=model.parent, signal_after=(results, signal.SIGKILL))
        assert killed.wait().returncode == -signal.SIGKILL
        now = partial.read_bytes().split(b"\n")[:-1]
        # What was finished before stays as it was: nothing is computed twice.
        assert now[: len(kept)] == kept
        assert len(now) == len(kept) + results
        kept = now
    assert "43 lines were done before" in onestem(*job, folder=model.parent).stderr
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl", "whole.jsonl"]


def test_scores_go_on_after_a_kill(model, tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts = [f"All of these are about one document. {i}?" for i in range(12)]
    asked = [{"prompt": prompt, "completions": [" A", " B"]} for prompt in prompts]
    lines = [*asked, {"text": "A whole text."}, {"text": ""}]
    write_job(source, [{"custom_id": str(i), **line} for i, line in enumerate(lines)])
    job = ("score", source, "-o", output, "--model", model, "--dtype", "float32",
           "--device", "cpu", "--kv-memory", "1MiB", "-q")  # fmt: skip
    killed = Command(*job, signal_after=(5, signal.SIGKILL))
    assert killed.wait().returncode == -signal.SIGKILL
    done = onestem(*job, code=1)
    assert "5 lines were done before" in done.stderr
    assert done.stderr.strip().splitlines()[-1].endswith("14 lines, 1 failed")
    *found, bad = [json.loads(line) for line in output.read_text().splitlines()]
    with LLM(model, dtype="float32", device="cpu", kv_memory="1MiB") as llm:
        wanted = [*llm.score(prompts, [[" A", " B"]] * 12), llm.score(["A whole text."])]
    for line, scores in zip(found, wanted, strict=True):
        (data,) = line["response"]["body"]["data"]
        for one, score in zip(data["scores"], scores, strict=True):
            assert tuple(one["token_ids"]) == score.token_ids
            assert one["token_logprobs"] == pytest.approx(score.token_logprobs, rel=1e-6, abs=1e-5)
    assert "text is empty" in bad["error"]["message"]


def test_ctrl_c_says_how_to_go_on(model, tmp_path):
    write_job(tmp_path / "in.jsonl", job_lines(60, max_tokens=24))
    args = ("batch", tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl", "--model", model, "-q",
            "--max-step-tokens", 32, "--kv-memory", "200KiB")  # fmt: skip
    done = Command(*args, signal_after=(20, signal.SIGINT)).wait()
    assert done.returncode == 130
    assert "20 of 60 lines are done" in done.stderr
    assert "the same command goes on" in done.stderr
    assert "Traceback" not in done.stderr
    assert "20 lines were done before" in onestem(*args).stderr
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 60


TWICE = """
import os, signal, sys, threading
from onestem.cli import app

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)

def while_it_ends():  # the interpreter waits for this thread
    threading.main_thread().join()
    while not threading.Event().wait(0.01):  # one that comes before the wait begins is not seen
        interrupt()

def command():
    if sys.argv[1] == "end":
        threading.Thread(target=while_it_ends).start()
    try:
        interrupt()
    finally:
        if sys.argv[1] == "cleanup":
            interrupt()

app.app = command
app.main()
"""


@pytest.mark.parametrize("when", ["cleanup", "end"])
def test_ctrl_c_again_ends_it_with_one_line(when):
    done = subprocess.run(
        [sys.executable, "-c", TWICE, when], capture_output=True, text=True, env=CPU, check=False
    )
    assert done.returncode == 130
    assert done.stderr == "onestem: ended at once\n"


def test_what_is_printed_is_utf_8_in_any_locale(model):
    command = ["-m", "onestem", "generate", "--model", model, "模", "--max-tokens", "1", "--json"]
    env = {**CPU, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run([sys.executable, *command], capture_output=True, env=env, check=True)
    assert json.loads(done.stdout)["prompt"] == "模"


def test_ctrl_c_while_the_command_is_imported_has_no_traceback(monkeypatch):
    class Interrupted:
        def __getattr__(self, name: str):
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "onestem.cli.app", Interrupted())
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130


def test_ctrl_c_is_the_callers_again_after_a_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["onestem", "--version"])
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit):
        main()
    assert signal.getsignal(signal.SIGINT) is before
    assert capsys.readouterr().out.startswith("onestem ")


def test_eval_without_lm_eval_is_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setattr(sys, "argv", ["onestem", "eval", "mmlu", "--model", "none"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("pip install 'onestem[eval]'")
