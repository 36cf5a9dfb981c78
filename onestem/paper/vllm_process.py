"""vLLM on jobs of the papers: in a process of its own, which may be another interpreter's.

The process reads the path of a job on each line and writes its figures as a JSON line. Imported by
nobody but its parent's `Vllm`, this file needs vLLM alone.
"""

from __future__ import annotations

import json
import os
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
"""Environment variable: the interpreter that has vLLM, where it is not this one."""

ENDING_SECONDS = 60.0
WARM_PROMPTS = 64  # of a job, before the clock starts
# As offline jobs have it on one large GPU; the other settings are vLLM's own.
SETTINGS = {"enable_prefix_caching": True, "max_num_batched_tokens": 8192, "max_num_seqs": 1024}


def absent_vllm() -> str | None:
    """Why there is no vLLM; None: there is."""
    if INTERPRETER in os.environ or find_spec("vllm") is not None:
        return None
    return f"needs the package vllm, not installed: install it, or name its Python in {INTERPRETER}"


class Vllm:
    """An engine with random weights of a model's shape.

    Args:
        settings: of `vllm.LLM`.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._folder = TemporaryDirectory(prefix="onestem-vllm-")
        command = [os.environ.get(INTERPRETER, sys.executable), "-P", __file__]
        quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        self._process = Popen(command, stdin=PIPE, stdout=PIPE, text=True, env=quiet | os.environ)
        try:
            self._told({"settings": SETTINGS | dict(settings)})
        except BaseException:
            self.close()
            raise

    def run(self, requests: Sequence[tuple[list[int], int]]) -> dict[str, float]:
        """Seconds of a job, from the call to the last answer, and `cached_tokens` of its prompts.
        The cache is empty before."""
        prompts, outputs = zip(*requests, strict=True)
        return self._told({"prompts": prompts, "outputs": outputs})

    def close(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()  # then it ends
        try:
            self._process.wait(ENDING_SECONDS)
        except TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._folder.cleanup()

    def _told(self, what: Mapping[str, Any]) -> dict[str, float]:
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
        found: dict[str, float] = json.loads(answer)
        return found


def main() -> None:
    # What vLLM and its libraries print is not an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    llm = None
    for line in sys.stdin:
        told = json.loads(Path(line.strip()).read_text())
        if llm is None:
            settings = told["settings"]
            llm = LLM(load_format="dummy", skip_tokenizer_init=True, **settings)
            found: dict[str, Any] = {}
        else:
            found = answered(llm, SamplingParams, told["prompts"], told["outputs"])
        answers.write(json.dumps(found) + "\n")
        answers.flush()


def answered(llm: Any, params: Any, prompts: list[list[int]], outputs: list[int]) -> dict[str, Any]:
    def generate(number: int, most: int) -> Any:
        asked = [
            params(temperature=0.0, max_tokens=min(count, most), ignore_eos=True, detokenize=False)
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
    assert [len(each.outputs[0].token_ids) for each in done] == outputs
    return {"seconds": seconds, "cached_tokens": sum(each.num_cached_tokens or 0 for each in done)}


if __name__ == "__main__":
    main()
