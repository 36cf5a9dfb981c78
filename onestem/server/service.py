"""All that a running server holds, and in which order it starts and ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from onestem.batch.identity import model_identity
from onestem.engine.schedule.admission import check_request
from onestem.engine.schedule.answers import AnswerLimit, answer_memory_bytes
from onestem.engine.text.bounded import BoundedTokenizer
from onestem.engine.text.tokenizer import Tokenizer
from onestem.models.config import ModelConfig
from onestem.openai.read import unknown_model
from onestem.planner import planner_of
from onestem.request import Request
from onestem.server.api.bodies import Bodies
from onestem.server.errors import ApiError, EngineDownError
from onestem.server.link.client import EngineClient
from onestem.server.link.supervisor import Launcher
from onestem.server.logs import log
from onestem.server.objects.jobs import JobModel, Jobs
from onestem.server.objects.prefixes import Prefixes, read_app
from onestem.server.objects.schemas import Schemas
from onestem.server.objects.store import Store
from onestem.server.objects.tenants import Keys, read_key_file
from onestem.server.records import History, Metrics, RerenderedLog
from onestem.server.settings import Settings

if TYPE_CHECKING:
    from onestem.server.api.calls import Call

__all__ = ["Service", "say_listening", "say_loading"]

TOKENISING_THREADS = 2
QUICK_BYTES = 1 << 15
# Log-probabilities of an answer that is sent whole take this many times as much in JSON's objects.
WHOLE_SHARE = 8
FRESH_SECONDS = 0.5

T = TypeVar("T")


class SnapshotCache:
    """The engine's snapshot, asked for at most twice a second for any number of readers."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._lock = asyncio.Lock()
        self._value: dict[str, Any] = {}
        self._at = 0.0

    async def get(self) -> dict[str, Any]:
        """The snapshot; empty while there is no engine."""
        async with self._lock:
            if time.monotonic() - self._at >= FRESH_SECONDS:
                try:
                    self._value = await self._service.client.ask("snapshot")
                    self._service.prefixes.take_infos(self._value["prefixes"])
                except ApiError:
                    self._value = {}
                self._at = time.monotonic()
        return self._value

    @property
    def last(self) -> dict[str, Any]:
        return self._value


class Service:
    """One server without its HTTP.

    Args:
        path: the model's directory.
        launcher: starts the engine on that model.
    """

    def __init__(
        self, settings: Settings, path: Path, tokenizer: Tokenizer | None, launcher: Launcher
    ) -> None:
        self.settings = settings
        self.path = path
        self.tokenizer = tokenizer
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
        self.prefixes = Prefixes(self.client, tokenizer, self.store)
        positions = ModelConfig.from_directory(path).max_position_embeddings
        self.schemas = Schemas(self.client, tokenizer, positions, self.store)
        self.bodies = Bodies(settings.max_body_bytes, settings.max_bodies_bytes)
        self.metrics = Metrics(self.client)
        self.history = History(self._token_text)
        self.rerendered = RerenderedLog(self._text)
        self.jobs = Jobs(
            self.store,
            self.client,
            self.schemas,
            self._job_model,
            self.check,
            self.keys.named,
            settings.max_key_files_bytes,
        )
        self.snapshots = SnapshotCache(self)
        self.stopping = asyncio.Event()
        self.started_at = int(time.time())
        self._threads = ThreadPoolExecutor(TOKENISING_THREADS, "tokenise")
        self._sampler: asyncio.Task[None] | None = None
        self.client.on_up = self._engine_up
        self.client.on_refused = self.prefixes.refused

    # ------------------------------------------------------------------------- life

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
            say_loaded(self, time.monotonic() - began)
            await self.prefixes.until_ready()
            say_prefixes(self)
            if self.settings.encode_schemas:
                tokens = await self.schemas.encode_common()
                log.info("schemas_encoded", count=len(self.settings.schemas), tokens=tokens)
        except BaseException:
            await self.client.stop()
            self.store.close()
            raise
        self.jobs.start()
        self._sampler = asyncio.create_task(self._sample())

    def begin_to_stop(self) -> None:
        """End the page's streams at once. Answers that still run when the grace is over get an
        error; `stop` stops jobs."""
        if not self.stopping.is_set():
            self.stopping.set()
            log.info("stopping", grace=self.settings.grace)
            late = EngineDownError("the server is stopping: try again later")
            loop = asyncio.get_running_loop()
            loop.call_later(self.settings.grace, self.client.requests.fail_all, late)

    async def stop(self) -> None:
        """Stop jobs and end the engine. Streams that still run get an error."""
        self.begin_to_stop()
        await self.jobs.stop()
        if self._sampler is not None:
            self._sampler.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sampler
        await self.client.stop()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.store.close()

    def _engine_up(self) -> None:
        self.prefixes.pin_all()
        self.jobs.wake()

    async def _sample(self) -> None:
        """Take a sample of the history once a second."""
        while True:
            await asyncio.sleep(1.0)
            try:
                self._sample_once()
            except Exception as error:  # the next one may be taken
                log.exception("sample_failed", error)

    def _sample_once(self) -> None:
        pages = self.snapshots.last.get("pages")
        used = None
        if pages:
            used = (pages["total"] - pages["free"]) * pages["size"]
        self.history.sample(
            self.client.stats,
            running=self.client.num_running,
            waiting=self.client.requests.num_waiting,
            kv_used=used,
        )

    # ------------------------------------------------------------------------- requests

    async def in_thread(self, call: Callable[..., T], *arguments: Any) -> T:
        """Run tokenising, templates and checks off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *arguments)

    async def parsed(self, raw: bytes, read: Callable[[bytes], T]) -> T:
        """Read a body: on the event loop where that takes a millisecond at most, else a thread."""
        return read(raw) if len(raw) <= QUICK_BYTES else await self.in_thread(read, raw)

    def check(self, request: Request) -> None:
        """Raise `RequestError` for a request that can never be answered. (Grammars are compiled by
        the engine process.)"""
        facts = self.client.facts
        assert facts is not None
        check_request(
            request,
            max_model_len=facts.max_model_len,
            vocab_size=facts.vocab_size,
            tokenizer=self.tokenizer,
            max_num_seqs=facts.options.max_num_seqs,
            answers=self._answers(1 if request.stream else WHOLE_SHARE),
        )

    def check_together(self, requests: Collection[Request]) -> None:
        """Raise `RequestError` where answers that are written whole may take too much in all."""
        self._answers(WHOLE_SHARE).check_together(requests)

    def _answers(self, share: int) -> AnswerLimit:
        facts = self.client.facts
        assert facts is not None
        return AnswerLimit(
            most=answer_memory_bytes(facts.options.answer_memory) // share,
            max_model_len=facts.max_model_len,
            kv_tokens=facts.kv_tokens,
        )

    @cached_property
    def bounded_tokenizer(self) -> BoundedTokenizer | None:
        """The tokenizer for prompts, once the engine has been up."""
        facts = self.client.facts
        assert facts is not None
        if self.tokenizer is None:
            return None
        return BoundedTokenizer(self.tokenizer, facts.max_model_len)

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.settings.names:
            raise ApiError(
                404,
                unknown_model(name, self.settings.names),
                param="model",
                code="model_not_found",
            )

    def note(self, call: Call) -> None:
        """A call has ended: count it, remember it, log it (without its text)."""
        call.when_left(partial(self._note, call, time.monotonic() - call.arrived))

    def _note(self, call: Call, seconds: float) -> None:
        self.metrics.note(call, seconds)
        self.history.note(call, seconds)
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
            seconds=round(seconds, 6),
        )

    def _token_text(self, token: int) -> str | None:
        return None if self.tokenizer is None else self.tokenizer.token_text(token)

    def _text(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, control tokens by their names."""
        if self.tokenizer is None:
            return ""
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)

    # ------------------------------------------------------------------------- jobs

    @cached_property
    def _identity(self) -> str:
        return model_identity(self.path)

    def _job_model(self) -> JobModel:
        """The model of jobs, as in `onestem batch`: a job's results are the same."""
        facts = self.client.facts
        assert facts is not None
        return JobModel(
            tokenizer=self.bounded_tokenizer,
            identity=self._identity,
            name=str(self.settings.engine.model),
            names=self.settings.names,
            options=facts.options.job_identity(self.settings.engine),
            planner=planner_of(facts.options, facts.kv_tokens),
            max_model_len=facts.max_model_len,
            max_num_seqs=facts.options.max_num_seqs,
        )


# ----------------------------------------------------------------------------- progress
# What a server logs while it starts.

EVERYWHERE = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}


def say_loading(settings: Settings, path: Path) -> None:
    """Log that a model was found, and that its weights are loaded next."""
    log.info("model_found", model=str(settings.engine.model), path=str(path))
    made_up = settings.engine.makes_weights_up
    size = 0 if made_up else sum(file.stat().st_size for file in path.glob("*.safetensors"))
    log.info("loading", weights_bytes=size, dtype=ModelConfig.from_directory(path).torch_dtype)


def say_loaded(service: Service, seconds: float) -> None:
    """Log that the engine has begun to run."""
    facts = service.client.facts
    assert facts is not None
    log.info(
        "loaded",
        kv_tokens=facts.kv_tokens,
        dtype=facts.options.dtype,
        device=facts.options.device,
        attention=facts.options.impl,
        seconds=round(seconds, 3),
    )


def say_prefixes(service: Service) -> None:
    """Log that the operator's prefixes and those of keys are in KV memory."""
    prefixes = service.prefixes.everyone()
    if prefixes:
        tokens = sum(prefix.num_tokens for prefix in prefixes)
        log.info("prefixes_computed", count=len(prefixes), tokens=tokens)


def say_listening(service: Service, host: str, port: int) -> None:
    """Log where requests are taken, and how to send one."""
    host = f"[{host}]" if ":" in host else host
    log.info("listening", url=f"http://{host}:{port}", model=service.settings.names[0])
    url = f"http://{EVERYWHERE.get(host, host)}:{port}"
    log.info("addresses", page=f"{url}/", api=f"{url}/v1")
    log.info("try", command=_command(service, f"{url}/v1"))


def _command(service: Service, api: str) -> str:
    path, body = _example(service)
    words = ["curl", f"{api}/{path}", "-H", "Content-Type: application/json"]
    if service.keys.needed:
        words += ["-H", "Authorization: Bearer KEY"]
    return shlex.join([*words, "-d", json.dumps({**body, "max_tokens": 40})])


def _example(service: Service) -> tuple[str, dict[str, Any]]:
    if service.tokenizer is None:
        return "completions", {"prompt": [1, 2, 3]}
    if not service.tokenizer.has_chat_template:
        return "completions", {"prompt": "Hello"}
    return "chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}
