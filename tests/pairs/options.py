"""Everything that a request can ask for beside its prompt, and every two of it."""

from __future__ import annotations

from itertools import combinations
from typing import Any

# Name -> fields of `SamplingParams`, which are those of a body of /v1/completions as well.
SAMPLING: dict[str, dict[str, Any]] = {
    "n": {"n": 3},
    "stop": {"stop": ["e", "xy"]},
    "stop_in_output": {"stop": ["a"], "include_stop_str_in_output": True},
    "choices": {"choices": ["yes", "no", "neither of them"]},
    "json": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {
                "name": "one",
                "schema": {"type": "object", "properties": {"a": {"type": "boolean"}}},
            },
        }
    },
    "any_json": {"response_format": {"type": "json_object"}},
    "logprobs": {"logprobs": 3},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": -1.0},
    "repetition": {"repetition_penalty": 1.3},
    "bias": {"logit_bias": {40: 5.0, 41: -100.0}},
    "min_tokens": {"min_tokens": 3},
    "stop_token_ids": {"stop_token_ids": [40, 70]},
    "ignore_eos": {"ignore_eos": True},
    "greedy": {"temperature": 0.0},
    "hot": {"temperature": 2.0},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.1},
    "seed": {"seed": 11},
    "one_token": {"max_tokens": 1},
    "special": {"skip_special_tokens": False},
}


def merged(*names: str) -> dict[str, Any]:
    """The fields of some options together; `seed` makes every answer repeatable."""
    fields: dict[str, Any] = {"max_tokens": 6, "temperature": 1.0, "seed": 5}
    for name in names:
        fields |= SAMPLING[name]
    return fields


PAIRS = [(name,) for name in SAMPLING] + list(combinations(SAMPLING, 2))
