"""What `onestem pml compare` does: a prompt with its modules cached, beside the same one computed
whole (Prompt Cache, section 5.6)."""

from __future__ import annotations

import secrets
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any

from onestem.cli.pml_run import answer_facts
from onestem.errors import ConfigError
from onestem.pml import CompiledPrompt, Prompt
from onestem.request import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from rich.table import Table

    from onestem.llm import LLM


def check_comparable(isolation: str, share: str) -> None:
    """Raise `ConfigError` for options under which nothing is cached."""
    if isolation == "off":
        raise ConfigError("isolation is off, which is compared anyway: give anchored or isolated")
    if share == "off":
        raise ConfigError("share is off, so that nothing is cached: compare with full or storage")


def side_by_side(
    llm: LLM, prompt: Prompt, isolation: str, params: SamplingParams, repeat: int
) -> dict[str, Any]:
    """Both answers of a prompt, and its times to the first token in seconds: medians of `repeat`
    turns. `whole` is causal attention over the same tokens at the same positions.

    Raises:
        ConfigError: KV memory does not hold the modules beside the whole prompt.
    """
    ways = {
        "cached": llm.schemas.compile(prompt, isolation),
        "whole": llm.schemas.compile(prompt, "off"),
    }
    first = params.replace(max_tokens=1, ignore_eos=True)
    times: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(repeat + 1):  # the first one computes the modules, and warms up
        for way, compiled in ways.items():
            facts = answer_facts(_answer(llm, compiled, first))
            if turn:
                _check_cached(llm, facts, compiled)
                times[way].append(facts["time_to_first_token"])
    medians = {way: median(measured) for way, measured in times.items()}
    answers = {
        way: {
            **answer_facts(_answer(llm, compiled, params)),
            "time_to_first_token": medians[way],
            "times_to_first_token": times[way],
        }
        for way, compiled in ways.items()
    }
    return {
        "schema": prompt.schema,
        "isolation": isolation,
        "speedup": medians["whole"] / medians["cached"],
        **answers,
    }


def _answer(llm: LLM, compiled: CompiledPrompt, params: SamplingParams) -> RequestOutput:
    """The answer to a prompt that finds its modules in the cache, and nothing else."""
    request = llm.pml_request(compiled, params)
    request = replace(request, cache_salt=secrets.token_hex(8), common_modules=True)
    llm.engine.requests.validate(request)
    (output,) = llm.engine.run([request])
    return output


def _check_cached(llm: LLM, facts: dict[str, Any], compiled: CompiledPrompt) -> None:
    if facts["num_cached_tokens"] != compiled.num_cached_tokens:
        raise ConfigError(
            f"KV memory holds {llm.kv_tokens} tokens, too few for the prompt's modules beside the "
            f"whole prompt of {compiled.num_tokens} tokens: raise --kv-memory"
        )


def comparison_table(name: str, facts: dict[str, Any]) -> Table:
    """Both ways beside each other, for a terminal."""
    from rich.table import Table
    from rich.text import Text

    cached, whole = facts["cached"], facts["whole"]
    table = Table(title=f"{name} ({facts['isolation']})", title_justify="left", expand=True)
    table.add_column("")
    table.add_column("modules cached", ratio=1)
    table.add_column("computed whole", ratio=1)
    faster = f" ({facts['speedup']:.1f} times as fast)"
    table.add_row("first token", _milliseconds(cached) + faster, _milliseconds(whole))
    table.add_row("prompt tokens", _tokens(cached), _tokens(whole))
    # As text: an answer is no markup, whatever brackets it has.
    table.add_row("answer", Text(cached["texts"][0]), Text(whole["texts"][0]))
    return table


def _milliseconds(facts: dict[str, Any]) -> str:
    return f"{1000 * facts['time_to_first_token']:.1f} ms"


def _tokens(facts: dict[str, Any]) -> str:
    return f"{facts['num_cached_tokens']} cached, {facts['num_computed_tokens']} computed"
