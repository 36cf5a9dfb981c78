"""Runs jobs with vLLM in a process of its own, which may use another interpreter.

The process reads the path of a job on each line and writes its figures as a JSON line. Run as that
process, this file needs vLLM alone.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired
from tempfile import TemporaryDirectory
from typing import Any

__all__ = ["INTERPRETER", "Vllm", "absent_vllm"]

INTERPRETER = "ONESTEM_VLLM_PYTHON"
"""Environment variable: the interpreter that has vLLM, if it is not this one."""

ENDING_SECONDS = 60.0
WARM_PROMPTS = 64  # prompts of a job that run before the clock starts
# Settings for offline jobs on one large GPU; the others are vLLM's defaults.
SETTINGS = {"enable_prefix_caching": True, "max_num_batched_tokens": 8192, "max_num_seqs": 1024}


def absent_vllm() -> str | None:
    """Why vLLM is not available; None: it is."""
    if INTERPRETER in os.environ or find_spec("vllm") is not None:
        return None
    return f"needs the package vllm, not installed: install it, or name its Python in {INTERPRETER}"


class Vllm:
    """A vLLM engine with random weights of a model's shape. It imports vLLM at once, but touches no
    device before `load`."""

    def __init__(self) -> None:
        self._folder = TemporaryDirectory(prefix="onestem-vllm-")
        command = [os.environ.get(INTERPRETER, sys.executable), "-P", __file__]
        quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        self._process = Popen(
            command, stdin=PIPE, stdout=PIPE, text=True, env=quiet | os.environ, process_group=0
        )

    def load(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Make the engine; `settings`: arguments of `vllm.LLM`.

        Returns:
            vLLM's `version`, and all `settings`.
        """
        try:
            return self._told({"settings": SETTINGS | dict(settings)})
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
            from onestem.errors import ConfigError  # vLLM's interpreter may be without it

            code = self._process.wait()
            raise ConfigError(f"vLLM ended with exit code {code}: see what it printed")
        found: dict[str, Any] = json.loads(answer)
        return found


def main() -> None:
    # Answers need a stream of their own: vLLM and its libraries print to stdout.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import vllm  # type: ignore[import-not-found]

    llm, first = None, True
    for line in sys.stdin:
        told = json.loads(Path(line.strip()).read_text())
        if llm is None:
            settings = told["settings"]
            llm = vllm.LLM(load_format="dummy", skip_tokenizer_init=True, **settings)
            found: dict[str, Any] = {"version": vllm.__version__, "settings": settings}
        else:
            for _ in range(1 + first):  # the first job of a process is discarded, as ours is
                found = answered(llm, vllm.SamplingParams, **told)
            first = False
        answers.write(json.dumps(found) + "\n")
        answers.flush()


def answered(
    llm: Any, kind: Any, prompts: list[list[int]], params: dict[str, Any], outputs: list[int]
) -> dict[str, Any]:
    def generate(number: int, most: int) -> Any:
        asked = [
            kind(**params, max_tokens=min(count, most), detokenize=False)
            for count in outputs[:number]
        ]
        given = [{"prompt_token_ids": ids} for ids in prompts[:number]]
        return llm.generate(given, asked, use_tqdm=False)

    generate(WARM_PROMPTS, 2)
    if not llm.reset_prefix_cache():
        raise RuntimeError("the prefix cache could not be emptied")
    began = time.perf_counter()
    done = generate(len(prompts), max(outputs))
    seconds = time.perf_counter() - began
    counts = [[len(one.token_ids) for one in each.outputs] for each in done]
    assert counts == [[count] * params.get("n", 1) for count in outputs]
    return {
        "seconds": seconds,
        "cached_tokens": sum(each.num_cached_tokens or 0 for each in done),
        "output_tokens": sum(map(sum, counts)),
    }


if __name__ == "__main__":
    main()
