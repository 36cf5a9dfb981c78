"""What a run of hostile traffic is: its options, the server's keys and its command."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onestem.options import EMBEDDED
from onestem.server.objects.tenants import OPERATOR
from onestem_lab.serve.hostile_pool import APP, PREFIXES, SCHEMAS

__all__ = [
    "ATTACKERS",
    "KEYS",
    "MAX_BODY",
    "PROBE",
    "SECRETS",
    "Setting",
    "server_command",
    "server_files",
]

Json = dict[str, Any]

KEYS = ("alice", "bob", "carol", "dave", OPERATOR)  # of ordinary clients
ATTACKERS = ("mallory", "trudy")
PROBE = "peggy"  # whose requests are timed, and whose batches must end whole
SECRETS = {
    name: f"key-of-{name}-{number:04}" for number, name in enumerate([*KEYS, *ATTACKERS, PROBE])
}
MAX_BODY = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is run. `minutes` or `requests` end it.

    Attributes:
        hang: seconds after which an answer is given up.
        pace: of the pauses that clients make; 1 is usual.
        restart_every: seconds between two ends of the server or its engine; 0: none.
        attackers: how many clients do nothing but attack.
        window: seconds without attacks, then with, and so on.
        judge_after: minutes that a process has to live for its memory to be judged.
    """

    seed: int = 0
    clients: int = 24
    pool: int = 1500
    minutes: float | None = None
    requests: int | None = None
    kv_memory: str = "32MiB"
    max_model_len: int = 1024
    max_step_ms: float | None = None
    max_queue: int = 48
    hang: float = 300.0
    pace: float = 1.0
    restart_every: float = 180.0
    attackers: int = 3
    window: float = 60.0
    judge_after: float = 20.0

    @property
    def engine(self) -> Json:
        """Options of `LLM`, for the server's engine and for the one that is alone."""
        return {
            "dtype": "float32",
            "device": "cpu",
            "kv_memory": self.kv_memory,
            "max_model_len": self.max_model_len,
        }


def server_files(folder: Path) -> dict[str, Path]:
    """What the server is given: keys, the prefix and the schema of all."""
    texts = {
        "keys": "".join(f"{name}:{key}\n" for name, key in SECRETS.items()),
        "app": PREFIXES[APP],
        "schema": SCHEMAS[APP],
    }
    files = {name: folder / name for name in texts}
    for name, text in texts.items():
        files[name].write_text(text, "utf-8")
    return files


def server_command(setting: Setting, model: Path, folder: Path, port: int) -> list[str]:
    """Without a seed, as most are started: the server draws one."""
    files = server_files(folder)
    options = {
        **setting.engine,
        "model": model,
        "served-model-name": EMBEDDED,
        "port": port,
        "state": folder / "state",
        "api-key-file": files["keys"],
        "app": f"{APP}={files['app']}",
        "schema": files["schema"],
        "max-queue": setting.max_queue,
        "max-body": MAX_BODY,
        "log-format": "json",
        "log-level": "warning",
    }
    if setting.max_step_ms is not None:
        options["max-step-ms"] = setting.max_step_ms
    named = (f"--{name.replace('_', '-')}={value}" for name, value in options.items())
    return [sys.executable, "-m", "onestem", "serve", *named]
