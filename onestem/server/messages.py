"""What the server and the engine process tell each other."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from onestem.options import EngineOptions
from onestem.pml import EncodedSegment
from onestem.request import (
    CompletionOutput,
    Request,
    RequestMetrics,
    RequestOutput,
    Reuse,
    TokenLogprobs,
)

__all__ = [
    "Abort",
    "Add",
    "Answered",
    "Ask",
    "Delta",
    "Facts",
    "Failed",
    "JobOutput",
    "JobRequests",
    "Pin",
    "Prefetch",
    "Ready",
    "RemoveJob",
    "Report",
    "Stop",
    "Tokens",
    "Unpin",
]

# ------------------------------------------------------------------------- to the engine process


@dataclass(frozen=True)
class Add:
    """An interactive request; `number`: of those that this engine was given, from 0."""

    request: Request
    number: int


@dataclass(frozen=True)
class Abort:
    request_id: str


@dataclass(frozen=True)
class JobRequests:
    """The next requests of a job, in planned order; `last`: there are no more."""

    job_id: str
    requests: Sequence[Request]
    last: bool


@dataclass(frozen=True)
class RemoveJob:
    job_id: str


@dataclass(frozen=True)
class Pin:
    name: str
    token_ids: Sequence[int]
    cache_salt: str


@dataclass(frozen=True)
class Unpin:
    name: str


@dataclass(frozen=True)
class Prefetch:
    """Modules that the next prompts in PML may want, to be read from the disk if they are there."""

    segments: Sequence[EncodedSegment]
    cache_salt: str


@dataclass(frozen=True)
class Ask:
    """A question that gets one `Answered`: `what` is validate, snapshot or check."""

    token: int
    what: str
    value: Any = None


@dataclass(frozen=True)
class Stop:
    pass


# ------------------------------------------------------------------------- to the server


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the server needs to know of the engine's model and memory.

    Attributes:
        options: as they were settled; kv_tokens: that KV memory holds.
    """

    options: EngineOptions
    max_model_len: int
    vocab_size: int
    kv_tokens: int
    kv_bytes_per_token: int


@dataclass(frozen=True)
class Ready:
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
    """Most of what a step brings, by columns: one sampled token each, of sequences that go on, with
    nothing to tell of it but its id and its text.

    Attributes:
        requests: the request's number (`Add`); indices: the sequence's, among those of its request.
        token_ids: the token; texts: what it adds to the answer's text.
    """

    requests: array[int] = field(default_factory=_numbers)
    indices: array[int] = field(default_factory=_numbers)
    token_ids: array[int] = field(default_factory=_numbers)
    texts: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Delta:
    """What is new in a request's answers. `metrics`, `prompt_logprobs` and `reuse` come last."""

    request_id: str
    pieces: list[CompletionOutput]
    finished: bool = False
    metrics: RequestMetrics | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    reuse: Reuse | None = None


@dataclass(frozen=True)
class JobOutput:
    """A finished request of a job."""

    job_id: str
    output: RequestOutput


@dataclass(frozen=True)
class Report:
    """What a step, or taking commands, came to.

    Attributes:
        tokens, deltas: of interactive requests; `tokens` come before `deltas`.
        refused: request id -> why.
        aborted: request id -> what it has cost; None: it was not begun, or has ended by itself.
        num_received: `Add`s taken so far; num_waiting: of these, not admitted yet.
        num_running: sequences in the engine.
        jobs: finished requests of jobs.
        pulled: job -> requests that the engine has taken so far.
        stats: the engine's counts, now and then.
        job_step_seconds: the longest step without an interactive request, since the last `stats`.
        num_taken: commands taken so far, but for questions that need the engine's grammars alone.
        busy: a further report follows without a command.
    """

    tokens: Tokens = field(default_factory=Tokens)
    deltas: list[Delta] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    aborted: dict[str, RequestMetrics | None] = field(default_factory=dict)
    num_received: int = 0
    num_waiting: int = 0
    num_running: int = 0
    jobs: list[JobOutput] = field(default_factory=list)
    pulled: dict[str, int] = field(default_factory=dict)
    stats: Mapping[str, float] | None = None
    job_step_seconds: float = 0.0
    num_taken: int = 0
    busy: bool = False


@dataclass(frozen=True)
class Answered:
    """`error`: why not; `fault`: whether a caller's mistake is the reason."""

    token: int
    value: Any = None
    error: str | None = None
    fault: bool = True
