"""Receivers of what an engine says of requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from onestem.server.errors import ApiError
from onestem.server.link.messages import Delta

__all__ = ["Listener", "OnEnd", "nobody"]

# Called once with a request's end (its pieces are not news); None where it is unknown.
OnEnd = Callable[[Delta | None], object]


def nobody(last: Delta | None) -> None:
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
