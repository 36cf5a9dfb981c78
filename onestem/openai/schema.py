"""The fields of a body, with the type, range and purpose of each.

Nothing is ignored in silence. A field is honoured, or is a label on which no answer depends, or has
the one value that asks for nothing; else the request is refused. `null` in a known field means that
it is not there, as with OpenAI. Fields that steer sampling are declared by `SamplingParams`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import copy
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationInfo,
    WithJsonSchema,
    create_model,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from onestem import beside_vllm
from onestem.checked import EXPECTED, Object, check_content, show, without_nulls
from onestem.errors import RequestError
from onestem.request import SamplingParams, Text, TokenId

Kind = Literal["chat", "completion", "score"]
URL_OF_KIND: Mapping[Kind, str] = {
    "chat": "/v1/chat/completions",
    "completion": "/v1/completions",
    "score": "/v1/score",
}

MAX_MESSAGES = 4096  # also of parts of a message; a chat template takes 0.04 ms for each
MAX_PROMPTS = 256
MAX_TOOLS = 1024
MAX_DOCUMENTS = 1024


TokenIds = Annotated[list[TokenId], Field(min_length=1)]
_Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
_Lists = Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]
_Several = Annotated[list[_Texts | _Lists], Field(min_length=1)]


def _shown(kind: Any) -> WithJsonSchema:
    """What the OpenAPI document has of a field that `openai.read` reads: its errors are plainer."""
    return WithJsonSchema(TypeAdapter(kind).json_schema())


_OneOrMore = Annotated[Any, _shown(str | _Texts | TokenIds | _Lists | None)]
_Completions = Annotated[Any, _shown(_Texts | _Lists | _Several | None)]


class _Sent(Object):
    """What clients send as they have dumped it: null in any field means that it is not there."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        return without_nulls(value) if isinstance(value, Mapping) else value


class CacheControl(_Sent):
    model_config = ConfigDict(extra="ignore")

    ttl: Literal["5m", "1h"] | None = None
    """No promise: how long it is kept is learned from when conversations go on."""


class TextPart(_Sent):
    type: Literal["text"]
    text: str

    cache_control: CacheControl | None = None
    """What is computed is kept as that of a conversation."""


class CalledFunction(_Sent):
    name: Text

    arguments: str | dict[str, Any] = "{}"
    """A JSON object, also as text; a call that was cut may have a part of one."""


class ToolCall(_Sent):
    """A call that an assistant has made. Without an id, results belong to calls in their order."""

    id: Text | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Message(_Sent):
    """A turn of a conversation. An assistant's may be sent back as the client has dumped it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: (
        str | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_MESSAGES)] | None
    ) = Field(default=None, json_schema_extra={EXPECTED: "text or a list of text parts"})
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_MESSAGES)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    reasoning: str | None = None
    """Another name of reasoning_content."""

    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    provider_specific_fields: dict[str, Any] | None = None
    """A label: LiteLLM has it in each answer that it gives."""

    @model_validator(mode="after")
    def _fits_its_role(self) -> Message:
        for field in ("tool_calls", "reasoning_content", "reasoning"):
            if self.role != "assistant" and getattr(self, field):
                raise RequestError(f"{field} of role {self.role}, expected of role assistant")
        if self.role != "tool" and self.tool_call_id is not None:
            raise RequestError(f"tool_call_id of role {self.role}, expected of role tool")
        has_more = self.tool_calls or self.reasoning_content or self.reasoning
        if self.content is None and not has_more and self.role != "tool":
            raise RequestError("content is missing, expected text or a list of text parts")
        return self


ToolName = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z0-9_.-]{1,128}$",
        json_schema_extra={EXPECTED: "up to 128 letters, digits, '_', '-' and '.'"},
    ),
]


class Function(_Sent):
    name: ToolName
    description: str | None = None

    parameters: dict[str, Any] | None = None
    """The JSON schema of its arguments."""

    strict: bool | None = None
    """Refuse a schema that arguments would not be held to."""

    @field_validator("parameters")
    @classmethod
    def _is_of_objects(cls, schema: dict[str, Any] | None) -> dict[str, Any] | None:
        if schema and schema.get("type", "object") != "object":
            raise RequestError("expected the JSON schema of an object, its type is another")
        return {"type": "object", **schema} if schema else None


class Tool(_Sent):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function
    cache_control: CacheControl | None = None


class FunctionName(_Sent):
    name: str


class NamedTool(_Sent):
    type: Literal["function"]
    function: FunctionName


class AllowedTools(_Sent):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1)]


class ToolChoice(_Sent):
    """A function that must be called, or those that may be called."""

    type: Literal["function", "allowed_tools"]
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None

    @model_validator(mode="after")
    def _fits_its_type(self) -> ToolChoice:
        contents = {"function": self.function, "allowed_tools": self.allowed_tools}
        check_content("tool_choice", self.type, self.type, contents)
        return self


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]


def _document(value: object) -> dict[str, Any]:
    """A document as a chat template has it: its fields in their order, as some templates list
    them."""
    given = {"text": value} if isinstance(value, str) else value
    text = given.get("text") if isinstance(given, dict) else None
    if not isinstance(given, dict) or not isinstance(text, str) or not text.strip():
        raise RequestError("expected text that is not blank, or an object with such a text")
    for name, one in given.items():
        kinds = str if name == "title" else (str, int, float)
        if one is not None and not isinstance(one, kinds):
            raise RequestError(f"expected an object whose {name} is text")
    return without_nulls(given)


_DOCUMENT = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "title": {"type": "string"}},
    "required": ["text"],
}
_Document = Annotated[
    Any, AfterValidator(_document), WithJsonSchema({"anyOf": [{"type": "string"}, _DOCUMENT]})
]


def _variables(given: dict[str, Any]) -> dict[str, Any]:
    """Variables of a template, whose keys are of one kind wherever they are."""
    try:
        json.dumps(given, sort_keys=True, default=str)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"chat_template_kwargs cannot be written as JSON: {error}") from None
    return given


_Variables = Annotated[dict[str, Any], AfterValidator(_variables)]


class Conversation(Object):
    """What a chat template is applied to, and how."""

    messages: Messages | None = Field(
        default=None, json_schema_extra={EXPECTED: "a list of at least one message"}
    )

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    """Functions that the model may call."""

    documents: Annotated[list[_Document], Field(max_length=MAX_DOCUMENTS)] | None = Field(
        default=None, json_schema_extra={EXPECTED: "a list of texts, or of objects with a text"}
    )
    """Texts that the conversation is about, perhaps with a `title`. They are where the chat
    template has its `documents`, else before the last message of the user."""

    repair: Annotated[float, Field(ge=0, le=1)] | None = None
    """The share of the documents' tokens that is computed with all before them in sight. Where it
    is left out, 1: the prompt is computed as any other."""

    lead_in: _Document | None = Field(
        default=None, json_schema_extra={EXPECTED: "text that is not blank, or an object with one"}
    )
    """A document like them after which `repair` stores all but the first. Where it is left out,
    prose that is built in. A `repair` of 1 stores none, and does not read it."""

    chat_template_kwargs: _Variables | None = None
    """Further variables of the model's chat template, such as `enable_thinking`."""

    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    """A variable of the chat template, if the template has it."""

    add_generation_prompt: bool | None = None
    """End the prompt with what begins an answer; true where it is left out."""

    continue_final_message: bool | None = None
    """Go on from the last message instead of answering it."""

    @cached_property
    def template_tools(self) -> list[dict[str, Any]]:
        """The tools as a chat template reads them; made once, also for the check of calls."""
        tools = self.tools or []
        if len({tool.function.name for tool in tools}) < len(tools):
            raise RequestError("tools has two functions of one name")
        return [tool.model_dump(exclude_none=True, exclude={"cache_control"}) for tool in tools]


class StreamOptions(_Sent):
    include_usage: bool | None = None
    """End the stream with a chunk that has the whole answer's `usage`."""


class CallFields(Object):
    """Fields of all bodies that a model answers."""

    beside: ClassVar[Mapping[str, beside_vllm.Name]] = beside_vllm.SAMPLING | beside_vllm.FIELDS

    model: str | None = None
    """Name of the served model; may be left out."""

    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Requests of different salts share nothing in the cache."""

    timeout: Annotated[float, Field(ge=0.001, le=86400)] | None = Field(
        default=None, json_schema_extra={EXPECTED: "seconds from 0.001 to 86400"}
    )
    """Seconds until the request is given up."""

    user: str | None = None
    metadata: dict[str, Any] | None = None


class _Fields(CallFields):
    """Fields of both kinds of completion, besides those of `SamplingParams`."""

    return_token_ids: bool | None = None
    """Put token ids beside the texts."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None

    prefix: Text | None = None
    """Name of the prefix that precedes the prompt."""

    pml: str | None = None
    """A prompt in PML, in place of the other kinds."""

    isolation: Literal["anchored", "isolated", "off"] | None = None
    """For pml: what cached tokens attend to."""

    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    """With the three before it: vLLM's older names of `structured_outputs`."""

    service_tier: str | None = None
    prompt_cache_key: str | None = None
    """What is computed is kept as that of a conversation."""

    safety_identifier: str | None = None


class ChatFields(Conversation, _Fields):
    """Fields of a conversation that is answered."""

    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    """The newer name of max_tokens."""

    logprobs: bool | None = None
    """Give each token's log-probability."""

    top_logprobs: Annotated[int, Field(ge=0, le=100)] | None = None
    """Also give those of this number of most probable tokens. Needs logprobs."""

    store: bool | None = None
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None = None

    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = Field(
        default=None,
        json_schema_extra={EXPECTED: "none, auto, required, or a function by its name"},
    )
    """Whether it must call one, and which; auto where there are tools."""

    parallel_tool_calls: bool | None = None
    """Whether it may call several at once; true where it is left out."""


class RawTexts(Object):
    """What is said of texts that are tokenised as they stand."""

    parse_special: bool | None = None
    """Read the names of control tokens in a text as these tokens, as is done where this is left
    out; false: as characters. Messages and PML are always characters."""


class CompletionFields(_Fields, RawTexts):
    """Fields of a text that is continued."""

    prompt: _OneOrMore = None
    """Text or token ids, or a list of either: a prompt each."""

    echo: bool | None = None
    """Put the prompt before its answer, with `logprobs` its tokens' too; `max_tokens` may be 0."""


_NEUTRAL: Mapping[str, Any] = {
    "add_special_tokens": None,
    "length_penalty": 1.0,
    "prediction": None,
    "priority": 0,
    "return_tokens_as_token_ids": False,
    "spaces_between_special_tokens": True,
    "truncate_prompt_tokens": None,
    "use_beam_search": False,
}
# Known fields with the only value that asks for nothing.
NEUTRAL: Mapping[Kind, Mapping[str, Any]] = {
    "chat": {
        "audio": None,
        "function_call": None,
        "functions": [],
        "web_search_options": None,
        **_NEUTRAL,
    },
    "completion": {"best_of": 1, "store": False, "suffix": None, **_NEUTRAL},
}


def _neutral(allowed: Any) -> Any:
    schema = {"type": "array", "maxItems": 0} if allowed == [] else {"const": allowed}

    def checked(value: Any, info: ValidationInfo) -> Any:
        if value is not None and (type(value) is not type(allowed) or value != allowed):
            told = beside_vllm.FIELDS.get(str(info.field_name), beside_vllm.Name(None))
            hint = told.note.replace("`", "")
            raise RequestError(
                f"{info.field_name} is {show(value)}: not supported here, leave it out "
                f"(or {json.dumps(allowed)}){'; ' * bool(hint)}{hint}"
            )
        return value

    return Annotated[Any, AfterValidator(checked), WithJsonSchema(schema)]


def _read_by(kind: Kind, base: type[_Fields]) -> type[_Fields]:
    """The model that reads a body without its sampling fields."""
    neutral: dict[str, Any] = {name: (_neutral(v), None) for name, v in NEUTRAL[kind].items()}
    return create_model(base.__name__, __base__=base, **neutral)


FIELDS: Mapping[Kind, type[_Fields]] = {
    "chat": _read_by("chat", ChatFields),
    "completion": _read_by("completion", CompletionFields),
}
# These go into `SamplingParams` under their own names.
SAMPLING: Mapping[Kind, frozenset[str]] = {
    kind: frozenset(SamplingParams.model_fields) - set(fields.model_fields)
    for kind, fields in FIELDS.items()
}


def _whole(name: str, kind: Kind, unlike: Mapping[str, object]) -> type[BaseModel]:
    """All fields of a body, for the OpenAPI document; none is required. `unlike`: defaults that
    differ from `SamplingParams`."""
    sampling: dict[str, Any] = {
        field: (info.annotation | None, _optional(info, unlike.get(field, info.default)))  # type: ignore[operator]
        for field, info in SamplingParams.model_fields.items()
        if field in SAMPLING[kind]
    }
    return create_model(name, __base__=FIELDS[kind], **sampling)


def _optional(info: FieldInfo, default: object) -> FieldInfo:
    """A field that may be null or left out; the schema shows the default that this means."""
    made = copy(info)
    made.default = None
    told = info.json_schema_extra
    made.json_schema_extra = {**(told if isinstance(told, dict) else {}), "default": default}  # type: ignore[dict-item]
    return made


ChatBody = _whole("ChatBody", "chat", {"max_tokens": None})
CompletionBody = _whole("CompletionBody", "completion", {})


_Documents = Annotated[list[Text], Field(min_length=1, max_length=MAX_DOCUMENTS)]


class Judged(Object):
    """How documents are judged."""

    instruction: Text | None = None
    """What makes a document relevant; where it is left out, that it answers a web search."""

    classifier_from_token: Annotated[list[Text], Field(min_length=2, max_length=2)] | None = Field(
        default=None, json_schema_extra={EXPECTED: "two texts"}
    )
    """What the model says of a document that is not relevant, and of one that is; `no` and `yes`
    where it is left out."""

    chat_template_kwargs: _Variables | None = None
    """Further variables of the model's chat template."""


class ScoreBody(CallFields, RawTexts, Judged):
    """How probable texts are: those that may follow a prompt, or whole ones. Or how relevant
    documents are to queries."""

    prompt: _OneOrMore = None
    """Text or token ids, or a list of either: a prompt each."""

    completions: _Completions = None
    """A list of texts, or of lists of token ids, as the prompt is; for several prompts a list each.
    """

    text: _OneOrMore = None
    """Instead of both: text or token ids, or a list of either, scored from the first token on."""

    queries: Text | _Documents | None = None
    """A text for all documents, or one for each."""

    documents: Text | _Documents | None = None
    """A text or several, each scored by how relevant it is to its query."""

    text_1: Text | _Documents | None = None
    text_2: Text | _Documents | None = None
    """With the one before it: older names of both."""


class DocumentText(Object):
    text: Text


class RerankBody(CallFields, Judged):
    """Documents that are ordered by how relevant they are to a query."""

    query: Text
    documents: Annotated[list[Text | DocumentText], Field(min_length=1, max_length=MAX_DOCUMENTS)]
    """Texts, or objects with a `text`."""

    top_n: Annotated[int, Field(ge=0)] | None = None
    """How many of the best are listed; 0: all."""

    return_documents: bool | None = None
    """List their texts too; true where it is left out."""


class PrefixBody(RawTexts):
    """Exactly one of text, messages and token_ids."""

    text: Text | None = None
    messages: Messages | None = None
    token_ids: TokenIds | None = None


class SchemaBody(Object):
    """The markup of a schema (docs/pml.md)."""

    pml: str

    encode: bool | None = None
    """Answer when its modules are computed. By default the first prompt that imports them has them
    computed."""


class UploadBody(Object):
    """A form: a file of batch lines."""

    file: Annotated[str, WithJsonSchema({"type": "string", "format": "binary"})]
    purpose: Literal["batch"]


class BatchBody(Object):
    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/score"]
    completion_window: Literal["24h"] = Field(
        json_schema_extra={EXPECTED: "'24h' (batches do not expire here)"}
    )
    metadata: (
        Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=16)] | None
    ) = Field(default=None, json_schema_extra={EXPECTED: "at most 16 texts by name"})


class TokenizeBody(Conversation, RawTexts):
    """Exactly one of prompt and messages."""

    model: str | None = None
    prompt: str | None = None

    add_special_tokens: bool | None = None
    """For a prompt; true where it is left out, and then BOS is not doubled. A chat template has its
    own."""

    return_token_strs: bool | None = None


class DetokenizeBody(Object):
    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=1_000_000, fail_fast=True)]


class ErrorInfo(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    error: ErrorInfo
