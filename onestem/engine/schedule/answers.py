"""Host memory of answers: what running requests keep until they end, beside their KV.

A sampled token's id and text are a few bytes, and KV memory bounds how many sequences are under
way. Log-probabilities of alternatives are not small: a request counts with all that it may ask for.
Of a request with n answers, those that have ended are kept until the last one has. Few have
`max_tokens` tokens. So a request counts with what KV memory holds of them, and with more as they
end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from onestem.engine.sequence import RequestState, Sequence
from onestem.errors import RequestError
from onestem.options import parse_memory
from onestem.request import Request
from onestem.threads import ram_bytes

# Measured, as Python's objects: an entry of a token's log-probabilities (85 of 100 alternatives, 60
# of 5), and a token of one of n answers, in its list.
ENTRY_BYTES, TOKEN_BYTES = 90, 48


def answer_memory_bytes(size: str | int) -> int:
    """Bytes that the option `answer_memory` means."""
    return ram_bytes() // 4 if size == "auto" else parse_memory(size)


@dataclass(frozen=True, kw_only=True)
class AnswerLimit:
    """What answers may take.

    Attributes:
        most: bytes.
        max_model_len: maximum tokens of prompt and answer.
        kv_tokens: that KV memory holds, so the maximum of sequences under way together.
    """

    most: int
    max_model_len: int
    kv_tokens: int

    def bytes_of(self, request: Request, ended: int = 0) -> int:
        """Maximum bytes that a request's answers take; 0 for one answer without log-probabilities,
        which KV memory bounds.

        Args:
            ended: tokens that it has, beside those in KV memory.
        """
        params, prompt = request.params, len(request.prompt_token_ids)
        entry = 0 if params.logprobs is None else ENTRY_BYTES * (params.logprobs + 1)
        room = max(1, self.max_model_len - prompt)
        longest = room if params.max_tokens is None else min(room, params.max_tokens)
        kept = 0
        if params.choices:
            count = min(room * len(params.choices), sum(map(len, params.choices)))
        else:
            count = params.n * longest
            if params.n > 1:
                kept = TOKEN_BYTES * min(count, self.kv_tokens + ended)
        of_prompt = params.prompt_logprobs
        scored = 0 if of_prompt is None else prompt * ENTRY_BYTES * (of_prompt + 1)
        return count * entry + kept + scored

    def check(self, request: Request) -> None:
        """Raise `RequestError` for a request whose answers may take more."""
        size = self.bytes_of(request)
        if size <= self.most:
            return
        params = request.params
        names = "n, max_tokens and logprobs"
        if params.prompt_logprobs is not None:
            names = f"prompt_logprobs, {names}"
        raise RequestError(
            f"{names} ask for answers of up to {_size(size)} in memory, limit is "
            f"{_size(self.most)}: lower one of them, or raise answer_memory"
        )

    def check_together(self, requests: Collection[Request]) -> None:
        """Raise `RequestError` for requests whose answers may take more in all."""
        size = sum(map(self.bytes_of, requests))
        if size > self.most:
            raise RequestError(
                f"{len(requests)} prompts ask for answers of up to {_size(size)} in memory, limit "
                f"is {_size(self.most)}: send fewer at once, or stream"
            )


def _size(count: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count / 2**10:.1f} KiB"


class AnswerMemory:
    """What answers of the requests that have begun may take, each until its last answer has ended.
    A request alone has room.

    Args:
        limit: of all together.

    Attributes:
        most_of_jobs: bytes of jobs' requests together, where others may come beside them.
        taken, taken_by_jobs: bytes now.
    """

    def __init__(self, limit: AnswerLimit) -> None:
        self.limit = limit
        self.most_of_jobs = limit.most
        self.taken = self.taken_by_jobs = 0
        self._of: dict[RequestState, int] = {}

    def first_with_room(self, waiting: Iterable[Sequence]) -> Sequence | None:
        """The first whose request may begin, or go on. Those that need memory begin in their order,
        and others pass them."""
        is_full = False
        for sequence in waiting:
            state = sequence.state
            if not self.taken or state in self._of:
                return sequence
            size = self.limit.bytes_of(state.request)
            if not size or (not is_full and self._have_room(state.request, size)):
                return sequence
            is_full = True
        return None

    def _have_room(self, request: Request, size: int) -> bool:
        if request.priority == "job" and self.taken_by_jobs + size > self.most_of_jobs:
            return False
        return self.taken + size <= self.limit.most

    def take(self, state: RequestState) -> None:
        """A request begins."""
        size = self.limit.bytes_of(state.request)
        if size and state not in self._of:
            self._of[state] = size
            self._add(state, size)

    def keep(self, state: RequestState) -> None:
        """Some of a request's sequences have left KV memory. Their tokens stay."""
        before = self._of.get(state)
        if before is not None:
            tokens = state.metrics.num_output_tokens
            size = max(before, self.limit.bytes_of(state.request, tokens))
            self._of[state] = size
            self._add(state, size - before)

    def outgrown(self) -> tuple[RequestState, str] | None:
        """The request that takes the most of those that take more than they began with, and why it
        cannot go on, where all together take too much."""
        most = self.limit.most
        if self.taken <= most:
            return None
        grown = [
            s for s, size in self._of.items() if self.limit.bytes_of(s.request) < min(size, most)
        ]
        if not grown:
            return None
        state = max(grown, key=self._of.__getitem__)
        return state, (
            f"answers of {state.metrics.num_output_tokens} tokens in all are kept until the last "
            f"ends, and answer_memory ({_size(most)}) has no room for more: lower n or max_tokens, "
            "or raise answer_memory"
        )

    def release(self, state: RequestState) -> None:
        """A request has ended."""
        self._add(state, -self._of.pop(state, 0))

    def _add(self, state: RequestState, size: int) -> None:
        self.taken += size
        if state.request.priority == "job":
            self.taken_by_jobs += size
