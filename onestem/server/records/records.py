"""Where calls are entered when they have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from onestem.server.link.client import EngineClient
from onestem.server.logs import log
from onestem.server.records.call_record import CallRecord
from onestem.server.records.history import History
from onestem.server.records.metrics import Metrics
from onestem.server.records.rerendered import RerenderedLog
from onestem.server.served_model import ServedModel


class Records:
    """All records of a server.

    Attributes:
        metrics, history, rerendered: one each.
    """

    def __init__(self, client: EngineClient, model: ServedModel) -> None:
        self.metrics = Metrics(client)
        self.history = History(model.token_text)
        self.rerendered = RerenderedLog(model.text)
        self._client = client

    def note(self, call: CallRecord) -> None:
        """Count a call that has ended, remember it, log it (without its text)."""
        self.metrics.note(call)
        self.history.note(call)
        self.rerendered.note(call)
        last = call.metrics[-1] if call.metrics else None
        first = last.first_token_time if last is not None else None
        log.info(
            "request",
            id=call.id,
            key=call.tenant.name or None,
            app=call.app or None,
            endpoint=call.kind,
            outcome=call.outcome,
            prompt_tokens=sum(len(request.prompt_token_ids) for request in call.requests),
            cached_tokens=sum(metrics.num_cached_tokens for metrics in call.metrics),
            output_tokens=sum(metrics.num_output_tokens for metrics in call.metrics),
            ttft=None if first is None else round(first - call.arrived, 6),
            seconds=round(call.took, 6),
        )

    async def sample(self, snapshot: Callable[[], Mapping[str, Any]]) -> None:
        """Take a sample of the history once a second, for ever.

        Args:
            snapshot: returns the engine's last one; empty where there is none.
        """
        while True:
            await asyncio.sleep(1.0)
            try:
                self._sample_once(snapshot().get("pages"))
            except Exception as error:  # the next one may be taken
                log.exception("sample_failed", error)

    def _sample_once(self, pages: Mapping[str, int] | None) -> None:
        used = (pages["total"] - pages["free"]) * pages["size"] if pages else None
        self.history.sample(
            self._client.stats,
            running=self._client.num_running,
            waiting=self._client.requests.num_waiting,
            kv_used=used,
        )
