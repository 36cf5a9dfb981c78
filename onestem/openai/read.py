"""Reads bodies of the API, of batch lines and of HTTP calls."""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from onestem.checked import check, read_json, show, without_nulls
from onestem.errors import RequestError
from onestem.openai.forms import Form, HoldSchema, Tools, held_to
from onestem.openai.forms.spelling import read_spelled
from onestem.openai.rank import Ranking
from onestem.openai.schema import (
    FIELDS,
    MAX_PROMPTS,
    SAMPLING,
    ChatFields,
    CompletionFields,
    Conversation,
    Judged,
    Kind,
    Message,
    PrefixBody,
    RawTexts,
    RerankBody,
    ScoreBody,
    ToolChoice,
)
from onestem.openai.write import Dialect
from onestem.rawtext import RawText, Span
from onestem.request import MAX_DEPTH, MAX_TOKEN_ID, ONE_TOKEN, SamplingParams, is_deep
from onestem.scores import Encoder, ScoreTask

JsonObject = dict[str, Any]

MAX_SEQUENCES = 4096  # for all prompts of a body together


class JsonError(RequestError):
    """Bytes that are no JSON object; `custom_id` of a batch line, if it could be read."""

    def __init__(self, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.custom_id = custom_id


def unknown_model(name: str, names: Iterable[str]) -> str:
    """What is said of a model that is not served."""
    return f"there is no model {name[:80]!r} here, there is {', '.join(names)}"


def read_object(raw: bytes, name: str = "the body", depth: int = MAX_DEPTH) -> JsonObject:
    """The JSON object in `raw`, nested at most `depth` deep; raises `JsonError`, which calls it
    `name`, for anything else. A key that occurs twice in an object is refused: one value would be
    ignored."""
    try:
        text = raw.decode("utf-8")
        record = read_json(text)
    except UnicodeDecodeError as error:
        raise JsonError(
            f"{name} is not UTF-8: byte {error.start + 1} of it is {raw[error.start]:#04x}"
        ) from error
    except RecursionError as error:
        raise _too_deep(name, depth) from error
    except ValueError as error:
        reason = str(error)
        if reason.startswith("Exceeds the limit"):  # Python's message names a function of Python's
            reason = f"an integer has over {sys.get_int_max_str_digits()} digits"
        raise JsonError(f"{name} is not JSON: {reason}") from error
    if not isinstance(record, dict):
        raise JsonError(f"{name} is {show(record)}, expected an object")
    if text.count("[") + text.count("{") > depth and is_deep(record, depth):
        custom_id = record.get("custom_id")
        raise _too_deep(name, depth, custom_id if isinstance(custom_id, str) else None)
    if "\\ud" in text.lower():
        _check_surrogates(record, name)
    return record


def _too_deep(name: str, depth: int, custom_id: str | None = None) -> JsonError:
    message = f"{name} nests too deeply, limit is {depth} objects and lists inside one another"
    return JsonError(message, custom_id)


def _check_surrogates(record: JsonObject, name: str) -> None:
    """Refuse half of a surrogate pair: it can be neither tokenised nor written as UTF-8."""
    try:
        json.dumps(record, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise JsonError(
            f"{name} has an unpaired \\ud800-\\udfff escape, which is half a character: "
            "write both halves, or leave it out"
        ) from error


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """How a chat template is applied: the arguments of `Tokenizer.chat`."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    documents: Sequence[Mapping[str, Any]] = ()
    repair: float = 1.0
    lead_in: Mapping[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    without_calls: bool = False


@dataclass(frozen=True)
class Prompt:
    """What is to be continued; exactly one of the four is set. `isolation` belongs to `pml`."""

    raw: RawText | None = None
    token_ids: list[int] | None = None
    messages: list[JsonObject] | None = None
    pml: str | None = None
    isolation: str = "anchored"
    template: ChatTemplate = ChatTemplate()

    @property
    def given(self) -> RawText | list[int]:
        """The text or token ids of a prompt that is either."""
        value = self.token_ids if self.raw is None else self.raw
        assert value is not None
        return value


@dataclass(frozen=True)
class Echo:
    """The prompt precedes its answer; `alone`: in place of it. `spells_control`: names of
    control tokens in its text are these tokens."""

    alone: bool
    spells_control: bool


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A checked body; nothing of it is tokenised yet.

    Attributes:
        model: the body's `model`, echoed in the answer.
        prompts: one, or several for /v1/completions and /v1/score.
        completions: of each prompt, for /v1/score; None: prompts are texts that are scored whole.
        sampling: keyword arguments for `SamplingParams`, as JSON has them.
        params: what they make.
        ranking: how the documents in the prompts are judged; None: there are none.
        return_token_ids: put token ids beside the texts of the answer.
        prefix: name of the prefix that precedes each prompt.
        in_conversation: see `names_conversation`.
        timeout: seconds; None: the server's.
        dialect: how its answer is written; None: as OpenAI's.
        is_free: whether the body asks for no format of its answers.
    """

    kind: Kind
    model: str | None
    prompts: Sequence[Prompt]
    sampling: Mapping[str, Any]
    params: SamplingParams
    return_token_ids: bool = False
    stream: bool = False
    include_usage: bool = False
    prefix: str | None = None
    cache_salt: str = ""
    in_conversation: bool = False
    timeout: float | None = None
    tools: Tools | None = None
    echo: Echo | None = None
    completions: Sequence[Sequence[Prompt]] | None = None
    ranking: Ranking | None = None
    is_free: bool = True
    dialect: Dialect | None = None

    @property
    def has_messages(self) -> bool:
        """Whether it is answered through the chat template."""
        return self.kind == "chat" and self.prompts[0].messages is not None

    def quoting(self, quoted: Mapping[str, Sequence[tuple[Span, ...]]]) -> Asked:
        """The body of a line with some parts of its texts quoted: those of each text of a field, by
        the field's name."""
        prompts = _quoting(self.prompts, quoted.get("prompt", quoted.get("text", ())))
        completions = self.completions
        if completions is not None:
            completions = [_quoting(completions[0], quoted.get("completions", ()))]
        return replace(self, prompts=prompts, completions=completions)

    def task(self, index: int, tokenizer: Encoder | None) -> ScoreTask:
        """What is scored of a prompt; raises `RequestError`."""
        some = None if self.completions is None else self.completions[index]
        return ScoreTask.read(
            self.prompts[index].given,
            None if some is None else [one.given for one in some],
            tokenizer,
        )

    def held(
        self,
        form: Form | None,
        token_of: Callable[[str], int | None],
        hold_schema: HoldSchema,
        *,
        opened: Callable[[], bool] = lambda: False,
    ) -> Asked:
        """The body with calls of tools held to their schemas, and the marks of reasoning in its
        answers' texts.

        Args:
            form: how the model writes calls and reasoning.
            token_of: the id of a control token; None for other texts.
            hold_schema: of the grammar compiler.
            opened: whether the prompt ends inside reasoning.

        Raises:
            RequestError: calls cannot be held to their schemas.
        """
        tools = None if self.tools is None or self.tools.mode == "none" else self.tools
        if tools is None:
            held = reasoning_fields(self.sampling, form, token_of) if self.has_messages else {}
        else:
            held = calls_fields(tools, self.params, form, token_of, hold_schema, opened)
        if not held:
            return self if tools is self.tools else replace(self, tools=tools)
        sampling = {**self.sampling, **held}
        if "response_format" in held:  # in place of the other name for it
            sampling.pop("structured_outputs", None)
        return replace(self, sampling=sampling, params=check(SamplingParams, sampling), tools=tools)


def is_free(params: SamplingParams) -> bool:
    """Whether an answer may be any text."""
    given = params.response_format
    return (given is None or given["type"] == "text") and params.choices is None


def reasoning_fields(
    sampling: Mapping[str, Any], form: Form | None, token_of: Callable[[str], int | None]
) -> dict[str, Any]:
    """The sampling fields that leave the marks of reasoning in an answer's text, where they are
    control tokens; `form` and `token_of` as for `Asked.held`."""
    if form is None or "skip_special_tokens" in sampling:
        return {}
    is_marked = any(token_of(mark) is not None for mark in form.reasoning_marks)
    return {"skip_special_tokens": False} if is_marked else {}


def calls_fields(
    tools: Tools,
    params: SamplingParams,
    form: Form | None,
    token_of: Callable[[str], int | None],
    hold_schema: HoldSchema,
    opened: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """The sampling fields that hold an answer's calls to their schemas; other arguments are those
    of `Asked.held`."""
    if form is None:
        raise RequestError(
            "tools: the model's chat template has no tools, for the model has none: give it one "
            "(--chat-template)"
        )
    if params.choices is not None:
        raise RequestError("choices and tools: give one of them")
    is_opened = form.reasoning is not None and opened()
    held = held_to(form, tools, params.response_format, token_of, hold_schema, opened=is_opened)
    fields: dict[str, Any] = {"response_format": held}
    if any(token_of(mark) is not None for mark in (*form.marks, *form.reasoning_marks)):
        fields["skip_special_tokens"] = False  # no others are sampled
    return fields


# Fields that mean something only to a server, and the values that a batch line may have.
SERVER_FIELDS: Mapping[str, object] = {
    "cache_salt": None,
    "echo": False,
    "prefix": None,
    "queries": None,
    "stream": False,
    "stream_options": None,
    "text_1": None,
    "timeout": None,
}


def names_conversation(body: Mapping[str, Any]) -> bool:
    """Whether a checked body says that what it computes will be wanted again, by
    `prompt_cache_key` or `cache_control`."""
    messages = [body, *body.get("messages", ())]
    lists = [body.get("tools"), body.get("system"), *(one.get("content") for one in messages)]
    parts = chain.from_iterable(found for found in lists if isinstance(found, list))
    return body.get("prompt_cache_key") is not None or any(
        part.get("cache_control") for part in chain(messages, parts) if isinstance(part, Mapping)
    )


def read_body(kind: Kind, body: Mapping[str, Any]) -> Asked:
    """Read the body of an HTTP call; raises `RequestError` if it can never be answered."""
    if kind == "score":
        return _read_score(body)
    given = without_nulls(body)
    sampling = {name: given.pop(name) for name in SAMPLING[kind] & given.keys()}
    fields = check(FIELDS[kind], given)
    guided = _guided(fields)
    if guided:
        if "structured_outputs" in sampling:
            raise RequestError(
                f"structured_outputs and guided_{next(iter(guided))}: give one of them"
            )
        sampling["structured_outputs"] = guided
    if isinstance(fields, ChatFields):
        # A chat answer may be as long as the model allows unless the request says otherwise.
        sampling["max_tokens"] = _chat_length(sampling, fields)
        sampling["logprobs"] = _chat_logprobs(fields)
    prompts = _prompts(fields)
    echo = _echo(sampling, fields, prompts[0]) if isinstance(fields, CompletionFields) else None
    params = check(SamplingParams, sampling)
    asked = Asked(
        kind=kind,
        model=fields.model,
        prompts=prompts,
        sampling=sampling,
        params=params,
        return_token_ids=bool(fields.return_token_ids),
        stream=bool(fields.stream),
        include_usage=bool(fields.stream_options and fields.stream_options.include_usage),
        prefix=fields.prefix,
        cache_salt=fields.cache_salt or "",
        in_conversation=names_conversation(given),
        timeout=fields.timeout,
        tools=_tools(fields) if isinstance(fields, ChatFields) else None,
        echo=echo,
        is_free=is_free(params),
    )
    if fields.stream_options is not None and not asked.stream:
        raise RequestError("stream_options needs stream: true")
    if asked.stream and params.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs and stream: give one of them")
    if asked.prefix is not None and fields.pml is not None:
        raise RequestError("prefix and pml are both given: a schema has its own beginning")
    _check_sequences(asked)
    return asked


def read_rerank(body: Mapping[str, Any]) -> Asked:
    """Read the body of /v1/rerank; raises `RequestError`."""
    fields = check(RerankBody, without_nulls(body))
    return _judged(fields, Ranking.of_documents(fields))


def _judged(fields: RerankBody | ScoreBody, ranking: Ranking) -> Asked:
    template = ChatTemplate(fields=ranking.fields)
    prompts = [Prompt(messages=one, template=template) for one in ranking.messages()]
    return replace(_scored(fields, prompts), ranking=ranking)


def _read_score(body: Mapping[str, Any]) -> Asked:
    fields = check(ScoreBody, without_nulls(body))
    ranking = Ranking.of_pairs(fields)
    others = ("prompt", "completions", "text", *RawTexts.model_fields)
    for name in Judged.model_fields if ranking is None else others:
        if getattr(fields, name) is not None:
            why = "needs" if ranking is None else "is not for"
            raise RequestError(f"{name} {why} queries and documents: leave it out")
    if ranking is not None:
        return _judged(fields, ranking)
    if (fields.prompt is None) == (fields.text is None):
        raise RequestError("body has not exactly one of prompt and text")
    if (fields.prompt is None) != (fields.completions is None):
        raise RequestError("prompt and completions go together, and text needs neither")
    name = "prompt" if fields.text is None else "text"
    given = getattr(fields, name)
    prompts = _prompts_in(given, name, fields)
    completions = None
    if fields.completions is not None:
        each = fields.completions if _is_several(given) else [fields.completions]
        if not isinstance(each, list) or len(each) != len(prompts):
            raise RequestError(
                f"completions is {show(fields.completions)}, expected a list for each of the "
                f"{len(prompts)} prompts"
            )
        for one in each:
            if not _is_several(one):
                raise RequestError(
                    f"completions of a prompt are {show(one)}, expected a list of texts or of "
                    "lists of token ids"
                )
        completions = [_prompts_in(one, "completions", fields) for one in each]
        total = sum(map(len, completions))
        if total > MAX_SEQUENCES:
            raise RequestError(
                f"there are {total} completions, limit is {MAX_SEQUENCES} in all: "
                "send several requests"
            )
    return replace(_scored(fields, prompts), completions=completions)


def _scored(fields: RerankBody | ScoreBody, prompts: Sequence[Prompt]) -> Asked:
    return Asked(
        kind="score",
        model=fields.model,
        prompts=prompts,
        sampling=ONE_TOKEN.model_dump(exclude_unset=True),
        params=ONE_TOKEN,
        cache_salt=fields.cache_salt or "",
        timeout=fields.timeout,
    )


def read_line_body(kind: Kind, body: Mapping[str, Any]) -> Asked:
    """Read the body of a batch line: one prompt, and no field that only a server has."""
    for name, neutral in SERVER_FIELDS.items():
        value = body.get(name)
        if value is not None and value is not neutral:
            out = "leave it out" if neutral is None else f"leave it out (or {json.dumps(neutral)})"
            raise RequestError(f"{name} is {show(value)}: not supported in a batch line, {out}")
    asked = read_body(kind, body)
    if len(asked.prompts) > 1:
        raise RequestError(
            f"prompt is a list of {len(asked.prompts)} prompts: give one prompt per line, "
            "or n for several answers to one"
        )
    return asked


def _chat_length(sampling: Mapping[str, Any], fields: ChatFields) -> Any:
    given = (sampling.get("max_tokens"), fields.max_completion_tokens)
    if None not in given and given[0] != given[1]:
        raise RequestError("max_tokens and max_completion_tokens differ: give one of them")
    return given[0] if given[1] is None else given[1]


def _chat_logprobs(fields: ChatFields) -> int | None:
    if fields.logprobs:
        return fields.top_logprobs or 0
    if fields.top_logprobs:
        raise RequestError("top_logprobs needs logprobs: true")
    return None


def _echo(sampling: JsonObject, fields: CompletionFields, prompt: Prompt) -> Echo | None:
    """How the prompt is given back, if at all; sets what that needs in `sampling`."""
    if not fields.echo:
        return None
    others = {"stream": fields.stream, "prefix": fields.prefix, "pml": fields.pml,
              "choices": sampling.get("choices"),
              "prompt_logprobs": sampling.get("prompt_logprobs")}  # fmt: skip
    for name, value in others.items():
        if value not in (None, False):
            raise RequestError(f"echo and {name}: give one of them")
    if sampling.get("logprobs") is not None:
        sampling["prompt_logprobs"] = sampling["logprobs"]
    alone = sampling.get("max_tokens") == 0 and not isinstance(sampling["max_tokens"], bool)
    if alone:
        sampling["max_tokens"] = 1  # the engine samples one token, which is dropped
    return Echo(alone, prompt.raw is not None and not prompt.raw.quoted)


def _guided(fields: Any) -> JsonObject:
    names = ("json", "regex", "choice", "grammar")
    return without_nulls({name: getattr(fields, f"guided_{name}") for name in names})


def _tools(fields: ChatFields) -> Tools | None:
    """The tools that may be called."""
    choice = fields.tool_choice
    if not fields.tools:
        if choice not in (None, "none", "auto"):
            raise RequestError("tool_choice needs tools")
        return None
    tools = fields.template_tools
    places = {tool["function"]["name"]: place for place, tool in enumerate(tools)}
    names = list(places)
    mode: Any = choice or "auto"
    is_named = isinstance(choice, ToolChoice) and choice.function is not None
    if isinstance(choice, ToolChoice):
        mode = "required"
        if choice.function is not None:
            names = [choice.function.name]
        if choice.allowed_tools is not None:
            mode = choice.allowed_tools.mode
            names = [tool.function.name for tool in choice.allowed_tools.tools]
    unknown = [name for name in names if name not in places]
    if unknown:
        raise RequestError(f"tool_choice names {show(unknown[0])}, which is not among the tools")
    return Tools(
        mode=mode,
        allowed={places[name]: tools[places[name]] for name in names},
        parallel=fields.parallel_tool_calls is not False and not is_named,
    )


def read_conversation(fields: Conversation) -> Prompt:
    """The prompt of a conversation; `fields` must have messages."""
    assert fields.messages is not None
    return Prompt(messages=_conversation(fields.messages), template=_template(fields))


def read_chat(fields: Mapping[str, Any]) -> tuple[Prompt, Tools | None]:
    """A conversation from Python values, and the tools that may be called; `fields` are those of
    `Conversation` and `tool_choice`, read as a body's are."""
    names = ("messages", "tools", "documents", "lead_in")
    plain = {name: _lists_and_objects(fields.get(name)) for name in names}
    checked = check(ChatFields, without_nulls({**fields, **plain}))
    return read_conversation(checked), _tools(checked)


def _lists_and_objects(value: Any) -> Any:
    """Python's sequences and mappings as JSON's lists and objects."""
    if isinstance(value, Mapping):
        return {key: _lists_and_objects(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_lists_and_objects(one) for one in value]
    return value


def _template(fields: Conversation) -> ChatTemplate:
    variables = dict(fields.chat_template_kwargs or {})
    if fields.tools and "tools" in variables:
        raise RequestError("tools and chat_template_kwargs.tools: give one of them")
    if fields.tools:
        variables["tools"] = fields.template_tools
    if fields.documents and "documents" in variables:
        raise RequestError("documents and chat_template_kwargs.documents: give one of them")
    if fields.documents is None and fields.repair is not None:
        raise RequestError("repair needs documents: leave it out")
    if fields.repair is None and fields.lead_in is not None:
        raise RequestError("lead_in needs repair: leave it out")
    if fields.reasoning_effort is not None:
        variables["reasoning_effort"] = fields.reasoning_effort
    goes_on = bool(fields.continue_final_message)
    begins = not goes_on if fields.add_generation_prompt is None else fields.add_generation_prompt
    return ChatTemplate(
        fields=variables,
        documents=fields.documents or (),
        repair=1.0 if fields.repair is None else fields.repair,
        lead_in=fields.lead_in,
        add_generation_prompt=begins,
        continue_final_message=goes_on,
        without_calls=getattr(fields, "tool_choice", None) == "none",
    )


def _check_sequences(asked: Asked) -> None:
    choices, num_prompts = asked.params.choices, len(asked.prompts)
    what = f"n is {asked.params.n}" if choices is None else f"choices has {len(choices)} texts"
    each = asked.params.n if choices is None else len(choices)
    if each * num_prompts > MAX_SEQUENCES:
        raise RequestError(
            f"{what} for {num_prompts} prompts, limit is {MAX_SEQUENCES} sequences in all: "
            "send several requests"
        )


def _prompts(fields: Any) -> list[Prompt]:
    """Text or token ids of a completion, messages of a chat, or either's `pml`."""
    name = "messages" if isinstance(fields, ChatFields) else "prompt"
    given = getattr(fields, name)
    if fields.pml is not None:
        if given is not None:
            raise RequestError(f"body has pml and {name}: give one of them")
        if getattr(fields, "parse_special", None):
            raise RequestError("parse_special and pml: texts in PML are characters, leave it out")
        for other in ("tools", "documents", "repair", "lead_in", "chat_template_kwargs",
                      "reasoning_effort", "add_generation_prompt",
                      "continue_final_message"):  # fmt: skip
            if getattr(fields, other, None) is not None:
                raise RequestError(f"{other} and pml: a prompt in PML has no chat template")
        return [Prompt(pml=fields.pml, isolation=fields.isolation or "anchored")]
    if fields.isolation is not None:
        raise RequestError("isolation needs pml")
    if given is None:
        raise RequestError(f"body has no {name} and no pml")
    if isinstance(fields, CompletionFields):
        return _prompts_in(given, name, fields)
    return [read_conversation(fields)]


_PLAIN = {"name", "tool_call_id", "reasoning_content", "tool_calls"}  # beside role and content


def _conversation(messages: Sequence[Message]) -> list[JsonObject]:
    """The messages as a chat template reads them. Calls without an id get one, and results without
    one belong to the calls before them, in their order."""
    plain, waiting = [_plain(message) for message in messages], deque[str]()
    for place, message in enumerate(plain):
        for index, call in enumerate(message.get("tool_calls", ())):
            call.setdefault("id", f"{place:05}{index:04}")  # of nine signs, as Mistral wants it
            waiting.append(call["id"])
        if message["role"] != "tool":
            continue
        if "tool_call_id" in message:
            if message["tool_call_id"] in waiting:
                waiting.remove(message["tool_call_id"])
        elif not waiting:
            raise RequestError(
                f"messages[{place}]: role tool has no tool_call_id, and no call before it is "
                "without a result: say which call it answers"
            )
        else:
            message["tool_call_id"] = waiting.popleft()
    return plain


def _plain(message: Message) -> JsonObject:
    """A message with its content as one text, a line for each part, and calls with their arguments
    as objects."""
    content = message.content or ""
    if not isinstance(content, str):
        content = "\n".join(part.text for part in content)
    plain: JsonObject = {"role": message.role, "content": content}
    plain |= message.model_dump(include=_PLAIN, exclude_none=True)
    if message.reasoning and not message.reasoning_content:
        plain["reasoning_content"] = message.reasoning
    calls = plain.pop("tool_calls", ())
    for call in calls:
        call.pop("index", None)
        call["function"]["arguments"] = _arguments(call["function"]["arguments"])
    if calls:
        plain["tool_calls"] = calls  # last: a template may write a message as it is
    return plain


def _arguments(text: str | JsonObject) -> Any:
    """The arguments of a call that is sent back, as an object for templates. What is not JSON, or
    was cut, stays text, as with OpenAI."""
    if not isinstance(text, str):
        return text
    try:
        value = read_spelled(text or "{}")
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) and not is_deep(value) else text


def _is_several(value: Any) -> bool:
    """Whether it is a list of texts or of lists of token ids."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], (str, list))


def _prompts_in(value: Any, name: str, how: RawTexts) -> list[Prompt]:
    """One prompt, or those of a list of texts or of lists of token ids; `name` is the field's."""
    if not _is_several(value):
        return [_prompt_in(value, name, how)]
    if len(value) > MAX_PROMPTS:
        raise RequestError(
            f"{name} is a list of {len(value)} {'texts' * (name != 'prompt') or 'prompts'}, limit "
            f"is {MAX_PROMPTS}: send several requests"
        )
    odd = next((one for one in value if not isinstance(one, type(value[0]))), None)
    if odd is not None:
        raise RequestError(f"{name} has {show(odd)} among others of another type")
    return [_prompt_in(one, name, how) for one in value]


def _quoting(prompts: Sequence[Prompt], quoted: Sequence[tuple[Span, ...]]) -> list[Prompt]:
    each: list[tuple[Span, ...]] = [*quoted, *([()] * len(prompts))]
    return [
        prompt if prompt.raw is None else replace(prompt, raw=replace(prompt.raw, quoted=some))
        for prompt, some in zip(prompts, each, strict=False)
    ]


def _prompt_in(value: Any, name: str, how: RawTexts) -> Prompt:
    if isinstance(value, str):
        return Prompt(RawText.of(value, how.parse_special is not False))
    if value == []:
        raise RequestError(f"{name} has no tokens")
    if not isinstance(value, list):
        raise RequestError(f"{name} is {show(value)}, expected text or a list of token ids")
    # `type`, not `isinstance`: true and false are integers to Python.
    if set(map(type, value)) != {int} or min(value) < 0 or max(value) > MAX_TOKEN_ID:
        odd = next(t for t in value if type(t) is not int or not 0 <= t <= MAX_TOKEN_ID)
        raise RequestError(
            f"a token id in {name} is {show(odd)}, expected an integer from 0 to {MAX_TOKEN_ID}"
        )
    return Prompt(token_ids=value)


def read_prefix(body: Mapping[str, Any]) -> JsonObject:
    """A prefix in the one form that is given: {"text": ...}, with `parse_special` where that is
    false, {"messages": ...} or {"token_ids": ...}."""
    fields = check(PrefixBody, without_nulls(body))
    names = [name for name in PrefixBody.model_fields if name not in RawTexts.model_fields]
    given = without_nulls({name: getattr(fields, name) for name in names})
    if len(given) != 1:
        raise RequestError(f"body has {len(given)} of {', '.join(names)}: give exactly one of them")
    if fields.text is None and fields.parse_special:
        raise RequestError(f"parse_special and {next(iter(given))}: it is for a prefix of text")
    if fields.messages is not None:
        return {"messages": _conversation(fields.messages)}
    is_quoted = fields.text is not None and fields.parse_special is False
    return {**given, "parse_special": False} if is_quoted else given
