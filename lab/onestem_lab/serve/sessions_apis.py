"""A conversation as a client of each API keeps it: what is sent, and what stays of an answer."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

from onestem_lab.serve.sessions_data import Conversation, Turn

__all__ = ["APIS", "Client"]

Json = dict[str, Any]


class Client:
    """One conversation.

    Args:
        conversation: its system prompt and tools.
        common: fields of each body.

    Attributes:
        path: of the route.
    """

    path: ClassVar[str]

    def __init__(self, conversation: Conversation, common: Json) -> None:
        self._conversation, self._common = conversation, common
        self._turns: list[Any] = []  # what each turn has added
        self._calls: list[str] = []  # ids of the last answer's
        self._waits: list[list[str]] = []  # these ids after each turn

    def branch(self, after: int) -> Client:
        """The conversation as it was after so many turns."""
        made = copy.copy(self)
        made._turns, made._waits = self._turns[:after], self._waits[:after]
        made._calls = made._waits[-1] if made._waits else []
        return made

    def body(self, turn: Turn) -> Json:
        """What is sent for a turn."""
        raise NotImplementedError

    def take(self, turn: Turn, answer: Json) -> tuple[int, int]:
        """Keep an answer; the prompt's tokens and cached ones, as its `usage` says."""
        raise NotImplementedError

    def _kept(self, added: Any, calls: list[str]) -> None:
        self._turns.append(added)
        self._calls = calls
        self._waits.append(calls)

    def _results(self, turn: Turn) -> list[tuple[str, str, bool]]:
        """Of each result its call's id, its text, and whether it is sent as a list of parts."""
        pairs = zip(self._calls, turn.results, strict=True)
        return [(name, text, len(text) % 2 == 0) for name, text in pairs]


class Chat(Client):
    """`/v1/chat/completions`."""

    path = "/v1/chat/completions"

    def _said(self, turn: Turn) -> list[Json]:
        results = [
            {"role": "tool", "tool_call_id": name,
             "content": [{"type": "text", "text": text}] if parts else text}
            for name, text, parts in self._results(turn)
        ]  # fmt: skip
        return results or [{"role": "user", "content": turn.user}]

    def body(self, turn: Turn) -> Json:
        one = self._conversation
        before = [message for turn in self._turns for message in turn]
        system = {"role": "system", "content": one.system}
        return {
            **self._common,
            "messages": [system, *before, *self._said(turn)],
            "tools": [{"type": "function", "function": tool} for tool in one.tools],
            "seed": turn.number,
            "max_completion_tokens": 4000,
        }

    def take(self, turn: Turn, answer: Json) -> tuple[int, int]:
        message = answer["choices"][0]["message"]
        calls = [call["id"] for call in message.get("tool_calls") or ()]
        self._kept([*self._said(turn), message], calls)
        usage = answer["usage"]
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


class Messages(Client):
    """`/v1/messages`, as Claude Code sends them: a line for billing that always changes, thinking,
    and hints where to cache, of which the last one moves on."""

    path = "/v1/messages"

    def _said(self, turn: Turn) -> list[Json]:
        results = [
            {"type": "tool_result", "tool_use_id": name,
             "content": [{"type": "text", "text": text}] if parts else text}
            for name, text, parts in self._results(turn)
        ]  # fmt: skip
        return [{"role": "user", "content": results or [{"type": "text", "text": turn.user}]}]

    def body(self, turn: Turn) -> Json:
        one, hint = self._conversation, {"cache_control": {"type": "ephemeral"}}
        bill = f"x-anthropic-billing-header: cc_version=2.1.{turn.number}; cch={turn.number:05x};"
        tools = [
            {"name": tool["name"], "description": tool["description"],
             "input_schema": tool["parameters"]}
            for tool in one.tools
        ]  # fmt: skip
        said = self._said(turn)
        said[-1]["content"][-1] |= hint
        return {
            **self._common,
            "system": [{"type": "text", "text": bill}, {"type": "text", "text": one.system} | hint],
            "messages": [*(message for turn in self._turns for message in turn), *said],
            "tools": [*tools[:-1], *(tool | hint for tool in tools[-1:])],
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "seed": turn.number,
            "max_tokens": 4000,
        }

    def take(self, turn: Turn, answer: Json) -> tuple[int, int]:
        content, usage = answer["content"], answer["usage"]
        calls = [block["id"] for block in content if block["type"] == "tool_use"]
        self._kept([*self._said(turn), {"role": "assistant", "content": content}], calls)
        read, made = usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]
        return usage["input_tokens"] + read + made, read


class Items(Client):
    """`/v1/responses` with whole items; nothing is stored."""

    path = "/v1/responses"

    def _said(self, turn: Turn) -> list[Json]:
        results = [
            {"type": "function_call_output", "call_id": name,
             "output": [{"type": "input_text", "text": text}] if parts else text}
            for name, text, parts in self._results(turn)
        ]  # fmt: skip
        text = [{"type": "input_text", "text": turn.user}]
        return results or [{"type": "message", "role": "user", "content": text}]

    def _input(self, turn: Turn) -> Json:
        before = [item for turn in self._turns for item in turn]
        return {"input": [*before, *self._said(turn)], "store": False}

    def body(self, turn: Turn) -> Json:
        one = self._conversation
        return {
            **self._common,
            **self._input(turn),
            "instructions": one.system,
            "tools": [{"type": "function", **tool} for tool in one.tools],
            "seed": turn.number,
            "max_output_tokens": 4000,
        }

    def take(self, turn: Turn, answer: Json) -> tuple[int, int]:
        calls = [item["call_id"] for item in answer["output"] if item["type"] == "function_call"]
        self._keep(turn, answer, calls)
        usage = answer["usage"]
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]

    def _keep(self, turn: Turn, answer: Json, calls: list[str]) -> None:
        self._kept([*self._said(turn), *answer["output"]], calls)


class Stored(Items):
    """`/v1/responses` with `previous_response_id`."""

    def _input(self, turn: Turn) -> Json:
        before = {"previous_response_id": self._turns[-1]} if self._turns else {}
        return {"input": self._said(turn), **before}

    def _keep(self, turn: Turn, answer: Json, calls: list[str]) -> None:
        self._kept(answer["id"], calls)


APIS: dict[str, type[Client]] = {
    "chat": Chat,
    "messages": Messages,
    "responses, items": Items,
    "responses, stored": Stored,
}
