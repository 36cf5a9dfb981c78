"""A line of an OpenAI batch file -> `BatchRequest`, or a `LineError` that says what is wrong.

    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "..."}}

A line is UTF-8 JSON. Lines end with LF or CRLF, the last one need not; a byte order mark before
the first is skipped; blank lines hold no request and get no result. Keys that stand twice in an
object are refused, since only one of their values could be honoured.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, NoReturn

from onestem.batch.fields import Kind, Prompt, checked_fields, read_prompt, sampling_fields, show
from onestem.errors import RequestError
from onestem.request import SamplingParams

__all__ = ["MAX_DEPTH", "BatchRequest", "LineError", "parse_line", "read_object"]

KIND_OF_URL: Mapping[str, Kind] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completion",
}
TOP_FIELDS = ("custom_id", "method", "url", "body")
MAX_MESSAGE = 500
# Objects and lists inside one another, in a body. A line is a body with an object around it.
MAX_DEPTH = 64
LINE_DEPTH = MAX_DEPTH + 1


class LineError(RequestError):
    """One line of the input that gets an error object instead of an answer.

    `code` is for programs; `custom_id` is the line's, as far as it could be read.
    """

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        line = " ".join(message.split())
        super().__init__(line if len(line) <= MAX_MESSAGE else line[: MAX_MESSAGE - 1] + "…")
        self.code = code
        self.custom_id = custom_id


@dataclass(frozen=True, kw_only=True)
class BatchRequest:
    """A good line, before tokenisation.

    Attributes:
        kind: chat or completion.
        model: the body's `model`, echoed in the result.
        sampling: keyword arguments for `SamplingParams`, as they are spooled.
        params: what they make; without a seed where the line has none.
        return_token_ids: put token ids beside the texts of the result.
    """

    custom_id: str
    kind: Kind
    model: str | None
    prompt: Prompt
    sampling: Mapping[str, Any]
    params: SamplingParams
    return_token_ids: bool = False


def parse_line(raw: bytes) -> BatchRequest:
    """The request in a line of the input; raises `LineError` alone, whatever the bytes are."""
    record = read_object(raw)
    custom_id = _custom_id(record)
    try:
        kind = _kind(record)
        return _request(custom_id, kind, record["body"])
    except LineError as error:
        error.custom_id = custom_id
        raise
    except RequestError as error:
        raise LineError("invalid_request", str(error), custom_id) from error


def read_object(raw: bytes, name: str = "the line", depth: int = LINE_DEPTH) -> dict[str, Any]:
    """The JSON object in `raw`, nested at most `depth` deep; raises `LineError` for anything else,
    calling it `name`."""
    try:
        text = raw.decode("utf-8")
        record = json.loads(text, object_pairs_hook=_no_key_twice, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        message = f"{name} is not UTF-8: byte {error.start + 1} of it is {raw[error.start]:#04x}"
        raise LineError("invalid_json_line", message) from error
    except RecursionError as error:
        raise _too_deep(name, depth) from error
    except ValueError as error:
        reason = str(error)
        if reason.startswith("Exceeds the limit"):  # Python's own, which names a function of it
            reason = f"an integer has over {sys.get_int_max_str_digits()} digits"
        raise LineError("invalid_json_line", f"{name} is not JSON: {reason}") from error
    if not isinstance(record, dict):
        raise LineError("invalid_json_line", f"{name} is {show(record)}, expected an object")
    if text.count("[") + text.count("{") > depth and _is_deeper(record, depth):
        custom_id = record.get("custom_id")
        raise _too_deep(name, depth, custom_id if isinstance(custom_id, str) else None)
    if "\\ud" in text.lower():
        _check_surrogates(record, name)
    return record


def _is_deeper(record: dict[str, Any], depth: int) -> bool:
    """Whether a value has more than `depth` objects and lists inside one another, itself too."""
    level: list[Any] = [record]
    for _ in range(depth):
        members = chain.from_iterable(v.values() if type(v) is dict else v for v in level)
        level = [value for value in members if type(value) in (dict, list)]
    return bool(level)


def _too_deep(name: str, depth: int, custom_id: str | None = None) -> LineError:
    message = f"{name} nests too deeply, limit is {depth} objects and lists inside one another"
    return LineError("invalid_json_line", message, custom_id)


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {show(twice)} stands twice in one object")
    return record


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _check_surrogates(record: dict[str, Any], name: str) -> None:
    """Half of a surrogate pair is no text: it can be neither tokenised nor written as UTF-8."""
    try:
        json.dumps(record, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        message = (
            f"{name} has an unpaired \\ud800-\\udfff escape, which is half a character: "
            "write both halves, or leave it out"
        )
        raise LineError("invalid_json_line", message) from error


def _custom_id(record: Mapping[str, Any]) -> str:
    custom_id = record.get("custom_id")
    if custom_id is None:
        message = f"the line has no custom_id{_what_a_line_is(record)}"
        raise LineError("missing_custom_id", message)
    if not isinstance(custom_id, str) or not custom_id:
        message = f"custom_id is {show(custom_id)}, expected non-empty text"
        raise LineError("invalid_custom_id", message)
    return custom_id


def _what_a_line_is(record: Mapping[str, Any]) -> str:
    """A batch line in short, for an error of a line that is a plain prompt or chat."""
    for url, name in (("/v1/chat/completions", "messages"), ("/v1/completions", "prompt")):
        if name in record and "body" not in record:
            line = f'"custom_id": "1", "method": "POST", "url": "{url}", "body": {{"{name}": ...}}'
            return f", expected {{{line}}}"
    return ""


def _kind(record: Mapping[str, Any]) -> Kind:
    for name in record:
        if name not in TOP_FIELDS:
            message = f"unknown field beside body: {show(name)}{_what_a_line_is(record)}"
            raise LineError("unknown_field", message)
    if record.get("method") != "POST":
        raise LineError("invalid_method", f"method is {show(record.get('method'))}, expected POST")
    url = record.get("url")
    if not isinstance(url, str) or url not in KIND_OF_URL:
        expected = " or ".join(KIND_OF_URL)
        raise LineError("invalid_url", f"url is {show(url)}, expected {expected}")
    if not isinstance(record.get("body"), dict):
        message = f"body is {show(record.get('body'))}, expected an object"
        raise LineError("invalid_body", message)
    return KIND_OF_URL[url]


def _request(custom_id: str, kind: Kind, body: Mapping[str, Any]) -> BatchRequest:
    fields = checked_fields(kind, body)
    prompt = read_prompt(kind, fields)
    sampling = sampling_fields(kind, fields)
    return BatchRequest(
        custom_id=custom_id,
        kind=kind,
        model=fields.get("model"),
        prompt=prompt,
        sampling=sampling,
        params=SamplingParams(**sampling),
        return_token_ids=fields.get("return_token_ids", False),
    )
