"""Answers of a server, whole or streamed, in one shape, and what is wrong with them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Choice", "Reply", "choices_of", "differences", "is_a_draw", "reply_of"]

Json = dict[str, Any]

CLOSE = 1e-4  # what log-probabilities may differ by
# Events of errors have no status of their own.
STATUS_OF_TYPE = {
    "invalid_request_error": 400,
    "rate_limit_error": 429,
    "service_unavailable_error": 503,
    "timeout_error": 504,
}


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One answer.

    Attributes:
        exact: what must be equal: text, token ids, finish reason, choice, tokens' texts.
        rows: by token, its log-probability and those beside it, highest first.
        prompt_rows: the same of the prompt; None: not there.
    """

    exact: Mapping[str, Any]
    rows: Sequence[Sequence[float]] = ()
    prompt_rows: Sequence[Sequence[float]] | None = None


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What came for a request.

    Attributes:
        usage: (tokens of the prompts, tokens of the answers), if it was told.
        error: the message, if it is one; fault: what is wrong with its form.
    """

    status: int
    choices: Sequence[Choice] = ()
    usage: tuple[int, int] | None = None
    error: str | None = None
    code: str | None = None
    fault: str | None = None

    def plain(self) -> Json:
        """For JSON."""
        return {name: value for name, value in asdict(self).items() if value}


# ----------------------------------------------------------------------------- reading


def reply_of(status: int, raw: bytes) -> Reply:
    """What a body says; a stream is put together."""
    try:
        return _streamed(raw) if raw.startswith((b"data: ", b":")) else _whole(status, raw)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        return Reply(status=status, fault=f"{type(error).__name__}: {error}: {raw[:200]!r}")


def _whole(status: int, raw: bytes) -> Reply:
    body = json.loads(raw)
    if status != 200:
        error = body["error"]
        return Reply(status=status, error=error["message"], code=error["code"])
    return Reply(status=200, choices=choices_of(body["choices"]), usage=_usage(body["usage"]))


def _usage(usage: Mapping[str, Any] | None) -> tuple[int, int] | None:
    return None if usage is None else (usage["prompt_tokens"], usage["completion_tokens"])


def _streamed(raw: bytes) -> Reply:
    events = [json.loads(event) for event in _events(raw)]
    failed = [event["error"] for event in events if "error" in event]
    if failed:
        status = STATUS_OF_TYPE.get(failed[0]["type"], 500)
        fault = "more than one error" if len(failed) > 1 else None
        error = failed[0]
        return Reply(status=status, error=error["message"], code=error["code"], fault=fault)
    usage = [_usage(event["usage"]) for event in events if event.get("usage")]
    choices = choices_of(folded(choice for event in events for choice in event["choices"]))
    return Reply(status=200, choices=choices, usage=usage[-1] if usage else None)


def _events(raw: bytes) -> list[str]:
    """The data of a stream's events, which must end as it should."""
    events = [one for one in raw.decode().split("\n\n") if not one.startswith(":")]
    if events[-2:] != ["data: [DONE]", ""]:
        raise ValueError(f"the stream ends with {events[-2:]}")
    if not all(event.startswith("data: ") for event in events[:-1]):
        raise ValueError("an event is no data")
    return [event.removeprefix("data: ") for event in events[:-2]]


def folded(pieces: Iterator[Json]) -> list[Json]:
    """The choices that the pieces of a stream make."""
    found: dict[int, Json] = {}
    for piece in pieces:
        begun = found.setdefault(piece["index"], {"index": piece["index"], "text": ""})
        if begun.get("finish_reason"):
            raise ValueError(f"choice {piece['index']} goes on behind its end")
        _add(begun, piece)
    return [found[index] for index in sorted(found)]


def _add(begun: Json, piece: Json) -> None:
    begun["text"] += _text(piece)
    begun["finish_reason"] = piece["finish_reason"]
    if "choice" in piece:
        begun["choice"] = piece["choice"]
    if "token_ids" in piece:
        begun["token_ids"] = begun.get("token_ids", []) + piece["token_ids"]
    for name, values in (piece["logprobs"] or {}).items():
        if isinstance(values, list):
            begun.setdefault("logprobs", {}).setdefault(name, []).extend(values)


def _text(choice: Mapping[str, Any]) -> str:
    """Of a chat's or a completion's choice, or a piece of it."""
    if "text" in choice:
        return str(choice["text"])
    return str(choice.get("message", choice.get("delta", {})).get("content", ""))


def choices_of(choices: Sequence[Json]) -> list[Choice]:
    """The choices of a body."""
    return [_choice(choice) for choice in choices]


def _choice(choice: Mapping[str, Any]) -> Choice:
    tokens, rows = _logprobs(choice.get("logprobs"))
    exact = {name: choice.get(name) for name in ("index", "finish_reason", "choice", "token_ids")}
    prompt = choice.get("prompt_logprobs")
    return Choice(
        exact={**exact, "text": _text(choice), "tokens": tokens},
        rows=rows,
        prompt_rows=None if prompt is None else [_prompt_row(row) for row in prompt],
    )


def _logprobs(logprobs: Mapping[str, Any] | None) -> tuple[list[Any], list[list[float]]]:
    """Of each token what it is called, and the numbers."""
    if not logprobs:
        return [], []
    if "content" in logprobs:
        return _chat_logprobs(logprobs["content"])
    tops = [sorted(top.values(), reverse=True) for top in logprobs["top_logprobs"]]
    rows = [[own, *top] for own, top in zip(logprobs["token_logprobs"], tops, strict=True)]
    return list(zip(logprobs["tokens"], logprobs["text_offset"], strict=True)), rows


def _chat_logprobs(content: Sequence[Json]) -> tuple[list[Any], list[list[float]]]:
    rows = [[one["logprob"], *(top["logprob"] for top in one["top_logprobs"])] for one in content]
    return [(one["token"], one["bytes"]) for one in content], rows


def _prompt_row(row: Mapping[str, Any] | None) -> list[float]:
    return sorted((one["logprob"] for one in (row or {}).values()), reverse=True)


# ----------------------------------------------------------------------------- comparing


def differences(expected: Reply, found: Reply) -> list[str]:
    """What a good answer has that it should not have, or the other way round."""
    if len(expected.choices) != len(found.choices):
        return [f"{len(found.choices)} choices, expected {len(expected.choices)}"]
    told = []
    if found.usage not in (None, expected.usage):
        told.append(f"usage is {found.usage}, expected {expected.usage}")
    for want, got in zip(expected.choices, found.choices, strict=True):
        told += [f"choice {want.exact['index']}: {what}" for what in _differs(want, got)]
    return told


def _differs(want: Choice, got: Choice) -> Iterator[str]:
    for name, value in want.exact.items():
        if got.exact[name] != value:
            yield f"{name} is {got.exact[name]!r}, expected {value!r}"
    if not _are_close(want.rows, got.rows):
        yield "log-probabilities differ"
    # Streams have none of the prompt.
    if got.prompt_rows is not None and not _are_close(want.prompt_rows or (), got.prompt_rows):
        yield "log-probabilities of the prompt differ"


def _are_close(want: Sequence[Sequence[float]], got: Sequence[Sequence[float]]) -> bool:
    return len(want) == len(got) and all(map(_is_close, want, got))


def _is_close(want: Sequence[float], got: Sequence[float]) -> bool:
    return len(want) == len(got) and all(
        math.isclose(a, b, rel_tol=0, abs_tol=CLOSE) for a, b in zip(want, got, strict=True)
    )


def is_a_draw(expected: Reply, found: Reply) -> bool:
    """Whether a sampled answer could differ by nothing but where a random number fell: each choice
    goes another way from some token on, and its log-probabilities are right up to there."""
    if len(expected.choices) != len(found.choices) or found.status != 200:
        return False
    return all(map(_goes_another_way, expected.choices, found.choices))


def _goes_another_way(want: Choice, got: Choice) -> bool:
    if not list(_differs(want, got)):
        return True
    ids = want.exact["token_ids"] or (), got.exact["token_ids"] or ()
    common = next((i for i, pair in enumerate(zip(*ids)) if pair[0] != pair[1]), None)
    return common is not None and _are_close(want.rows[:common], got.rows[:common])
