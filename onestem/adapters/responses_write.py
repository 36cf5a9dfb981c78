"""Answers in the shapes of OpenAI's Responses API: whole, and as events."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from onestem.adapters.blocks import MARK, Block, BlockWriter, around_marks, named_event
from onestem.openai.write import ResponseFormat, compact_json
from onestem.request import CompletionOutput

JsonObject = dict[str, Any]
ID_PREFIX = {"text": "msg", "reasoning": "rs", "call": "fc"}
# Of a text or of reasoning: the type of its part, and of its events.
PARTS = {"text": "output_text", "reasoning": "reasoning_text"}
ARGUMENTS = "function_call_arguments"


@dataclass(frozen=True)
class Responses:
    """Writes the answer to a chat as a response (`onestem.openai.write.Dialect`).

    Args:
        echo: fields of the request that the answer repeats.
        keep: stores the answer; None: it is not to be stored.
    """

    echo: Mapping[str, Any]
    keep: Callable[[JsonObject], None] | None
    id_prefix = "resp_"

    def writer(
        self,
        name: str,
        created: int,
        form: ResponseFormat,
        usage: Callable[[], Mapping[str, Any]],
    ) -> ResponseWriter:
        """See `Dialect.writer`."""
        return ResponseWriter(self, name, created, form)


class ResponseWriter(BlockWriter):
    """Writes one response, whole or as events (`onestem.openai.write.DialectWriter`)."""

    ping = b""

    def __init__(self, asked: Responses, name: str, created: int, form: ResponseFormat) -> None:
        super().__init__(form.reading, name)
        self._asked, self._created, self._form = asked, created, form
        self._number = 0  # of the next event
        self._is_cut = False

    def whole(self, piece: CompletionOutput, usage: Mapping[str, Any]) -> JsonObject:
        """The response, which is stored."""
        self._is_cut = piece.finish_reason == "length"
        self._feed(piece.text, ends=True)
        return self._final(usage)

    def events(self, pieces: Mapping[tuple[int, int], CompletionOutput]) -> bytes:
        """The events for what has come."""
        written = self._start()
        for piece in pieces.values():
            self._is_cut = piece.finish_reason == "length"
            written += self._feed(piece.text, ends=piece.finish_reason is not None)
        return written.encode()

    def usage(self, usage: Mapping[str, Any]) -> bytes:
        """The last event; the response is stored."""
        made = self._final(usage)
        return self._event(f"response.{made['status']}", response=made).encode()

    def failed(self, status: int, message: str) -> bytes:
        """The event that ends a stream that fails."""
        code = "rate_limit_exceeded" if status == 429 else "server_error"
        made = self._response("failed", error={"code": code, "message": message})
        return (self._start() + self._event("response.failed", response=made)).encode()

    def _final(self, usage: Mapping[str, Any]) -> JsonObject:
        details = {"reason": "max_output_tokens"} if self._is_cut else None
        status = "incomplete" if self._is_cut else "completed"
        made = self._response(status, incomplete_details=details, usage=_usage(usage))
        if self._asked.keep is not None:
            self._asked.keep(made)
        return made

    def _response(self, status: str, **more: Any) -> JsonObject:
        """The response as it stands."""
        echo = self._asked.echo
        text = echo.get("text", {})
        return {
            "id": self._name,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "max_output_tokens": None,
            "metadata": {},
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "temperature": None,
            "tool_choice": "auto",
            "tools": [],
            "top_p": None,
            "truncation": "disabled",
            "usage": None,
            "user": None,
            **echo,
            "model": self._form.model,
            "output": [self._item(block, ends=True) for block in self._blocks],
            "reasoning": {"effort": None, "summary": None, **echo.get("reasoning", {})},
            "store": self._asked.keep is not None,
            "text": {"format": {"type": "text"}, **text},
            **more,
        }

    def _item(self, block: Block, *, ends: bool) -> JsonObject:
        """A block as an item; `ends`: with its contents."""
        text = block.text if ends else ""
        made: JsonObject = {"id": self._item_id(block)}
        if block.kind == "reasoning":
            content = [self._part(block, text)] if ends else []
            return {**made, "type": "reasoning", "summary": [], "content": content}
        is_last = block is self._blocks[-1]
        ended = "incomplete" if self._is_cut and is_last else "completed"
        made["status"] = ended if ends else "in_progress"
        if block.kind == "text":
            content = [self._part(block, text)] if ends else []
            return {**made, "type": "message", "role": "assistant", "content": content}
        made |= {"type": "function_call", "call_id": block.call_id, "name": block.name}
        return {**made, "arguments": text}

    def _item_id(self, block: Block) -> str:
        own = self._name.removeprefix(self._asked.id_prefix)
        return f"{ID_PREFIX[block.kind]}_{own}_{block.index}"

    def _part(self, block: Block, text: str) -> JsonObject:
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _start(self) -> str:
        """The events before all others, once."""
        if self._number:
            return ""
        begun = self._response("in_progress")
        return self._event("response.created", response=begun) + self._event(
            "response.in_progress", response=begun
        )

    def _begun(self, block: Block) -> str:
        kind, place = PARTS.get(block.kind), self._place(block)
        more: JsonObject = {"type": f"response.{kind or ARGUMENTS}.delta", "sequence_number": MARK}
        block.around = around_marks(more | place | {"delta": MARK} | _logprobs(block))
        added = self._event(
            "response.output_item.added",
            output_index=block.index,
            item=self._item(block, ends=False),
        )
        if kind is None:
            return added
        part = self._part(block, "")
        return added + self._event("response.content_part.added", **place, part=part)

    def _more(self, block: Block, text: str) -> str:
        first, between, last = block.around
        event = f"{first}{self._number}{between}{compact_json(text)}{last}"
        self._number += 1
        return event

    def _ended(self, block: Block) -> str:
        kind, place = PARTS.get(block.kind), self._place(block)
        if kind is None:
            written = self._event(f"response.{ARGUMENTS}.done", **place, arguments=block.text)
        else:
            logprobs = _logprobs(block)
            written = self._event(f"response.{kind}.done", **place, text=block.text, **logprobs)
            whole = self._part(block, block.text)
            written += self._event("response.content_part.done", **place, part=whole)
        return written + self._event(
            "response.output_item.done",
            output_index=block.index,
            item=self._item(block, ends=True),
        )

    def _end(self) -> str:
        """An answer of no text is an empty message: without one a conversation lacks its turn."""
        return ("" if self._blocks else self._begin("text")) + super()._end()

    def _place(self, block: Block) -> JsonObject:
        """Where a block's text is in the response."""
        item: JsonObject = {"item_id": self._item_id(block), "output_index": block.index}
        return item if block.kind == "call" else {**item, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> str:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return named_event(event)


def _logprobs(block: Block) -> JsonObject:
    return {"logprobs": []} if block.kind == "text" else {}


def _usage(usage: Mapping[str, Any]) -> JsonObject:
    details = usage["prompt_tokens_details"]
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": details["cached_tokens"],
            "cache_write_tokens": details["cache_write_tokens"],
        },
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }
