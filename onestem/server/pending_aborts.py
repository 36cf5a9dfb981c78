"""Requests that were aborted, until the engine has said what they have cost."""

from __future__ import annotations

from collections.abc import Callable

from onestem.request import RequestMetrics

__all__ = ["PendingAborts", "OnEnd", "nobody"]

# Told once; None where nobody knows.
OnEnd = Callable[[RequestMetrics | None], object]


def nobody(metrics: RequestMetrics | None) -> None:
    """Nobody wants to know."""


class PendingAborts:
    """By request id, who wants to know."""

    def __init__(self) -> None:
        self._waiting: dict[str, OnEnd] = {}

    def add(self, request_id: str, on_end: OnEnd) -> None:
        self._waiting[request_id] = on_end

    def take(self, request_id: str, metrics: RequestMetrics | None) -> None:
        """The engine is done with a request, whether it was aborted or ended by itself."""
        self._waiting.pop(request_id, nobody)(metrics)

    def give_up(self) -> None:
        """The engine is gone."""
        waiting, self._waiting = self._waiting, {}
        for on_end in waiting.values():
            on_end(None)
