"""Interactive requests that have not ended.

They wait in the engine, which decides their order. Here they are counted, and kept so that the
next engine gets them too.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from onestem.errors import RequestError
from onestem.request import Request
from onestem.server.errors import ApiError, EngineDownError, as_api_error
from onestem.server.link.chunk_size import ChunkSize
from onestem.server.link.messages import Abort, Add, Begun, Delta, Tokens
from onestem.server.link.recent_window import RecentWindow
from onestem.server.link.supervisor import Supervisor
from onestem.server.logs import log

# Called once with a request's end (its pieces are not news); None where it is unknown.
OnEnd = Callable[[Delta | None], object]


def _nobody(last: Delta | None) -> None:
    """Ignore a request's end."""


class Listener(Protocol):
    """Receives a request's news, until it has ended."""

    def on_token(self, index: int, token_id: int, text: str, weights_version: int) -> None:
        """A token of the sequence `index`, with what it adds to the text."""
        ...

    def on_delta(self, delta: Delta) -> None:
        """Any other news; the last one is `finished`."""
        ...

    def on_restart(self) -> None:
        """The engine died: the request's news will come again, from their beginning."""
        ...

    def on_error(self, error: ApiError) -> None:
        """The request has failed. It is still open: whoever hears this aborts it."""
        ...


@dataclass
class OpenRequest:
    """A request, whose it is and who hears of it; see `Engine.add_request`."""

    request: Request
    key: str
    weight: float
    listener: Listener
    number: int | None = None  # among those that were sent to this engine
    begun: bool = False  # by this engine
    was_lost: bool = False  # an engine died that had begun it

    def tell_error(self, error: ApiError) -> None:
        """Tell the listener; one that fails keeps nobody else from hearing."""
        try:
            self.listener.on_error(error)
        except Exception as failure:
            log.exception("news_failed", failure, id=self.request.request_id)


class OpenRequests:
    """Requests with their keys and listeners.

    Args:
        supervisor: of the engine that they are sent to.
        queue_limit: maximum requests of a key that wait.
        stream_interval: minimum tokens of a stream's chunk (see `ChunkSize`).

    Attributes:
        chunk_size: of all streams.
    """

    def __init__(self, supervisor: Supervisor, queue_limit: int, stream_interval: int = 1) -> None:
        self.queue_limit = queue_limit
        self.chunk_size = ChunkSize(stream_interval)
        self._supervisor = supervisor
        self._entries: dict[str, OpenRequest] = {}
        self._by_number: dict[int, OpenRequest] = {}  # of those that were sent
        self._num_sent = 0  # to this engine
        self._waiting: Counter[str] = Counter()  # by key: those that the engine has not begun
        self._aborted: dict[str, OnEnd] = {}  # those that the engine has not ended yet
        self._finished = RecentWindow(30.0, most=256)

    def __len__(self) -> int:
        return len(self._entries)

    def check_room(self, key: str, count: int) -> None:
        """Raise a 429 if a key's queue has no room for `count` more requests. The error says about
        when it will have, from the rate at which requests ended recently."""
        if self._waiting[key] + count <= self.queue_limit:
            return
        after = max(1, min(60, round((self._finished.seconds_each or 1.0) * count)))
        raise ApiError(
            429,
            f"{self._waiting[key]} requests of this key are waiting, limit is {self.queue_limit}: "
            f"try again in {after} s",
            code="queue_full",
            headers={"Retry-After": str(after)},
        )

    def submit(self, request: Request, key: str, weight: float, listener: Listener) -> None:
        """Queue a request; `listener` gets its news."""
        entry = OpenRequest(request, key, weight, listener)
        self._entries[request.request_id] = entry
        self._waiting[key] += 1
        if self._supervisor.state == "running":
            self._hand_over(entry)

    def abort(self, request_id: str, on_end: OnEnd = _nobody) -> None:
        """End a request, wherever it is; its listener gets no more news.

        Args:
            on_end: called once with the request's end; None where it is unknown.
        """
        entry = self._forget(request_id)
        if entry is not None and entry.number is not None and self._supervisor.is_connected:
            self._aborted[request_id] = on_end
            self._supervisor.send(Abort(request_id))
        else:
            on_end(None)

    async def gone(self, request_id: str) -> None:
        """Wait until the engine is done with a request, if it was aborted: its id is free then."""
        on_end = self._aborted.get(request_id)
        if on_end is None:
            return
        gone = asyncio.Event()

        def end(last: Delta | None) -> None:
            gone.set()
            on_end(last)

        self._aborted[request_id] = end
        await gone.wait()

    def by_key(self) -> Mapping[str, tuple[int, int]]:
        """Key -> (requests that wait, requests that the engine has begun)."""
        all_of = Counter(entry.key for entry in self._entries.values())
        return {key: (self._waiting[key], n - self._waiting[key]) for key, n in all_of.items()}

    def key_of(self, request_id: str) -> str | None:
        """The key whose request it is; None if the request is gone."""
        entry = self._entries.get(request_id)
        return entry.key if entry is not None else None

    @property
    def num_waiting(self) -> int:
        """Requests that the engine has not begun."""
        return self._waiting.total()

    @property
    def num_aborted(self) -> int:
        """Aborted requests that the engine has not ended yet."""
        return len(self._aborted)

    def fail_all(self, error: ApiError) -> None:
        """Tell all listeners of an error; they end their requests (`abort`)."""
        for entry in list(self._entries.values()):
            entry.tell_error(error)

    def hand_over(self) -> None:
        """Send all to a new engine."""
        self._num_sent = 0
        self._by_number.clear()
        for entry in list(self._entries.values()):
            self._hand_over(entry)

    def take_back(self) -> None:
        """The engine has died. Queue what it had begun once more; what was begun at two deaths
        fails. Requests that were not begun keep waiting."""
        self.forget_aborted()
        for entry in list(self._entries.values()):
            entry.number = None
            if entry.begun:
                self._take_back(entry)

    def forget_aborted(self) -> None:
        """No engine will say any more what aborted requests have cost."""
        for request_id in list(self._aborted):
            self.take_aborted(request_id, None)

    def take_begun(self, begun: Begun) -> None:
        """The engine computes these from now on."""
        for entry in filter(None, map(self._entries.get, begun.request_ids)):
            entry.begun = True
            self._waiting[entry.key] -= 1

    def take_tokens(self, tokens: Tokens) -> None:
        """Hand on news that is one token each."""
        self.chunk_size.note(len(tokens.requests))
        rows = zip(tokens.requests, tokens.indices, tokens.token_ids, tokens.texts, strict=True)
        for number, index, token_id, text in rows:
            entry = self._by_number.get(number)
            if entry is None:
                continue
            try:
                entry.listener.on_token(index, token_id, text, tokens.weights_version)
            except Exception as error:
                self._failed_to_hear(entry, error)

    def take_delta(self, delta: Delta) -> None:
        """Hand on a request's news."""
        entry = self._entries.get(delta.request_id)
        if entry is None:
            if delta.finished:  # it ended while its abort was under way
                self.take_aborted(delta.request_id, delta)
            return
        if delta.finished:
            self._forget(delta.request_id)
            self._finished.note()
        try:
            entry.listener.on_delta(delta)
        except Exception as error:
            self._failed_to_hear(entry, error)

    def take_aborted(self, request_id: str, last: Delta | None) -> None:
        """The engine is done with a request, whether it was aborted or ended by itself."""
        try:
            self._aborted.pop(request_id, _nobody)(last)
        except Exception as error:  # of one request: the news of others follow
            log.exception("news_failed", error, id=request_id)

    def refuse(self, request_id: str, why: str) -> None:
        """The engine refuses a request."""
        entry = self._entries.get(request_id)
        if entry is not None:
            self._fail(entry, as_api_error(RequestError(why)))

    def _hand_over(self, entry: OpenRequest) -> None:
        try:
            self._supervisor.send(Add(entry.request, self._num_sent, entry.key, entry.weight))
        except Exception as error:  # it cannot be pickled: no other request is affected
            log.exception("unsendable_request", error, id=entry.request.request_id)
            self._fail(entry, ApiError(500, f"the request cannot be sent: {error}"))
            return
        entry.number = self._num_sent
        self._by_number[entry.number] = entry
        self._num_sent += 1

    def _fail(self, entry: OpenRequest, error: ApiError) -> None:
        self._forget(entry.request.request_id)
        entry.tell_error(error)

    def _failed_to_hear(self, entry: OpenRequest, error: Exception) -> None:
        """A request whose listener fails ends, and no other."""
        name = entry.request.request_id
        log.exception("news_failed", error, id=name)
        if name in self._entries:
            self.abort(name)
        entry.tell_error(ApiError(500, f"{type(error).__name__}: {error}"))

    def _forget(self, request_id: str) -> OpenRequest | None:
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            self._waiting[entry.key] -= not entry.begun
            if entry.number is not None:
                self._by_number.pop(entry.number, None)
        return entry

    def _take_back(self, entry: OpenRequest) -> None:
        """Queue a request again that a dead engine had begun; the second time it fails."""
        if entry.was_lost:
            self._fail(entry, EngineDownError("the engine died twice while it answered this"))
            return
        entry.was_lost, entry.begun = True, False
        self._waiting[entry.key] += 1
        try:
            entry.listener.on_restart()
        except Exception as error:
            self._failed_to_hear(entry, error)
