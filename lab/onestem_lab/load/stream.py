"""Reads a streamed answer, and checks for parts that are missing, doubled or out of order."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

__all__ = ["Answer", "Events"]


class Events:
    """Cuts a byte stream into the data of server-sent events (WHATWG HTML, section 9.2)."""

    def __init__(self) -> None:
        self._line = b""
        self._data: list[bytes] = []

    def feed(self, received: bytes) -> list[bytes]:
        """Data of the events that are complete now. Lines end in LF or CR LF."""
        *lines, self._line = (self._line + received).split(b"\n")
        return [data for line in lines if (data := self._take(line.rstrip(b"\r"))) is not None]

    @property
    def torn(self) -> bool:
        """Whether an event has begun and not ended."""
        return bool(self._line or self._data)

    def _take(self, line: bytes) -> bytes | None:
        if line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" "))
        if line or not self._data:
            return None
        data, self._data = b"\n".join(self._data), []
        return data


class Answer:
    """One streamed completion or chat completion with one choice, as it arrives.

    `faults` lists what is wrong with it. An event is not JSON, is an error object, or has another
    choice or id. A chunk comes after the finish reason or [DONE]. A text offset goes back. There is
    no finish reason, the stream ends early, or tokens are fewer or more than asked or counted.
    """

    def __init__(
        self, output_tokens: int | None, expected_ids: Sequence[int] | None = None
    ) -> None:
        self.faults: list[str] = []
        self.token_times: list[float] = []
        self.token_ids: list[int] = []
        self.text: list[str] = []
        self.usage: dict[str, Any] | None = None
        self.finish_reason: str | None = None
        self._asked, self._expected = output_tokens, expected_ids
        self._id: object = None
        self._done = False
        self._text_end = 0
        self._events = Events()

    def feed(self, received: bytes, now: float) -> None:
        for data in self._events.feed(received):
            if self._done:
                self._fault("an event after [DONE]")
            elif data == b"[DONE]":
                self._done = True
            else:
                self._chunk(data, now)

    def end(self) -> None:
        """Note what is missing when the connection has ended."""
        if self._events.torn:
            self._fault("the stream ends within an event")
        if not self._done:
            self._fault("the stream ends without [DONE]")
        if self.finish_reason is None:
            self._fault("no finish_reason")
        self._check_counts()
        if self._expected is not None and self.token_ids != list(self._expected):
            self._fault(f"token ids differ at {_first_difference(self.token_ids, self._expected)}")

    @property
    def output_tokens(self) -> int:
        """Tokens by the server's own count, else by ids, else by chunks that bring text."""
        if self.usage is not None:
            return int(self.usage.get("completion_tokens") or 0)
        return len(self.token_ids) or len(self.token_times)

    @property
    def cached_tokens(self) -> int:
        details = (self.usage or {}).get("prompt_tokens_details") or {}
        return int(details.get("cached_tokens") or 0)

    def _chunk(self, data: bytes, now: float) -> None:
        try:
            chunk = json.loads(data)
            choices = chunk.get("choices", [])
        except (ValueError, AttributeError):
            self._fault("an event that is no JSON object")
            return
        if "error" in chunk:
            self._fault(f"error: {_message(chunk['error'])}")
            return
        self._same_id(chunk.get("id"))
        self.usage = chunk.get("usage") or self.usage
        for choice in choices:
            self._choice(choice, now)

    def _same_id(self, given: object) -> None:
        if self._id is None:
            self._id = given
        elif given != self._id:
            self._fault("a chunk of another id")

    def _choice(self, choice: dict[str, Any], now: float) -> None:
        if choice.get("index", 0) != 0:
            self._fault(f"choice {choice['index']}, only one was asked")
            return
        text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        ids = choice.get("token_ids") or []
        if self.finish_reason is not None:
            self._fault("a chunk after the finish_reason")
        self._offsets(choice.get("logprobs") or {})
        self.text.append(text)
        self.token_ids.extend(ids)
        if text or ids:
            self.token_times.append(now)
        self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def _offsets(self, logprobs: dict[str, Any]) -> None:
        for offset in logprobs.get("text_offset") or []:
            if offset < self._text_end:
                self._fault(f"text offset {offset} after {self._text_end}")
            self._text_end = max(self._text_end, offset)

    def _check_counts(self) -> None:
        if self.usage is not None and self.token_ids:
            self._equal(len(self.token_ids), self.output_tokens, "streamed", "counted in usage")
        if self._asked is not None and (self.usage is not None or self.token_ids):
            self._equal(self.output_tokens, self._asked, "answered", "asked")

    def _equal(self, found: int, wanted: int, what: str, than: str) -> None:
        if found != wanted:
            self._fault(f"{found} tokens {what}, {wanted} {than}")

    def _fault(self, what: str) -> None:
        if what not in self.faults:
            self.faults.append(what)


def _first_difference(found: Sequence[int], wanted: Sequence[int]) -> int:
    pairs = enumerate(zip(found, wanted))
    return next((i for i, (a, b) in pairs if a != b), min(len(found), len(wanted)))


def _message(error: object) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)[:200]
