"""Reads bodies of OpenAI's Responses API as those of chats."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal, Protocol

from pydantic import Discriminator, Field, Tag

from onestem.adapters.messages_read import of_type, read_chat
from onestem.adapters.responses_write import Responses
from onestem.checked import EXPECTED, Object, check, without_nulls
from onestem.errors import RequestError
from onestem.openai.read import Asked
from onestem.openai.schema import MAX_MESSAGES, MAX_TOOLS, CallFields, ToolName
from onestem.request import Text

JsonObject = dict[str, Any]
_Label = dict[str, Any]
_None = Annotated[list[Any], Field(max_length=0)]


class Conversation(Protocol):
    """What was said up to a stored answer, and with it."""

    def items(self) -> list[JsonObject]:
        """As items of an input."""
        ...


# The conversation of a stored answer by its id; raises where there is none.
Recall = Callable[[str], Conversation]


class TextPart(Object):
    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: _None | None = None
    logprobs: _None | None = None


_Texts = Annotated[
    list[Annotated[TextPart, of_type("input_text", "output_text")]], Field(max_length=MAX_MESSAGES)
]


class _Item(Object):
    id: str | None = None
    status: str | None = None


class MessageItem(_Item):
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | _Texts = Field(json_schema_extra={EXPECTED: "text or a list of text parts"})
    phase: str | None = None


class CallItem(_Item):
    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: str
    namespace: None = None
    caller: _Label | None = None
    async_: Literal[False] | None = None


class ResultItem(_Item):
    type: Literal["function_call_output"]
    call_id: Text
    output: str | _Texts = Field(json_schema_extra={EXPECTED: "text or a list of text parts"})
    name: str | None = None
    namespace: None = None
    caller: _Label | None = None


class ThoughtText(Object):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(_Item):
    type: Literal["reasoning"]
    summary: list[ThoughtText] | None = None
    content: list[ThoughtText] | None = None
    encrypted_content: str | None = None


def _kind(value: Any) -> str:
    given = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
    return "message" if given is None else str(given)


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[ResultItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
    of_type("message", "function_call", "function_call_output", "reasoning"),
]


class Input(Object):
    """Items of a conversation."""

    input: Annotated[list[Item], Field(max_length=MAX_MESSAGES)]


class FunctionTool(Object):
    """A function that the model may call."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    output_schema: _Label | None = None


class NamedFunction(Object):
    type: Literal["function"]
    name: Text


class ToolChoice(Object):
    type: Literal["function", "allowed_tools"]
    name: Text | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[NamedFunction] | None = None


class Format(Object):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextConfig(Object):
    format: Format | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Object):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    """A variable of the chat template, if the template has it."""

    summary: str | None = None
    """There are none: all of the reasoning is in its item."""

    generate_summary: str | None = None


class StreamOptions(Object):
    include_obfuscation: bool | None = None
    """Nothing is hidden here."""


class ResponsesBody(CallFields):
    """A conversation, or what is new in one."""

    input: str | Annotated[list[Item], Field(max_length=MAX_MESSAGES)] = Field(
        json_schema_extra={EXPECTED: "text or a list of items"}
    )
    instructions: str | None = None
    """A system message before all others."""

    previous_response_id: str | None = None
    """Go on from a stored answer."""

    store: bool | None = None
    """Keep the answer and its conversation for a later request; true where it is left out."""

    tools: (
        Annotated[list[Annotated[FunctionTool, of_type("function")]], Field(max_length=MAX_TOOLS)]
        | None
    ) = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = Field(
        default=None,
        json_schema_extra={EXPECTED: "none, auto, required, or a function by its name"},
    )
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the model's chat template."""

    prefix: Text | None = None
    """Name of the prefix that precedes the conversation."""

    include: list[Literal["reasoning.encrypted_content"]] | None = None
    """Reasoning is in its item as it is."""

    max_tool_calls: int | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    top_logprobs: Literal[0] | None = None
    conversation: None = None
    prompt: None = None
    moderation: None = None
    context_management: _None | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: _Label | None = None
    client_metadata: _Label | None = None


class Keep(Protocol):
    """Stores an answer."""

    def __call__(
        self, body: JsonObject, *, said: Sequence[JsonObject], num_bytes: int, before: Any
    ) -> None:
        """`said`: the items of its request; `num_bytes` of these; `before`: the conversation that
        they go on from, if any."""
        ...


_ECHOED = ("instructions", "max_output_tokens", "metadata", "parallel_tool_calls",
           "previous_response_id", "reasoning", "temperature", "text", "tool_choice", "tools",
           "top_p", "user")  # fmt: skip
_SAME = ("model", "cache_salt", "timeout", "stream", "temperature", "top_p", "top_k", "seed",
         "prefix", "prompt_cache_key", "parallel_tool_calls", "chat_template_kwargs")  # fmt: skip

_NAMES = {
    r"(tools\[\d+\])\.function": r"\1",
    r"tool_choice\.(function\.name|allowed_tools)": "tool_choice",
    r"response_format(\.json_schema)?": "text.format",
}


def read_responses(body: Mapping[str, Any], recall: Recall, keep: Keep) -> Asked:
    """Read the body of a call.

    Args:
        recall: the conversation of a stored answer.
        keep: stores the answer.

    Raises:
        RequestError: it can never be answered.
    """
    given = without_nulls(body)
    fields = check(ResponsesBody, given)
    before = None
    if fields.previous_response_id is not None:
        before = recall(fields.previous_response_id)
    new = given["input"]
    if isinstance(new, str):
        new = [{"type": "message", "role": "user", "content": new}]
    earlier = [] if before is None else before.items()
    if not earlier and not new:
        raise RequestError("input is [], expected text or a list of at least one item")
    messages = _messages(check(Input, {"input": [*earlier, *new]}).input)
    if fields.instructions is not None:
        messages.insert(0, {"role": "system", "content": fields.instructions})
    chat = {name: getattr(fields, name) for name in _SAME}
    asked = read_chat({**chat, "messages": messages, **_renamed(fields)}, _NAMES)
    echo = {name: given[name] for name in _ECHOED if name in given}
    kept = None
    if fields.store is not False:
        kept = partial(keep, said=new, num_bytes=len(json.dumps(new)), before=before)
    return replace(asked, include_usage=True, dialect=Responses(echo, kept))


def _renamed(fields: ResponsesBody) -> JsonObject:
    """Fields that chats have under other names."""
    tools = None
    if fields.tools is not None:
        names = {"name", "description", "parameters", "strict"}
        tools = [
            {"type": "function", "function": tool.model_dump(include=names, exclude_none=True)}
            for tool in fields.tools
        ]
    reasoning = fields.reasoning or Reasoning()
    return {
        "max_completion_tokens": fields.max_output_tokens,
        "tools": tools,
        "tool_choice": _choice(fields.tool_choice),
        "reasoning_effort": reasoning.effort,
        "response_format": _format((fields.text or TextConfig()).format),
    }


def _choice(choice: str | ToolChoice | None) -> Any:
    if not isinstance(choice, ToolChoice):
        return choice
    if choice.type == "function":
        return {"type": "function", "function": {"name": choice.name}}
    tools = [{"type": "function", "function": {"name": tool.name}} for tool in choice.tools or ()]
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}}


def _format(form: Format | None) -> JsonObject | None:
    if form is None or form.type != "json_schema":
        return None if form is None else {"type": form.type}
    schema = {"name": form.name, "description": form.description, "schema": form.schema_,
              "strict": form.strict}  # fmt: skip
    return {"type": "json_schema", "json_schema": without_nulls(schema)}


def _messages(items: Iterable[Any]) -> list[JsonObject]:
    """The messages of a chat. Items of one answer are one message of it, but for a text after
    calls."""
    messages: list[JsonObject] = []
    before: Any = None
    for item in items:
        if isinstance(item, ResultItem):
            content = _joined(item.output)
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
        elif isinstance(item, MessageItem) and item.role != "assistant":
            messages.append({"role": item.role, "content": _joined(item.content)})
        else:
            # Two texts in succession are two messages: an answer has none such.
            is_text = isinstance(item, MessageItem)
            is_next = is_text and isinstance(before, (MessageItem, CallItem))
            goes_on = _is_of_answer(before) and not is_next
            if not goes_on:
                messages.append({"role": "assistant", "content": ""})
            _extend(messages[-1], item)
        before = item
    return messages


def _is_of_answer(item: Any) -> bool:
    if isinstance(item, MessageItem):
        return item.role == "assistant"
    return isinstance(item, (CallItem, ReasoningItem))


def _extend(message: JsonObject, item: MessageItem | CallItem | ReasoningItem) -> None:
    """Put an item of an answer into its message."""
    if isinstance(item, MessageItem):
        message["content"] += _joined(item.content)
    elif isinstance(item, CallItem):
        function = {"name": item.name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        message.setdefault("tool_calls", []).append(call)
    else:
        thoughts = [part.text for part in item.content or item.summary or ()]
        if not thoughts and item.encrypted_content:
            raise RequestError(
                "a reasoning item has only encrypted_content, which no other server can read: "
                "leave the item out"
            )
        earlier = message.get("reasoning_content")
        if text := "\n".join(filter(None, [earlier, *thoughts])):
            message["reasoning_content"] = text


def _joined(content: str | Sequence[TextPart]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)
