"""`AsyncLLM`: many callers of one event loop, one engine in a process of its own. Names as in
vLLM's `AsyncLLM`."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator, Collection, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from onestem.answers import OutputKind, check_output_kind, with_texts
from onestem.beside_vllm import Beside, refuses_vllms
from onestem.checked import show
from onestem.engine.text.tokenizer import Tokenizer
from onestem.errors import ConfigError, OnestemError, RequestError
from onestem.models.checkpoint import with_own_head
from onestem.models.config import ModelConfig
from onestem.models.find import find_model
from onestem.models.sizes import quantised_as
from onestem.models.updates import checked_tensors
from onestem.options import EngineOptions, takes
from onestem.prompts import AnyPrompt, PromptReader
from onestem.request import (
    Answer,
    CompletionOutput,
    Request,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
)
from onestem.server.errors import ApiError
from onestem.server.link.chunk_size import ChunkSize
from onestem.server.link.client import EngineClient
from onestem.server.link.inbox import Inbox
from onestem.server.link.messages import Delta
from onestem.server.link.process import EngineProcess
from onestem.server.link.supervisor import State

PauseMode = Literal["abort", "wait", "keep"]
LOADER = "onestem.server.link.worker:load_with_ranks"


class AsyncLLM(Beside):
    """A model and the engine that runs it, in a process of its own, for callers of one event loop.

    Its arguments are those of `LLM`. The model is loaded with the first call, or with `start`. An
    engine that dies is started again, and what it was answering is sent once more.

    Attributes:
        tokenizer: None for a model without one.
        weights_version: of the weights; what the checkpoint has is version 0.

    Raises:
        OnestemError: with one line that says what is wrong and the way out.
    """

    @takes(EngineOptions)
    def __init__(self, options: EngineOptions) -> None:
        self._make(options, None)

    @classmethod
    def from_options(
        cls, options: EngineOptions, launcher: EngineProcess | None = None
    ) -> AsyncLLM:
        """An `AsyncLLM` of these options alone, whatever the environment says.

        Args:
            launcher: starts the engine; None: in a process.
        """
        llm = cls.__new__(cls)
        llm._make(options, launcher)
        return llm

    def _make(self, options: EngineOptions, launcher: EngineProcess | None) -> None:
        self.name = str(options.model)
        self.path = find_model(self.name)
        self.config = ModelConfig.from_directory(self.path)
        self.tokenizer = Tokenizer.from_directory(self.path, options.template_text)
        self.weights_version = 0
        # One seed for all engines: a request that is sent again is answered alike.
        self._options = options.replace(
            model=self.path,
            seed=secrets.randbits(63) if options.seed is None else options.seed,
            random_weights=options.makes_weights_up,
        )
        self._client = EngineClient(launcher or EngineProcess(self._options, LOADER), 0)
        self._client.on_up = self._engine_up
        self._starting: asyncio.Task[Any] | None = None
        self._streams: dict[str, _Stream] = {}
        self._ids = (f"request-{number}" for number in itertools.count(1))
        self._going = asyncio.Event()  # not paused
        self._going.set()
        self._writing = asyncio.Lock()
        self._is_changed = False  # the weights are not the checkpoint's
        self._is_closed = False

    async def start(self) -> None:
        """Load the model, unless that was done.

        Raises:
            ConfigError: it cannot be loaded; or the AsyncLLM is closed, or another event loop's.
        """
        if self._is_closed:
            raise ConfigError(f"the AsyncLLM of {self.name} is closed: make another")
        loop = asyncio.get_running_loop()
        if self._starting is None:
            self._starting = loop.create_task(self._client.start())
        if self._starting.get_loop() is not loop:
            raise ConfigError("the AsyncLLM was started in another event loop: make one for each")
        await asyncio.shield(self._starting)

    @property
    def _reader(self) -> PromptReader:
        return PromptReader(
            self.tokenizer,
            self.path,
            max_model_len=self.options.max_model_len,
            max_positions=self.config.max_position_embeddings,
        )

    @property
    def options(self) -> EngineOptions:
        """The options as settled where the engine runs; before `start`, as given."""
        facts = self._client.facts
        return self._options if facts is None else facts.options

    async def close(self) -> None:
        """End what runs, and the engine. Closing twice is fine.

        Raises:
            ConfigError: it was started in another event loop, which still runs.
        """
        if self._is_closed:
            return
        loop = None if self._starting is None else self._starting.get_loop()
        if loop not in (None, asyncio.get_running_loop()) and not loop.is_closed():
            raise ConfigError("the AsyncLLM was started in another event loop: close it there")
        self._is_closed = True
        if loop is not None and loop.is_closed():
            self._client.supervisor.kill()
            return
        self._going.set()
        if self._starting is not None:
            self._client.requests.fail_all(ApiError(503, f"the AsyncLLM of {self.name} was closed"))
            await self._client.stop()
            await asyncio.gather(self._starting, return_exceptions=True)

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def _engine_up(self) -> None:
        """Called when an engine has come up, with the checkpoint's weights."""
        if self._is_changed:
            self._client.requests.fail_all(
                ApiError(
                    503,
                    "the engine died and its updated weights are lost: call update_weights() with "
                    "all of them",
                )
            )
            self._client.tell("drop_weights")

    @refuses_vllms
    async def generate(
        self,
        prompt: AnyPrompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        parse_special: bool = True,
        output_kind: OutputKind = "cumulative",
    ) -> AsyncIterator[Answer]:
        """Answer a prompt. Outputs come as they grow, and the last one is `finished`. Leaving the
        iterator (`aclose`, a cancelled task) ends the request.

        Args:
            prompt: text, token ids, or vLLM's object of one of them.
            request_id: for `abort`; None: one is made.
            parse_special: see `LLM.generate`.
            output_kind: see `LLM.stream`. Slow readers get fewer outputs, and so does each of very
                many: an event loop bears some thousands a second.

        Raises:
            RequestError: it cannot be answered.
            OnestemError: the engine failed.
        """
        check_output_kind(output_kind)
        if not isinstance(request_id, str | None):
            raise RequestError(f"request_id is {show(request_id)}, expected text")
        params = SamplingParams() if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params is {show(params)}, expected SamplingParams")
        name = next(self._ids) if request_id is None else request_id
        if name in self._streams:
            raise RequestError(f"request id {name!r} is in use: give each request its own")
        with self._open(name) as stream, _as_own_errors():
            text, ids = await asyncio.to_thread(self._reader.one, prompt, parse_special)
            stream.request = Request(
                request_id=name, prompt_token_ids=ids, prompt=text, params=params, stream=True
            )
            await stream.until_ready(self._ready_for(stream.request))
            if not stream.answered.is_set():
                self._check_awake()
                stream.is_sent = True
                self._client.requests.submit(stream.request, "", 1.0, stream)
            describe = partial(with_texts, self.tokenizer)
            while not stream.is_over:
                yield await stream.next(output_kind, describe)

    @contextmanager
    def _open(self, name: str) -> Iterator[_Stream]:
        """Hold a request's stream; however this is left, the request is ended."""
        stream = self._streams[name] = _Stream(self._client.requests.chunk_size)
        try:
            yield stream
        finally:
            del self._streams[name]
            stream.answered.set()
            self._client.requests.abort(name)

    def _check_awake(self) -> None:
        """An engine that sleeps refuses requests; while it is started again, nobody else does."""
        if self._client.sleep_level and self.state != "running":
            raise RequestError(
                "the LLM is asleep, and its engine is being started again: call wake_up() before "
                "requests"
            )

    async def _ready_for(self, request: Request) -> None:
        """Wait until a request may be sent; one that cannot be answered raises an error."""
        await self.start()
        await self._going.wait()
        await self.start()  # it may have been closed
        await self._client.requests.gone(request.request_id)
        if request.params.response_format is not None:
            await self._client.validate(request)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests now: the last output of each has `finish_reason` `abort`. Unknown ids are
        skipped: they have ended."""
        names = [request_id] if isinstance(request_id, str) else list(request_id)
        ends = []
        for name in names:
            if name in self._streams:
                ends.append(asyncio.get_running_loop().create_future())
                self._client.requests.abort(name, partial(self._streams[name].abort, ends[-1]))
        await asyncio.gather(*ends)

    async def _control(self, what: str, value: Any = None) -> Any:
        with _as_own_errors():
            return await self._client.control(what, value)

    async def pause_generation(
        self, mode: PauseMode = "abort", *, clear_cache: bool = True
    ) -> None:
        """Compute nothing until `resume_generation`; new requests wait.

        Args:
            mode: requests that run are ended (`abort`), awaited (`wait`), or stay as they are and
                go on afterwards (`keep`). `wait` waits for the engine, not for readers.
            clear_cache: drop what is cached; not with `keep`.
        """
        if mode not in ("abort", "wait", "keep"):
            raise RequestError(f"pause mode is {show(mode)}, expected abort, wait or keep")
        await self.start()
        was_going = self._going.is_set()
        self._going.clear()
        try:
            sent = {name: one for name, one in self._streams.items() if one.is_sent}
            if mode == "abort":
                await self.abort(sent)
            elif mode == "wait":
                await asyncio.gather(*(one.answered.wait() for one in sent.values()))
            await self._control("pause")
            if mode != "keep" and clear_cache:
                await self.reset_prefix_cache()
        except BaseException:  # also where its caller has waited long enough
            if was_going:
                self._client.resume()
                self._going.set()
            raise

    async def resume_generation(self) -> None:
        """Go on after `pause_generation`, also while an engine that died is started again."""
        await self.start()
        self._client.resume()
        self._going.set()

    async def is_paused(self) -> bool:
        """Whether `pause_generation` holds requests back."""
        return self._client.is_paused

    async def update_weights(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int | None = None
    ) -> int:
        """See `LLM.update_weights`. Requests that run go on with the new weights. The tensors go to
        the engine's process through a file in memory (or in TMPDIR, where /dev/shm is too small).
        """
        await self.start()
        async with self._writing:  # each has a version of its own
            tensors = await asyncio.to_thread(self._checked, named_tensors)
            version = self.weights_version + 1 if version is None else version
            folder = _folder_for(sum(tensor.nbytes for tensor in tensors.values()))
            with tempfile.TemporaryDirectory(prefix="onestem-", dir=folder) as own:
                file = Path(own) / "weights.safetensors"
                await asyncio.to_thread(_write, tensors, file)
                # Even if this fails: an engine that is started next does not have these weights.
                self._is_changed = True
                await self._control("update_weights", (str(file), version))
            self.weights_version = version
        return version

    def _checked(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        made_up, config = self._options.random_weights, self.config
        config = config if made_up else with_own_head(self.path, config)
        quantised = quantised_as(config, self._options.quantization)
        return checked_tensors(config, named_tensors, quantised)

    async def sleep(self, level: int = 1) -> None:
        """See `LLM.sleep`."""
        await self.start()
        await self._control("sleep", level)
        self._is_changed |= level == 2

    async def wake_up(self, tags: Collection[str] | None = None) -> None:
        """See `LLM.wake_up`."""
        await self.start()
        tags = tags if tags is None or isinstance(tags, str) else list(tags)
        await self._control("wake_up", tags)

    async def is_sleeping(self) -> bool:
        """Whether `sleep` has freed memory that `wake_up` has not taken again."""
        return self._client.sleep_level > 0

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """See `LLM.reset_prefix_cache`."""
        await self.start()
        return bool(await self._control("reset_prefix_cache", reset_running_requests))

    @property
    def state(self) -> State:
        """The engine's: it computes while `running`; `starting`, `down` and `stuck` end by
        themselves."""
        return self._client.supervisor.state

    @property
    def stats(self) -> dict[str, float]:
        """The engine's counts (`EngineStats`), a quarter of a second old at most."""
        return self._client.stats


class _Aborted(ApiError):
    def __init__(self, last: Delta | None) -> None:
        super().__init__(499, "the request was aborted")
        self.last = last


class _Stream:
    """The output of one request.

    Attributes:
        request: known when its prompt was read.
        inbox: where it arrives.
        is_sent: to the engine.
        answered: the engine is done with it. is_over: all of it was read.
    """

    request: Request

    def __init__(self, size: ChunkSize) -> None:
        self.inbox = Inbox(1, size)
        self.is_sent = False
        self.answered = asyncio.Event()
        self.is_over = False
        self._part = self.inbox.part(0)
        self.on_token, self.on_restart = self._part.on_token, self._part.on_restart
        self._so_far: dict[int, CompletionOutput] = {}  # of deltas, the last of each sequence
        self._waiting: asyncio.Task[None] | None = None

    async def until_ready(self, ready: Coroutine[Any, Any, None]) -> None:
        """Wait until the request may be sent, or was aborted."""
        self._waiting = waiting = asyncio.create_task(ready)
        if self.answered.is_set():
            waiting.cancel()
        try:
            await asyncio.wait([waiting])
        finally:
            waiting.cancel()
        self._waiting = None
        try:
            if not waiting.cancelled():
                waiting.result()
        finally:
            del waiting  # an error has this frame, and must not be in it

    def on_delta(self, delta: Delta) -> None:
        self._part.on_delta(delta)
        if delta.finished:
            self.answered.set()

    def on_error(self, error: ApiError) -> None:
        self._part.on_error(error)
        self.answered.set()

    def abort(self, told: asyncio.Future[None], last: Delta | None) -> None:
        """End an aborted request; `last`: what the engine says of it; None: it had ended, or that
        is unknown."""
        self.inbox.fail(_Aborted(last))
        self.answered.set()
        if self._waiting is not None:
            self._waiting.cancel()
        told.set_result(None)

    async def next(self, kind: OutputKind, describe: Any) -> Answer:
        """The next output, when there is one."""
        try:
            await self.inbox.wait()
            pieces = {index: piece for (_, index), piece in self.inbox.take().items()}
            last = self.inbox.ended.get(0)
        except _Aborted as error:
            pieces = {index: piece for (_, index), piece in self.inbox.take().items()}
            last = self._aborted(pieces, error.last)
        except BaseException:
            self.is_over = True
            raise
        self.is_over = last is not None
        return Answer.of(self._output(kind, pieces, last), describe)

    def _aborted(self, pieces: dict[int, CompletionOutput], last: Delta | None) -> Delta:
        """The last output, which ends all sequences that have not ended."""
        params = self.request.params
        for index in range(1 if params.choices else params.n):
            before = pieces.get(index) or self._so_far.get(index)
            if before is None or before.finish_reason is None:
                new = CompletionOutput(index=index, text="", token_ids=[])
                pieces.setdefault(index, new).finish_reason = "abort"
        return last or Delta(self.request.request_id, [], finished=True)

    def _output(
        self, kind: OutputKind, pieces: dict[int, CompletionOutput], last: Delta | None
    ) -> RequestOutput:
        for index, piece in pieces.items():
            if kind == "cumulative" and index in self._so_far:
                self._so_far[index].extend(piece)
            else:
                self._so_far[index] = piece
        shown = pieces if kind == "delta" else {i: one.copy() for i, one in self._so_far.items()}
        metrics = last.metrics if last is not None else None
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.request.prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            outputs=[shown[index] for index in sorted(shown)],
            finished=last is not None,
            prompt_logprobs=last.prompt_logprobs if last is not None else None,
            metrics=metrics or RequestMetrics(num_prompt_tokens=len(self.request.prompt_token_ids)),
            reuse=last.reuse if last is not None else None,
        )


@contextmanager
def _as_own_errors() -> Iterator[None]:
    """Raise the server's errors (`ApiError`) as the ones that Python's users know."""
    try:
        yield
    except ApiError as error:
        kind = RequestError if error.status < 500 else OnestemError
        raise kind(error.message) from None


def _folder_for(num_bytes: int) -> Path:
    """A folder to hand `num_bytes` over in: in memory, if there is room."""
    folders = [Path("/dev/shm"), Path(tempfile.gettempdir())]
    for folder in folders:
        if folder.is_dir() and shutil.disk_usage(folder).free > 1.1 * num_bytes:
            return folder
    raise ConfigError(
        f"the weights take {num_bytes} bytes on their way to the engine, and neither {folders[0]} "
        f"nor {folders[1]} has room: name another folder in TMPDIR"
    )


def _write(tensors: dict[str, torch.Tensor], file: Path) -> None:
    # safetensors writes no tensors that share memory, or have gaps.
    save_file({name: tensor.cpu().clone().contiguous() for name, tensor in tensors.items()}, file)
