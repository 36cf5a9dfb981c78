"""What has come of a call's answers and is not handed out yet.

Pieces of one sequence that meet here are joined: a slow reader gets fewer and larger chunks, and
holds at most one whole answer.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence

from onestem.request import CompletionOutput, RequestMetrics
from onestem.server.errors import ApiError, EngineDownError
from onestem.server.link.chunk_size import ChunkSize
from onestem.server.link.messages import Delta


class _Part:
    """The listener of one of a call's requests."""

    def __init__(self, inbox: Inbox, number: int) -> None:
        self._inbox, self._number = inbox, number

    def on_token(self, index: int, token_id: int, text: str, weights_version: int = 0) -> None:
        self._inbox.add_token((self._number, index), token_id, text, weights_version)

    def on_delta(self, delta: Delta) -> None:
        self._inbox.add(self._number, delta)

    def on_restart(self) -> None:
        self._inbox.restart(self._number)

    def on_error(self, error: ApiError) -> None:
        self._inbox.fail(error)


class _Heard:
    """What of one sequence was handed out. After a restart: what of it the engine has yet to send
    again."""

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self._ids_to_come: list[int] = []
        self._text_to_come = ""

    @property
    def whole(self) -> tuple[Sequence[int], str]:
        """Its token ids and its text."""
        return self._token_ids, "".join(self._texts)

    def note(self, token_ids: Sequence[int], text: str) -> None:
        self._token_ids += token_ids
        self._texts.append(text)

    def restart(self) -> None:
        self._ids_to_come, self._text_to_come = list(self._token_ids), "".join(self._texts)

    @property
    def comes_again(self) -> bool:
        return bool(self._ids_to_come or self._text_to_come)

    def cut(self, piece: CompletionOutput) -> bool:
        """Cut a piece down to what is new; False: it differs from what was sent before."""
        count = min(len(self._ids_to_come), len(piece.token_ids))
        chars = min(len(self._text_to_come), len(piece.text))
        same = self._ids_to_come[:count] == piece.token_ids[:count]
        same &= self._text_to_come[:chars] == piece.text[:chars]
        self._ids_to_come = self._ids_to_come[count:]
        self._text_to_come = self._text_to_come[chars:]
        del piece.token_ids[:count], piece.weight_versions[:count]
        piece.text = piece.text[chars:]
        piece.logprobs = piece.logprobs and piece.logprobs[count:]
        return same and not (piece.finish_reason and self.comes_again)


class Inbox:
    """Collects the pieces of `num_parts` requests.

    Args:
        size: tokens of a sequence after its first one that make news together. A sequence's end
            and other news do not wait for more. None: each token is news.

    Attributes:
        ended: part -> its last delta (with metrics).
        begun: part -> what it had cost at its first token, of parts that stream.
        error: what ended the call early.
        direct: for a call of one sequence: gets a token's id and text when nothing else is to be
            handed out before, which saves the waiter's wake-up. It returns False if it could not
            take the token. None: no token is handed out this way.
    """

    def __init__(self, num_parts: int, size: ChunkSize | None = None) -> None:
        self.ended: dict[int, Delta] = {}
        self.begun: dict[int, RequestMetrics] = {}
        self.direct: Callable[[int, str], bool] | None = None
        self.error: ApiError | None = None
        self._num_parts = num_parts
        self._pieces: dict[tuple[int, int], CompletionOutput] = {}
        self._size = size or ChunkSize()
        self._heard: defaultdict[tuple[int, int], _Heard] = defaultdict(_Heard)
        self._news = asyncio.Event()
        self._is_waited_for = False

    def part(self, number: int) -> _Part:
        """The listener of request `number`, to be submitted with it."""
        return _Part(self, number)

    def add_token(
        self, key: tuple[int, int], token_id: int, text: str, weights_version: int = 0
    ) -> None:
        """A token of `key`, (part, sequence)."""
        heard = self._heard.get(key)
        if heard is not None and heard.comes_again:
            self._add_piece(key, _one_token(key[1], token_id, text, weights_version))
            return
        if heard and self.direct and self._is_idle and self.direct(token_id, text):
            heard.note((token_id,), text)
            return
        piece = self._pieces.get(key)
        if piece is None:
            piece = self._pieces[key] = _one_token(key[1], token_id, text, weights_version)
        else:
            piece.text += text
            piece.token_ids.append(token_id)
            piece.weight_versions.append(weights_version)
        if heard is None or len(piece.token_ids) >= self._size.tokens:
            self._news.set()

    def add(self, part: int, delta: Delta) -> None:
        """Any news of a request but plain tokens."""
        for piece in delta.pieces:
            self._add_piece((part, piece.index), piece)
        if delta.finished:
            self.ended[part] = delta
        elif delta.metrics is not None:
            self.begun[part] = delta.metrics
            return
        self._news.set()

    def _add_piece(self, key: tuple[int, int], piece: CompletionOutput) -> None:
        heard = self._heard.get(key)
        if heard is not None and heard.comes_again and not heard.cut(piece):
            self.fail(EngineDownError("the engine died, and its new answer differs: ask again"))
            return
        if not (piece.token_ids or piece.text or piece.finish_reason):
            return
        before = self._pieces.get(key)
        if before is None:
            self._pieces[key] = piece
        else:
            before.extend(piece)

    def restart(self, part: int) -> None:
        """A part is answered again; what was handed out is not handed out again."""
        self._pieces = {key: piece for key, piece in self._pieces.items() if key[0] != part}
        for key, heard in self._heard.items():
            if key[0] == part:
                heard.restart()

    def fail(self, error: ApiError) -> None:
        """End the call, unless all of its answers are here."""
        if not self.complete:
            self.error = self.error or error
            self._news.set()

    @property
    def complete(self) -> bool:
        """Whether all requests have ended, their pieces taken or not."""
        return len(self.ended) == self._num_parts

    @property
    def drained(self) -> bool:
        """Whether all answers are here, and all of them were taken."""
        return self.complete and not self._pieces

    @property
    def has_news(self) -> bool:
        """Whether `wait` ends at once."""
        return self._news.is_set()

    @property
    def _is_idle(self) -> bool:
        """Whether all that was handed out is sent, and the next token is news by itself."""
        waits = self._is_waited_for and not self._pieces and not self._news.is_set()
        return waits and self._size.tokens == 1

    async def wait(self) -> None:
        """Wait for news; raises the error that ended the call early. Call it when all that was
        handed out before is sent."""
        self._is_waited_for = True
        await self._news.wait()
        self._is_waited_for = False
        self._news.clear()
        error, self.error = self.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # it has this frame now: neither the frame nor the inbox may have it

    async def whole(self) -> dict[tuple[int, int], CompletionOutput]:
        """All pieces of all parts, each sequence's joined."""
        while not self.complete:
            await self.wait()
        pieces, self._pieces = self._pieces, {}
        return pieces

    @property
    def taken(self) -> list[tuple[Sequence[int], str]]:
        """Token ids and text of each sequence, as far as `take` and `direct` handed them out."""
        return [heard.whole for heard in self._heard.values()]

    def take(self) -> dict[tuple[int, int], CompletionOutput]:
        """(part, sequence) -> what is new since the last time."""
        pieces, self._pieces = self._pieces, {}
        for key, piece in pieces.items():
            self._heard[key].note(piece.token_ids, piece.text)
        return pieces


def _one_token(index: int, token_id: int, text: str, weights_version: int) -> CompletionOutput:
    return CompletionOutput(
        index=index, text=text, token_ids=[token_id], weight_versions=[weights_version]
    )
