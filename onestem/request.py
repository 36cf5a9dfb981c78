"""Requests and their outputs: plain values, no torch.

A *request* is what the user sent; a *sequence* is one continuation of it (a request with n = 4 has
four). Field names are those that users of vLLM and of OpenAI's API know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    WithJsonSchema,
    model_validator,
)

from onestem.beside_vllm import SAMPLING, Name
from onestem.checked import (
    EXPECTED,
    Checked,
    DescribedBy,
    Object,
    check,
    check_content,
    plain,
    read_json,
    show,
)
from onestem.errors import RequestError
from onestem.pml import CompiledPrompt
from onestem.scores import PathScores, ScorePath

__all__ = [
    "ONE_TOKEN",
    "WHITESPACE",
    "Answer",
    "Completion",
    "CompletionOutput",
    "FinishReason",
    "Logprob",
    "Logprobs",
    "Priority",
    "RankedLogprobs",
    "Request",
    "RequestMetrics",
    "RequestOutput",
    "Rerendered",
    "Reuse",
    "SamplingParams",
    "Told",
    "TokenLogprobs",
    "Whitespace",
    "is_masked",
    "masking_fields",
    "whitespace_of",
    "why_masked",
]

FinishReason = Literal["stop", "length", "abort", "error"]
Priority = Literal["interactive", "job"]

# token id -> natural-log probability, highest first; the sampled (or given) token is always in it.
TokenLogprobs = Mapping[int, float]


class RankedLogprobs(dict[int, float]):
    """The same, with the `rank` of the sampled (or given) token."""

    __slots__ = ("rank",)
    rank: int


class Logprob(NamedTuple):
    """A token's log-probability, as vLLM has it.

    Attributes:
        logprob: natural logarithm.
        rank: place of the token in its distribution, from 1 on; of equal ones the lower id is
            first.
        decoded_token: its text alone; None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None


Logprobs = dict[int, Logprob]  # in the order of `TokenLogprobs`

MAX_LOGPROBS = 100
MAX_CHOICES = 1024  # each is a sequence, as each of n is
MAX_STOPS = 64  # each is looked for after every token
MAX_DEPTH = 64  # objects and lists inside one another, in a body or in a text of JSON
MAX_TOKEN_ID = 2**31 - 1  # ids are kept as int32
TEXT = {"type": "string", "minLength": 1}
_FORBIDDEN = "no token may follow: "
TOP_K = "an integer of at least -1 (0 and -1: off)"

# A choice is scored whole, as the model's own distribution has it: these would not change it.
_FREE_BESIDE_CHOICES: Mapping[str, object] = {
    "n": 1,
    "response_format": None,
    "allowed_token_ids": None,
    "bad_words": (),
    "stop": (),
    "stop_token_ids": (),
    "min_tokens": 0,
    "logit_bias": None,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}


def is_deep(value: Any, depth: int = MAX_DEPTH) -> bool:
    """Whether a value has more than `depth` objects and lists inside one another, itself too."""
    level: list[Any] = [value]
    for _ in range(depth + 1):
        level = [one for one in level if type(one) in (dict, list)]
        if not level:
            return False
        level = list(chain.from_iterable(v.values() if type(v) is dict else v for v in level))
    return True


def _texts(value: Any) -> Any:
    """One text or several as a tuple; None is none."""
    if isinstance(value, str):
        return (value,)
    return () if value is None else _tuple(value)


def _tuple(value: Any) -> Any:
    value = plain(value)
    is_list = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    return tuple(value) if is_list else value


def _ids(value: Any) -> Any:
    """Each id once, in a tuple."""
    value = _tuple(value)
    if not isinstance(value, tuple):
        return () if value is None else value
    value = tuple(map(plain, value))
    return tuple(dict.fromkeys(value)) if {type(one) for one in value} <= {int} else value


def _ids_as_keys(value: Any) -> Any:
    """JSON's objects have texts as keys."""
    if not isinstance(value, Mapping):
        return value
    biases: dict[Any, Any] = {}
    for key, bias in value.items():
        if isinstance(key, str):
            if not (key.isascii() and key.isdecimal() and len(key) <= 10):
                raise RequestError(
                    f"a key of logit_bias is {show(key)}, expected a token id in decimal digits"
                )
            key = int(key)
        if key in biases:
            raise RequestError(f"a key of logit_bias is {show(key)}, expected each token id once")
        biases[key] = plain(bias)
    return biases


def _mapping(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


def _format(value: dict[str, Any]) -> dict[str, Any]:
    """A copy of a response format, checked and otherwise as it was given."""
    check(ResponseFormat, value, "response_format")
    try:
        return deepcopy(value)
    except RecursionError as error:
        raise RequestError("response_format nests too deeply: no grammar is made of it") from error


def _hashable(value: Any) -> Any:
    """What is equal for equal values, and has a hash."""
    if isinstance(value, Mapping):
        return frozenset((key, _hashable(one)) for key, one in value.items())
    return tuple(map(_hashable, value)) if isinstance(value, (list, tuple)) else value


Text = Annotated[str, Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]


Whitespace = Literal["spaced", "compact", "any"]
WHITESPACE: Whitespace = "spaced"  # where a request says nothing


class NamedSchema(Object):
    """A JSON schema that an answer is held to."""

    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class Structure(Object):
    """A tag of vLLM's older form, and its content."""

    begin: Text
    json_schema: dict[str, Any] = Field(alias="schema")
    end: str


Structures = Annotated[list[Structure], Field(min_length=1, max_length=MAX_CHOICES)]


class ResponseFormat(Object):
    """What an answer is held to: OpenAI's object, and further types (vLLM's structured outputs).
    Each but `text` and `json_object` has its content in the field of its name."""

    type: Literal[
        "text", "json_object", "json_schema", "regex", "grammar", "choice", "structural_tag"
    ]
    json_schema: NamedSchema | None = None

    regex: Annotated[str, Field(min_length=1, max_length=10_000)] | None = None
    """The whole answer matches it (ECMAScript's, without lookaround and back references)."""

    grammar: Annotated[str, Field(min_length=1, max_length=100_000)] | None = None
    """EBNF as in llama.cpp's GBNF; it begins at the rule `root`."""

    choice: Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES)] | None = None
    """The answer is one of these texts, sampled."""

    format: dict[str, Any] | None = None
    """Of structural_tag: xgrammar's format."""

    structures: Structures | None = None
    """With triggers vLLM's older form of a structural_tag, in place of its format."""

    triggers: Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES)] | None = None
    """Texts that a structure begins with: from there on it has to follow."""

    whitespace: Whitespace | None = None
    """Between values of JSON: `spaced` (the default: a space after each comma and colon, as models
    write it), `compact` (none), or `any`."""

    any_whitespace: bool | None = None
    """True: another name of `"whitespace": "any"`."""

    @model_validator(mode="after")
    def _fits_its_type(self) -> ResponseFormat:
        needed = {"structural_tag": "format"}.get(self.type, self.type)
        names = ["json_schema", "regex", "grammar", "choice", "format", "structures", "triggers"]
        if self.type == "structural_tag" and (self.structures or self.triggers):
            needed = "structures"
            if self.triggers is None:
                raise RequestError("response_format with structures needs triggers")
            names.remove("triggers")
        contents = {name: getattr(self, name) for name in names}
        check_content("response_format", self.type, needed, contents)
        for name in ("whitespace", "any_whitespace"):
            if getattr(self, name) and not self.type.startswith("json"):
                raise RequestError(f"response_format of type {self.type} has {name}")
        if self.whitespace is not None and self.any_whitespace is not None:
            raise RequestError("response_format has whitespace and any_whitespace: give whitespace")
        return self


def whitespace_of(response_format: Mapping[str, Any]) -> Whitespace | None:
    """What a format says of whitespace between values of JSON; None: nothing."""
    if response_format.get("any_whitespace"):
        return "any"
    said: Whitespace | None = response_format.get("whitespace")
    return said


class StructuredOutputs(Object):
    """vLLM's names for the same: exactly one of the first six."""

    json_schema: dict[str, Any] | str | bool | None = Field(default=None, alias="json")
    json_object: Literal[True] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: dict[str, Any] | str | None = None
    disable_any_whitespace: bool | None = None

    @property
    def response_format(self) -> dict[str, Any]:
        """What it is as a `response_format`."""
        given = {
            name: value
            for name in type(self).model_fields
            if (value := getattr(self, name)) is not None and name != "disable_any_whitespace"
        }
        if len(given) != 1:
            raise RequestError(
                f"structured_outputs has {len(given)} of json, json_object, regex, choice, grammar "
                "and structural_tag: give exactly one of them"
            )
        ((kind, value),) = given.items()
        made: dict[str, Any] = {"type": kind, kind: value}
        if kind == "json_schema":
            made["json_schema"] = {"schema": _read(value, "structured_outputs.json")}
        elif kind == "json_object":
            del made["json_object"]
        elif kind == "structural_tag":
            tag = _read(value, "structured_outputs.structural_tag")
            is_whole = tag.get("type", kind) == kind
            made = {**tag, "type": kind} if is_whole else {"type": kind, "format": tag}
        if self.disable_any_whitespace is False and kind.startswith("json"):
            made["whitespace"] = "any"
        return made


def _read(value: Any, name: str) -> Any:
    """An object that may be given as JSON."""
    if isinstance(value, str):
        try:
            value = read_json(value)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{name} is no JSON: {str(error)[:80]}") from error
        if is_deep(value):
            raise RequestError(f"{name} nests too deeply, limit is {MAX_DEPTH} levels")
    if not isinstance(value, dict):
        raise RequestError(f"{name} is {show(value)}, expected an object")
    return value


def _as_mapping(value: Any) -> Any:
    """vLLM's own object, or any with the same attributes."""
    if value is None or isinstance(value, Mapping):
        return value
    known = [info.alias or name for name, info in StructuredOutputs.model_fields.items()]
    names = [name for name in known if hasattr(value, name)]
    return {name: getattr(value, name) for name in names} if names else value


def _structured(value: Any) -> dict[str, Any]:
    fields = {  # vLLM's object has False where nothing is asked
        name: one
        for name, one in value.items()
        if one not in (None, False) or name == "disable_any_whitespace"
    }
    return check(StructuredOutputs, fields, "structured_outputs").response_format


if TYPE_CHECKING:
    Stops = str | Sequence[str] | None
    Texts = Sequence[str]
    BadWords = Sequence[str]
    TokenIds = Sequence[int]
    Bias = Mapping[int, float]
    Format = Mapping[str, Any]
    Structured = Any
else:
    BadWords = Annotated[tuple[Text, ...], Field(max_length=MAX_CHOICES), BeforeValidator(_texts)]
    Texts = Annotated[
        tuple[Text, ...], Field(min_length=1, max_length=MAX_CHOICES), BeforeValidator(_tuple)
    ]
    Stops = Annotated[
        tuple[Text, ...],
        Field(max_length=MAX_STOPS),
        BeforeValidator(_texts),
        WithJsonSchema(
            {
                "anyOf": [TEXT, {"type": "array", "items": TEXT, "maxItems": MAX_STOPS}],
                EXPECTED: "non-empty text or a list of non-empty texts",
            }
        ),
    ]
    TokenIds = Annotated[tuple[TokenId, ...], Field(fail_fast=True), BeforeValidator(_ids)]
    BiasKey = Annotated[TokenId, WithJsonSchema({"type": "string", "pattern": "^[0-9]{1,10}$"})]
    Bias = Annotated[
        dict[BiasKey, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_ids_as_keys)
    ]
    Format = Annotated[
        dict[str, Any],
        BeforeValidator(_mapping),
        AfterValidator(_format),
        DescribedBy(ResponseFormat),
    ]
    Structured = Annotated[
        dict[str, Any],
        BeforeValidator(_as_mapping),
        AfterValidator(_structured),
        DescribedBy(StructuredOutputs),
    ]


class SamplingParams(Checked):
    """How to continue a prompt.

    `None` in `temperature`, `top_k`, `top_p`, `min_p` and `repetition_penalty` means the model's
    own default (`generation_config.json`), or, where that is silent: 1.0, off, 1.0, 0.0, 1.0.
    """

    beside: ClassVar[Mapping[str, Name]] = SAMPLING

    n: int = Field(default=1, ge=1, le=4096)
    """Sequences to sample; they share the prompt's KV."""

    max_tokens: int | None = Field(default=16, ge=1)
    """Maximum tokens to sample; None: up to the model's length."""

    min_tokens: int = Field(default=0, ge=0)
    """Minimum tokens before an end-of-sequence token or a stop condition can end the answer."""

    temperature: float | None = Field(default=None, ge=0, le=100)
    """0 is greedy."""

    top_k: int | None = Field(default=None, ge=-1, json_schema_extra={EXPECTED: TOP_K})
    """Keep the k most likely tokens; 0 or -1: all."""

    top_p: float | None = Field(default=None, gt=0, le=1)
    """Keep the smallest set of tokens with this probability mass."""

    min_p: float | None = Field(default=None, ge=0, le=1)
    """Keep tokens with at least `min_p` times the top token's probability."""

    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    """OpenAI's, over the sampled tokens."""

    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    """OpenAI's, over the sampled tokens."""

    repetition_penalty: float | None = Field(default=None, ge=1e-6, le=100)
    """Over prompt and sampled tokens; 1 is off."""

    seed: int | None = Field(
        default=None, ge=-(2**63), le=2**64 - 1, json_schema_extra={EXPECTED: "a 64-bit integer"}
    )
    """Random numbers are a function of (seed, sequence index, token index) alone. None: the engine
    draws one per request; jobs derive it from the request's id."""

    stop: Stops = ()
    """Texts that end the sequence; cut from its text."""

    stop_token_ids: TokenIds = ()
    """Further ids that end the sequence."""

    ignore_eos: bool = False
    """Go on after an end-of-sequence token."""

    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    """For each sampled token its log-probability, and those of this number of most probable tokens.
    They are the model's own: natural logarithms at temperature 1, before penalties, bias, masks,
    top-k, top-p and min-p; or after all of these (the option `logprobs_mode`)."""

    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    """The same for the prompt's tokens (the first has none)."""

    logit_bias: Bias | None = None
    """Token id to a number that is added to its logit."""

    choices: Texts | None = None
    """Pick the most probable of these texts instead of sampling. stop, min_tokens, penalties and
    bias are refused with it; temperature, top_k, top_p, min_p and seed have no effect."""

    response_format: Format | None = None
    """OpenAI's object: `{"type": "json_schema", "json_schema": {...}}`, `{"type": "json_object"}`
    or `{"type": "text"}`; also of type `regex`, `grammar`, `choice` and `structural_tag`."""

    structured_outputs: Structured | None = None
    """vLLM's form of `response_format`, which it becomes."""

    allowed_token_ids: TokenIds | None = None
    """Only these may be sampled; name an end-of-sequence id too if the answer may end by itself."""

    bad_words: BadWords = ()
    """Texts whose tokens the answer may not contain."""

    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""

    include_stop_str_in_output: bool = False
    """Keep the stop string at the text's end."""

    @property
    def may_end_early(self) -> bool:
        """Whether an answer may end before `max_tokens`."""
        ends = not self.ignore_eos or self.stop or self.stop_token_ids
        return self.response_format is not None or bool(ends and self.min_tokens != self.max_tokens)

    @model_validator(mode="after")
    def _check_together(self) -> SamplingParams:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, expected at most max_tokens ({self.max_tokens})"
            )
        if self.structured_outputs is not None:
            if self.response_format is not None:
                raise RequestError("response_format and structured_outputs: give one of them")
            self.__dict__["response_format"] = _format(self.structured_outputs)
            self.__dict__["structured_outputs"] = None
        if self.allowed_token_ids == ():
            raise RequestError("allowed_token_ids is [], expected at least one token id")
        if self.choices is not None:
            self._check_choices(self.choices)
        return self

    def _check_choices(self, choices: Sequence[str]) -> None:
        if len(set(choices)) < len(choices):
            raise RequestError(f"choices is {show(choices)}, expected different texts")
        for name, free in _FREE_BESIDE_CHOICES.items():
            value = getattr(self, name)
            if value not in (None, free):
                raise RequestError(
                    f"{name} is {show(value)}, expected {free or 'nothing'} together with choices"
                )

    def __hash__(self) -> int:
        return hash(tuple(_hashable(value) for _, value in self))

    def replace(self, **changes: Any) -> Self:
        kept: dict[str, Any] = {}
        if changes.get("structured_outputs") is not None:
            kept["response_format"] = None  # the same field by another name
        return super().replace(**{**kept, **changes})


def masking_fields(params: SamplingParams) -> list[str]:
    """Fields of a request that forbid tokens, the most likely cause first."""
    early = params.min_tokens > 0
    present = {
        "response_format": params.response_format is not None,
        "allowed_token_ids": params.allowed_token_ids is not None,
        "bad_words": bool(params.bad_words),
        "stop_token_ids": early and bool(params.stop_token_ids),
        "min_tokens": early,
    }
    return [name for name, is_there in present.items() if is_there]


def why_masked(params: SamplingParams) -> str | None:
    """The `stop_reason` of a sequence that no token may follow: the fields at fault, and the way
    out. None: it has no such fields, so the logits are the cause."""
    fields = masking_fields(params)
    if not fields:
        return None
    *others, last = fields
    if not others:
        return f"{_FORBIDDEN}{last} forbids all of them: loosen it"
    names = f"{', '.join(others)} and {last}"
    return f"{_FORBIDDEN}{names} together forbid all of them: loosen one of them"


def is_masked(reason: int | str | None) -> bool:
    """Whether the caller's own fields are why a sequence ended with an error."""
    return isinstance(reason, str) and reason.startswith(_FORBIDDEN)


ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
"""For requests that only compute keys and values, or only measure the time to a first token."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt, tokenised, and how to continue it.

    Attributes:
        request_id: unique among the requests an engine holds.
        prompt_token_ids: at least one id, BOS included where the model wants it.
        params: see `SamplingParams`; `seed` is set where the request is made.
        prompt_array: `prompt_token_ids` as an integer array, if there is one: this saves time.
        prompt: the text, if there was one (only handed back).
        pml: the prompt as segments, if it imports modules; `prompt_token_ids` are its tokens in use
            in the order of their positions.
        stream: also return unfinished outputs from each step that sampled for it.
        score_from: if set, log-probabilities of the prompt's tokens from this index on are
            computed (and what lies before may come from the cache up to `score_from - 1`).
        paths: given tokens that are scored instead of sampling (`onestem.scores`): a sequence each,
            which shares what others compute but for the rows that it scores.
        cache_salt: prompts of different salts never match each other's cached tokens; "" is the
            common one.
        common_prefix_tokens: number of the prompt's first tokens without salt: a prefix for all.
        common_modules: the modules that a prompt in PML imports have no salt: a schema for all.
        priority: a `job`'s request runs in what `interactive` ones leave free.
        prefilled_tokens: number of the prompt's last tokens that a chat template writes before an
            answer but not before the same answer in a later prompt (an empty `<think></think>`).
        group: the planned group it belongs to; its first `group_prefix_tokens` tokens stay in the
            cache until the group's last member has finished.
        group_only: it shares these tokens alone, and only with its group (for measuring what a plan
            saves; its modules are shared nevertheless).
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    prompt_array: NDArray[np.integer] | None = field(default=None, compare=False, repr=False)
    prompt: str | None = None
    pml: CompiledPrompt | None = None
    stream: bool = False
    score_from: int | None = None
    paths: tuple[ScorePath, ...] = ()
    cache_salt: str = ""
    common_prefix_tokens: int = 0
    common_modules: bool = False
    priority: Priority = "interactive"
    prefilled_tokens: int = 0
    group: int | None = None
    group_prefix_tokens: int = 0
    group_only: bool = False

    @property
    def module_salt(self) -> str:
        """Cache salt of the modules that it imports."""
        return "" if self.common_modules else self.cache_salt


@dataclass(kw_only=True)
class RequestMetrics:
    """What a request cost. Times are seconds of `time.monotonic()`.

    `num_computed_tokens` counts the prompt's rows that were computed for all of its sequences, also
    again after a preemption. For one sequence that was never preempted, it and `num_cached_tokens`
    add up to `num_prompt_tokens`.
    """

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    num_preempted: int = 0
    arrival_time: float = 0.0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None


@dataclass(frozen=True, kw_only=True)
class Rerendered:
    """Where a prompt departs inside a stored answer: its conversation is written differently than
    before.

    Attributes:
        at: index of the prompt's first token that differs.
        num_tokens: stored tokens of the conversation from there on.
        offset: tokens from the answer's beginning (with its `Request.prefilled_tokens`) to `at`.
        earlier: the first stored ids from there on (at most 16).
    """

    at: int
    num_tokens: int
    offset: int
    earlier: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Reuse:
    """What of a prompt was stored or being computed when it was admitted, and why the match ended.

    Attributes:
        matched_tokens: number of its first tokens that matched.
        prefix: name of the longest pinned prefix among them.
        ended: `prompt` (all of it but its last token, which is always computed), `differs` (what is
            stored goes on in another way), `new` (nothing stored goes on from there).
        here: the prompt's token id where the match ended.
        there: ids that are stored in its place (at most 4, of the same cache salt).
        rerendered: set where it ended inside an answer.
    """

    matched_tokens: int
    prefix: str | None
    ended: Literal["prompt", "differs", "new"]
    here: int | None
    there: tuple[int, ...]
    rerendered: Rerendered | None = None


@dataclass(kw_only=True)
class CompletionOutput:
    """One sequence's answer, or what is new in it (but for `cumulative_logprob`). `logprobs[i]` and
    `weight_versions[i]` belong to `token_ids[i]`; the latter is the version of the weights that the
    token was sampled with (`LLM.update_weights`)."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    choice: int | None = None
    weight_versions: list[int] = field(default_factory=list)

    def copy(self) -> CompletionOutput:
        """A copy with lists of its own."""
        copied = replace(self, token_ids=[*self.token_ids], weight_versions=[*self.weight_versions])
        copied.logprobs = None if self.logprobs is None else [*self.logprobs]
        return copied

    def extend(self, then: CompletionOutput) -> None:
        """Add what came next."""
        self.text += then.text
        self.token_ids += then.token_ids
        self.cumulative_logprob = then.cumulative_logprob
        self.weight_versions += then.weight_versions
        if then.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *then.logprobs]
        self.finish_reason, self.stop_reason = then.finish_reason, then.stop_reason
        self.choice = then.choice


class Told:
    """How much of one sequence's answer was handed out.

    Attributes:
        text, tokens: number of characters and of tokens. ended: whether its end was, too.
    """

    __slots__ = ("ended", "text", "tokens")

    def __init__(self) -> None:
        self.text = 0
        self.tokens = 0
        self.ended = False

    def news(self, sequence: CompletionOutput) -> CompletionOutput | None:
        """What is new in an answer, which counts as handed out from now on; None: nothing."""
        if self.ended or (
            sequence.finish_reason is None
            and len(sequence.token_ids) == self.tokens
            and len(sequence.text) == self.text
        ):
            return None
        logprobs = sequence.logprobs
        piece = CompletionOutput(
            index=sequence.index,
            text=sequence.text[self.text :],
            token_ids=sequence.token_ids[self.tokens :],
            cumulative_logprob=sequence.cumulative_logprob,
            logprobs=None if logprobs is None else logprobs[self.tokens :],
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            choice=sequence.choice,
            weight_versions=sequence.weight_versions[self.tokens :],
        )
        self.text, self.tokens = len(sequence.text), len(sequence.token_ids)
        self.ended = sequence.finish_reason is not None
        return piece


@dataclass(kw_only=True)
class RequestOutput:
    """A request's answers; `finished` once each of its sequences has a `finish_reason`. `scores` is
    set once those of all its paths are known."""

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    scores: list[PathScores] | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    reuse: Reuse | None = None


class _Described:
    """An output whose log-probabilities become objects only when they are read: few are."""

    _entries: Iterable[TokenLogprobs | None]
    _describe: Callable[[TokenLogprobs], Logprobs]

    def _put_off(self, name: str, output: object, describe: Callable[..., Logprobs]) -> None:
        """Take an output's fields; the entries of the field `name` are described when read."""
        self.__dict__.update(output.__dict__)
        if self.__dict__[name] is not None:
            self._entries, self._describe = self.__dict__.pop(name), describe

    def _described(self) -> Any:
        return [None if entry is None else self._describe(entry) for entry in self._entries]

    def __getstate__(self) -> dict[str, Any]:
        described = {one.name: getattr(self, one.name) for one in fields(self)}  # type: ignore[arg-type]
        return {**described, **({"index": self.index} if hasattr(self, "index") else {})}


class Completion(_Described, CompletionOutput):
    """`CompletionOutput` as `LLM` gives it: `logprobs` has `Logprob`s."""

    @cached_property
    def logprobs(self) -> list[Logprobs] | None:  # type: ignore[override]
        return self._described()


class Answer(_Described, RequestOutput):
    """`RequestOutput` as `LLM` gives it: `prompt_logprobs` has `Logprob`s.

    Attributes:
        index: which of the call's prompts it answers.
    """

    index: int = 0
    outputs: list[Completion]  # type: ignore[assignment]

    @cached_property
    def prompt_logprobs(self) -> list[Logprobs | None] | None:  # type: ignore[override]
        return self._described()

    @staticmethod
    def of(output: RequestOutput, describe: Callable[[TokenLogprobs], Logprobs]) -> Answer:
        """An engine's output as an answer; `describe` makes the objects of a token's entry."""
        made = object.__new__(Answer)
        made._put_off("prompt_logprobs", output, describe)
        made.outputs = [object.__new__(Completion) for _ in output.outputs]
        for one, given in zip(made.outputs, output.outputs, strict=True):
            one._put_off("logprobs", given, describe)
        return made
