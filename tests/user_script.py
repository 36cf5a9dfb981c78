"""What a user writes, for mypy: `disallow_any_expr` refuses each expression whose type is lost.

It is checked with the package, not run.
"""

from __future__ import annotations

from typing import assert_type

from onestem import (
    LLM,
    AsyncLLM,
    EngineOptions,
    Logprob,
    OnestemError,
    RequestOutput,
    SamplingParams,
    Score,
    __version__,
)


def answers(model: str) -> list[str]:
    params = SamplingParams(n=2, temperature=0.7, max_tokens=16, logprobs=1, stop=["\n"])
    with LLM(model, kv_memory="1GiB", page_size=32) as llm:
        outputs = llm.generate(["one", "two"], params, use_tqdm=False)
        outputs += llm.generate([[5, 6], [7]], [params, params.replace(n=1)])
        outputs += llm.generate({"prompt_token_ids": [5, 6]}, params)
        assert_type(outputs, list[RequestOutput])
        assert_type(outputs[0].metrics.num_cached_tokens, int)
        for piece in llm.stream("one", params, output_kind="delta"):
            assert_type(piece.outputs[0].token_ids, list[int])
        for entry in outputs[0].outputs[0].logprobs or ():
            assert_type(list(entry.values()), list[Logprob])
        return [answer.text for output in outputs for answer in output.outputs]


def best(options: EngineOptions, prompt: str, completions: list[str]) -> str:
    with LLM.from_options(options) as llm:
        assert_type(llm.score([prompt]), list[Score])
        (scores,) = llm.score([prompt], [completions])
    logprobs = [score.logprob for score in scores]
    return completions[logprobs.index(max(logprobs))]


def chat(llm: LLM) -> str:
    (output,) = llm.chat([{"role": "user", "content": "Hello"}], SamplingParams(max_tokens=8))
    return output.outputs[0].text


async def ask(llm: AsyncLLM, prompt: str) -> str:
    text = ""
    async for output in llm.generate(prompt, SamplingParams(max_tokens=64)):
        text = output.outputs[0].text
    return text


def version_or_error() -> str:
    try:
        return f"onestem {__version__}"
    except OnestemError as error:
        return str(error)
