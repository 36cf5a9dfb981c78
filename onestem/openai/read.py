"""A body of the API -> what is asked: of a batch line or of an HTTP call."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NoReturn

from onestem.checked import check, show
from onestem.errors import RequestError
from onestem.openai.schema import (
    FIELDS,
    MAX_PROMPTS,
    SAMPLING,
    ChatFields,
    CompletionFields,
    Kind,
    Message,
    PrefixBody,
)
from onestem.request import MAX_TOKEN_ID, SamplingParams

__all__ = [
    "MAX_DEPTH",
    "Asked",
    "JsonError",
    "Prompt",
    "read_body",
    "read_line_body",
    "read_object",
    "read_prefix",
]

JsonObject = dict[str, Any]

MAX_DEPTH = 64  # objects and lists inside one another, in a body
MAX_SEQUENCES = 1024  # of all prompts of a body together


# ----------------------------------------------------------------------------- JSON


class JsonError(RequestError):
    """Bytes that are no object; `custom_id` of a batch line, as far as it could be read."""

    def __init__(self, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.custom_id = custom_id


def read_object(raw: bytes, name: str = "the body", depth: int = MAX_DEPTH) -> JsonObject:
    """The JSON object in `raw`, nested at most `depth` deep; raises `JsonError` for anything else,
    calling it `name`. Keys that stand twice in an object are refused: only one of their values
    could be honoured."""
    try:
        text = raw.decode("utf-8")
        record = json.loads(text, object_pairs_hook=_no_key_twice, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise JsonError(
            f"{name} is not UTF-8: byte {error.start + 1} of it is {raw[error.start]:#04x}"
        ) from error
    except RecursionError as error:
        raise _too_deep(name, depth) from error
    except ValueError as error:
        reason = str(error)
        if reason.startswith("Exceeds the limit"):  # Python's own, which names a function of it
            reason = f"an integer has over {sys.get_int_max_str_digits()} digits"
        raise JsonError(f"{name} is not JSON: {reason}") from error
    if not isinstance(record, dict):
        raise JsonError(f"{name} is {show(record)}, expected an object")
    if text.count("[") + text.count("{") > depth and _is_deeper(record, depth):
        custom_id = record.get("custom_id")
        raise _too_deep(name, depth, custom_id if isinstance(custom_id, str) else None)
    if "\\ud" in text.lower():
        _check_surrogates(record, name)
    return record


def _is_deeper(record: JsonObject, depth: int) -> bool:
    """Whether a value has more than `depth` objects and lists inside one another, itself too."""
    level: list[Any] = [record]
    for _ in range(depth):
        members = chain.from_iterable(v.values() if type(v) is dict else v for v in level)
        level = [value for value in members if type(value) in (dict, list)]
    return bool(level)


def _too_deep(name: str, depth: int, custom_id: str | None = None) -> JsonError:
    message = f"{name} nests too deeply, limit is {depth} objects and lists inside one another"
    return JsonError(message, custom_id)


def _no_key_twice(pairs: list[tuple[str, Any]]) -> JsonObject:
    record = dict(pairs)
    if len(record) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {show(twice)} stands twice in one object")
    return record


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _check_surrogates(record: JsonObject, name: str) -> None:
    """Half of a surrogate pair is no text: it can be neither tokenised nor written as UTF-8."""
    try:
        json.dumps(record, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise JsonError(
            f"{name} has an unpaired \\ud800-\\udfff escape, which is half a character: "
            "write both halves, or leave it out"
        ) from error


# ----------------------------------------------------------------------------- bodies


@dataclass(frozen=True)
class Prompt:
    """What is to be continued; exactly one of the four is there. `isolation` belongs to `pml`."""

    text: str | None = None
    token_ids: list[int] | None = None
    messages: list[JsonObject] | None = None
    pml: str | None = None
    isolation: str = "anchored"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A body, checked; nothing of it is tokenised yet.

    Attributes:
        model: the body's `model`, echoed in the answer.
        prompts: one, or several for /v1/completions.
        sampling: keyword arguments for `SamplingParams`, as JSON has them.
        params: what they make.
        return_token_ids: put token ids beside the texts of the answer.
        prefix: name of the prefix that stands before each prompt.
        timeout: seconds; None: the server's.
    """

    kind: Kind
    model: str | None
    prompts: Sequence[Prompt]
    sampling: Mapping[str, Any]
    params: SamplingParams
    return_token_ids: bool = False
    stream: bool = False
    include_usage: bool = False
    prefix: str | None = None
    cache_salt: str = ""
    timeout: float | None = None


# Fields that mean something to a server alone, and what they may be in a batch line.
SERVER_FIELDS: Mapping[str, object] = {
    "cache_salt": None,
    "prefix": None,
    "stream": False,
    "stream_options": None,
    "timeout": None,
}


def read_body(kind: Kind, body: Mapping[str, Any]) -> Asked:
    """What the body of an HTTP call asks; raises `RequestError` if that can never be answered."""
    given = {name: value for name, value in body.items() if value is not None}
    sampling = {name: given.pop(name) for name in SAMPLING[kind] & given.keys()}
    fields = check(FIELDS[kind], given)
    if isinstance(fields, ChatFields):
        # A chat answer may be as long as the model allows unless the request says otherwise.
        sampling["max_tokens"] = _chat_length(sampling, fields)
        sampling["logprobs"] = _chat_logprobs(fields)
    params = check(SamplingParams, sampling)
    asked = Asked(
        kind=kind,
        model=fields.model,
        prompts=_prompts(fields),
        sampling=sampling,
        params=params,
        return_token_ids=bool(fields.return_token_ids),
        stream=bool(fields.stream),
        include_usage=bool(fields.stream_options and fields.stream_options.include_usage),
        prefix=fields.prefix,
        cache_salt=fields.cache_salt or "",
        timeout=fields.timeout,
    )
    if fields.stream_options is not None and not asked.stream:
        raise RequestError("stream_options needs stream: true")
    if asked.prefix is not None and fields.pml is not None:
        raise RequestError("prefix and pml are both given: a schema has its own beginning")
    _check_sequences(asked)
    return asked


def read_line_body(kind: Kind, body: Mapping[str, Any]) -> Asked:
    """What the body of a batch line asks: one prompt, and nothing of a server."""
    for name, neutral in SERVER_FIELDS.items():
        value = body.get(name)
        if value is not None and value is not neutral:
            out = "leave it out" if neutral is None else f"leave it out (or {json.dumps(neutral)})"
            raise RequestError(f"{name} is {show(value)}: not supported in a batch line, {out}")
    asked = read_body(kind, body)
    if len(asked.prompts) > 1:
        raise RequestError(
            f"prompt is a list of {len(asked.prompts)} prompts: give one prompt per line, "
            "or n for several answers to one"
        )
    return asked


def _chat_length(sampling: Mapping[str, Any], fields: ChatFields) -> Any:
    given = (sampling.get("max_tokens"), fields.max_completion_tokens)
    if None not in given and given[0] != given[1]:
        raise RequestError("max_tokens and max_completion_tokens differ: give one of them")
    return given[0] if given[1] is None else given[1]


def _chat_logprobs(fields: ChatFields) -> int | None:
    if fields.logprobs:
        return fields.top_logprobs or 0
    if fields.top_logprobs is not None:
        raise RequestError("top_logprobs needs logprobs: true")
    return None


def _check_sequences(asked: Asked) -> None:
    choices, num_prompts = asked.params.choices, len(asked.prompts)
    what = f"n is {asked.params.n}" if choices is None else f"choices has {len(choices)} texts"
    each = asked.params.n if choices is None else len(choices)
    if each * num_prompts > MAX_SEQUENCES:
        raise RequestError(
            f"{what} for {num_prompts} prompts, limit is {MAX_SEQUENCES} sequences in all: "
            "send several requests"
        )


# ----------------------------------------------------------------------------- prompts


def _prompts(fields: Any) -> list[Prompt]:
    """Text or token ids of a completion, messages of a chat, or either's `pml`."""
    name = "messages" if isinstance(fields, ChatFields) else "prompt"
    given = getattr(fields, name)
    if fields.pml is not None:
        if given is not None:
            raise RequestError(f"body has pml and {name}: give one of them")
        return [Prompt(pml=fields.pml, isolation=fields.isolation or "anchored")]
    if fields.isolation is not None:
        raise RequestError("isolation needs pml")
    if given is None:
        raise RequestError(f"body has no {name} and no pml")
    if isinstance(fields, CompletionFields):
        return _completion_prompts(given)
    return [Prompt(messages=[_plain(message) for message in given])]


def _plain(message: Message) -> JsonObject:
    """A message as a chat template reads it: calls with their arguments as objects."""
    plain: JsonObject = {"role": message.role, "content": ""}
    if message.content is not None:
        is_text = isinstance(message.content, str)
        parts = message.content
        plain["content"] = parts if is_text else [{"type": "text", "text": p.text} for p in parts]  # type: ignore[union-attr]
    for name in ("name", "tool_call_id", "reasoning_content"):
        value = getattr(message, name)
        if value is not None:
            plain[name] = value
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": json.loads(call.function.arguments or "{}"),
                },
            }
            for call in message.tool_calls
        ]
    return plain


def _completion_prompts(value: Any) -> list[Prompt]:
    """One prompt, or those of a list of texts or of lists of token ids."""
    if not isinstance(value, list) or not value or not isinstance(value[0], (str, list)):
        return [_completion_prompt(value)]
    if len(value) > MAX_PROMPTS:
        raise RequestError(
            f"prompt is a list of {len(value)} prompts, limit is {MAX_PROMPTS}: "
            "send several requests"
        )
    odd = next((one for one in value if not isinstance(one, type(value[0]))), None)
    if odd is not None:
        raise RequestError(f"prompt has {show(odd)} among others of another type")
    return [_completion_prompt(one) for one in value]


def _completion_prompt(value: Any) -> Prompt:
    if isinstance(value, str):
        return Prompt(text=value)
    if value == []:
        raise RequestError("prompt has no tokens")
    if not isinstance(value, list):
        raise RequestError(f"prompt is {show(value)}, expected text or a list of token ids")
    # `type`, not `isinstance`: true and false are integers to Python.
    if set(map(type, value)) == {int} and min(value) >= 0 and max(value) <= MAX_TOKEN_ID:
        return Prompt(token_ids=value)
    for token in value:
        if type(token) is not int or not 0 <= token <= MAX_TOKEN_ID:
            raise RequestError(
                f"a token id in prompt is {show(token)}, expected an integer from 0 to "
                f"{MAX_TOKEN_ID}"
            )
    raise AssertionError("one of them is bad")


def read_prefix(body: Mapping[str, Any]) -> JsonObject:
    """The one form in which a prefix is given: {"text": ...}, {"messages": ...} or
    {"token_ids": ...}."""
    fields = check(PrefixBody, {name: value for name, value in body.items() if value is not None})
    given: JsonObject = {
        name: value
        for name in PrefixBody.model_fields
        if (value := getattr(fields, name)) is not None
    }
    if len(given) != 1:
        names = ", ".join(PrefixBody.model_fields)
        raise RequestError(f"body has {len(given)} of {names}: give exactly one of them")
    if fields.messages is not None:
        return {"messages": [_plain(message) for message in fields.messages]}
    return given
