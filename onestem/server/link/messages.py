"""Messages between the server and the engine process: first those to it, then those from it."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from onestem.options import EngineOptions
from onestem.request import (
    CompletionOutput,
    Request,
    RequestMetrics,
    RequestOutput,
    Reuse,
    TokenLogprobs,
)
from onestem.scores import PathScores


@dataclass(frozen=True)
class Add:
    """An interactive request; `number` counts those that this engine was given, from 0. `key` and
    `weight`: see `Engine.add_request`."""

    request: Request
    number: int
    key: str = ""
    weight: float = 1.0


@dataclass(frozen=True)
class Abort:
    """A request's listener has left: end it, wherever it is."""

    request_id: str


@dataclass(frozen=True)
class JobRequests:
    """The next requests of a job, in planned order; `first`: they go before other jobs'."""

    job_id: str
    requests: Sequence[Request]
    first: bool = False


@dataclass(frozen=True)
class RemoveJob:
    """A job is given up, or has ended."""

    job_id: str


@dataclass(frozen=True)
class Ask:
    """A question that gets one `Answered`: `what` is validate, or one that `Orders` answers. `key`
    and `weight` are of the request to validate: see `GrammarCompiler.prepare`."""

    token: int
    what: str
    value: Any = None
    key: str = ""
    weight: float = 1.0


@dataclass(frozen=True)
class Unask:
    """Nobody waits any more for the answer to a question to validate."""

    token: int


@dataclass(frozen=True)
class Stop:
    """End; what runs is lost."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the server needs to know of the engine's model and memory.

    Attributes:
        options: as settled; kv_tokens: tokens that KV memory holds.
    """

    options: EngineOptions
    vocab_size: int
    kv_tokens: int
    kv_bytes_per_token: int

    @property
    def max_model_len(self) -> int:
        """Maximum tokens of a prompt and its answer."""
        assert self.options.max_model_len is not None
        return self.options.max_model_len


@dataclass(frozen=True)
class Ready:
    """The engine has loaded its model and takes requests."""

    facts: Facts
    pid: int


@dataclass(frozen=True)
class Failed:
    """The engine process ends. `fault`: whether a caller's mistake (an option) is the reason."""

    message: str
    fault: bool


def _numbers() -> array[int]:
    return array("q")


@dataclass(frozen=True)
class Tokens:
    """Most of what a step brings, by columns: one sampled token for each sequence that goes on and
    has no other news than its id and its text.

    Attributes:
        weights_version: of the weights that sampled them.
        requests: the request's number (`Add`); indices: the sequence's, among those of its request.
        token_ids: the token; texts: what it adds to the answer's text.
    """

    weights_version: int = 0
    requests: array[int] = field(default_factory=_numbers)
    indices: array[int] = field(default_factory=_numbers)
    token_ids: array[int] = field(default_factory=_numbers)
    texts: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Delta:
    """What is new in a request's answers. `metrics`, `prompt_logprobs`, `scores` and `reuse` come
    last; `metrics` of a request with one sequence also with its first token, if it streams."""

    request_id: str
    pieces: list[CompletionOutput]
    finished: bool = False
    metrics: RequestMetrics | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    scores: list[PathScores] | None = None
    reuse: Reuse | None = None


@dataclass(frozen=True)
class Begun:
    """Requests that are in the step that is computed next, unless memory is short."""

    request_ids: Sequence[str]


@dataclass(frozen=True)
class Report:
    """What came of a step, or of taking commands.

    Attributes:
        tokens, deltas: of interactive requests; `tokens` come before `deltas`.
        refused: request id -> why.
        aborted: request id -> its end, without pieces: what it cost and reused; None: it was not
            begun, or has ended by itself.
        num_running: sequences in the engine.
        jobs: finished requests, each with its job.
        pulled: job -> requests that the engine has taken so far.
        stats: the engine's counts, now and then.
        job_step_seconds: the longest step without an interactive request, since the last `stats`.
        num_taken: commands taken so far, without questions that only need the engine's grammars.
        busy: a further report follows without a command.
    """

    tokens: Tokens = field(default_factory=Tokens)
    deltas: list[Delta] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    aborted: dict[str, Delta | None] = field(default_factory=dict)
    num_running: int = 0
    jobs: list[tuple[str, RequestOutput]] = field(default_factory=list)
    pulled: dict[str, int] = field(default_factory=dict)
    stats: Mapping[str, float] | None = None
    job_step_seconds: float = 0.0
    num_taken: int = 0
    busy: bool = False


@dataclass(frozen=True)
class Answered:
    """An answer; `error`: why there is none; `fault`: whether a caller's mistake is the reason;
    `lasts`: whether there would be none later either."""

    token: int
    value: Any = None
    error: str | None = None
    fault: bool = True
    lasts: bool = True
