"""What the engine process is asked and does between two steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from onestem.errors import CacheError, OnestemError
from onestem.server.link.messages import Answered, Ask
from onestem.server.link.snapshot import snapshot_of

if TYPE_CHECKING:
    from onestem.engine.engine import Engine

log = logging.getLogger(__name__)


class Orders:
    """Carries out orders (`EngineClient.control`), and answers questions about the engine.

    Args:
        job_of: of a request's id; None: it is no job's.
    """

    def __init__(self, engine: Engine, job_of: Callable[[str], str | None]) -> None:
        self._engine = engine
        self._job_of = job_of
        self._refused: dict[str, str] = {}  # prefix -> why

    def answer(self, ask: Ask) -> Answered:
        """The answer to a question, or what came of an order: an error, if it failed."""
        try:
            return Answered(ask.token, self._orders()[ask.what](ask.value))
        except OnestemError as error:
            return Answered(ask.token, error=str(error))
        except Exception as error:
            log.error("an order failed: %s", ask.what, exc_info=error)
            return Answered(ask.token, error=f"{type(error).__name__}: {error}", fault=False)

    def _orders(self) -> dict[str, Callable[[Any], Any]]:
        """What to call for each order or question, with its value."""
        engine = self._engine
        return {
            "pause": lambda _: self._pause(True),
            "resume": lambda _: self._pause(False),
            "sleep": engine.weights.sleep,
            "wake_up": self._wake_up,
            "drop_weights": lambda _: engine.weights.drop(),
            "reset_prefix_cache": lambda running: engine.reset_prefix_cache(
                reset_running_requests=running
            ),
            "update_weights": self._update_weights,
            "pin": lambda prefix: self._pin(*prefix),
            "unpin": self._unpin,
            "snapshot": lambda _: self._snapshot(),
            "prefixes": lambda _: self._prefixes(),
            "check": lambda _: self._check(),
            "prefetch": lambda modules: engine.requests.prefetch_modules(*modules),
        }

    def _pause(self, paused: bool) -> None:
        self._engine.is_paused = paused

    def _wake_up(self, tags: Collection[str] | None) -> bool:
        """Wake up; returns whether all is awake."""
        self._engine.weights.wake_up(tags)
        return not self._engine.weights.asleep

    def _update_weights(self, value: tuple[str, int]) -> int:
        from safetensors.torch import load_file  # brings torch

        file, version = value
        return self._engine.weights.update(load_file(file).items(), version)

    def _pin(self, name: str, token_ids: list[int], cache_salt: str) -> None:
        try:
            self._engine.requests.pin_prefix(name, token_ids, cache_salt=cache_salt)
        except OnestemError as error:
            self._refused[name] = str(error)

    def _prefixes(self) -> list[dict[str, Any]]:
        """The pinned prefixes, and {name, refused: why} for those that could not be."""
        pinned = [asdict(prefix) for prefix in self._engine.requests.prefixes()]
        return pinned + [{"name": name, "refused": why} for name, why in self._refused.items()]

    def _unpin(self, name: str) -> None:
        self._refused.pop(name, None)
        if name in self._engine.requests.pins:
            self._engine.requests.unpin_prefix(name)

    def _snapshot(self) -> dict[str, Any]:
        """The engine's snapshot, with jobs' holdings under the jobs' names."""
        snapshot = snapshot_of(self._engine)
        for holder in snapshot["holders"]:
            holder["name"] = self._job_of(holder["name"]) or holder["name"]
        return snapshot

    def _check(self) -> dict[str, Any]:
        """Whether KV memory balances; page counts."""
        error = None
        try:
            self._engine.check()
        except CacheError as reason:
            error = str(reason)
        pool = self._engine.cache.pool
        cached = {page for run in self._engine.cache.runs() for page in run.pages}
        return {
            "error": error,
            "free": pool.num_free,
            "cached": len(cached),
            "held": pool.num_held,
            "total": pool.num_pages,
            "running": self._engine.num_running,
            "waiting": self._engine.num_waiting,
        }
