"""Replicas as actors of Ray."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
from typing import Any

from onestem.build import GIB, kv_memory_bytes, pick_device
from onestem.errors import ConfigError, JobError
from onestem.options import EngineOptions
from onestem.replicas.worker import Facts, Failure, Report, Worker
from onestem.request import Request
from onestem.threads import ram_bytes, usable_cores

WAIT_SECONDS = 60.0
ANSWER_SECONDS = 5.0
# What a client of HTTP/2, and so of gRPC, begins with: the preface, and an empty frame of settings.
# The server's first frame is one of settings too (RFC 9113, section 3.4).
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
MOST_REASON = 200
HOST_PORT = re.compile(r"(\[[^\]]+\]|[^:/\[\]]+):(\d+)")
PROCESS_BYTES = GIB // 2  # that any engine's process takes at least
# The reason in the text of an actor's death; the rest is names and addresses.
DETAIL = re.compile(r"Worker exit detail: (.+?)(?:\. |$)|(The actor's node was terminated[^.]*)")


class RayCrew:
    """Starts an actor for each replica, and talks with them.

    Args:
        options: of each engine. Each actor finds the model on its own machine.
        num_replicas: replicas that will be started.
        address: of a cluster; None or `local`: Ray is started on this machine, and ends with the
            process.

    Raises:
        ConfigError: Ray is not installed or cannot be reached, or the options do not suit replicas.
    """

    def __init__(self, options: EngineOptions, num_replicas: int, address: str | None) -> None:
        _check(options)
        self._ray = ray = _import()
        if address in ("", "local"):
            address = None
        self._began_ray = not ray.is_initialized()
        if self._began_ray:
            if address is None:
                options = fitting_here(options, num_replicas)
            _init(ray, address)
        cpus, gpus, self._options = _share(
            options, num_replicas, ray.cluster_resources(), local=address is None
        )
        self._actor = ray.remote(num_cpus=cpus, num_gpus=gpus, max_restarts=0, max_task_retries=0)(
            Worker
        )
        self._actors: dict[int, Any] = {}
        self._waiting: dict[Any, int] = {}

    def start(self, replica: int) -> None:
        """See `Crew`."""
        self._actors[replica] = actor = self._actor.remote(self._options)
        self._waiting[actor.load.remote()] = replica

    def call(self, replica: int, run: int, requests: list[Request], seconds: float) -> None:
        """See `Crew`."""
        self._waiting[self._actors[replica].work.remote(run, requests, seconds)] = replica

    def wait(self) -> list[tuple[int, Facts | Report | Failure]]:
        """See `Crew`."""
        waiting = list(self._waiting)
        self._ray.wait(waiting, num_returns=1, timeout=WAIT_SECONDS)
        ready, _ = self._ray.wait(waiting, num_returns=len(waiting), timeout=0)
        events: list[tuple[int, Facts | Report | Failure]] = []
        for ref in ready:
            replica = self._waiting.pop(ref, None)
            if replica is None:
                continue  # its replica failed with an earlier call
            try:
                events.append((replica, self._ray.get(ref)))
            except self._ray.exceptions.RayError as error:
                self._forget(replica)
                events.append((replica, Failure(_reason(error))))
        if not events or any(isinstance(event, Failure) for _, event in events):
            self._check_node()
        return events

    def _check_node(self) -> None:
        """Raise `JobError` if the node that this process belongs to is gone: Ray starts no more
        actors for it."""
        own = self._ray.get_runtime_context().get_node_id()
        if any(node["NodeID"] == own and not node["Alive"] for node in self._ray.nodes()):
            raise JobError("Ray's node on this machine has ended: the same command goes on")

    def _forget(self, replica: int) -> None:
        self._waiting = {ref: one for ref, one in self._waiting.items() if one != replica}

    def stop(self, replica: int) -> None:
        """See `Crew`."""
        self._forget(replica)
        actor = self._actors.pop(replica, None)
        if actor is not None:
            self._ray.kill(actor)

    def close(self) -> None:
        """End all actors, and Ray if it was started here."""
        for replica in list(self._actors):
            self.stop(replica)
        if self._began_ray:
            self._ray.shutdown()


def _import() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Actors without a GPU keep CUDA_VISIBLE_DEVICES; otherwise Ray warns that this will change.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError:
        raise ConfigError(
            "replicas need Ray, which is not installed: pip install 'onestem[ray]'"
        ) from None
    return ray


def _init(ray: Any, address: str | None) -> None:
    settings: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if address is None:
        settings |= {"num_cpus": usable_cores(), "include_dashboard": False}
    else:
        check_reached(address)
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address or "local", **settings)
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # Ray's prints a stack trace
    except (OSError, RuntimeError, ValueError) as error:
        told = " ".join(str(error).split())[:MOST_REASON]
        raise ConfigError(
            f"Ray cannot be reached at {address or 'this machine'}: {told}"
        ) from error


def check_reached(address: str) -> None:
    """Raise `ConfigError` where no server of gRPC is at HOST:PORT: Ray would try for ever, and
    could not be interrupted."""
    found = HOST_PORT.fullmatch(address)
    if found is None:
        return
    host, port = found.groups()
    try:
        with socket.create_connection((host.strip("[]"), int(port)), ANSWER_SECONDS) as server:
            if os.environ.get("RAY_USE_TLS") == "1":
                return
            server.sendall(HTTP2_PREFACE)
            answer = server.recv(9)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"Ray cannot be reached at {address}: {error}") from None
    if answer[3:4] != b"\4":  # the frame's type
        raise ConfigError(f"Ray cannot be reached at {address}: what answers there is not Ray")


def _check(options: EngineOptions) -> None:
    """Raise `ConfigError` for options that do not suit replicas."""
    if options.trace is not None:
        raise ConfigError("trace is a file of one engine: leave it out with replicas")
    kind, _, index = options.device.partition(":")
    if index:
        raise ConfigError(
            f"device is {options.device!r}: with replicas say {kind}, each has its own"
        )


def fitting_here(options: EngineOptions, num_replicas: int) -> EngineOptions:
    """The options with which all replicas fit this machine. On a CPU they have half of its memory
    at most for keys and values.

    Raises:
        ConfigError: there is no room for what is asked.
    """
    device, ranks = pick_device(options.device), options.tensor_parallel_size
    processes, memory = num_replicas * ranks, ram_bytes()
    if processes * PROCESS_BYTES > memory:
        each = f" of {ranks} each" if ranks > 1 else ""
        raise ConfigError(
            f"replicas is {num_replicas}{each}, and a process takes half a GiB at least: this "
            f"machine has {memory / GIB:.1f} GiB, lower it"
        )
    if device.type != "cpu" or options.kv_memory != "auto":
        return options
    own = kv_memory_bytes("auto", device, ranks=ranks)
    return options.replace(kv_memory=min(own, memory // (2 * processes)))


def _share(
    options: EngineOptions, num_replicas: int, resources: dict[str, float], *, local: bool
) -> tuple[float, int, EngineOptions]:
    """CPUs and GPUs of a cluster (`resources`) for each replica, and the options of its engine."""
    if os.path.isdir(options.model):
        options = options.replace(model=os.path.abspath(options.model))
    options = options.replace(random_weights=options.makes_weights_up)
    gpus, ranks = int(resources.get("GPU", 0)), options.tensor_parallel_size
    if options.device == "cuda" or (options.device == "auto" and gpus):
        if local and gpus < num_replicas * ranks:
            each = f" of {ranks} each" if ranks > 1 else ""
            raise ConfigError(
                f"replicas is {num_replicas}{each}, there are {gpus} GPUs here: lower it, or give "
                "--ray-address"
            )
        return float(ranks), ranks, options.replace(device="cuda")
    cores = resources.get("CPU", 1.0) / num_replicas
    threads = options.threads or max(1, int(cores / ranks))
    # Ray takes whole cores, or a fraction of one with four digits.
    cpus = min(int(cores), threads * ranks) if cores >= 1 else int(1e4 * cores) / 1e4
    return cpus, 0, options.replace(device="cpu", threads=threads)


def _reason(error: Exception) -> str:
    """Why an actor died, in one line."""
    text = " ".join(str(error).split())
    found = DETAIL.search(text)
    return (found.group(1) or found.group(2) if found else text)[:MOST_REASON]
