"""Answers that later requests go on from (`previous_response_id`), in memory.

Each is a turn with the turn before it: a conversation is stored once, however long it grows, and a
turn stays while a later one goes on from it. The least recently used answers make room.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from onestem.checked import show
from onestem.server.errors import ApiError

JsonObject = dict[str, Any]
MOST = 1024
MOST_BYTES = 64 << 20


@dataclass(eq=False)
class Turn:
    """What a request has said, and its answer.

    Attributes:
        said: items of both.
        before: the turn that it goes on from.
        size: bytes of it alone, as JSON.
        uses: answers and turns that need it.
    """

    said: Sequence[JsonObject]
    before: Turn | None
    size: int
    uses: int = 0

    def items(self) -> list[JsonObject]:
        """All items of the conversation up to this turn, and with it."""
        turns: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.before
        return [item for one in reversed(turns) for item in one.said]


@dataclass
class _Shelf:
    """The answers of a key, the most recently used last."""

    answers: OrderedDict[str, tuple[JsonObject, Turn]] = field(default_factory=OrderedDict)
    num_bytes: int = 0

    def hold(self, turn: Turn | None) -> None:
        """Something needs a turn; the first that does brings its bytes."""
        while turn is not None:
            turn.uses += 1
            if turn.uses > 1:
                return
            self.num_bytes += turn.size
            turn = turn.before

    def let_go(self, turn: Turn | None) -> None:
        """Undo `hold`."""
        while turn is not None:
            turn.uses -= 1
            if turn.uses:
                return
            self.num_bytes -= turn.size
            turn = turn.before


class StoredResponses:
    """Stored answers of all keys. Its methods may be called in any thread.

    Args:
        most, most_bytes: maximum answers of a key, and their bytes as JSON.
    """

    def __init__(self, most: int = MOST, most_bytes: int = MOST_BYTES) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._shelves: dict[str, _Shelf] = {}
        self._lock = threading.Lock()

    def add(
        self,
        owner: str,
        body: JsonObject,
        *,
        said: Sequence[JsonObject],
        num_bytes: int,
        before: Turn | None,
    ) -> None:
        """Store an answer of a key.

        Args:
            body: of the answer.
            said, num_bytes: items of its request, and their size.
            before: the turn that the request goes on from.
        """
        turn = Turn([*said, *body["output"]], before, num_bytes + len(json.dumps(body)))
        with self._lock:
            shelf = self._shelves.setdefault(owner, _Shelf())
            shelf.answers[body["id"]] = body, turn
            shelf.hold(turn)
            while len(shelf.answers) > self._most or shelf.num_bytes > self._most_bytes:
                _, (_, oldest) = shelf.answers.popitem(last=False)
                shelf.let_go(oldest)

    def find(self, owner: str, name: str) -> JsonObject:
        """The body of an answer of a key; raises a 404 if it is not stored."""
        return self._found(owner, name, "response_id")[0]

    def turn(self, owner: str, name: str) -> Turn:
        """The turn of an answer of a key; raises a 404 if it is not stored."""
        return self._found(owner, name, "previous_response_id")[1]

    def delete(self, owner: str, name: str) -> None:
        """Forget an answer of a key; raises a 404 if it is not stored."""
        with self._lock:
            shelf = self._shelves.get(owner, _Shelf())
            if name in shelf.answers:
                _, turn = shelf.answers.pop(name)
                shelf.let_go(turn)
                return
        raise self._missing(name, "response_id")

    def _found(self, owner: str, name: str, param: str) -> tuple[JsonObject, Turn]:
        with self._lock:
            shelf = self._shelves.get(owner, _Shelf())
            if name in shelf.answers:
                shelf.answers.move_to_end(name)
                return shelf.answers[name]
        raise self._missing(name, param)

    def _missing(self, name: str, param: str) -> ApiError:
        return ApiError(
            404,
            f"there is no response {show(name)}: it was never stored, was deleted, or made room "
            f"(a key has its last {self._most}, of {self._most_bytes >> 20} MiB, until the server "
            "ends): send the whole input",
            param=param,
            code="response_not_found",
        )
