"""How each server is started: ours in its modes, and vLLM's, with the same KV memory."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from onestem_lab.load.server import free_port, onestem_command, serving
from onestem_lab.peers.vllm_process import server_command, server_environment

__all__ = ["SERVERS", "Setting", "running"]

SERVERS = re.compile(r"(full|storage|off)(-before)?|vllm(-eager|-block\d+|-step\d+)*")
# Longest system prompt, question and answer together, rounded up to vLLM's block.
MAX_MODEL_LEN = 5120


@dataclass(frozen=True)
class Setting:
    """What all servers of a comparison have in common.

    Attributes:
        kv_gib: KV memory of each server, in GiB.
        peers: where lab/onestem_lab/peers/install put vLLM's environment.
        logs: where the servers' output goes.
        random_weights: our servers make the weights up.
        before: the folder of another version of ours, for servers named `-before`.
    """

    model: Path
    dtype: str
    device: str
    kv_gib: float
    threads: int
    peers: Path
    logs: Path
    random_weights: bool = False
    before: Path | None = None


@contextmanager
def running(name: str, setting: Setting) -> Iterator[str]:
    """The base URL of a server: `full`, `storage` or `off` of ours, `full-before` of its other
    version, or `vllm` (see `_vllm`)."""
    port = free_port()
    environment = {"OMP_NUM_THREADS": str(setting.threads), "HF_HUB_OFFLINE": "1"}
    log = setting.logs / f"{name}.log"
    folder: Path | None = None  # what the interpreter looks into first
    with TemporaryDirectory() as state:
        if name.startswith("vllm"):
            command = _vllm(name, setting, port)
            environment |= server_environment(
                setting.peers,
                kv_gib=setting.kv_gib,
                threads=setting.threads,
                cache=setting.logs.resolve() / "inductor",
            )
        else:
            if setting.before is not None and name.endswith("-before"):
                folder = setting.before
                others = os.environ.get("PYTHONPATH", "").split(":")
                environment["PYTHONPATH"] = ":".join([str(folder), *others])
            command = _onestem(name.removesuffix("-before"), setting, port, Path(state))
        with serving(
            command, port, ready_within=1200, log=log, environment=environment, folder=folder
        ) as url:
            yield url


def _onestem(name: str, setting: Setting, port: int, state: Path) -> list[str]:
    options = {
        "model": str(setting.model),
        "share": name,
        "dtype": setting.dtype,
        "device": setting.device,
        "kv-memory": f"{int(setting.kv_gib * 2**30)}",
        "max-model-len": str(MAX_MODEL_LEN),
    }
    flags = [f"--{key}={value}" for key, value in options.items()]
    return onestem_command(port, state, flags + ["--random-weights"] * setting.random_weights)


def _vllm(name: str, setting: Setting, port: int) -> list[str]:
    """`vllm`: compiled, blocks of 128 tokens, steps of 2,048. Parts of the name change that:
    `vllm-eager`, `vllm-block32`, `vllm-step8192`, or several of them."""
    options = {
        "model": str(setting.model),
        "host": "127.0.0.1",
        "port": port,
        "dtype": setting.dtype,
        "max-model-len": MAX_MODEL_LEN,
        "block-size": _number("block", name, 128),
        "max-num-batched-tokens": _number("step", name, 2048),
        "served-model-name": "bench",
    }
    python = setting.peers / "bin" / "python"
    return server_command(python, options, eager="eager" in name.split("-"))


def _number(what: str, name: str, default: int) -> int:
    found = re.search(rf"-{what}(\d+)", name)
    return int(found[1]) if found else default
