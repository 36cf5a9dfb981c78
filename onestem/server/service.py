"""All that a running server holds, and in which order it starts and ends."""

from __future__ import annotations

import asyncio
import contextlib
import time
from functools import cached_property
from pathlib import Path
from typing import Any

from onestem.batch import Rules
from onestem.batch.identity import model_identity
from onestem.engine.text.tokenizer import Tokenizer
from onestem.models.config import ModelConfig
from onestem.models.local import names_of
from onestem.options import parse_memory
from onestem.planner import planner_of
from onestem.server.errors import EngineDownError
from onestem.server.link.client import EngineClient
from onestem.server.link.process import EngineProcess
from onestem.server.logs import log
from onestem.server.objects.jobs import Jobs
from onestem.server.objects.prefixes import Prefixes, read_app
from onestem.server.objects.responses import StoredResponses
from onestem.server.objects.schemas import Schemas
from onestem.server.objects.store import Store
from onestem.server.objects.tenants import Keys, read_key_file
from onestem.server.records.records import Records
from onestem.server.served_model import ServedModel
from onestem.server.settings import Settings
from onestem.server.snapshots import SnapshotCache


class Service:
    """One server without its HTTP.

    Args:
        path: the model's directory.
        launcher: starts the engine on that model.
    """

    def __init__(
        self, settings: Settings, path: Path, tokenizer: Tokenizer | None, launcher: EngineProcess
    ) -> None:
        self.settings = settings
        self.path = path
        file = settings.api_key_file
        self.keys = Keys() if file is None else read_key_file(file)
        self._apps = dict(map(read_app, settings.apps))
        self.store = Store(settings.folder)
        self.client = EngineClient(
            launcher,
            settings.max_queue,
            stream_interval=settings.stream_interval,
            engine_timeout=settings.engine_timeout,
        )
        names = settings.served_model_name or names_of(str(settings.engine.model), path)
        self.model = ServedModel(names, tokenizer, self.client)
        self.prefixes = Prefixes(self.client, tokenizer, self.store)
        config = ModelConfig.from_directory(path)
        self.schemas = Schemas(self.client, tokenizer, config, self.store)
        self.responses = StoredResponses()
        self.records = Records(self.client, self.model)
        self.jobs = Jobs(
            self.store,
            self.client,
            self.schemas,
            self._job_model,
            self.keys.named,
            parse_memory(settings.max_key_files),
        )
        self.snapshots = SnapshotCache(
            self.client, lambda snapshot: self.prefixes.take_infos(snapshot["prefixes"])
        )
        self.stopping = asyncio.Event()
        self.started_at = int(time.time())
        self._sampling: asyncio.Task[None] | None = None
        self._jobs_end: asyncio.Task[None] | None = None
        self.client.on_up = self._engine_up

    async def start(self) -> None:
        """Start the engine, compute the prefixes and, with `encode_schemas`, operators' modules.

        Raises:
            ConfigError, RequestError: an option or a prefix is wrong.
        """
        try:
            self.schemas.load(map(Path, self.settings.schemas))
            self.prefixes.load(self._apps)
            began = time.monotonic()
            await self.client.start()
            facts = self.model.facts
            log.info(
                "loaded",
                kv_tokens=facts.kv_tokens,
                dtype=facts.options.dtype,
                device=facts.options.device,
                attention=facts.options.impl,
                seconds=round(time.monotonic() - began, 3),
            )
            await self.prefixes.until_ready()
            if made := self.prefixes.everyone():
                tokens = sum(prefix.num_tokens for prefix in made)
                log.info("prefixes_computed", count=len(made), tokens=tokens)
            if self.settings.encode_schemas:
                tokens = await self.schemas.encode_common()
                log.info("schemas_encoded", count=len(self.settings.schemas), tokens=tokens)
        except BaseException:
            await self.client.stop()
            self.store.close()
            raise
        self.jobs.start()
        self._sampling = asyncio.create_task(self.records.sample(self.snapshots.last))

    def begin_to_stop(self) -> None:
        """End the page's streams at once, and jobs: answers that are to end need their memory.
        Those that still run when the grace is over get an error."""
        if not self.stopping.is_set():
            self.stopping.set()
            log.info("stopping", grace=self.settings.grace)
            late = EngineDownError("the server is stopping: try again later")
            loop = asyncio.get_running_loop()
            loop.call_later(self.settings.grace, self.client.requests.fail_all, late)
            self._jobs_end = loop.create_task(self.jobs.stop())

    async def stop(self) -> None:
        """End the engine, once jobs have stopped. Streams that still run get an error."""
        self.begin_to_stop()
        if self._jobs_end is not None:
            await self._jobs_end
        if self._sampling is not None:
            self._sampling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sampling
        await self.client.stop()
        self.model.close()
        self.store.close()

    def _engine_up(self) -> None:
        self.prefixes.pin_all()
        self.jobs.wake()

    @cached_property
    def _identity(self) -> str:
        return model_identity(self.path)

    def _job_model(self) -> tuple[Rules, dict[str, Any]]:
        """Rules and arguments of `run_job` that describe the model, as `onestem batch` gives them:
        a job's results are the same, under the name that the server shows."""
        facts, tokenizer = self.model.facts, self.model.bounded_tokenizer
        rules = Rules(
            tokenizer=tokenizer,
            validate=self.model.check,
            max_model_len=facts.max_model_len,
            max_num_seqs=facts.options.max_num_seqs,
            model_names=self.model.names,
        )
        return rules, {
            "token_bytes": None if tokenizer is None else tokenizer.token_bytes,
            "model_identity": self._identity,
            "model_name": self.model.names[0],
            "options": dict(facts.options.job_identity(self.settings.engine)),
            "planner": planner_of(facts.options, facts.kv_tokens),
        }
