"""Do the runners compute what they say? Small models, ragged prompts, float32, little KV memory.

    python -m onestem_lab.peers.check --environments DIRECTORY [--engines ENGINE,...]

The settings of each peer's sweep must give Onestem's tokens. Exit code 1 if one does not. Left out:
llama.cpp's flash attention (it computes in 16 bits, and near ties fall otherwise). vLLM's steps are
kept within this job's size.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from onestem.models.config import ModelConfig
from onestem_lab.peers.cases import kv_bytes_per_token
from onestem_lab.peers.engines import Bench
from onestem_lab.peers.runners.job import Group, Job
from onestem_lab.peers.settings import ENGINES, sweep
from onestem_lab.peers.weights import write_weights

STEP_TOKENS = 512

STATES = "qwen3_5_text"  # has recurrent states; transformers alone is asked, with nothing padded

# Grouped-query heads in all, so that a mistaken order of K's rows shows; some of them tied.
COMMON: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "vocab_size": 512,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    STATES: {
        "architectures": ["Qwen3_5ForCausalLM"],
        "tie_word_embeddings": True,
        "layer_types": ["linear_attention", "full_attention"],
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    },
}
GROUPS = ((40, 5), (40, 3), (17, 4), (0, 6), (33, 1))  # prefix tokens, requests
KV_TOKENS = (100_000, 256)  # ample; and less than half of what the job has
OWN = 30
OUTPUT = 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--environments", type=Path, required=True)
    parser.add_argument("--engines", default=",".join(ENGINES[1:]))
    options = parser.parse_args()
    engines = options.engines.split(",")
    with tempfile.TemporaryDirectory() as work:
        wrong = sum(
            _differences(kind, kv_tokens, engines, options.environments, Path(work))
            for kind in MODELS
            for kv_tokens in KV_TOKENS
        )
    print("all equal" if wrong == 0 else f"{wrong} runs differ or failed")
    sys.exit(wrong > 0)


def _differences(
    kind: str, kv_tokens: int, engines: list[str], environments: Path, work: Path
) -> int:
    """Runs whose answers are not Onestem's."""
    bench = Bench(_job(kind, kv_tokens, work), environments, work, timeout=600)
    if "error" in bench.run("onestem", {}, keep=True):
        return 1
    wrong = 0
    for engine in engines if kind != STATES else {"transformers"}.intersection(engines):
        for settings in _small(sweep(engine, "float32")):
            run = bench.run(engine, settings, keep=True)
            same = run.get("agreement", {}).get("requests", 0.0)
            wrong += same < 1
            print(f"{kind}, KV of {kv_tokens}: {engine} {settings}: {100 * same:.0f}% equal")
    return wrong


def _small(settings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that compute in float32, each once, with steps of at most `STEP_TOKENS`."""
    small = []
    for one in settings:
        step = one.get("max_num_batched_tokens")
        one = one if step is None else {**one, "max_num_batched_tokens": min(step, STEP_TOKENS)}
        if one not in small and not one.get("flash_attention", False):
            small.append(one)
    return small


def _job(kind: str, kv_tokens: int, work: Path) -> Job:
    model = work / kind
    model.mkdir(exist_ok=True)
    config = {**COMMON, **MODELS[kind], "model_type": kind}
    (model / "config.json").write_text(json.dumps(config))
    write_weights(model, "float32")
    prompts, groups = _prompts(config["vocab_size"], (OWN, OWN + 1) if kind == STATES else (1, OWN))
    return Job(
        model=str(model),
        dtype="float32",
        vocab_size=config["vocab_size"],
        prompts=prompts,
        groups=groups,
        output_tokens=OUTPUT,
        kv_tokens=kv_tokens,
        kv_bytes=kv_tokens * kv_bytes_per_token(ModelConfig.from_directory(model), "float32"),
        threads=2,
        settings={},
        outputs="",
    )


def _prompts(vocab_size: int, own: tuple[int, int]) -> tuple[list[list[int]], list[Group]]:
    """Prompts of all groups, shuffled; their own parts are of `own` tokens, from and below."""
    rng = np.random.default_rng(1)
    of_group: list[int] = []
    prompts: list[list[int]] = []
    for group, (prefix_tokens, members) in enumerate(GROUPS):
        prefix = rng.integers(0, vocab_size, prefix_tokens).tolist()
        for _ in range(members):
            of_group.append(group)
            prompts.append(prefix + rng.integers(0, vocab_size, rng.integers(*own)).tolist())
    order = rng.permutation(len(prompts)).tolist()
    groups = [
        Group(prefix_tokens, tuple(at for at, i in enumerate(order) if of_group[i] == group))
        for group, (prefix_tokens, _) in enumerate(GROUPS)
    ]
    return [prompts[i] for i in order], groups


if __name__ == "__main__":
    main()
