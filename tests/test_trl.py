"""Rollouts for TRL's own trainer. Skipped where TRL is not installed."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
import transformers

from onestem import LLM
from onestem.errors import ConfigError, UnsupportedError
from onestem.rollouts.trl import Rollouts
from tests.engine.harness import TOLERANCE
from tests.engine.tiny_tokenizers import make_byte_level_tokenizer
from tests.models.tiny import VOCAB_SIZE, make_tiny

OPTIONS = {"dtype": "float32", "kv_memory": "8MiB", "seed": 0, "device": "cpu"}
TEMPLATE = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = make_tiny("qwen2", tmp_path_factory.mktemp("trl") / "tiny")
    make_byte_level_tokenizer(path, vocab_size=VOCAB_SIZE)
    return path


@pytest.fixture(scope="module")
def trl():
    pytest.importorskip("trl")
    import trl

    return trl


def logprobs_of(model, prompt, completion, temperature):
    """Of each token of a completion, by the trainer's model."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *completion]])).logits[0].float() / temperature
    chosen = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    return chosen.gather(1, torch.tensor(completion)[:, None])[:, 0].tolist()


def stand_in(model, **changes):
    """What a rollout function reads of a trainer."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    values = {
        "state": SimpleNamespace(global_step=0),
        "accelerator": SimpleNamespace(unwrap_model=lambda one: one),
        "model": transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        "processing_class": tokenizer,
        "tools": None,
        "chat_template": TEMPLATE,
        "chat_template_kwargs": {},
        "max_completion_length": 7,
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": None,
        "repetition_penalty": 1.0,
        "args": SimpleNamespace(generation_kwargs=None),
    }
    return SimpleNamespace(**{**values, **changes})


def test_rollouts_are_the_trainers_model(model):
    """Its weights at that step, its tokens, its log-probabilities to 1e-4; a group is computed
    once."""
    trainer = stand_in(model)
    chat = [{"role": "user", "content": "hi"}]
    prompts = ["one prompt"] * 4 + ["another prompt"] * 2
    with LLM(model, logprobs_mode="processed_logprobs", **OPTIONS) as llm:
        rollouts = Rollouts(llm)
        for step in range(3):
            trainer.state.global_step = step
            with torch.no_grad():
                for parameter in trainer.model.parameters():
                    parameter.mul_(1 + 0.1 * step)
            llm.engine.reset_stats()
            for asked in (prompts, [chat, chat]):
                found = rollouts(asked, trainer)
                rows = list(zip(*(found[name] for name in found), strict=True))
                assert list(found) == ["prompt_ids", "completion_ids", "logprobs"]
                assert len(rows) == len(asked)
                for prompt, completion, logprobs in rows:
                    want = logprobs_of(trainer.model, prompt, completion, 0.7)
                    assert logprobs == pytest.approx(want, abs=TOLERANCE)
            assert llm.weights_version == step
            assert llm.engine.stats.requests == 3
        tokenizer = trainer.processing_class
        rendered = tokenizer("hi\n", add_special_tokens=False)["input_ids"]
        assert [row[0] for row in rows] == [rendered] * 2
        trainer.args.generation_kwargs = {"max_tokens": 2, "ignore_eos": True, "stop_token_ids": []}
        assert {len(ids) for ids in rollouts(prompts, trainer)["completion_ids"]} == {2}
        trainer.state.global_step += 1
        trainer.model.peft_config = {}
        with pytest.raises(UnsupportedError, match="train without peft_config"):
            rollouts(prompts, trainer)
    with LLM(model, **OPTIONS) as llm, pytest.raises(ConfigError, match="expected processed_logpr"):
        Rollouts(llm)


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_that_is_not_changed(trl, model, tmp_path, monkeypatch):
    """Each call has the weights of its step, in an unpatched `GRPOTrainer`."""
    from datasets import Dataset

    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    calls = []
    with LLM(model, logprobs_mode="processed_logprobs", **OPTIONS) as llm:
        rollouts = Rollouts(llm)

        def checked(prompts, trainer):
            found = rollouts(prompts, trainer)
            trained = trainer.accelerator.unwrap_model(trainer.model)
            for row in zip(found["prompt_ids"], found["completion_ids"], found["logprobs"]):
                want = logprobs_of(trained, row[0], row[1], trainer.temperature)
                assert row[2] == pytest.approx(want, abs=TOLERANCE)
            calls.append((trainer.state.global_step, llm.weights_version, len(prompts)))
            return found

        trainer = trl.GRPOTrainer(
            model=transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            processing_class=transformers.AutoTokenizer.from_pretrained(model),
            reward_funcs=lambda completions, **_: [float(len(set(one))) for one in completions],
            train_dataset=Dataset.from_list([{"prompt": text} for text in ("ab", "abc", "b")]),
            rollout_func=checked,
            args=trl.GRPOConfig(
                output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=4,
                num_generations=4, max_completion_length=6, temperature=0.9, learning_rate=1e-3,
                report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True, bf16=False,
                logging_steps=1, seed=0,
            ),
        )  # fmt: skip
        trainer.train()
    assert calls == [(step, step, 4) for step in range(3)]
    assert json.dumps(trainer.state.log_history)


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore")
def test_the_reward_rises(trl):
    """The benchmark's short form: the embedded model learns to write digits."""
    from onestem_lab.grpo import train

    found = train(steps=6, batch=32, length=8, rate=2e-3)
    assert len(found["rewards"]) == 6
    assert found["rewards"][-1] > 1.5 * found["rewards"][0]
    assert found["computed_prompt_tokens"] < found["prompt_tokens"] / 4
