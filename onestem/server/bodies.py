"""A request body of the API -> what is asked. The fields that batch lines have too are read by
`onestem.batch.fields`; here are those that only a server has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onestem.batch.fields import (
    Kind,
    Prompt,
    checked_fields,
    read_prompt,
    sampling_fields,
    show,
)
from onestem.batch.format import MAX_DEPTH, LineError, read_object
from onestem.errors import RequestError
from onestem.request import SamplingParams
from onestem.server.errors import ApiError

__all__ = ["Asked", "read_body", "read_json"]

MOST_PROMPTS = 256
MOST_SEQUENCES = 1024
LONGEST_SALT = 256
SHORTEST_TIMEOUT, LONGEST_TIMEOUT = 0.001, 24 * 3600.0
SERVER_FIELDS = ("cache_salt", "prefix", "stream", "stream_options", "timeout")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A body, checked; nothing of it is tokenised yet.

    Attributes:
        prompts: one, or several for /v1/completions.
        prefix: name of the prefix that stands before each prompt.
        timeout: seconds; None: the server's.
    """

    kind: Kind
    model: str | None
    prompts: Sequence[Prompt]
    params: SamplingParams
    return_token_ids: bool = False
    stream: bool = False
    include_usage: bool = False
    prefix: str | None = None
    cache_salt: str = ""
    timeout: float | None = None


def read_json(raw: bytes) -> dict[str, Any]:
    """The object in a body; raises a 400 for anything else."""
    try:
        return read_object(raw, "the body", MAX_DEPTH)
    except LineError as error:
        raise ApiError(400, str(error), code="invalid_json") from error


def read_body(kind: Kind, raw: bytes) -> Asked:
    """What a body asks.

    Raises:
        ApiError, RequestError: it asks nothing that can be answered.
    """
    body = read_json(raw)
    own = {name: body.pop(name) for name in SERVER_FIELDS if name in body}
    fields = checked_fields(kind, body)
    params = SamplingParams(**sampling_fields(kind, fields))
    prompts = [read_prompt(kind, {**fields, **prompt}) for prompt in _each_prompt(kind, fields)]
    stream = _boolean("stream", own.get("stream"))
    asked = Asked(
        kind=kind,
        model=fields.get("model"),
        prompts=prompts,
        params=params,
        return_token_ids=fields.get("return_token_ids", False),
        stream=stream,
        include_usage=_include_usage(own.get("stream_options"), stream),
        prefix=_text("prefix", own.get("prefix")),
        cache_salt=_text("cache_salt", own.get("cache_salt")) or "",
        timeout=_timeout(own.get("timeout")),
    )
    if asked.prefix is not None and prompts[0].pml is not None:
        raise RequestError("prefix and pml are both given: a schema has its own beginning")
    _check_sizes(asked)
    return asked


def _each_prompt(kind: Kind, fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The prompts of a completion, each alone as a field."""
    prompt = fields.get("prompt")
    if kind == "chat" or not isinstance(prompt, list) or not prompt:
        return [{}]
    if isinstance(prompt[0], str):
        odd = next((one for one in prompt if not isinstance(one, str)), None)
    elif isinstance(prompt[0], list):
        odd = next((one for one in prompt if not isinstance(one, list)), None)
    else:
        return [{}]
    if odd is not None:
        raise RequestError(f"prompt has {show(odd)} among others of another type")
    return [{"prompt": [one]} for one in prompt]  # a list of one, of which no other list is left


def _check_sizes(asked: Asked) -> None:
    if len(asked.prompts) > MOST_PROMPTS:
        raise RequestError(
            f"prompt is a list of {len(asked.prompts)} prompts, limit is {MOST_PROMPTS}: "
            "send several requests"
        )
    _check_sequences(asked)
    if len(asked.cache_salt) > LONGEST_SALT:
        raise RequestError(
            f"cache_salt has {len(asked.cache_salt)} characters, limit is {LONGEST_SALT}"
        )


def _check_sequences(asked: Asked) -> None:
    choices, num_prompts = asked.params.choices, len(asked.prompts)
    what = f"n is {asked.params.n}" if choices is None else f"choices has {len(choices)} texts"
    each = asked.params.n if choices is None else len(choices)
    if each * num_prompts > MOST_SEQUENCES:
        raise RequestError(
            f"{what} for {num_prompts} prompts, limit is {MOST_SEQUENCES} sequences in all: "
            "send several requests"
        )


def _boolean(name: str, value: Any) -> bool:
    if value is not None and not isinstance(value, bool):
        raise RequestError(f"{name} is {show(value)}, expected true or false")
    return bool(value)


def _text(name: str, value: Any) -> str | None:
    if value is not None and not (isinstance(value, str) and value):
        raise RequestError(f"{name} is {show(value)}, expected non-empty text")
    text: str | None = value
    return text


def _timeout(value: Any) -> float | None:
    if value is None:
        return None
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not SHORTEST_TIMEOUT <= value <= LONGEST_TIMEOUT:  # NaN is in no range
        raise RequestError(
            f"timeout is {show(value)}, expected seconds from {SHORTEST_TIMEOUT} to "
            f"{LONGEST_TIMEOUT:.0f}"
        )
    return float(value)


def _include_usage(options: Any, stream: bool) -> bool:
    if options is None:
        return False
    if not isinstance(options, dict):
        raise RequestError(f"stream_options is {show(options)}, expected an object")
    if not stream:
        raise RequestError("stream_options needs stream: true")
    for name in options:
        if name != "include_usage":
            raise RequestError(f"unknown field in stream_options: {show(name)}")
    return _boolean("stream_options.include_usage", options.get("include_usage"))
