"""What a user asks and what comes back: plain values, no torch.

A *request* is what the user sent; a *sequence* is one continuation of it (a request with n = 4 has
four). Field names are those that users of vLLM and of OpenAI's API know.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from onestem.errors import RequestError
from onestem.pml import CompiledPrompt

__all__ = [
    "CompletionOutput",
    "FinishReason",
    "Priority",
    "Request",
    "RequestMetrics",
    "RequestOutput",
    "Reuse",
    "SamplingParams",
    "ShareMode",
    "TokenLogprobs",
    "is_masked",
    "masking_fields",
    "show",
    "why_masked",
]

FinishReason = Literal["stop", "length", "abort", "error"]
Priority = Literal["interactive", "job"]
ShareMode = Literal["full", "storage", "off", "no-attention"]

# token id -> natural-log probability, highest first; the sampled (or given) token is always in it.
TokenLogprobs = Mapping[int, float]

MAX_LOGPROBS = 100
MAX_CHOICES = 1024  # each is a sequence, as each of n is
MAX_STOPS = 64  # each is looked for behind every token

# A choice is scored whole, as the model's own distribution has it: these would not change it.
NEUTRAL_BESIDE_CHOICES: Mapping[str, object] = {
    "n": 1,
    "response_format": None,
    "stop": (),
    "stop_token_ids": (),
    "min_tokens": 0,
    "logit_bias": None,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}


def show(value: object) -> str:
    """`value` for an error message: its start, on one line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else text[:79] + "…"


def _check(ok: bool, name: str, value: object, limit: str) -> None:
    if not ok:
        raise RequestError(f"{name} is {show(value)}, expected {limit}")


def _check_count(name: str, values: Sequence[object], limit: int, way_out: str) -> None:
    if len(values) > limit:
        raise RequestError(f"{name} has {len(values)} texts, limit is {limit}: {way_out}")


def _tuple(name: str, value: object, limit: str) -> tuple[Any, ...]:
    """A sequence as a tuple; None is an empty one."""
    ok = value is None or (isinstance(value, Sequence) and not isinstance(value, (str, bytes)))
    _check(ok, name, value, limit)
    return tuple(value) if isinstance(value, Sequence) else ()


def _once_each(ids: tuple[Any, ...]) -> tuple[Any, ...]:
    """Each id once; what is no list of integers stays, to be refused."""
    return tuple(dict.fromkeys(ids)) if all(map(_is_int, ids)) else ids


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to continue a prompt.

    `None` in `temperature`, `top_k`, `top_p`, `min_p` and `repetition_penalty` means the model's
    own default (`generation_config.json`), or, where that is silent: 1.0, off, 1.0, 0.0, 1.0.

    Attributes:
        n: sequences to sample; they share the prompt's KV.
        max_tokens: most tokens to sample; `None`: up to the model's length.
        min_tokens: end-of-sequence and stop conditions cannot hold before so many tokens.
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens; 0 or -1: all.
        top_p: keep the smallest set with this probability mass.
        min_p: keep tokens with at least `min_p` times the top token's probability.
        presence_penalty, frequency_penalty: OpenAI's, over the sampled tokens; -2..2.
        repetition_penalty: over prompt and sampled tokens; from 1e-6, 1 is off.
        seed: random numbers are a function of (seed, sequence index, token index) alone.
            `None`: the engine draws one per request; jobs derive it from the request's id.
        stop: strings that end the sequence, at most 64; cut from the text.
        stop_token_ids: further ids that end the sequence.
        ignore_eos: go on after an end-of-sequence token.
        logprobs: for each sampled token its log-probability, and those of so many of the most
            probable ones. They are the model's own: natural logarithms at temperature 1, before
            penalties, bias, masks, top-k, top-p and min-p.
        prompt_logprobs: the same for the prompt's tokens (their first has none).
        logit_bias: token id -> number added to its logit, -100..100.
        choices: pick the most probable of these texts, at most 1,024, instead of sampling. What
            steers sampling means nothing then: stop, min_tokens, penalties and bias are refused,
            temperature, top_k, top_p, min_p and seed have no effect.
        response_format: OpenAI's object: `{"type": "json_schema", "json_schema": {...}}`,
            `{"type": "json_object"}` or `{"type": "text"}`.
        skip_special_tokens: leave special tokens out of the text.
        include_stop_str_in_output: keep the stop string at the text's end.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    choices: Sequence[str] | None = None
    response_format: Mapping[str, Any] | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", _tuple("stop", stop, "a string or a list of strings"))
        ids = _tuple("stop_token_ids", self.stop_token_ids, "a list of token ids")
        object.__setattr__(self, "stop_token_ids", _once_each(ids))
        if self.choices is not None:
            choices = _tuple("choices", self.choices, "a list of texts")
            object.__setattr__(self, "choices", choices)
        for name in ("logit_bias", "response_format"):
            value = getattr(self, name)
            _check(value is None or isinstance(value, Mapping), name, value, "a mapping or None")
        if self.logit_bias is not None:  # what its owner does to it later is another matter
            object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            _check(isinstance(getattr(self, name), bool), name, getattr(self, name), "a boolean")
        self._check_counts()
        self._check_probabilities()
        self._check_texts()

    def _check_counts(self) -> None:
        _check(_is_int(self.n) and 1 <= self.n <= 1024, "n", self.n, "an integer from 1 to 1024")
        _check(
            self.max_tokens is None or (_is_int(self.max_tokens) and self.max_tokens >= 1),
            "max_tokens",
            self.max_tokens,
            "an integer of at least 1, or None",
        )
        _check(
            _is_int(self.min_tokens) and self.min_tokens >= 0,
            "min_tokens",
            self.min_tokens,
            "an integer of at least 0",
        )
        _check(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            "min_tokens",
            self.min_tokens,
            f"at most max_tokens ({self.max_tokens})",
        )
        _check(
            self.seed is None or (_is_int(self.seed) and -(2**63) <= self.seed < 2**64),
            "seed",
            self.seed,
            "a 64-bit integer or None",
        )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _check(
                value is None or (_is_int(value) and 0 <= value <= MAX_LOGPROBS),
                name,
                value,
                f"an integer from 0 to {MAX_LOGPROBS}, or None",
            )

    def _check_probabilities(self) -> None:
        def number(
            name: str, low: float, high: float, limit: str, *, open_low: bool = False
        ) -> None:
            value = getattr(self, name)
            if value is None:
                return
            ok = _is_number(value) and low <= value <= high and not (open_low and value == low)
            _check(ok, name, value, limit)

        number("temperature", 0.0, 100.0, "a number from 0 to 100")
        number("top_p", 0.0, 1.0, "a number above 0 and at most 1", open_low=True)
        number("min_p", 0.0, 1.0, "a number from 0 to 1")
        number("presence_penalty", -2.0, 2.0, "a number from -2 to 2")
        number("frequency_penalty", -2.0, 2.0, "a number from -2 to 2")
        number("repetition_penalty", 1e-6, 100.0, "a number from 1e-6 to 100")
        _check(
            self.top_k is None or (_is_int(self.top_k) and self.top_k >= -1),
            "top_k",
            self.top_k,
            "an integer of at least -1 (0 and -1: off), or None",
        )
        for token, bias in (self.logit_bias or {}).items():
            _check(_is_int(token) and token >= 0, "logit_bias key", token, "a token id")
            _check(
                _is_number(bias) and -100 <= bias <= 100,
                f"logit_bias[{token}]",
                bias,
                "a number from -100 to 100",
            )

    def _check_texts(self) -> None:
        assert isinstance(self.stop, tuple)
        _check_count("stop", self.stop, MAX_STOPS, "give fewer")
        for text in self.stop:
            _check(isinstance(text, str) and text != "", "stop", text, "non-empty strings")
        for token in self.stop_token_ids:
            _check(_is_int(token) and token >= 0, "stop_token_ids", token, "token ids")
        if self.choices is not None:
            self._check_choices(self.choices)

    def _check_choices(self, choices: Sequence[str]) -> None:
        _check(len(choices) >= 1, "choices", choices, "at least one text")
        _check_count("choices", choices, MAX_CHOICES, "pick among fewer, then among the winners")
        for text in choices:
            _check(isinstance(text, str) and text != "", "choices", text, "non-empty texts")
        _check(len(set(choices)) == len(choices), "choices", choices, "different texts")
        for name, neutral in NEUTRAL_BESIDE_CHOICES.items():
            value = getattr(self, name)
            limit = f"{neutral or 'nothing'} together with choices"
            _check(value in (None, neutral), name, value, limit)

    def replace(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed, checked again."""
        return dataclasses.replace(self, **changes)


_FORBIDDEN = "no token may follow: "


def masking_fields(params: SamplingParams) -> list[str]:
    """Fields of a request that forbid tokens, the one most to blame first."""
    early = params.min_tokens > 0
    present = {
        "response_format": params.response_format is not None,
        "stop_token_ids": early and bool(params.stop_token_ids),
        "min_tokens": early,
    }
    return [name for name, is_there in present.items() if is_there]


def why_masked(params: SamplingParams) -> str | None:
    """The `stop_reason` of such a sequence: the fields at fault, and the way out. None: it has no
    such fields, and the logits are to blame."""
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


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt, tokenised, and how to continue it.

    Attributes:
        request_id: unique among the requests an engine holds.
        prompt_token_ids: at least one id, BOS included where the model wants it.
        params: see `SamplingParams`; `seed` is set by whoever makes the request.
        prompt: the text, if there was one (only handed back).
        pml: the prompt as segments, if it imports modules; `prompt_token_ids` are its tokens in use
            in the order of their positions.
        stream: also return unfinished outputs from each step that sampled for it.
        score_from: if set, log-probabilities of the prompt's tokens from this index on are
            computed (and what lies before may come from the cache up to `score_from - 1`).
        cache_salt: prompts of different salts never match each other's cached tokens; "" is the
            common one.
        common_prefix_tokens: the prompt's first so many tokens are without salt: a prefix meant
            for all.
        common_modules: the modules that a prompt in PML imports are without salt: a schema meant
            for all.
        priority: a `job`'s request runs in what `interactive` ones leave free.
        group: the planned group it belongs to; its first `group_prefix_tokens` tokens stay in the
            cache until the group's last member has finished.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    prompt: str | None = None
    pml: CompiledPrompt | None = None
    stream: bool = False
    score_from: int | None = None
    cache_salt: str = ""
    common_prefix_tokens: int = 0
    common_modules: bool = False
    priority: Priority = "interactive"
    group: int | None = None
    group_prefix_tokens: int = 0

    @property
    def module_salt(self) -> str:
        """Of the modules that it imports."""
        return "" if self.common_modules else self.cache_salt


@dataclass(kw_only=True)
class RequestMetrics:
    """What a request cost. Times are seconds of `time.monotonic()`.

    `num_computed_tokens` counts the prompt's rows that were computed for all of its sequences, also
    again after a preemption; for one sequence that was never preempted, it and `num_cached_tokens`
    are `num_prompt_tokens` together.
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
class Reuse:
    """What of a prompt was stored or being computed when it was admitted, and where that ended.

    Attributes:
        matched_tokens: its first so many tokens.
        prefix: the longest pinned prefix among them, by name.
        ended: `prompt` (all of it but its last token, which is always computed), `differs` (what is
            stored goes on in another way), `new` (nothing stored goes on from there).
        here: the token id where it ended, of the prompt.
        there: first ids of what is stored beside it (at most 4, of the same cache salt).
    """

    matched_tokens: int
    prefix: str | None
    ended: Literal["prompt", "differs", "new"]
    here: int | None
    there: tuple[int, ...]


@dataclass(kw_only=True)
class CompletionOutput:
    """One sequence's answer, or what is new in it. `logprobs[i]` belongs to `token_ids[i]`."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    choice: int | None = None

    def extend(self, then: CompletionOutput) -> None:
        """Add what came next."""
        self.text += then.text
        self.token_ids += then.token_ids
        if then.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *then.logprobs]
        self.finish_reason, self.stop_reason = then.finish_reason, then.stop_reason
        self.choice = then.choice


@dataclass(kw_only=True)
class RequestOutput:
    """A request's answers; `finished` once each of its sequences has a `finish_reason`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    reuse: Reuse | None = None
