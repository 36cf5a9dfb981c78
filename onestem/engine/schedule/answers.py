"""Host memory of answers: what running requests keep until they end, beside their KV.

A sampled token's id and text are a few bytes, and KV memory bounds how many sequences are under
way. Log-probabilities of alternatives are not small, and of a request with n answers those that
have ended are kept until the last one has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from onestem.engine.sequence import RequestState, Sequence
from onestem.errors import RequestError
from onestem.options import parse_memory
from onestem.request import Request
from onestem.threads import ram_bytes

__all__ = [
    "AnswerMemory",
    "answer_bytes",
    "answer_memory_bytes",
    "check_answer",
    "check_together",
]

# Measured, as Python's objects: an entry of a token's log-probabilities (85 of 100 alternatives, 60
# of 5), and a token of one of n answers, in its list.
ENTRY_BYTES, TOKEN_BYTES = 90, 48


def answer_memory_bytes(size: str | int) -> int:
    """Bytes that the option `answer_memory` means."""
    return ram_bytes() // 4 if size == "auto" else parse_memory(size)


def answer_bytes(request: Request, max_model_len: int) -> int:
    """Maximum bytes that a request's answers take until it ends; 0 for one answer without
    log-probabilities, which KV memory bounds.

    Args:
        max_model_len: maximum tokens of prompt and answer.
    """
    params, prompt = request.params, len(request.prompt_token_ids)
    entry = 0 if params.logprobs is None else ENTRY_BYTES * (params.logprobs + 1)
    room = max(1, max_model_len - prompt)
    longest = room if params.max_tokens is None else min(room, params.max_tokens)
    if params.choices:
        count = min(room * len(params.choices), sum(map(len, params.choices)))
    else:
        count, entry = params.n * longest, entry + TOKEN_BYTES * (params.n > 1)
    of_prompt = params.prompt_logprobs
    scored = 0 if of_prompt is None else prompt * ENTRY_BYTES * (of_prompt + 1)
    return count * entry + scored


def check_answer(request: Request, max_model_len: int, most: int) -> None:
    """Raise `RequestError` for a request whose answers may take more than `most` bytes."""
    size = answer_bytes(request, max_model_len)
    if size <= most:
        return
    params = request.params
    names = "n, max_tokens and logprobs"
    if params.prompt_logprobs is not None:
        names = f"prompt_logprobs, {names}"
    raise RequestError(
        f"{names} ask for answers of up to {_size(size)} in memory, limit is {_size(most)}: "
        "lower one of them, or raise answer_memory"
    )


def check_together(requests: Collection[Request], max_model_len: int, most: int) -> None:
    """Raise `RequestError` for requests whose answers may take more than `most` bytes in all."""
    size = sum(answer_bytes(request, max_model_len) for request in requests)
    if size > most:
        raise RequestError(
            f"{len(requests)} prompts ask for answers of up to {_size(size)} in memory, limit is "
            f"{_size(most)}: send fewer at once, or stream"
        )


def _size(count: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count / 2**10:.1f} KiB"


class AnswerMemory:
    """What answers of the requests that have begun may take, each until its last answer has ended.

    Args:
        most: bytes of all together; None: any number. A request alone has room.
        max_model_len: maximum tokens of prompt and answer.
    """

    def __init__(self, most: int | None, max_model_len: int) -> None:
        self.most = most
        self.taken = 0
        self._max_model_len = max_model_len
        self._of: dict[RequestState, int] = {}

    def needed(self, request: Request) -> int:
        """Bytes that a request's answers may take (`answer_bytes`)."""
        return answer_bytes(request, self._max_model_len)

    def first_with_room(self, waiting: Iterable[Sequence]) -> Sequence | None:
        """The first whose request may begin, or go on. Those that need memory begin in their order,
        and others pass them."""
        is_full = False
        for sequence in waiting:
            state = sequence.state
            if self.most is None or not self.taken or state in self._of:
                return sequence
            size = self.needed(state.request)
            if not size or (not is_full and self.taken + size <= self.most):
                return sequence
            is_full = True
        return None

    def take(self, state: RequestState) -> None:
        """A request begins."""
        size = self.needed(state.request)
        if size and state not in self._of:
            self._of[state] = size
            self.taken += size

    def release(self, state: RequestState) -> None:
        """A request has ended."""
        self.taken -= self._of.pop(state, 0)
