"""One HTTP call for answers: its requests from queueing to the last token, and what it cost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from onestem.openai.forms import Reading
from onestem.openai.rank import Ranking
from onestem.openai.read import Echo
from onestem.openai.write import Dialect
from onestem.scores import ScoreTask
from onestem.server.errors import TOO_LATE, ApiError, too_late
from onestem.server.link.chunk_size import ChunkSize
from onestem.server.link.client import EngineClient
from onestem.server.link.inbox import Inbox
from onestem.server.link.messages import Delta
from onestem.server.records.call_record import CallRecord, Outcome


@dataclass(kw_only=True)
class Call(CallRecord):
    """A validated call.

    Attributes:
        tasks: what each of them scores; none where answers are sampled.
        ranking: what `tasks` judge; None: they are not of documents.
        chunk_size: of its stream's chunks after the first one; None: a token each.
        echo: how its prompts are given back; None: they are not.
        reading: how its answers are read; None: they are text as they are.
        dialect: how its answer is written; None: as OpenAI's.
        is_kept: whether what is computed of its prompts is kept for later ones.
        seconds: its time limit.
    """

    model: str
    tasks: Sequence[ScoreTask] = ()
    ranking: Ranking | None = None
    stream: bool = False
    include_usage: bool = False
    return_token_ids: bool = False
    reading: Reading | None = None
    dialect: Dialect | None = None
    is_kept: bool = True
    echo: Echo | None = None
    chunk_size: ChunkSize | None = None
    seconds: float
    inbox: Inbox = field(init=False)
    _num_left: int = field(init=False, default=0)
    _on_left: Callable[[], object] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.inbox = Inbox(len(self.requests), self.chunk_size)
        self.ended = self.inbox.ended

    def submit(self, client: EngineClient) -> None:
        """Queue its requests. `running` has to follow: it ends them."""
        client.supervisor.check_up()
        client.check_awake()
        key, weight = self.tenant.name, self.tenant.weight
        client.requests.check_room(key, len(self.requests))
        for number, request in enumerate(self.requests):
            client.requests.submit(request, key, weight, self.inbox.part(number))

    @asynccontextmanager
    async def running(self, client: EngineClient) -> AsyncIterator[Inbox]:
        """Its answers come inside the block; however that is left, none of its requests runs on."""
        timer = asyncio.get_running_loop().call_later(
            self.deadline - time.monotonic(), lambda: self.inbox.fail(too_late(self.seconds))
        )
        try:
            yield self.inbox
            self.outcome = self._finish_reason()
        except ApiError as error:
            self.outcome = "refused" if error.status < 500 else "error"
            if error.code == TOO_LATE:
                self.outcome = "timeout"
            raise
        finally:
            timer.cancel()
            self.outcome = self.outcome or "abort"
            for part, request in enumerate(self.requests):
                client.requests.abort(request.request_id, partial(self._left, part))

    def _left(self, part: int, last: Delta | None) -> None:
        """The engine is done with one of its requests; `last` where it was cut short."""
        if last is not None:
            self.ended.setdefault(part, last)
        self._num_left += 1
        if self._num_left == len(self.requests) and self._on_left is not None:
            tell, self._on_left = self._on_left, None  # it refers to the call
            tell()

    def when_left(self, tell: Callable[[], object]) -> None:
        """Have `tell` called when the engine is done with all of its requests: `ended` is whole
        then. For a call that was cut short, that is soon after `running`."""
        if self._num_left == len(self.requests):
            tell()
        else:
            self._on_left = tell

    def _finish_reason(self) -> Outcome:
        reasons = [piece.finish_reason for delta in self.deltas for piece in delta.pieces]
        return reasons[-1] or "stop" if reasons else "stop"

    @property
    def deadline(self) -> float:
        """When its time is over, by `time.monotonic()`."""
        return self.arrived + self.seconds


def usage_of(call: Call, reasoning_tokens: int = 0) -> dict[str, Any]:
    """OpenAI's `usage`; a prompt counts once, however many answers it gets. Of a call that has
    begun: as far as it is known.

    Args:
        reasoning_tokens: of all answers to a chat.
    """
    prompt = sum(len(request.prompt_token_ids) for request in call.requests)
    if call.tasks and call.ranking is None:
        prompt = sum(task.num_tokens for task in call.tasks)
    metrics = call.metrics or list(call.inbox.begun.values())
    output = sum(one.num_output_tokens for one in metrics)
    if call.echo is not None and call.echo.alone:
        output = 0
    cached = sum(min(one.num_cached_tokens, one.num_prompt_tokens) for one in metrics)
    details = {"cached_tokens": cached}
    for tier in ("host", "disk"):
        copied = sum(getattr(one, f"num_{tier}_tokens") for one in metrics)
        if copied:
            details[f"{tier}_tokens"] = copied
    if call.dialect is not None:
        details["cache_write_tokens"] = prompt - cached if call.is_kept else 0
    rerendered = call.rerendered
    if rerendered is not None:
        details["rerendered_tokens"] = rerendered.num_tokens
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": details,
    }
    if call.kind == "chat":
        usage["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return usage
