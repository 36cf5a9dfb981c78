"""Onestem: `LLM.generate` over the whole job, planning included."""

from __future__ import annotations

from typing import Any

from job import Job, main

from onestem.llm import LLM
from onestem.request import SamplingParams


class Onestem:
    def __init__(
        self,
        job: Job,
        *,
        share: str = "full",
        page_size: int = 16,
        max_step_tokens: int | None = None,
        impl: str = "auto",
    ) -> None:
        self.llm = LLM(
            job.model,
            device="cpu",
            dtype=job.dtype,
            kv_memory=job.kv_bytes,
            share=share,  # type: ignore[arg-type]
            page_size=page_size,
            max_step_tokens=max_step_tokens,
            impl=impl,
        )

    def answer(self, job: Job) -> list[list[int]]:
        params = SamplingParams(max_tokens=job.output_tokens, temperature=0, ignore_eos=True)
        outputs = self.llm.generate(job.prompts, params)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def forget(self) -> None:
        self.llm.engine.cache.clear()
        self.llm.engine.reset_stats()

    def facts(self) -> dict[str, Any]:
        stats = self.llm.engine.stats.to_dict()
        return {"attention": self.llm.engine.options.impl, "stats": stats}


def load(job: Job) -> Onestem:
    return Onestem(job, **job.settings)


if __name__ == "__main__":
    main("onestem", load, ("torch", "transformers"))
