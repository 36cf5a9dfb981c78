"""vLLM in this process, for jobs. It needs vLLM alone.

As a program it reads the path of a job on each line of stdin, and writes figures as JSON lines.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__all__ = ["QUIET", "Engine"]

QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
"""Environment variables, unless they are set."""
if find_spec("flashinfer") is None:  # vLLM imports it for its sampler all the same
    QUIET["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
WARM_PROMPTS = 64  # prompts of a job that run before the clock starts


class Engine:
    """Args: those of `vllm.LLM`. Prompts and answers are token ids."""

    def __init__(self, **settings: Any) -> None:
        import vllm  # type: ignore[import-not-found]

        self.version = vllm.__version__
        self._params = vllm.SamplingParams
        self.llm = vllm.LLM(skip_tokenizer_init=True, **settings)

    def generate(
        self, prompts: Sequence[list[int]], outputs: Sequence[int], params: Mapping[str, Any]
    ) -> Any:
        """vLLM's own outputs, in this order.

        Args:
            outputs: `max_tokens` of each prompt.
            params: other fields of `vllm.SamplingParams`.
        """
        asked = [self._params(**params, max_tokens=count, detokenize=False) for count in outputs]
        given = [{"prompt_token_ids": ids} for ids in prompts]
        return self.llm.generate(given, asked, use_tqdm=False)

    def forget(self) -> None:
        """Empty the prefix cache."""
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be emptied")


def cached_tokens(outputs: Any) -> int:
    """Prompt tokens that vLLM took from its cache."""
    return sum(each.num_cached_tokens or 0 for each in outputs)


def main() -> None:
    # Answers need a stream of their own: vLLM and its libraries print to stdout.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import vllm  # noqa: F401  (while the caller still makes its job)

    engine, first = None, True
    for line in sys.stdin:
        told = json.loads(Path(line.strip()).read_text())
        if engine is None:
            engine = Engine(load_format="dummy", **told["settings"])
            found: dict[str, Any] = {"version": engine.version, "settings": told["settings"]}
        else:
            for _ in range(1 + first):  # the first job of a process is discarded, as ours is
                found = answered(engine, **told)
            first = False
        answers.write(json.dumps(found) + "\n")
        answers.flush()


def answered(
    engine: Engine, prompts: list[list[int]], params: dict[str, Any], outputs: list[int]
) -> dict[str, Any]:
    """Figures of a job that begins with an empty cache, after a warm-up."""
    engine.generate(prompts[:WARM_PROMPTS], [min(2, n) for n in outputs[:WARM_PROMPTS]], params)
    engine.forget()
    began = time.perf_counter()
    done = engine.generate(prompts, outputs, params)
    seconds = time.perf_counter() - began
    counts = [[len(one.token_ids) for one in each.outputs] for each in done]
    assert counts == [[count] * params.get("n", 1) for count in outputs]
    return {
        "seconds": seconds,
        "cached_tokens": cached_tokens(done),
        "output_tokens": sum(map(sum, counts)),
    }


if __name__ == "__main__":
    os.environ |= QUIET | os.environ
    main()
