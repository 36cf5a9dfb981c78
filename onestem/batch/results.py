"""Outputs -> lines of the result file, in the shapes of OpenAI's batch API.

    {"id": ..., "custom_id": ...,
     "response": {"status_code": 200, "request_id": ..., "body": {...}}, "error": null}
    {"id": ..., "custom_id": ..., "response": null,
     "error": {"code": ..., "message": ..., "line": ...}}

Nothing in a line depends on when or in which order it was computed. `created` is always 0, and ids
come from the job and the line:
* `id` is `batch_req_<job>_<line number in the input>`. It is how a line finds its place again, and
  how a finished file is recognised.
* `request_id` and the body's `id` come from a hash of the job and `custom_id`, as does the seed of
  a request that brings none.
How many prompt tokens came from the cache depends on the order, so `usage` does not say.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onestem.batch.fields import Kind
from onestem.request import CompletionOutput, RequestOutput, TokenLogprobs

__all__ = [
    "NotANumberError",
    "ResponseFormat",
    "answer_body",
    "answer_line",
    "chat_logprobs",
    "completion_logprobs",
    "derived_seed",
    "error_line",
    "result_id",
    "split_result_id",
]

CREATED = 0
LEAST_LOGPROB = -9999.0  # JSON has no -infinity; this is what OpenAI writes

# token id -> the bytes it stands for, or None where there is no tokenizer to ask.
TokenBytes = Callable[[int], bytes] | None


def result_id(job: str, line_number: int) -> str:
    return f"batch_req_{job}_{line_number}"


def split_result_id(value: object) -> tuple[str, int] | None:
    """(job, line number) of an id that `result_id` made; None for any other value."""
    parts = value.split("_") if isinstance(value, str) else []
    if len(parts) != 4 or parts[:2] != ["batch", "req"]:
        return None
    if not (parts[3].isascii() and parts[3].isdecimal()):
        return None
    return parts[2], int(parts[3])


def _digest(job: str, custom_id: str) -> bytes:
    return hashlib.sha256(f"{job}\0{custom_id}".encode()).digest()


def derived_seed(job: str, custom_id: str) -> int:
    """The seed of a request that brings none: 63 bits."""
    return int.from_bytes(_digest(job, custom_id)[:8], "big") >> 1


def _line(record: Mapping[str, Any]) -> bytes:
    """One line of UTF-8 that stays one line under every notion of a line end."""
    text = json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for mark in ("\u0085", "\u2028", "\u2029"):
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return text.encode() + b"\n"


def error_line(job: str, line_number: int, custom_id: str | None, code: str, message: str) -> bytes:
    """The result of a line without an answer."""
    return _line(
        {
            "id": result_id(job, line_number),
            "custom_id": custom_id,
            "response": None,
            "error": {"code": code, "message": message, "line": line_number},
        }
    )


@dataclass(frozen=True, kw_only=True)
class ResponseFormat:
    """How a result is written: what its request asked for beside the text.

    `token_bytes` is None where there is no tokenizer; tokens are then called `token_id:<id>`.
    """

    kind: Kind
    model: str
    logprobs: int | None
    return_token_ids: bool
    token_bytes: TokenBytes


def answer_line(
    job: str, line_number: int, custom_id: str, output: RequestOutput, form: ResponseFormat
) -> bytes:
    """The result of a line whose request was answered."""
    name = _digest(job, custom_id).hex()[:24]
    return _line(
        {
            "id": result_id(job, line_number),
            "custom_id": custom_id,
            "response": {
                "status_code": 200,
                "request_id": f"req_{name}",
                "body": answer_body(name, output, form),
            },
            "error": None,
        }
    )


def answer_body(name: str, output: RequestOutput, form: ResponseFormat) -> dict[str, Any]:
    """The answer to a request as OpenAI's API gives it; `created` is 0."""
    body = _chat_body if form.kind == "chat" else _completion_body
    return body(name, output, form)


def _chat_body(name: str, output: RequestOutput, form: ResponseFormat) -> dict[str, Any]:
    body = _body(f"chatcmpl-{name}", "chat.completion", output, form)
    body["choices"] = [
        _choice(sequence, form, chat_logprobs(sequence, form))
        | {"message": {"role": "assistant", "content": sequence.text}}
        for sequence in _in_order(output)
    ]
    if output.prompt_logprobs is not None:
        body["prompt_logprobs"] = _prompt_logprobs(output.prompt_logprobs, form.token_bytes)
    return body


def _completion_body(name: str, output: RequestOutput, form: ResponseFormat) -> dict[str, Any]:
    body = _body(f"cmpl-{name}", "text_completion", output, form)
    body["choices"] = [
        _choice(sequence, form, completion_logprobs(sequence, form)) | {"text": sequence.text}
        for sequence in _in_order(output)
    ]
    if output.prompt_logprobs is not None:
        prompt = _prompt_logprobs(output.prompt_logprobs, form.token_bytes)
        for choice in body["choices"]:
            choice["prompt_logprobs"] = prompt
    return body


def _in_order(output: RequestOutput) -> list[CompletionOutput]:
    return sorted(output.outputs, key=lambda sequence: sequence.index)


def _body(
    name: str, object_type: str, output: RequestOutput, form: ResponseFormat
) -> dict[str, Any]:
    num_prompt_tokens = len(output.prompt_token_ids)
    num_output_tokens = output.metrics.num_output_tokens
    body: dict[str, Any] = {
        "id": name,
        "object": object_type,
        "created": CREATED,
        "model": form.model,
        "choices": [],
        "usage": {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_output_tokens,
            "total_tokens": num_prompt_tokens + num_output_tokens,
        },
    }
    if form.return_token_ids:
        body["prompt_token_ids"] = [int(token) for token in output.prompt_token_ids]
    return body


def _choice(sequence: CompletionOutput, form: ResponseFormat, logprobs: Any) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": sequence.index,
        "logprobs": logprobs,
        "finish_reason": sequence.finish_reason,
    }
    if sequence.choice is not None:
        choice["choice"] = sequence.choice
    if form.return_token_ids:
        choice["token_ids"] = [int(token) for token in sequence.token_ids]
    return choice


class NotANumberError(ValueError):
    """A log-probability that cannot be written."""


def _logprob(value: float) -> float:
    if math.isnan(value):
        raise NotANumberError("the model gave a log-probability that is not a number")
    return LEAST_LOGPROB if value < LEAST_LOGPROB else float(value)


def _token_text(token: int, token_bytes: TokenBytes) -> str:
    """A token as text; OpenAI's `bytes:\\x..` form where it is no text by itself."""
    if token_bytes is None:
        return f"token_id:{token}"
    spelled = token_bytes(token)
    try:
        return spelled.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def chat_logprobs(sequence: CompletionOutput, form: ResponseFormat) -> dict[str, Any] | None:
    """OpenAI's list of tokens with their bytes and alternatives; None if not asked for."""
    if form.logprobs is None or sequence.logprobs is None:
        return None
    content = []
    for token, logprobs in zip(sequence.token_ids, sequence.logprobs, strict=True):
        entry = _chat_token(token, logprobs[token], form.token_bytes)
        entry["top_logprobs"] = [
            _chat_token(other, logprob, form.token_bytes)
            for other, logprob in _top(logprobs, form.logprobs)
        ]
        content.append(entry)
    return {"content": content, "refusal": None}


def _chat_token(token: int, logprob: float, token_bytes: TokenBytes) -> dict[str, Any]:
    return {
        "token": _token_text(token, token_bytes),
        "logprob": _logprob(logprob),
        "bytes": None if token_bytes is None else list(token_bytes(token)),
    }


def _top(logprobs: TokenLogprobs, count: int) -> Sequence[tuple[int, float]]:
    """The `count` most likely tokens. Equal ones by id, so that their order is always the same."""
    return sorted(logprobs.items(), key=lambda item: (-item[1], item[0]))[:count]


def completion_logprobs(sequence: CompletionOutput, form: ResponseFormat) -> dict[str, Any] | None:
    """OpenAI's four lists; offsets count characters from the start of the answer."""
    if form.logprobs is None or sequence.logprobs is None:
        return None
    tokens: list[str] = []
    token_logprobs: list[float] = []
    top_logprobs: list[dict[str, float]] = []
    offsets: list[int] = []
    offset = 0
    for token, logprobs in zip(sequence.token_ids, sequence.logprobs, strict=True):
        tokens.append(_token_text(token, form.token_bytes))
        token_logprobs.append(_logprob(logprobs[token]))
        top_logprobs.append(_completion_top(token, logprobs, form))
        offsets.append(offset)
        offset += len(tokens[-1])
    return {
        "tokens": tokens,
        "token_logprobs": token_logprobs,
        "top_logprobs": top_logprobs,
        "text_offset": offsets,
    }


def _completion_top(token: int, logprobs: TokenLogprobs, form: ResponseFormat) -> dict[str, float]:
    """OpenAI's map from text to log-probability; it always has the sampled token.

    Of two tokens that spell the same the more likely one stands: the shape has room for one.
    """
    top: dict[str, float] = {}
    shown = list(_top(logprobs, form.logprobs or 0))
    if all(other != token for other, _ in shown):
        shown.append((token, logprobs[token]))
    for other, logprob in shown:
        top.setdefault(_token_text(other, form.token_bytes), _logprob(logprob))
    return top


def _prompt_logprobs(
    prompt_logprobs: Sequence[TokenLogprobs | None], token_bytes: TokenBytes
) -> list[dict[str, Any] | None]:
    """vLLM's shape: for each prompt token (the first has none) token id -> log-probability."""
    return [
        None
        if logprobs is None
        else {
            str(token): {
                "logprob": _logprob(logprob),
                "decoded_token": _token_text(token, token_bytes),
            }
            for token, logprob in sorted(logprobs.items(), key=lambda item: (-item[1], item[0]))
        }
        for logprobs in prompt_logprobs
    ]
