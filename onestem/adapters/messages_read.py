"""Reads bodies of Anthropic's Messages API as those of chats."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from onestem.adapters.messages_write import Messages
from onestem.checked import EXPECTED, Object, check, show, without_nulls
from onestem.errors import RequestError
from onestem.openai.read import Asked, Prompt, names_conversation, read_body
from onestem.openai.schema import MAX_MESSAGES, MAX_TOOLS, CacheControl, CallFields, ToolName
from onestem.request import Text

JsonObject = dict[str, Any]

# How errors name a chat's fields, and what they are called here.
NAMES = {
    r"stop\b": "stop_sequences",
    r"(tools\[\d+\])\.function\.parameters": r"\1.input_schema",
    r"response_format\.json_schema": "output_config.format",
}

# Claude Code begins its system prompt with a line that differs in each request: behind it, nothing
# would be as in the request before.
BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")


def of_type(*kinds: str, default: str | None = None) -> BeforeValidator:
    """Refuses objects of other types by name; those without a type are of `default`."""

    def checked(value: Any) -> Any:
        kind = value.get("type", default) if isinstance(value, Mapping) else None
        if isinstance(kind, str) and kind not in kinds:
            known = ", ".join(kinds)
            raise RequestError(f"type is {show(kind)}: not supported here, there is {known}")
        return value

    return BeforeValidator(checked)


def read_chat(chat: Mapping[str, Any], names: Mapping[str, str]) -> Asked:
    """Read the body of a chat; its errors begin with a field's other name, if it has one."""
    try:
        return read_body("chat", chat)
    except RequestError as error:
        text = str(error)
        for name, other in names.items():
            text = re.sub(rf"\A{name}", other, text)
        raise RequestError(text) from None


class _Cached(Object):
    cache_control: CacheControl | None = None
    """What is computed is kept as that of a conversation."""


class TextBlock(_Cached):
    type: Literal["text"]
    text: str
    citations: Annotated[list[Any], Field(max_length=0)] | None = None


class ThinkingBlock(_Cached):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class ToolUseBlock(_Cached):
    type: Literal["tool_use"]
    id: Text
    name: Text
    input: dict[str, Any]
    caller: dict[str, Any] | None = None
    toolset_name: None = None


_Texts = Annotated[
    list[Annotated[TextBlock, of_type("text")]],
    Field(max_length=MAX_MESSAGES, json_schema_extra={EXPECTED: "text or a list of text blocks"}),
]


class ToolResultBlock(_Cached):
    type: Literal["tool_result"]
    tool_use_id: Text
    content: str | _Texts | None = None
    is_error: bool | None = None
    toolset_name: None = None


Block = Annotated[
    TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
    of_type("text", "thinking", "tool_use", "tool_result"),
]
KINDS = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
    "system": ("text",),
}


class Turn(Object):
    """A turn of a conversation. An answer may be sent back as the client has dumped it."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(max_length=MAX_MESSAGES)] = Field(
        json_schema_extra={EXPECTED: "text or a list of blocks"}
    )

    @model_validator(mode="after")
    def _fits_its_role(self) -> Turn:
        for block in () if isinstance(self.content, str) else self.content:
            if block.type not in KINDS[self.role]:
                raise RequestError(f"content of role {self.role} has a block of type {block.type}")
        return self


class Tool(_Cached):
    """A function that the model may call."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    input_examples: Annotated[list[Any], Field(max_length=0)] | None = None

    def as_chats(self) -> JsonObject:
        """As a chat has it."""
        function = {"name": self.name, "description": self.description,
                    "parameters": self.input_schema, "strict": self.strict}  # fmt: skip
        return {"type": "function", "function": function}


class Choice(Object):
    """Whether tools are to be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _is_named(self) -> Choice:
        if (self.type == "tool") != (self.name is not None):
            raise RequestError(f"tool_choice of type {self.type} has {'no' * (not self.name)} name")
        return self

    def as_chats(self) -> JsonObject:
        """As fields of a chat."""
        named = {"type": "function", "function": {"name": self.name}}
        choice = {"any": "required", "tool": named}.get(self.type, self.type)
        return {"tool_choice": choice, "parallel_tool_calls": not self.disable_parallel_tool_use}


class Thinking(Object):
    """Whether the model is to think, where its chat template has the choice (`enable_thinking`).
    The rest is read, and nothing is held to it."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None
    display: str | None = None


class Format(Object):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Object):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """A variable of the chat template, if the template has it."""

    format: Format | None = None


class Edit(Object):
    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class ContextManagement(Object):
    edits: list[Edit] | None = None


class CountBody(CallFields):
    """A conversation whose tokens are counted."""

    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES)] = Field(
        json_schema_extra={EXPECTED: "a list of at least one message"}
    )
    system: str | _Texts | None = None
    tools: (
        Annotated[list[Annotated[Tool, of_type("custom")]], Field(max_length=MAX_TOOLS)] | None
    ) = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None

    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the model's chat template."""

    cache_control: CacheControl | None = None
    speed: Literal["standard"] | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None


class MessagesBody(CountBody):
    """A conversation that is answered."""

    max_tokens: Annotated[int, Field(ge=1)]
    """Maximum tokens to sample."""

    stop_sequences: list[str] | None = None
    """Texts that end the answer; cut from its text."""

    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None

    prefix: Text | None = None
    """Name of the prefix that precedes the conversation."""

    service_tier: str | None = None
    inference_geo: str | None = None
    container: None = None
    diagnostics: dict[str, Any] | None = None
    mcp_servers: Annotated[list[Any], Field(max_length=0)] | None = None


def read_messages(body: Mapping[str, Any]) -> Asked:
    """Read the body of a call; raises `RequestError` if it can never be answered."""
    fields = check(MessagesBody, without_nulls(body))
    kept = ("model", "cache_salt", "timeout", "max_tokens", "stream", "temperature", "top_p",
            "top_k", "seed", "prefix")  # fmt: skip
    asked = read_chat(
        {
            **_conversation(fields),
            **{name: getattr(fields, name) for name in kept},
            "stop": fields.stop_sequences,
            "continue_final_message": _is_begun(fields.messages[-1]) or None,
        },
        NAMES,
    )
    return replace(
        asked,
        in_conversation=names_conversation(body),
        include_usage=True,
        dialect=Messages(fields.max_tokens),
    )


def read_count(body: Mapping[str, Any]) -> tuple[Prompt, str | None]:
    """Read a conversation that is counted, and the model's name; raises `RequestError`."""
    fields = check(CountBody, without_nulls(body))
    asked = {**_conversation(fields), "continue_final_message": _is_begun(fields.messages[-1])}
    return read_chat(asked, NAMES).prompts[0], fields.model


def _is_begun(last: Turn) -> bool:
    """Whether the answer goes on from the last message."""
    kinds = {"text"} if isinstance(last.content, str) else {block.type for block in last.content}
    return last.role == "assistant" and kinds == {"text"}


def _conversation(fields: CountBody) -> JsonObject:
    """The fields of a chat that make its prompt."""
    chat: JsonObject = {"messages": [*_system(fields.system)]}
    for turn in fields.messages:
        chat["messages"] += _messages(turn)
    if fields.tools is not None:
        chat["tools"] = [without_nulls(tool.as_chats()) for tool in fields.tools]
    if fields.tool_choice is not None:
        chat |= fields.tool_choice.as_chats()
    variables = dict(fields.chat_template_kwargs or {})
    if fields.thinking is not None:
        variables.setdefault("enable_thinking", fields.thinking.type != "disabled")
    output = fields.output_config or OutputConfig()
    effort = "xhigh" if output.effort == "max" else output.effort
    if output.format is not None:
        schema = {"name": "answer", "schema": output.format.schema_}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    return {**chat, "chat_template_kwargs": variables or None, "reasoning_effort": effort}


def _system(system: str | Sequence[TextBlock] | None) -> Iterator[JsonObject]:
    blocks = system or ""
    texts = [blocks] if isinstance(blocks, str) else [block.text for block in blocks]
    kept = [left for text in texts if (left := BILLING.sub("", text)) or not BILLING.match(text)]
    if any(kept):
        yield {"role": "system", "content": _parts(kept)}


def _messages(turn: Turn) -> Iterator[JsonObject]:
    """The messages of a turn: results of tools are messages of their own."""
    if isinstance(turn.content, str):
        yield {"role": turn.role, "content": turn.content}
    elif turn.role == "assistant":
        yield from _answer(turn.content)
    else:
        texts: list[str] = []
        for block in turn.content:
            if isinstance(block, TextBlock):
                texts.append(block.text)
                continue
            if texts:
                yield {"role": turn.role, "content": _parts(texts)}
                texts = []
            assert isinstance(block, ToolResultBlock)
            yield _result(block)
        if texts or not turn.content:
            yield {"role": turn.role, "content": _parts(texts)}


def _parts(texts: Sequence[str]) -> str | list[JsonObject]:
    return [{"type": "text", "text": text} for text in texts] or ""


def _result(block: ToolResultBlock) -> JsonObject:
    content = block.content or ""
    text = content if isinstance(content, str) else "\n".join(part.text for part in content)
    if block.is_error:  # chats have no other place for it
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}


def _answer(blocks: Sequence[Any]) -> list[JsonObject]:
    """An answer that is sent back. A text after calls begins a message of its own; adjacent ones
    are a client's, and lines of one."""
    answer: JsonObject = {"role": "assistant", "content": ""}
    messages = [answer]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    if any(thoughts):
        answer["reasoning_content"] = "\n".join(thoughts)
    before = None
    for block in blocks:
        if isinstance(block, TextBlock):
            if "tool_calls" in messages[-1]:
                messages.append({"role": "assistant", "content": ""})
            messages[-1]["content"] += "\n" * isinstance(before, TextBlock) + block.text
        elif isinstance(block, ToolUseBlock):
            function = {"name": block.name, "arguments": block.input}
            call = {"id": block.id, "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        before = block
    return messages
