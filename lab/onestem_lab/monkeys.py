"""Very many samples of few prompts: tokens per second beside the floor, and where a step's time is.

    python -m onestem_lab.monkeys [--model shape:llama3.2-1b] [--prompts 16] [--samples 1024]
        [--prompt-tokens 900] [--tokens 250] [--max-num-seqs N] [--device cuda] [--out FILE]

The job by which Tokasaurus is known ("large language monkeys" on GSM8K: 128 problems behind 4
examples, 1,024 samples of each, temperature 0.6), of which a part is run: so many prompts. Answers
have a fixed length here, and random weights. The length of the prompts is assumed: four worked
examples and a question.

The floor: products at the rate of one of 8192^3, all KV and weights at the rate of a copy, and the
logits written once and read once; both rates are measured in the same run. Kernels: the GPU's
milliseconds of a step with all rows, by kind.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import onestem
from onestem.llm import LLM
from onestem.request import Request, SamplingParams
from onestem_lab.engine_gpu import Rates, measure_rates
from onestem_lab.results import device_name, machine, write
from onestem_lab.sampling import step_kernels

PROFILED = 10  # steps


def main() -> None:
    options = parse()
    with LLM(
        options.model, device=options.device, dtype="bfloat16", kv_memory=options.kv_memory,
        max_num_seqs=options.max_num_seqs, max_model_len=options.prompt_tokens + options.tokens,
        seed=0,
    ) as llm:  # fmt: skip
        result: dict[str, Any] = {
            "command": f"python -m onestem_lab.monkeys {' '.join(sys.argv[1:])}".strip(),
            "machine": machine(),
            "device": device_name(llm.device),
            "onestem": onestem.__version__,
            "kv_tokens": llm.kv_tokens,
            **{name: value for name, value in vars(options).items() if name != "out"},
        }
        prompts = make_prompts(llm, options)
        params = SamplingParams(
            n=options.samples, temperature=0.6, max_tokens=options.tokens, ignore_eos=True, seed=1
        )
        # All rows, since kernels are compiled for numbers of rows.
        llm.generate(prompts, params.replace(max_tokens=min(8, options.tokens)))
        result |= measure(llm, prompts, params)
        line = f"{options.prompts} x {options.samples} samples of {options.tokens}"
        line = f"{line} tokens: {result['tokens_per_s']:.0f} tokens/s"
        if llm.device.type == "cuda":
            llm.engine.cache.clear()
            result["kernels_ms"], result["kernels_rows"] = profiled(llm, prompts, params)
        sizes = (llm.config, llm.decoder.num_parameters, llm.decoder.kv_bytes_per_token)
    if "kernels_ms" in result:
        rates = measure_rates()
        floor = floor_seconds(options, rates, *sizes)
        kernels = {kind: round(ms, 1) for kind, ms in result["kernels_ms"].items()}
        result |= {
            "matrix_flops_per_s": rates.flops,
            "copy_bytes_per_s": rates.bytes,
            "floor_seconds": floor,
            "share_of_floor": sum(floor.values()) / result["seconds"],
        }
        line += f", {result['share_of_floor']:.0%} of the floor; a step of"
        line += f" {result['kernels_rows']} rows: {kernels} ms, wall {result['step_ms']:.1f},"
        line += f" host {result['host_ms']:.1f} to plan and {result['sample_ms']:.1f} to take"
    print(line, flush=True)
    if options.out is not None:
        write(options.out, result)


def make_prompts(llm: LLM, options: argparse.Namespace) -> list[list[int]]:
    """Examples that all have in common, nine tenths, and a question."""
    rng, vocab = np.random.default_rng(0), llm.config.vocab_size
    head = rng.integers(0, vocab, options.prompt_tokens * 9 // 10).tolist()
    own = options.prompt_tokens - len(head)
    return [head + rng.integers(0, vocab, own).tolist() for _ in range(options.prompts)]


def measure(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> dict[str, Any]:
    llm.engine.cache.clear()
    llm.engine.reset_stats()
    began = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - began
    count = sum(len(one.token_ids) for output in outputs for one in output.outputs)
    assert count == len(prompts) * params.n * (params.max_tokens or 0)
    stats = llm.engine.stats
    return {
        "seconds": seconds,
        "tokens_per_s": count / seconds,
        "output_tokens": count,
        "steps": stats.steps,
        "mean_rows": count / stats.steps,
        "step_ms": 1e3 * seconds / stats.steps,
        "host_ms": 1e3 * stats.host_seconds / stats.steps,
        "launch_ms": 1e3 * stats.model_seconds / stats.steps,
        "sample_ms": 1e3 * stats.sample_seconds / stats.steps,
        "num_preempted": stats.num_preempted,
        "processed_prompt_tokens": stats.processed_prompt_tokens,
    }


def profiled(
    llm: LLM, prompts: list[list[int]], params: SamplingParams
) -> tuple[dict[str, float], int]:
    """Milliseconds of a step's kernels halfway through the answers, and its rows."""
    engine, half = llm.engine, (params.max_tokens or 0) // 2
    names = [f"profiled-{i}" for i in range(len(prompts))]
    for name, ids in zip(names, prompts, strict=True):
        engine.add_request(Request(request_id=name, prompt_token_ids=ids, params=params))
    for _ in range(half):
        engine.step()
    rows = len(engine.batch_rows)
    took = step_kernels(engine, PROFILED)
    for name in names:
        engine.abort(name)
    while engine.has_unfinished():
        engine.step()
    return took, rows


def floor_seconds(
    options: argparse.Namespace, rates: Rates, config: Any, parameters: int, token_bytes: int
) -> dict[str, float]:
    """Of the job's parts; as many rows to a step as there are."""
    count = options.prompts * options.samples
    rows = min(count, options.max_num_seqs or count)
    embedding = 0 if config.tie_embeddings else config.vocab_size * config.hidden_size
    multiplied = parameters - embedding
    pair_flops = 4.0 * config.num_layers * config.num_q_heads * config.head_dim
    waves = count / rows
    found = {"prompts": 0.0, "products": 0.0, "attention": 0.0, "logits": 0.0}
    head = options.prompt_tokens * 9 // 10
    prompt_rows = head + options.prompts * (options.prompt_tokens - head)
    found["prompts"] = rates.seconds(2.0 * multiplied * prompt_rows, 2.0 * multiplied)
    for step in range(options.tokens):
        found["products"] += waves * rates.seconds(2.0 * multiplied * rows, 2.0 * multiplied)
        found["attention"] += waves * rates.seconds(
            pair_flops * rows * (options.prompt_tokens + step),
            token_bytes * (prompt_rows + rows * step),
        )
        found["logits"] += waves * rates.seconds(0.0, 2.0 * 4 * rows * config.vocab_size)
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="shape:llama3.2-1b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--kv-memory", default="auto")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--prompt-tokens", type=int, default=900)
    parser.add_argument("--tokens", type=int, default=250)
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
