"""Serve until a signal: the socket, the signals, the order of the end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn

from onestem.engine.text import templates
from onestem.engine.text.tokenizer import Tokenizer
from onestem.errors import ConfigError
from onestem.garbage import collecting_less, give_freed_memory_back, giving_holes_back
from onestem.models.find import find_model
from onestem.server.api.app import make_app
from onestem.server.api.foreign import hosts_of
from onestem.server.api.half_open import HalfOpenProtocol
from onestem.server.link.process import EngineProcess
from onestem.server.logs import log
from onestem.server.page.routes import page_routes
from onestem.server.service import Service
from onestem.server.settings import Settings
from onestem.server.startup import say_listening, say_loading

BACKLOG = 2048
KEEP_ALIVE_SECONDS = 65  # longer than proxies keep idle connections, which is about a minute

TRIM_SECONDS = 10  # between looks whether freed parts of heaps are worth giving back
LAST_SECONDS = 5  # to write the errors of answers whose time is over


def bind(host: str, port: int) -> socket.socket:
    """A socket of that address that does not listen yet; raises `ConfigError` if it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With its protocol named: only on such sockets does asyncio send pieces at once (TCP_NODELAY).
    # Otherwise the second piece of an answer waits 40 ms for the client's acknowledgement.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"cannot listen on {host}, port {port}: {error.strerror or error}: choose another"
        ) from error
    bound.set_inheritable(False)
    return bound


class HttpServer(uvicorn.Server):
    """uvicorn without its own handling of signals."""

    def __init__(self, service: Service) -> None:
        app = make_app(service)
        app.include_router(page_routes)
        config = uvicorn.Config(
            app,
            http=HalfOpenProtocol,  # based on h11: httptools takes endless headers
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=int(service.settings.grace) + LAST_SECONDS,
        )
        super().__init__(config)
        self._service = service

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `serve`."""
        yield

    def begin_to_stop(self) -> None:
        """Take no new connections and let running answers end; a second call ends them at once."""
        self.force_exit = self.should_exit
        self.should_exit = True
        self._service.begin_to_stop()


class _Signals:
    """The first signal calls `stop`; a second one ends the process at once."""

    def __init__(self, stop: Callable[[], object]) -> None:
        self.stop = stop
        self._told = False

    def heed(self, number: signal.Signals) -> None:
        asyncio.get_running_loop().add_signal_handler(number, self._take, number)

    def _take(self, number: signal.Signals) -> None:
        if self._told:
            log.warning("ended_at_once")
            os._exit(128 + number)
        self._told = True
        self.stop()


async def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        ConfigError, RequestError: what is wrong with the options.
        KeyboardInterrupt: SIGINT came before requests were taken.
    """
    give_freed_memory_back()
    task = asyncio.current_task()
    assert task is not None
    signals = _Signals(task.cancel)
    signals.heed(signal.SIGINT)
    try:
        await _start(settings, signals)
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def _start(settings: Settings, signals: _Signals) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the other cores are the engine's
    hosts_of(settings.host, settings.allowed_hosts)  # refused before anything is loaded
    listener = bind(settings.host, settings.port)
    try:
        path = await asyncio.to_thread(find_model, settings.engine.model)
        # One seed for all engines of this server: a request that is sent again is answered alike.
        seed = secrets.randbits(63) if settings.engine.seed is None else settings.engine.seed
        made_up = settings.engine.makes_weights_up
        engine = settings.engine.replace(
            model=path,
            seed=seed,
            random_weights=made_up,
            default_temperature=settings.temperature,
            default_top_p=settings.top_p,
        )
        launcher = EngineProcess(engine, logs=(settings.log_level, settings.log_format or ""))
        tokenizer = await asyncio.to_thread(Tokenizer.from_directory, path, engine.template_text)
        if tokenizer is not None and tokenizer.has_chat_template:
            templates.isolate()
        service = Service(settings, path, tokenizer, launcher)
        say_loading(settings, path)
        await service.start()
        with collecting_less(clean=True):
            await _serve(service, listener, signals)
    finally:
        listener.close()


async def _serve(service: Service, listener: socket.socket, signals: _Signals) -> None:
    server = HttpServer(service)
    signals.stop = server.begin_to_stop
    signals.heed(signal.SIGTERM)
    host, port = listener.getsockname()[:2]
    listener.listen(BACKLOG)  # before the line that says so: its reader may connect at once
    say_listening(service.model, host, port, keys=service.keys.needed)
    try:
        with giving_holes_back(TRIM_SECONDS):
            await server.serve(sockets=[listener])
    finally:
        await service.stop()
        log.info("stopped")
