"""The fields of a request body: which exist, what type each has, what each turns into.

Nothing is ignored in silence: a field is honoured, or it is a pure label (`user`, `metadata`), or
it is a known field of OpenAI's with the one value that asks for nothing, or the line is refused.
`null` in a known field means that it is not there, as with OpenAI.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from onestem.errors import RequestError
from onestem.request import show

__all__ = ["Kind", "Prompt", "checked_fields", "read_prompt", "sampling_fields", "show"]

Kind = Literal["chat", "completion"]
JsonObject = dict[str, Any]
Check = Callable[[str, Any], Any]

MAX_TOKEN_ID = 2**31 - 1  # ids are spooled as int32
MAX_MESSAGES = 4096  # and parts of one; a chat template takes 0.04 ms for each
ROLES = ("system", "user", "assistant")


def _refuse(name: str, value: object, expected: str) -> RequestError:
    return RequestError(f"{name} is {show(value)}, expected {expected}")


def _integer(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise _refuse(name, value, "an integer")
    return value


def _number(name: str, value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise _refuse(name, value, "a number")
    return value


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _refuse(name, value, "true or false")
    return value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _refuse(name, value, "text")
    return value


def _object(name: str, value: Any) -> JsonObject:
    if not isinstance(value, dict):
        raise _refuse(name, value, "an object")
    found: JsonObject = value
    return found


def _texts(name: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise _refuse(name, value, "a list of texts")
    return value


def _stop(name: str, value: Any) -> str | list[str]:
    return value if isinstance(value, str) else _texts(name, value)


def _token_ids(name: str, value: Any) -> list[int]:
    if not isinstance(value, list):
        raise _refuse(name, value, "a list of token ids")
    # `type`, not `isinstance`: true and false are integers to Python.
    if set(map(type, value)) == {int} and min(value) >= 0 and max(value) <= MAX_TOKEN_ID:
        return value
    for token in value:
        if type(token) is not int or not 0 <= token <= MAX_TOKEN_ID:
            raise _refuse(f"a token id in {name}", token, f"an integer from 0 to {MAX_TOKEN_ID}")
    return value


def _logit_bias(name: str, value: Any) -> dict[int, float]:
    biases: dict[int, float] = {}
    for key, bias in _object(name, value).items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise _refuse(f"a key of {name}", key, "a token id in decimal digits")
        if int(key) in biases:
            raise _refuse(f"a key of {name}", key, "each token id once")
        biases[int(key)] = _number(f"{name}[{key}]", bias)
    return biases


def _response_format(name: str, value: Any) -> JsonObject:
    asked = _object(name, value)
    kind = asked.get("type")
    if kind == "json_schema":
        schema = _object(f"{name}.json_schema", asked.get("json_schema")).get("schema")
        _object(f"{name}.json_schema.schema", schema)
    elif kind not in ("json_object", "text"):
        raise _refuse(f"{name}.type", kind, "json_schema, json_object or text")
    return asked


# Body field -> its check. These go into `SamplingParams` under their own names.
SAMPLING: Mapping[str, Check] = {
    "choices": _texts,
    "frequency_penalty": _number,
    "ignore_eos": _boolean,
    "include_stop_str_in_output": _boolean,
    "logit_bias": _logit_bias,
    "max_tokens": _integer,
    "min_p": _number,
    "min_tokens": _integer,
    "n": _integer,
    "presence_penalty": _number,
    "prompt_logprobs": _integer,
    "repetition_penalty": _number,
    "response_format": _response_format,
    "seed": _integer,
    "skip_special_tokens": _boolean,
    "stop": _stop,
    "stop_token_ids": _token_ids,
    "temperature": _number,
    "top_k": _integer,
    "top_p": _number,
}

# These need more than a check: see `sampling_fields` and `read_prompt`.
PML: Mapping[str, Check] = {"isolation": _text, "pml": _text}

SPECIAL: Mapping[Kind, Mapping[str, Check]] = {
    "chat": {
        **PML,
        "logprobs": _boolean,
        "max_completion_tokens": _integer,
        "messages": lambda name, value: value,
        "model": _text,
        "return_token_ids": _boolean,
        "top_logprobs": _integer,
    },
    "completion": {
        **PML,
        "logprobs": _integer,
        "model": _text,
        "prompt": lambda name, value: value,
        "return_token_ids": _boolean,
    },
}

# Labels that OpenAI's clients send and that no answer depends on.
LABELS: Mapping[str, Check] = {"metadata": _object, "user": _text}

# Known fields with the only value that asks for nothing.
NEUTRAL: Mapping[Kind, Mapping[str, Any]] = {
    "chat": {
        "parallel_tool_calls": None,
        "store": False,
        "stream": False,
        "stream_options": None,
        "tool_choice": "none",
        "tools": [],
    },
    "completion": {
        "best_of": 1,
        "echo": False,
        "store": False,
        "stream": False,
        "stream_options": None,
        "suffix": None,
    },
}


def _check_neutral(kind: Kind, name: str, value: Any) -> None:
    allowed = NEUTRAL[kind][name]
    if type(value) is not type(allowed) or value != allowed:
        raise RequestError(
            f"{name} is {show(value)}: not supported here, leave it out (or {json.dumps(allowed)})"
        )


def checked_fields(kind: Kind, body: Mapping[str, Any]) -> JsonObject:
    """The fields of `body` that say something, each of the right type."""
    known = {**SAMPLING, **SPECIAL[kind]}
    fields: JsonObject = {}
    for name, value in body.items():
        if name in known:
            if value is not None:
                fields[name] = known[name](name, value)
        elif name in LABELS:
            if value is not None:
                LABELS[name](name, value)
        elif name in NEUTRAL[kind]:
            if value is not None:
                _check_neutral(kind, name, value)
        else:
            raise RequestError(f"unknown field in body: {show(name)}")
    return fields


def sampling_fields(kind: Kind, fields: Mapping[str, Any]) -> JsonObject:
    """The keyword arguments of `SamplingParams` that checked fields amount to."""
    sampling = {name: value for name, value in fields.items() if name in SAMPLING}
    if kind == "completion":
        if "logprobs" in fields:
            sampling["logprobs"] = fields["logprobs"]
        return sampling
    # A chat answer may be as long as the model allows unless the request says otherwise.
    sampling["max_tokens"] = _chat_length(fields)
    sampling["logprobs"] = _chat_logprobs(fields)
    return sampling


def _chat_length(fields: Mapping[str, Any]) -> int | None:
    lengths = {fields[name] for name in ("max_tokens", "max_completion_tokens") if name in fields}
    if len(lengths) > 1:
        raise RequestError("max_tokens and max_completion_tokens differ: give one of them")
    return lengths.pop() if lengths else None


def _chat_logprobs(fields: Mapping[str, Any]) -> int | None:
    if fields.get("logprobs"):
        count: int = fields.get("top_logprobs", 0)
        return count
    if "top_logprobs" in fields:
        raise RequestError("top_logprobs needs logprobs: true")
    return None


@dataclass(frozen=True)
class Prompt:
    """What is to be continued; exactly one of the four is there. `isolation` belongs to `pml`."""

    text: str | None = None
    token_ids: list[int] | None = None
    messages: list[JsonObject] | None = None
    pml: str | None = None
    isolation: str = "anchored"


def read_prompt(kind: Kind, fields: Mapping[str, Any]) -> Prompt:
    """The prompt of a body: text or token ids of a completion, messages of a chat, or either's
    `pml`."""
    name = "messages" if kind == "chat" else "prompt"
    if "pml" in fields:
        if name in fields:
            raise RequestError(f"body has pml and {name}: give one of them")
        return Prompt(pml=fields["pml"], isolation=fields.get("isolation", "anchored"))
    if "isolation" in fields:
        raise RequestError("isolation needs pml")
    if name not in fields:
        raise RequestError(f"body has no {name} and no pml")
    if kind == "chat":
        return Prompt(messages=_messages(fields[name]))
    return _completion_prompt(fields[name])


def _completion_prompt(value: Any) -> Prompt:
    if isinstance(value, list) and value and isinstance(value[0], (str, list)):
        if len(value) > 1:
            raise RequestError(
                f"prompt is a list of {len(value)} prompts: give one prompt per line, "
                "or n for several answers to one"
            )
        value = value[0]
    if isinstance(value, str):
        return Prompt(text=value)
    if value == []:
        raise RequestError("prompt has no tokens")
    if not isinstance(value, list):
        raise _refuse("prompt", value, "text or a list of token ids")
    return Prompt(token_ids=_token_ids("prompt", value))


def _messages(value: Any) -> list[JsonObject]:
    if not isinstance(value, list) or not value:
        raise _refuse("messages", value, "a list of at least one message")
    _check_length("messages", value, "messages")
    return [_message(f"messages[{i}]", message) for i, message in enumerate(value)]


def _check_length(name: str, value: list[Any], what: str) -> None:
    if len(value) > MAX_MESSAGES:
        raise RequestError(
            f"{name} has {len(value)} {what}, limit is {MAX_MESSAGES}: join some of them"
        )


def _message(name: str, value: Any) -> JsonObject:
    message = _object(name, value)
    for key in message:
        if key not in ("role", "content"):
            raise RequestError(f"unknown field in {name}: {show(key)}")
    if message.get("role") not in ROLES:
        raise _refuse(f"{name}.role", message.get("role"), "system, user or assistant")
    return {"role": message["role"], "content": _content(f"{name}.content", message.get("content"))}


def _content(name: str, value: Any) -> str | list[JsonObject]:
    """A message's text, or its text parts, which the tokenizer joins."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise _refuse(name, value, "text or a list of text parts")
    _check_length(name, value, "parts")
    return [_part(f"{name}[{i}]", part) for i, part in enumerate(value)]


def _part(name: str, value: Any) -> JsonObject:
    part = _object(name, value)
    if part.get("type") != "text" or set(part) != {"type", "text"}:
        raise _refuse(name, value, '{"type": "text", "text": ...}')
    _text(f"{name}.text", part["text"])
    return part
