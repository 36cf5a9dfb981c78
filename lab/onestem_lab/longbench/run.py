"""One example at a time: its context encoded first, then its question answered and timed."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from onestem.errors import RequestError
from onestem.llm import LLM
from onestem.pml import Import, Module, Prompt, Role, Schema
from onestem.request import SamplingParams
from onestem_lab.longbench.load import Example, passages
from onestem_lab.longbench.tasks import TASKS, Task, score

__all__ = ["Answered", "measure", "summary"]

# Positions kept free for the chat template, and for tokens that come apart where text is cut.
MARGIN = 64
MARGIN_A_MODULE = 2


@dataclass(frozen=True)
class Answered:
    """An answer, its score (0 to 1) and what it cost.

    Attributes:
        seconds: from the request to its first token; the context is stored by then, unless `off`.
    """

    example: Example
    isolation: str
    text: str
    score: float
    seconds: float
    num_prompt_tokens: int
    num_cached_tokens: int


def measure(
    llm: LLM, examples: Sequence[Example], isolation: str, *, max_tokens: int | None = None
) -> Iterator[Answered]:
    """Answers of `examples`, greedily; `max_tokens`: instead of each task's own."""
    for example in examples:
        task = TASKS[example.task]
        longest = task.max_tokens if max_tokens is None else max_tokens
        schema, prompt = prompt_of(llm, example, longest)
        llm.add_schema(schema)
        if isolation != "off":
            encode(llm, prompt, isolation)
        params = SamplingParams(temperature=0, max_tokens=longest)
        output = llm.generate_pml(prompt, params, isolation=isolation)[0]
        text, spent = output.outputs[0].text, output.metrics
        assert spent.first_token_time is not None
        yield Answered(
            example=example,
            isolation=isolation,
            text=text,
            score=score(example.task, text, example.answers, example.labels),
            seconds=spent.first_token_time - spent.arrival_time,
            num_prompt_tokens=spent.num_prompt_tokens,
            num_cached_tokens=spent.num_cached_tokens,
        )


def encode(llm: LLM, prompt: Prompt, isolation: str) -> None:
    """Compute what `prompt` imports, and keep it."""
    imports = [node for node in prompt.body if isinstance(node, Import)]
    once = SamplingParams(temperature=0, max_tokens=1)
    llm.generate_pml(Prompt(prompt.schema, imports), once, isolation=isolation)


def prompt_of(llm: LLM, example: Example, max_tokens: int) -> tuple[Schema, Prompt]:
    """The schema that holds an example's context, and the prompt that asks about it."""
    task = TASKS[example.task]
    after = task.after.replace("{input}", example.input)
    context = fitted(llm, example, task.before + after, max_tokens)
    modules = [Module(f"part-{i}", [text]) for i, text in enumerate(passages(context), 1)]
    schema = Schema(example.name, _turns(llm, task, [task.before, *modules]))
    return schema, Prompt(example.name, [*(Import(one.name) for one in modules), after])


def _turns(llm: LLM, task: Task, body: list[str | Module]) -> list[Role | Module | str]:
    assert llm.tokenizer is not None
    chat = llm.tokenizer.has_chat_template and not task.few_shot
    return [Role("user", body)] if chat else list(body)


def fitted(llm: LLM, example: Example, other: str, max_tokens: int) -> str:
    """The context, cut in its middle where the model has too few positions for all of it."""
    assert llm.tokenizer is not None
    limit = llm.engine.max_model_len
    taken = len(llm.tokenizer.encode(other, add_special_tokens=False)) + max_tokens + MARGIN
    room = limit - taken - MARGIN_A_MODULE * len(list(passages(example.context)))
    if room < 1:
        raise RequestError(
            f"{example.name}: instructions, question and answer take {taken} tokens, the limit is "
            f"{limit}: raise kv_memory or choose a model with more positions"
        )
    ids = llm.tokenizer.encode(example.context, add_special_tokens=False)
    if len(ids) <= room:
        return example.context
    first = room // 2
    kept = (ids[:first], ids[len(ids) - (room - first) :])
    return "".join(llm.tokenizer.decode(part) for part in kept)


def summary(answered: Sequence[Answered]) -> dict[str, dict[str, dict]]:
    """task -> isolation -> score (0 to 100), seconds to the first token, share of cached tokens."""
    tasks: dict[str, dict[str, list[Answered]]] = {}
    for one in answered:
        tasks.setdefault(one.example.task, {}).setdefault(one.isolation, []).append(one)
    return {
        task: {isolation: _row(task, some) for isolation, some in rows.items()}
        for task, rows in tasks.items()
    }


def _row(task: str, answered: Sequence[Answered]) -> dict[str, object]:
    seconds = [one.seconds for one in answered]
    prompt_tokens = sum(one.num_prompt_tokens for one in answered)
    return {
        "metric": TASKS[task].metric,
        "examples": len(answered),
        "score": round(100 * statistics.fmean(one.score for one in answered), 2),
        "seconds_to_first_token": {
            "median": round(statistics.median(seconds), 6),
            "mean": round(statistics.fmean(seconds), 6),
        },
        "prompt_tokens": prompt_tokens,
        "cached_share": round(sum(one.num_cached_tokens for one in answered) / prompt_tokens, 4),
    }
