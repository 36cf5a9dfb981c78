"""GRPO with TRL's own trainer, whose rollouts Onestem computes: the reward rises.

    python -m onestem_lab.grpo --output lab/results/grpo.json

The embedded model goes on from the first words of the documents in examples/facts.jsonl, 16 tokens
at temperature 1. The reward is checked by a program: the share of the answer's characters that are
digits. TRL is needed (`pip install onestem[trl]`); two cores take minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from onestem import LLM
from onestem.models.find import find_model
from onestem.rollouts.trl import Rollouts
from onestem_lab.results import ROOT, write

WORDS = 12  # of a document


def prompts() -> list[dict[str, str]]:
    """How the documents of the demo's job begin."""
    lines = map(json.loads, (ROOT / "examples/facts.jsonl").read_text().splitlines())
    texts = (line["body"]["messages"][-1]["content"] for line in lines)
    return [{"prompt": one} for one in dict.fromkeys(" ".join(t.split()[:WORDS]) for t in texts)]


def rewards(completions: list[str], **_: Any) -> list[float]:
    """TRL's form of a reward function."""
    return [sum(map(str.isdigit, one)) / max(1, len(one)) for one in completions]


def train(
    *, steps: int, group: int = 8, batch: int = 64, length: int = 16, rate: float = 5e-4
) -> dict[str, Any]:
    """The mean reward of each step, and what the rollouts computed."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer
    from trl import __version__ as trl_version

    path = find_model("embedded")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    llm = LLM(path, dtype="float32", kv_memory="512MiB", logprobs_mode="processed_logprobs", seed=0)
    with llm, tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            processing_class=AutoTokenizer.from_pretrained(path),
            reward_funcs=rewards,
            train_dataset=Dataset.from_list(prompts()),
            rollout_func=Rollouts(llm),
            args=GRPOConfig(
                output_dir=folder,
                max_steps=steps,
                per_device_train_batch_size=batch,
                num_generations=group,
                max_completion_length=length,
                temperature=1.0,
                learning_rate=rate,
                lr_scheduler_type="constant",
                beta=0.0,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                use_cpu=True,
                bf16=False,
                seed=0,
            ),
        )
        trainer.train()
        stats = llm.engine.stats.to_dict()
    found = [line["reward"] for line in trainer.state.log_history if "reward" in line]
    return {
        "model": "embedded",
        "device": "cpu",
        "dtype": "float32",
        "trl": trl_version,
        "answers_per_step": batch,
        "group": group,
        "rate": rate,
        "rewards": found,
        "first": mean(found[: max(1, steps // 5)]),
        "last": mean(found[-max(1, steps // 5) :]),
        "prompt_tokens": stats["logical_prompt_tokens"],
        "computed_prompt_tokens": stats["processed_prompt_tokens"],
        "sampled_tokens": stats["output_tokens"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rate", type=float, default=5e-4)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    found = train(steps=args.steps, rate=args.rate)
    print(
        f"reward {found['first']:.3f} in the first fifth of {args.steps} steps, "
        f"{found['last']:.3f} in the last; {found['computed_prompt_tokens']} of "
        f"{found['prompt_tokens']} prompt tokens computed"
    )
    if args.output is not None:
        write(args.output, found)


if __name__ == "__main__":
    main()
