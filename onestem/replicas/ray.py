"""Replicas as actors of Ray."""

from __future__ import annotations

import os
import re
import signal
import threading
from dataclasses import dataclass
from typing import Any

from onestem.errors import ConfigError
from onestem.options import EngineOptions
from onestem.replicas.worker import Facts, Failure, Report, Worker
from onestem.request import Request
from onestem.threads import usable_cores

__all__ = ["RayCrew"]

WAIT_SECONDS = 60.0
MOST_REASON = 200
# The reason in the text of an actor's death; the rest is names and addresses.
DETAIL = re.compile(r"Worker exit detail: (.+?)(?:\. |$)|(The actor's node was terminated[^.]*)")


@dataclass(frozen=True)
class _Share:
    """An actor's share of the cluster, and the options of its engine."""

    cpus: float
    gpus: int
    options: EngineOptions


class RayCrew:
    """Starts an actor for each replica, and talks with them.

    Args:
        options: of each engine. Each actor finds the model on its own machine.
        num_replicas: replicas that will be started.
        address: of a cluster; None: Ray is started on this machine, and ends with the process.

    Raises:
        ConfigError: Ray is not installed or cannot be reached, or the options do not suit replicas.
    """

    def __init__(self, options: EngineOptions, num_replicas: int, address: str | None) -> None:
        self._ray = ray = _import()
        self._began_ray = not ray.is_initialized()
        if self._began_ray:
            _init(ray, address)
        share = _share(options, num_replicas, ray.cluster_resources(), local=address is None)
        self._options = share.options
        self._actor = ray.remote(
            num_cpus=share.cpus, num_gpus=share.gpus, max_restarts=0, max_task_retries=0
        )(Worker)
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
        return events

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
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address or "local", **settings)
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # Ray's prints a stack trace
    except (ConnectionError, RuntimeError, ValueError) as error:
        told = " ".join(str(error).split())[:MOST_REASON]
        raise ConfigError(
            f"Ray cannot be reached at {address or 'this machine'}: {told}"
        ) from error


def _share(
    options: EngineOptions, num_replicas: int, resources: dict[str, float], *, local: bool
) -> _Share:
    """The share of a cluster (`resources`) for each replica."""
    if options.trace is not None:
        raise ConfigError("trace is a file of one engine: leave it out with replicas")
    if ":" in options.device:
        raise ConfigError(f"device is {options.device!r}: with replicas say cuda, each has its own")
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
        return _Share(float(ranks), ranks, options.replace(device="cuda"))
    cores = resources.get("CPU", 1.0) / num_replicas
    threads = options.threads or max(1, int(cores / ranks))
    # Ray takes whole cores, or a fraction of one with four digits.
    cpus = min(int(cores), threads * ranks) if cores >= 1 else int(1e4 * cores) / 1e4
    return _Share(cpus, 0, options.replace(device="cpu", threads=threads))


def _reason(error: Exception) -> str:
    """Why an actor died, in one line."""
    text = " ".join(str(error).split())
    found = DETAIL.search(text)
    return (found.group(1) or found.group(2) if found else text)[:MOST_REASON]
