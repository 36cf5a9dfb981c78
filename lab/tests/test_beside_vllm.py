"""`onestem_lab.beside_vllm` with a stand-in for vLLM: what both are asked, and what is told."""

from __future__ import annotations

import argparse
import json

import pytest

from lab.tests.test_vllm_process import asked
from onestem.shapes import find_shape
from onestem_lab import beside_vllm, gpu_jobs
from onestem_lab.peers.vllm_model import model_settings

__all__ = ["asked"]  # a fixture


@pytest.mark.parametrize("more", [[], ["--deterministic"]])
def test_both_do_the_same_work(asked, monkeypatch, tmp_path, capsys, more):
    out = tmp_path / "out.json"
    works = ("job 2x3 20/5/3", "samples 2x3 8/3", "exam 2x4")
    arguments = [
        "beside_vllm", "--model", "shape:nothing", "--device", "cpu", "--kv-memory", "16MiB",
        "--repeats", "1", "--peer-repeats", "1", "--peer-questions", "1", "--out", str(out),
        *more, *(word for work in works for word in ("--work", work)),
    ]  # fmt: skip
    monkeypatch.setattr("sys.argv", arguments)
    beside_vllm.main()
    result = json.loads(out.read_text())
    assert [found["work"] for found in result["works"]] == list(works)
    assert all(found["against"]["vllm"] > 0 for found in result["works"])
    assert result["vllm"]["version"] == "0"
    # Without sharing it would be the last line's three times as many and more.
    job, samples, exam = (found["engines"]["bfloat16"]["runs"][0] for found in result["works"])
    assert job["processed_prompt_tokens"] == 2 * 20 + 6 * 5
    assert samples["output_tokens"] == result["works"][1]["vllm"]["runs"][0]["output_tokens"] == 18
    assert exam["computed_rows"] == exam["distinct_rows"]
    # One question, four options, each behind the whole prompt.
    told = json.loads(asked.read_text())
    assert told["settings"]["kv_cache_memory_bytes"] == 16 << 20
    assert told["invariant"] == str(len(more))
    last = told["jobs"][-1]
    assert len(last) == 4
    assert len({tuple(ids[:-1]) for ids in last}) == 1
    assert capsys.readouterr().out.count("vLLM") == 6


def test_vllm_has_the_whole_of_which_a_text_model_is_a_part(tmp_path):
    shape = find_shape("qwen3.5-9b")
    settings = model_settings(shape, tmp_path)
    assert settings == {"model": str(tmp_path), "language_model_only": True}
    whole = json.loads((tmp_path / "config.json").read_text())
    text = json.loads((shape / "config.json").read_text())
    assert whole["text_config"].items() >= text.items()
    assert whole["model_type"] == "qwen3_5"
    dense = find_shape("llama3.1-8b")
    assert model_settings(dense, tmp_path) == {"model": str(dense)}


def test_modes_of_sharing_beside_full():
    options = argparse.Namespace(quantization="fp8", share=["storage"], alone=False)
    assert list(beside_vllm.our_engines(options)) == ["fp8", "storage"]
    options.share = []
    assert list(beside_vllm.our_engines(options)) == ["fp8", "bfloat16"]
    options.alone = True
    assert list(beside_vllm.our_engines(options)) == ["fp8"]


def test_parts_are_commands(tmp_path):
    for part in gpu_jobs.PARTS:
        for tiny in (False, True):
            command = part.command(tmp_path, tiny=tiny)
            assert command[1:3] == ["-m", f"onestem_lab.{part.module}"]
            assert not any(word in gpu_jobs.TINY for word in command) or not tiny


def test_a_part_that_fails_is_told(tmp_path, monkeypatch, capsys):
    bad = gpu_jobs.Part("bad", "scores", "--device nowhere", 60, "--questions 1")
    monkeypatch.setattr(gpu_jobs, "PARTS", (bad,))
    monkeypatch.setattr("sys.argv", ["gpu_jobs", "--tiny", "--out", str(tmp_path)])
    assert gpu_jobs.main() == 1
    assert "failed: " in capsys.readouterr().out
    assert "device is 'nowhere'" in (tmp_path / "bad.log").read_text()
