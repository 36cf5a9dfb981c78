"""What a request comes back as: plain values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal, NamedTuple

from onestem.scores import PathScores

FinishReason = Literal["stop", "length", "abort", "error"]

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


@dataclass(kw_only=True)
class RequestMetrics:
    """What a request cost. Times are seconds of `time.monotonic()`.

    `num_computed_tokens` counts the prompt's rows that were computed for all of its sequences, also
    again after a preemption. For one sequence that was never preempted, it and `num_cached_tokens`
    add up to `num_prompt_tokens`. Of the latter, `num_host_tokens` were copied from host memory and
    `num_disk_tokens` from files; the others were in KV memory.
    """

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_host_tokens: int = 0
    num_disk_tokens: int = 0
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
        state_at: of them, those in the recurrent state that it began with; rows after these were
            computed again. None: the model's layers keep no state.
    """

    matched_tokens: int
    prefix: str | None
    ended: Literal["prompt", "differs", "new"]
    here: int | None
    there: tuple[int, ...]
    rerendered: Rerendered | None = None
    state_at: int | None = None


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
        copied = object.__new__(CompletionOutput)  # `replace` takes several times as long
        copied.__dict__.update(self.__dict__)
        copied.token_ids, copied.weight_versions = [*self.token_ids], [*self.weight_versions]
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


@dataclass(slots=True, eq=False)
class Told:
    """How much of one sequence's answer was handed out.

    Attributes:
        text, tokens: number of characters and of tokens. ended: whether its end was, too.
    """

    text: int = 0
    tokens: int = 0
    ended: bool = False

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
        """Of each token, and of those in its place; None: not asked for."""
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
        """Of each token of the prompt, as far as it was scored; None: not asked for."""
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
