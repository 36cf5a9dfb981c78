"""How a prompt is continued: `SamplingParams`, the only declaration of its fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from onestem.beside_vllm import SAMPLING, Name
from onestem.checked import EXPECTED, Checked, plain, show
from onestem.errors import RequestError
from onestem.request.formats import MAX_CHOICES, Format, Structured, Text, copied_format

MAX_LOGPROBS = 100
MAX_STOPS = 64  # each is looked for after every token
MAX_TOKEN_ID = 2**31 - 1  # ids are kept as int32
TEXT = {"type": "string", "minLength": 1}
_FORBIDDEN = "no token may follow: "
TOP_K = "an integer of at least -1 (0 and -1: off)"

TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]

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


def _hashable(value: Any) -> Any:
    """What is equal for equal values, and has a hash."""
    if isinstance(value, Mapping):
        return frozenset((key, _hashable(one)) for key, one in value.items())
    return tuple(map(_hashable, value)) if isinstance(value, (list, tuple)) else value


if TYPE_CHECKING:
    Stops = str | Sequence[str] | None
    Texts = Sequence[str]
    BadWords = Sequence[str]
    TokenIds = Sequence[int]
    Bias = Mapping[int, float]
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
            self.__dict__["response_format"] = copied_format(self.structured_outputs)
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
        """A copy with other values, checked together."""
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
