"""Errors as OpenAI's clients expect them: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from onestem.errors import OnestemError, RequestError, UnsupportedError
from onestem.openai.read import JsonError

TOO_LATE = "deadline_exceeded"
BUG = "an error in the server: its log says which"

TYPE_OF_STATUS: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    408: "timeout_error",
    409: "conflict_error",
    429: "rate_limit_error",
    501: "not_implemented_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
UNKNOWN_FIELD = re.compile(r"unknown field in body: '([^']*)'")
UNKNOWN_INSIDE = re.compile(r"unknown field in ([a-z_]+)")
INSIDE = re.compile(r"(?:a key of|a token id in|body has|body has no) ([a-z_]+)\b(?= is| and)")
FIELD = re.compile(r"([a-z][a-z_]*)(?=[\[. ])")
NO_FIELD = ("a", "body", "no", "prompt", "the", "unknown")
GUIDED = tuple(f"guided_{kind}" for kind in ("json", "regex", "choice", "grammar"))
# What a body may have in place of a field that errors name.
OTHER_NAMES: Mapping[str, Sequence[str]] = {
    "completion": ("completions",),
    "grammar": ("guided_grammar", "structured_outputs", "response_format"),
    "logprobs": ("top_logprobs",),
    "max_tokens": ("max_completion_tokens",),
    "prefix": ("text", "messages"),
    "prompt": ("messages", "pml", "text"),
    "regex": ("guided_regex", "structured_outputs", "response_format"),
    "response_format": ("structured_outputs", *GUIDED, "tools"),
    "structured_outputs": GUIDED,
}


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: of HTTP.
        message: one line: the thing, the limit, the way out.
        param: the field at fault.
        code: for programs.
        headers: to send with it.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """What is sent, as JSON's object; its type follows from the status."""
        other = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = TYPE_OF_STATUS.get(self.status, other)
        told = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": told}


class EngineDownError(ApiError):
    """The engine process is not there, or died while it answered."""

    def __init__(self, message: str) -> None:
        super().__init__(503, message, code="engine_down", headers={"Retry-After": "2"})


class NoAnswerError(ApiError):
    """The engine process runs, but has not answered a question in time."""

    def __init__(self, seconds: float) -> None:
        message = f"the engine has not answered within {seconds:.3g} s: try again later"
        super().__init__(503, message, code="engine_slow", headers={"Retry-After": "2"})
        self.seconds = seconds


class BusyError(ApiError):
    """The machine has no time or memory left for what a request needs."""

    def __init__(self, message: str) -> None:
        super().__init__(503, message, code="machine_busy", headers={"Retry-After": "10"})


def too_late(seconds: float) -> ApiError:
    """The error of a request that was not answered within `seconds`."""
    return ApiError(
        504,
        f"no answer within {seconds:.6g} s: raise timeout, or ask for fewer tokens",
        param="timeout",
        code=TOO_LATE,
        headers={"x-should-retry": "false"},
    )


def as_api_error(error: OnestemError) -> ApiError:
    """A caller's mistake, with the field at fault where its message begins with one."""
    message = " ".join(str(error).split())
    if isinstance(error, JsonError):
        return ApiError(400, message, code="invalid_json")
    param = _param(message) if isinstance(error, RequestError | UnsupportedError) else None
    code = "unsupported" if isinstance(error, UnsupportedError) else "invalid_request"
    return ApiError(400, message, param=param, code=code)


def field_of(param: str | None, fields: Collection[str]) -> str | None:
    """The field of a body that `param` stands for; None: it has none."""
    names = () if param is None else (param, *OTHER_NAMES.get(param, ()))
    return next((name for name in names if name in fields), None)


def _param(message: str) -> str | None:
    for pattern in (UNKNOWN_FIELD, UNKNOWN_INSIDE, INSIDE):
        named = pattern.match(message)
        if named is not None:
            return named[1]
    if message.startswith("prompt "):
        return "prompt"
    found = FIELD.match(message)
    return None if found is None or found[1] in NO_FIELD else found[1]
