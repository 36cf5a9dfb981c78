"""The model as requests see it: its names, its tokenizer, its limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, TypeVar

from onestem.engine.schedule.admission import check_request
from onestem.engine.schedule.answers import AnswerLimit, answer_memory_bytes
from onestem.engine.text.bounded import BoundedTokenizer
from onestem.engine.text.tokenizer import Tokenizer
from onestem.openai.read import unknown_model
from onestem.request import Request
from onestem.server.errors import ApiError
from onestem.server.link.client import EngineClient
from onestem.server.link.messages import Facts

TOKENISING_THREADS = 2
QUICK_BYTES = 1 << 15
# Log-probabilities of an answer that is sent whole take this many times as much in JSON's objects.
WHOLE_SHARE = 8

T = TypeVar("T")


class ServedModel:
    """A model with an engine.

    Args:
        client: of its engine, which tells its limits.

    Attributes:
        names: that requests may give; the first is shown.
        tokenizer: None for a model without one.
    """

    def __init__(
        self, names: Sequence[str], tokenizer: Tokenizer | None, client: EngineClient
    ) -> None:
        self.names = names
        self.tokenizer = tokenizer
        self._client = client
        self._threads = ThreadPoolExecutor(TOKENISING_THREADS, "tokenise")

    @property
    def facts(self) -> Facts:
        """What the engine has told; only for callers after its first start."""
        facts = self._client.facts
        assert facts is not None
        return facts

    @cached_property
    def bounded_tokenizer(self) -> BoundedTokenizer | None:
        """The tokenizer for prompts, once the engine has been up."""
        if self.tokenizer is None:
            return None
        return BoundedTokenizer(self.tokenizer, self.facts.max_model_len)

    def token_text(self, token: int) -> str | None:
        """The text of a token for people; None without a tokenizer."""
        return None if self.tokenizer is None else self.tokenizer.token_text(token)

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, control tokens by their names; "" without a tokenizer."""
        if self.tokenizer is None:
            return ""
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)

    def check_name(self, name: str | None) -> None:
        """Raise a 404 for the name of another model; None: it is left out."""
        if name is not None and name not in self.names:
            raise ApiError(
                404, unknown_model(name, self.names), param="model", code="model_not_found"
            )

    def check(self, request: Request) -> None:
        """Raise `RequestError` for a request that can never be answered. (Grammars are compiled by
        the engine process.)"""
        check_request(
            request,
            max_model_len=self.facts.max_model_len,
            vocab_size=self.facts.vocab_size,
            tokenizer=self.tokenizer,
            max_num_seqs=self.facts.options.max_num_seqs,
            answers=self._answers(1 if request.stream else WHOLE_SHARE),
        )

    def check_together(self, requests: Collection[Request]) -> None:
        """Raise `RequestError` where answers that are written whole may take too much in all."""
        self._answers(WHOLE_SHARE).check_together(requests)

    def _answers(self, share: int) -> AnswerLimit:
        return AnswerLimit(
            most=answer_memory_bytes(self.facts.options.answer_memory) // share,
            max_model_len=self.facts.max_model_len,
            kv_tokens=self.facts.kv_tokens,
        )

    async def in_thread(self, call: Callable[..., T], *arguments: Any) -> T:
        """Run tokenising, templates and checks off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *arguments)

    async def parsed(self, raw: bytes, read: Callable[[bytes], T]) -> T:
        """Read a body: on the event loop where that takes a millisecond at most, else a thread."""
        return read(raw) if len(raw) <= QUICK_BYTES else await self.in_thread(read, raw)

    def close(self) -> None:
        """End its threads; what waits for one is cancelled."""
        self._threads.shutdown(wait=False, cancel_futures=True)
