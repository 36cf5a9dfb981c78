"""Who hears what the engine has to say."""

from __future__ import annotations

from typing import Protocol

from onestem.server.errors import ApiError
from onestem.server.messages import Delta, JobOutput

__all__ = ["JobSink", "Listener"]


class Listener(Protocol):
    """Who gets a request's news. One that has ended gets no more."""

    def on_token(self, index: int, token_id: int, text: str) -> None: ...
    def on_delta(self, delta: Delta) -> None: ...
    def on_restart(self) -> None:
        """The engine died: what it said of the request will be said again, from its beginning."""
        ...

    def on_error(self, error: ApiError) -> None: ...


class JobSink(Protocol):
    """Who gets a job's outputs."""

    def on_output(self, output: JobOutput) -> None: ...
    def on_pulled(self, count: int) -> None: ...
    def on_down(self) -> None: ...
