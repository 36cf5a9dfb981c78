"""The shapes of requests and answers, for the OpenAPI document.

Completions are read by `onestem.batch.fields` and `bodies`, whose errors name the field and the way
out; the tests hold both to the same fields.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from onestem.batch.fields import MAX_MESSAGES
from onestem.request import MAX_CHOICES, MAX_STOPS

__all__ = [
    "BatchBody",
    "ChatBody",
    "CompletionBody",
    "ErrorAnswer",
    "PrefixBody",
    "SchemaBody",
]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


Text = Annotated[str, Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Count = Annotated[int, Field(ge=0, le=100)]


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class Message(_Strict):
    role: Literal["system", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_MESSAGES)]


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]


class StreamOptions(_Strict):
    include_usage: bool | None = None


class NamedSchema(_Strict):
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(_Strict):
    type: Literal["json_schema"]
    json_schema: NamedSchema


class PlainFormat(_Strict):
    type: Literal["json_object", "text"]


class _Sampling(_Strict):
    """Fields of both kinds of completion."""

    model: str | None = Field(None, description="The served model; left out: that one.")
    n: Annotated[int, Field(ge=1, le=1024)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=1e-6, le=100)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    stop: Text | Annotated[list[Text], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Count | None = None
    logit_bias: (
        dict[
            Annotated[str, Field(pattern=r"^[0-9]{1,10}$")],
            Annotated[float, Field(ge=-100, le=100)],
        ]
        | None
    ) = None
    choices: Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES)] | None = Field(
        None, description="Pick the most probable of these texts instead of sampling."
    )
    response_format: JsonSchemaFormat | PlainFormat | None = None
    return_token_ids: bool | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prefix: Text | None = Field(None, description="Name of the prefix that stands before.")
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        None, description="Requests of different salts share nothing in the cache."
    )
    timeout: Annotated[float, Field(ge=0.001, le=86400)] | None = Field(
        None, description="Seconds until the request is given up."
    )
    pml: str | None = Field(None, description="A prompt in PML, in place of the other kinds.")
    isolation: Literal["anchored", "isolated", "off"] | None = Field(
        None, description="Of pml: who sees what."
    )


class ChatBody(_Sampling):
    messages: Messages | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    parallel_tool_calls: None = None
    store: Literal[False] | None = None
    tool_choice: Literal["none"] | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None


TokenIds = Annotated[list[TokenId], Field(min_length=1)]


class CompletionBody(_Sampling):
    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=256)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1, max_length=256)]
        | None
    ) = None
    logprobs: Count | None = None
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    store: Literal[False] | None = None
    suffix: None = None


class PrefixBody(_Strict):
    """Exactly one of the three."""

    text: Text | None = None
    messages: Messages | None = None
    token_ids: TokenIds | None = None


class SchemaBody(_Strict):
    """The markup of a schema (docs/pml.md)."""

    pml: str


class BatchBody(_Strict):
    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions"]
    completion_window: Literal["24h"]
    metadata: dict[str, Annotated[str, Field(max_length=512)]] | None = None


class ErrorInfo(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    error: ErrorInfo
