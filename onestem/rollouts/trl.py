"""Rollouts for TRL's `GRPOTrainer`, through its `rollout_func`: nothing of TRL is changed.

llm = LLM(path, dtype="float32", logprobs_mode="processed_logprobs")
trainer = GRPOTrainer(model=path, rollout_func=Rollouts(llm), ...)
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from onestem.errors import ConfigError, OnestemError, UnsupportedError
from onestem.llm import LLM
from onestem.request import CompletionOutput, SamplingParams


class Rollouts:
    """Answers a trainer's prompts with the weights that the trainer has at that step.

    Consecutive equal prompts, as those of a group, are one request with `n` answers: the prompt is
    computed once. Sampling follows the trainer's arguments (`temperature`, `top_p`, `top_k`,
    `min_p`, `repetition_penalty`, `max_completion_length`, and `generation_kwargs` by the names of
    `SamplingParams`).

    Args:
        llm: of the same model, with `logprobs_mode="processed_logprobs"`, as TRL needs them.

    Raises:
        ConfigError: `llm` has another `logprobs_mode`.
    """

    def __init__(self, llm: LLM) -> None:
        if llm.options.logprobs_mode != "processed_logprobs":
            raise ConfigError(
                f"logprobs_mode is {llm.options.logprobs_mode}, expected processed_logprobs: TRL "
                "compares log-probabilities after the temperature"
            )
        self.llm = llm
        self._step: int | None = None  # of the trainer, whose weights these are

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """`rollout_func` of `GRPOTrainer`.

        Args:
            prompts: texts or conversations, each repeated once per answer.

        Returns:
            `prompt_ids`, `completion_ids` and `logprobs` (of each token of the completion), in the
            prompts' order.

        Raises:
            UnsupportedError: the trainer trains adapters, not the model itself.
            OnestemError: an answer could not be computed.
        """
        self._synchronise(trainer)
        groups = [(ids, len(list(same))) for ids, same in groupby(_token_ids(prompts, trainer))]
        params = [_params(trainer).replace(n=count) for _, count in groups]
        answers = self.llm.generate([ids for ids, _ in groups], params, use_tqdm=False)
        rows = [
            (list(answer.prompt_token_ids), one) for answer in answers for one in answer.outputs
        ]
        return {
            "prompt_ids": [ids for ids, _ in rows],
            "completion_ids": [one.token_ids for _, one in rows],
            "logprobs": [_logprobs(one) for _, one in rows],
        }

    def _synchronise(self, trainer: Any) -> None:
        """Take the trainer's weights if it has made a step since the last call."""
        step = trainer.state.global_step
        if step == self._step:
            return
        model = trainer.accelerator.unwrap_model(trainer.model)
        if getattr(model, "peft_config", None) is not None:
            raise UnsupportedError(
                "rollouts take the weights of whole models: train without peft_config"
            )
        self.llm.update_weights(model.named_parameters(), version=step)
        self._step = step


def _token_ids(prompts: Sequence[Any], trainer: Any) -> list[list[int]]:
    """Ids of the prompts, tokenised as the trainer does."""
    tokenizer = trainer.processing_class
    if prompts and isinstance(prompts[0], str):
        return [list(ids) for ids in tokenizer(text=list(prompts))["input_ids"]]
    encoded = tokenizer.apply_chat_template(
        conversation=list(prompts),
        tools=trainer.tools or None,
        chat_template=trainer.chat_template,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **trainer.chat_template_kwargs,
    )
    return [list(ids) for ids in encoded["input_ids"]]


def _params(trainer: Any) -> SamplingParams:
    fields = {
        "max_tokens": trainer.max_completion_length,
        "temperature": trainer.temperature,
        "top_p": trainer.top_p,
        "top_k": trainer.top_k,
        "min_p": trainer.min_p,
        "repetition_penalty": trainer.repetition_penalty,
        "stop_token_ids": [trainer.processing_class.eos_token_id],
        "skip_special_tokens": False,
        "logprobs": 0,
    }
    return SamplingParams(**{**fields, **(trainer.args.generation_kwargs or {})})


def _logprobs(one: CompletionOutput) -> list[float]:
    if one.finish_reason == "error" or one.logprobs is None:
        raise OnestemError(f"an answer could not be computed: {one.stop_reason}")
    entries: Any = one.logprobs  # `Logprob`s, as `LLM` gives them
    return [entry[token].logprob for token, entry in zip(one.token_ids, entries, strict=True)]
