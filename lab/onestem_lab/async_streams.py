"""`AsyncLLM` with many streams, beside `LLM.generate` of the same prompts.

    python -m onestem_lab.async_streams [--model shape:llama3.1-8b] [--streams 512]
        [--prompt-tokens 256] [--tokens 256] [--output-kind cumulative,delta] [--device cuda]
        [--kv-memory 24GiB] [--repeats 3] [--out FILE]

Each stream is a task of its own that reads all of its outputs. Both engines are loaded, with so
much KV memory each, and take turns. Tokens per second, from the first call to the last output:
medians, and the median ratio of neighbours. On a CPU that others use too the processor's seconds
say more: of this process and the engine's, for the same tokens (`cpu_seconds`).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

import onestem
from onestem.async_llm import AsyncLLM
from onestem.llm import LLM
from onestem.request import SamplingParams
from onestem_lab.results import device_name, machine, write


def main() -> None:
    asyncio.run(run(parse()))


async def run(options: argparse.Namespace) -> None:
    engine = {
        "device": options.device,
        "dtype": "bfloat16",
        "kv_memory": options.kv_memory,
        "max_model_len": options.prompt_tokens + options.tokens,
        "seed": 0,
    }
    params = SamplingParams(
        max_tokens=options.tokens, temperature=1, ignore_eos=True, seed=1, logprobs=options.logprobs
    )
    kinds = options.output_kind.split(",")
    rates: dict[str, list[float]] = {name: [] for name in ("generate", *kinds)}
    worked: dict[str, list[float]] = {name: [] for name in rates}
    async with AsyncLLM(options.model, **engine) as streaming:
        with LLM(options.model, **engine) as llm:
            device, rng = device_name(llm.device), np.random.default_rng(0)
            size = (options.streams, options.prompt_tokens)
            prompts = rng.integers(0, llm.config.vocab_size, size).tolist()
            for repeat in range(-1, options.repeats):
                for name in rates:
                    llm.engine.cache.clear()
                    await streaming.reset_prefix_cache()
                    before = cpu_seconds()
                    if name == "generate":
                        rate = generated(llm, prompts, params)
                    else:
                        rate = await streamed(streaming, prompts, params, name)
                    if repeat >= 0:
                        rates[name].append(rate)
                        worked[name].append(cpu_seconds() - before)
    result: dict[str, Any] = {
        "command": f"python -m onestem_lab.async_streams {' '.join(sys.argv[1:])}".strip(),
        "machine": machine(),
        "device": device,
        "onestem": onestem.__version__,
        **{name: value for name, value in vars(options).items() if name != "out"},
        "tokens_per_s": {name: statistics.median(each) for name, each in rates.items()},
        "all": rates,
        "threads": torch.get_num_threads(),
        "cpu_seconds": {name: statistics.median(each) for name, each in worked.items()},
        "against_generate": {
            kind: statistics.median(
                a / b for a, b in zip(rates[kind], rates["generate"], strict=True)
            )
            for kind in kinds
        },
    }
    told = [f"{name} {rate:.0f}" for name, rate in result["tokens_per_s"].items()]
    ratios = [f"{kind} {ratio:.3f}" for kind, ratio in result["against_generate"].items()]
    print(
        f"{options.streams} streams: {', '.join(told)} tokens/s; against generate: "
        f"{', '.join(ratios)}; CPU seconds: "
        f"{', '.join(f'{name} {seconds:.1f}' for name, seconds in result['cpu_seconds'].items())}",
        flush=True,
    )
    if options.out is not None:
        write(options.out, result)


def cpu_seconds() -> float:
    """Of this process and its children."""
    total = time.process_time()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(") ")[2].split()
            if int(fields[1]) == os.getpid():
                total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def generated(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> float:
    began = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - began
    return sum(len(output.outputs[0].token_ids) for output in outputs) / seconds


async def streamed(
    llm: AsyncLLM, prompts: list[list[int]], params: SamplingParams, kind: Any
) -> float:
    async def tokens(prompt: list[int]) -> int:
        count = 0
        async for output in llm.generate(prompt, params, output_kind=kind):
            now = len(output.outputs[0].token_ids)
            count = now if kind == "cumulative" else count + now
        return count

    began = time.perf_counter()
    counts = await asyncio.gather(*map(tokens, prompts))
    seconds = time.perf_counter() - began
    assert counts == [params.max_tokens] * len(prompts)
    return sum(counts) / seconds


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="shape:llama3.1-8b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--kv-memory", default="24GiB")
    parser.add_argument("--streams", type=int, default=512)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--output-kind", default="cumulative,delta")
    parser.add_argument("--logprobs", type=int, help="of each token; default: none")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
