"""Answers in the shapes of Anthropic's Messages API: whole, as events, and errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel
from pydantic_core import from_json

from onestem.adapters.blocks import MARK, Block, BlockWriter, around_marks, named_event
from onestem.openai.write import ResponseFormat, compact_json
from onestem.request import CompletionOutput

JsonObject = dict[str, Any]

TYPE_OF_STATUS: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
DELTAS = {"text": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking"),
          "call": ("input_json_delta", "partial_json")}  # fmt: skip


class MessageErrorInfo(BaseModel):
    type: str
    message: str


class MessageError(BaseModel):
    type: str
    error: MessageErrorInfo
    request_id: str


def error_body(status: int, message: str, request_id: str) -> JsonObject:
    """An error as Anthropic's clients expect it."""
    other = "api_error" if status >= 500 else "invalid_request_error"
    kind = TYPE_OF_STATUS.get(status, other)
    error = {"type": kind, "message": message}
    return {"type": "error", "error": error, "request_id": request_id}


@dataclass(frozen=True)
class Messages:
    """Writes the answer to a chat as a message (`onestem.openai.write.Dialect`).

    Args:
        max_tokens: of the request.
    """

    max_tokens: int
    id_prefix = "msg_"

    def writer(
        self,
        name: str,
        created: int,
        form: ResponseFormat,
        usage: Callable[[], Mapping[str, Any]],
    ) -> MessageWriter:
        """See `Dialect.writer`."""
        return MessageWriter(self, name, form, usage)


class MessageWriter(BlockWriter):
    """Writes one message, whole or as events (`onestem.openai.write.DialectWriter`)."""

    ping = named_event({"type": "ping"}).encode()

    def __init__(
        self,
        asked: Messages,
        name: str,
        form: ResponseFormat,
        usage: Callable[[], Mapping[str, Any]],
    ) -> None:
        super().__init__(form.reading, name)
        self._asked, self._form, self._usage = asked, form, usage
        self._has_begun = False
        self._last: CompletionOutput | None = None

    def whole(self, piece: CompletionOutput, usage: Mapping[str, Any]) -> JsonObject:
        """The message."""
        self._feed(piece.text, ends=True)
        self._last = piece
        content = [
            self._block(block, _input(block.text) if block.kind == "call" else {})
            for block in self._blocks
        ]
        return self._message(content, usage) | self._stop(usage)

    def events(self, pieces: Mapping[tuple[int, int], CompletionOutput]) -> bytes:
        """The events for what has come."""
        written = "" if self._has_begun else self._start()
        for piece in pieces.values():
            written += self._feed(piece.text, ends=piece.finish_reason is not None)
            if piece.finish_reason is not None:
                self._last = piece
        return written.encode()

    def usage(self, usage: Mapping[str, Any]) -> bytes:
        """The last events."""
        end = {"type": "message_delta", "delta": self._stop(usage), "usage": _usage(usage)}
        return (named_event(end) + named_event({"type": "message_stop"})).encode()

    def failed(self, status: int, message: str) -> bytes:
        """The event that ends a stream that fails."""
        return named_event(error_body(status, message, self._name)).encode()

    def _start(self) -> str:
        self._has_begun = True
        message = {**self._message([], self._usage()), "stop_reason": None, "stop_sequence": None}
        start = {"type": "message_start", "message": message}
        return named_event(start) + self.ping.decode()

    def _message(self, content: Sequence[JsonObject], usage: Mapping[str, Any]) -> JsonObject:
        return {
            "id": self._name,
            "type": "message",
            "role": "assistant",
            "model": self._form.model,
            "content": content,
            "usage": _usage(usage),
        }

    def _begun(self, block: Block) -> str:
        kind, field = DELTAS[block.kind]
        block.around = around_marks(_delta(block, {"type": kind, field: MARK}))
        shown = self._block(replace(block, parts=[]), {})
        if block.kind == "reasoning":
            shown["signature"] = ""
        begin = {"type": "content_block_start", "index": block.index, "content_block": shown}
        return named_event(begin)

    def _more(self, block: Block, text: str) -> str:
        return compact_json(text).join(block.around)

    def _ended(self, block: Block) -> str:
        signed = ""
        if block.kind == "reasoning":
            signature = {"type": "signature_delta", "signature": self._name}
            signed = named_event(_delta(block, signature))
        return signed + named_event({"type": "content_block_stop", "index": block.index})

    def _block(self, block: Block, arguments: JsonObject) -> JsonObject:
        if block.kind == "text":
            return {"type": "text", "text": block.text}
        if block.kind == "reasoning":
            # Nobody checks the signature, but clients send no block back that has none.
            return {"type": "thinking", "thinking": block.text, "signature": self._name}
        called = {"id": block.call_id, "name": block.name, "input": arguments}
        return {"type": "tool_use", **called}

    def _stop(self, usage: Mapping[str, Any]) -> JsonObject:
        """Why the message ended."""
        last, stop = self._last, None
        reason = "end_turn"
        if last is not None and last.finish_reason == "length":
            is_whole = usage["completion_tokens"] >= self._asked.max_tokens
            reason = "max_tokens" if is_whole else "model_context_window_exceeded"
        elif self._has_called:
            reason = "tool_use"
        elif last is not None and isinstance(last.stop_reason, str):
            reason, stop = "stop_sequence", last.stop_reason
        return {"stop_reason": reason, "stop_sequence": stop}


def _delta(block: Block, delta: JsonObject) -> JsonObject:
    return {"type": "content_block_delta", "index": block.index, "delta": delta}


def _usage(usage: Mapping[str, Any]) -> dict[str, int]:
    """Anthropic's three kinds of prompt tokens add up to all of them."""
    details = usage["prompt_tokens_details"]
    read, written = details["cached_tokens"], details["cache_write_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - read - written,
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": read,
        "output_tokens": usage["completion_tokens"],
    }


def _input(arguments: str) -> JsonObject:
    """A call's arguments as an object: of those that were cut, what there is, as clients read the
    events. What JSON cannot have (a number beyond all bounds) stays text."""
    try:
        value = from_json(arguments or "{}", allow_partial=True)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}
