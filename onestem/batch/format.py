"""Parses a line of an OpenAI batch file to a `BatchRequest`, or a `LineError` with the reason.

    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "..."}}
    {"custom_id": "b", "prompt": "...", "completions": ["...", "..."]}
    {"custom_id": "c", "text": "..."}

The second and third are short for lines of /v1/score with these fields as their body.

A line is UTF-8 JSON. Lines end with LF or CRLF; the last one need not. A byte order mark before the
first is skipped. Blank lines hold no request and get no result. Duplicate keys in an object are
refused, since only one of their values could be used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from onestem.checked import show
from onestem.errors import RequestError
from onestem.openai.read import Asked, JsonError, Prompt, read_line_body, read_object
from onestem.openai.schema import URL_OF_KIND, Kind
from onestem.rawtext import Span
from onestem.request import MAX_DEPTH

KIND_OF_URL: Mapping[str, Kind] = {url: kind for kind, url in URL_OF_KIND.items()}
TOP_FIELDS = ("custom_id", "method", "url", "body")
MAX_MESSAGE = 500
LINE_DEPTH = MAX_DEPTH + 1  # a line is a body with an object around it


class LineError(RequestError):
    """A line of the input that gets an error object instead of an answer.

    `code` is for programs; `custom_id` is the line's, if it could be read.
    """

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        line = " ".join(message.split())
        super().__init__(line if len(line) <= MAX_MESSAGE else line[: MAX_MESSAGE - 1] + "…")
        self.code = code
        self.custom_id = custom_id


class BatchLine(NamedTuple):
    """A line of a batch file, or one made of a row.

    Attributes:
        raw: the line.
        quoted: parts of the texts of a body's field that a row's values have filled, of each text.
            In them names of control tokens are characters, unless the body says `parse_special`.
    """

    raw: bytes
    quoted: Mapping[str, Sequence[tuple[Span, ...]]] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class BatchRequest:
    """A good line, before tokenisation."""

    custom_id: str
    asked: Asked

    @property
    def prompt(self) -> Prompt:
        """The prompt; a line has one."""
        return self.asked.prompts[0]

    @property
    def is_scored(self) -> bool:
        """Whether it asks for scores of given tokens."""
        return self.asked.kind == "score"


def parse_line(line: BatchLine, parse_special: bool | None = None) -> BatchRequest:
    """The request in a line of the input. Any bytes raise nothing but `LineError`.

    Args:
        parse_special: of a body that does not say it.
    """
    try:
        record = read_object(line.raw, "the line", LINE_DEPTH)
    except JsonError as error:
        raise LineError("invalid_json_line", str(error), error.custom_id) from error
    custom_id = _custom_id(record)
    try:
        if _is_short(record):
            kind: Kind = "score"
            body = {name: value for name, value in record.items() if name != "custom_id"}
        else:
            kind, body = _kind(record), record["body"]
        is_open = kind != "chat" and body.get("pml") is None and body.get("parse_special") is None
        if is_open and parse_special is not None:
            body = {**body, "parse_special": parse_special}
        asked = read_line_body(kind, body)
        if is_open and parse_special is None and line.quoted:
            asked = asked.quoting(line.quoted)
        return BatchRequest(custom_id=custom_id, asked=asked)
    except LineError as error:
        error.custom_id = custom_id
        raise
    except RequestError as error:
        raise LineError("invalid_request", str(error), custom_id) from error


def url_of(record: Mapping[str, Any]) -> object:
    """The endpoint that a line names; None: it names none."""
    return "/v1/score" if _is_short(record) else record.get("url")


def _is_short(record: Mapping[str, Any]) -> bool:
    """Whether a line is in the short form of a /v1/score line."""
    return not record.keys().isdisjoint(("completions", "text")) and record.keys().isdisjoint(
        ("method", "url", "body")
    )


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
    """The expected form of a batch line, for the error of a line that is a plain prompt or chat."""
    for url, name in ((URL_OF_KIND["chat"], "messages"), (URL_OF_KIND["completion"], "prompt")):
        if name in record and "body" not in record:
            named = " --id id" if "id" in record else ""
            rows = f"onestem batch --{name} '{{{name}}}'{named}"
            line = f'"custom_id": "1", "method": "POST", "url": "{url}", "body": {{"{name}": ...}}'
            return f", expected {{{line}}}; or {rows} reads such rows"
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
