"""A server in a process of its own, for as long as a benchmark needs it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import IO

from onestem.errors import ConfigError
from onestem.interrupts import exit_on_sigterm

__all__ = ["free_port", "onestem_command", "serving"]

ONESTEM = [sys.executable, "-m", "onestem"]


def free_port() -> int:
    """A TCP port of this machine on which no process listens now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def onestem_command(port: int, state: Path, options: Sequence[str]) -> list[str]:
    """Our own server's command, with limits on queue and time that an open loop does not reach.

    `state` must be a folder of this run alone: it must hold no jobs of another server.
    """
    own = {"host": "127.0.0.1", "port": port, "state": state, "timeout": 86400, "max-queue": 10**6}
    return [*ONESTEM, "serve", *(f"--{name}={value}" for name, value in own.items()), *options]


@contextmanager
def serving(
    command: Sequence[str],
    port: int,
    *,
    ready_within: float = 600.0,
    log: Path | None = None,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Iterator[str]:
    """Run a server in `folder`; gives its base URL. It must answer `/health` with 200 once ready.

    Its output goes to `log` (else to a temporary file). At the end it gets SIGTERM, and 30 seconds
    later, if it still runs, SIGKILL with all processes of its group. If this process is killed, the
    server gets SIGTERM too.
    """
    with exit_on_sigterm(), log.open("w+b") if log else tempfile.TemporaryFile("w+b") as output:
        process = subprocess.Popen(
            _ends_with_us(command),
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            cwd=folder,
            start_new_session=True,
        )
        try:
            base_url = f"http://127.0.0.1:{port}"
            _wait_until_ready(process, base_url, ready_within, output)
            yield base_url
        finally:
            _stop(process)


def _ends_with_us(command: Sequence[str]) -> list[str]:
    """The command that runs another one in its own process, to which Linux sends SIGTERM when the
    thread that starts it ends: also where this process is killed and cleans nothing up."""
    code = (
        "import ctypes, os, signal, sys; PR_SET_PDEATHSIG = 1; "
        "ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM); "
        f"os.getppid() == {os.getpid()} or sys.exit('the process that started this has ended'); "
        "os.execvp(sys.argv[1], sys.argv[1:])"
    )
    return [sys.executable, "-I", "-S", "-c", code, *command]


def _wait_until_ready(
    process: subprocess.Popen[bytes], base_url: str, ready_within: float, output: IO[bytes]
) -> None:
    limit = time.monotonic() + ready_within
    while not _healthy(base_url):
        if process.poll() is not None:
            raise ConfigError(
                f"the server ended with code {process.returncode}: {_last_line(output)}"
            )
        if time.monotonic() > limit:
            raise ConfigError(f"the server was not ready after {ready_within:.0f} s")
        time.sleep(0.2)


def _healthy(base_url: str) -> bool:
    connection = HTTPConnection(base_url.removeprefix("http://"), timeout=5.0)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def _last_line(output: IO[bytes]) -> str:
    output.seek(0)
    lines = output.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(30)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
